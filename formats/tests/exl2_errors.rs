//! A hostile input for each error of the EXL2 layout, named after it and the SPEC statement it breaks.

use half::f16;
use requant_formats::exl2::{Bits, Error, ExpectedOffset, Group, GroupTable, Matrix, Packed};
use requant_formats::{NotAPermutation, Permutation};

fn bits(width: u32) -> Bits {
    Bits::try_from(width).expect("a width of the format")
}

/// Two groups of 32 rows (4 and 3 bits), 32 columns, all codes zero.
fn packed() -> Packed {
    let groups = GroupTable::new(vec![Group { bits: bits(4), rows: 32 }, Group { bits: bits(3), rows: 32 }]);
    let codes = [8u8, 4].iter().flat_map(|&code| [code; 32 * 32]).collect();
    let identity = Permutation::identity(64);
    Matrix::new(groups.expect("groups"), 32, codes, vec![15; 64], vec![f16::ONE; 2], identity)
        .expect("a matrix")
        .pack()
}

/// What unpacking says after a change.
fn unpack(change: impl FnOnce(&mut Packed)) -> Result<Matrix, Error> {
    let mut tensors = packed();
    change(&mut tensors);
    Matrix::unpack(tensors.tensors(), 32)
}

/// What a matrix is put together from.
struct Parts {
    codes: Vec<u8>,
    scale_index: Vec<u8>,
    scale_max: Vec<f16>,
}

/// Puts the same matrix together from parts, after a change.
fn assemble(change: impl FnOnce(&mut Parts)) -> Result<Matrix, Error> {
    let matrix = unpack(|_| ())?;
    let (codes, scale_index) = (matrix.codes().to_vec(), matrix.scale_index().to_vec());
    let mut parts = Parts { codes, scale_index, scale_max: matrix.scale_max().to_vec() };
    change(&mut parts);
    let (groups, invperm) = (matrix.groups().clone(), matrix.invperm().clone());
    Matrix::new(groups, 32, parts.codes, parts.scale_index, parts.scale_max, invperm)
}

#[test]
fn length_e7_1() {
    assert!(unpack(|_| ()).is_ok());
    let length = |tensor, found, expected| Err(Error::Length { tensor, found, expected });
    assert_eq!(unpack(|t| t.q_weight.truncate(223)), length("q_weight", 223, 224));
    assert_eq!(unpack(|t| t.q_scale.truncate(4)), length("q_scale", 4, 8));
    assert_eq!(unpack(|t| t.q_scale_max.push(f16::ONE)), length("q_scale_max", 3, 2));
    assert_eq!(assemble(|p| p.codes.clear()), length("codes", 0, 2048));
    assert_eq!(assemble(|p| p.scale_index.truncate(63)), length("q_scale", 63, 64));
    let matrix = unpack(|_| ()).unwrap();
    let short = Permutation::identity(32);
    let (codes, index) = (matrix.codes().to_vec(), matrix.scale_index().to_vec());
    let found = Matrix::new(matrix.groups().clone(), 32, codes, index, vec![f16::ONE; 2], short);
    assert_eq!(found, length("q_invperm", 32, 64));
}

#[test]
fn odd_groups_e7_1() {
    assert_eq!(unpack(|t| t.q_groups.truncate(3)), Err(Error::OddGroups { found: 3 }));
    assert_eq!(unpack(|t| t.q_groups.clear()), Err(Error::OddGroups { found: 0 }));
    assert_eq!(GroupTable::new(vec![]), Err(Error::OddGroups { found: 0 }));
}

#[test]
fn columns_e7_2() {
    let tensors = packed();
    for found in [0, 8, 16, 33, usize::MAX] {
        assert_eq!(Matrix::unpack(tensors.tensors(), found), Err(Error::Columns { found }));
    }
}

#[test]
fn bits_e7_3() {
    for found in [0, 1, 7, 9, 16, -4, i16::MIN, i16::MAX] {
        let refused = Error::Bits { group: Some(1), found: i32::from(found) };
        assert_eq!(unpack(|t| t.q_groups[2] = found), Err(refused));
    }
    assert_eq!(Bits::try_from(7), Err(Error::Bits { group: None, found: 7 }));
}

#[test]
fn rising_width_e2_3_e7_4() {
    let refused = Err(Error::RisingWidth { group: 1, found: bits(4), before: bits(3) });
    assert_eq!(unpack(|t| t.q_groups = vec![3, 0, 4, 3]), refused);
}

#[test]
fn offset_e7_5_e7_6_e7_7() {
    let refused = |group, found, expected| Error::Offset { group, found, expected };
    for found in [1, 4, -1, i16::MIN] {
        let at = refused(0, i32::from(found), ExpectedOffset::Zero);
        assert_eq!(unpack(|t| t.q_groups[1] = found), Err(at));
    }
    for found in [0, -1, i16::MIN] {
        let at = refused(1, i32::from(found), ExpectedOffset::Above(0));
        assert_eq!(unpack(|t| t.q_groups[3] = found), Err(at));
    }
    assert_eq!(unpack(|t| t.q_groups[3] = 8), Err(refused(1, 8, ExpectedOffset::Below(7))));
    assert_eq!(GroupTable::parse(&[4, 0], 0), Err(refused(0, 0, ExpectedOffset::Below(0))));
    // E2.5: 4096 groups of 8 words a column end at the first offset that doesn't fit.
    let wide = vec![Group { bits: bits(8), rows: 32 }; 4097];
    assert_eq!(GroupTable::new(wide), Err(refused(4096, 32_768, ExpectedOffset::SixteenBits)));
}

#[test]
fn group_rows_e7_8() {
    let refused = Err(Error::GroupRows { group: 0, bits: bits(4), words: 3 });
    assert_eq!(unpack(|t| t.q_groups[3] = 3), refused);
    for rows in [0, 16, 33] {
        let found = GroupTable::new(vec![Group { bits: bits(2), rows }]);
        assert!(matches!(found, Err(Error::GroupRows { group: 0, .. })), "{found:?}");
    }
}

#[test]
fn long_group_e7_8() {
    for rows in [65_536, usize::MAX & !31] {
        let found = GroupTable::new(vec![Group { bits: bits(2), rows }]);
        assert_eq!(found, Err(Error::LongGroup { group: 0, found: rows }));
    }
    assert!(matches!(GroupTable::parse(&[8, 0], usize::MAX), Err(Error::GroupRows { .. })));
    assert!(matches!(GroupTable::parse(&[8, 0], isize::MAX as usize & !7), Err(Error::LongGroup { .. })));
}

#[test]
fn total_rows_e7_9() {
    // Spare words in the last group are rows that q_invperm doesn't have.
    let spare = unpack(|t| t.q_weight.extend(vec![0; 3 * 32]));
    assert_eq!(spare, Err(Error::TotalRows { found: 96, expected: 64 }));
    let short = unpack(|t| t.q_invperm.truncate(63));
    assert_eq!(short, Err(Error::TotalRows { found: 64, expected: 63 }));
}

#[test]
fn permutation_e7_10() {
    let refused =
        |position, value, repeated| Err(Error::Permutation(NotAPermutation { position, value, repeated }));
    assert_eq!(unpack(|t| t.q_invperm[9] = 8), refused(9, 8, true));
    assert_eq!(unpack(|t| t.q_invperm[9] = 64), refused(9, 64, false));
    assert_eq!(unpack(|t| t.q_invperm[9] = u32::MAX), refused(9, -1, false));
}

#[test]
fn rows_e7_10() {
    let long = vec![Group { bits: bits(2), rows: 32_768 }; 3];
    assert_eq!(GroupTable::new(long), Err(Error::Rows { found: 98_304 }));
    assert!(GroupTable::new(vec![Group { bits: bits(2), rows: 32_768 }; 2]).is_ok());
}

#[test]
fn ceiling_e7_11() {
    for found in [f16::INFINITY, f16::NEG_INFINITY, f16::NAN, f16::NEG_ONE] {
        let error = unpack(|t| t.q_scale_max[1] = found).unwrap_err();
        assert!(matches!(error, Error::Ceiling { group: 1, .. }), "{error}");
    }
    // All codes are zero: a ceiling of 0 is legal.
    assert!(unpack(|t| t.q_scale_max[1] = f16::ZERO).is_ok());
}

#[test]
fn vanishing_group_e7_12() {
    for stored in [0x0000, 0x0001, 0x0080] {
        let found = f16::from_bits(stored);
        let changed = assemble(|p| {
            p.codes[40 * 32] = 3;
            p.scale_max[1] = found;
        });
        assert_eq!(changed, Err(Error::VanishingGroup { group: 1, found: found.to_f32() }));
    }
    let kept = assemble(|p| {
        p.codes[40 * 32] = 3;
        p.scale_max[1] = f16::from_bits(0x0081);
    });
    assert!(kept.is_ok());
}

#[test]
fn overflow_e7_13() {
    let largest = |code, ceiling| {
        assemble(|p| {
            p.codes[5 * 32 + 7] = code;
            p.scale_max[0] = f16::from_f32(ceiling);
        })
    };
    // Index 15 makes m2 the ceiling itself.
    assert_eq!(largest(0, 8200.0), Err(Error::Overflow { group: 0, column: 7 }));
    assert_eq!(largest(15, 9400.0), Err(Error::Overflow { group: 0, column: 7 }));
    let kept = largest(0, 8188.0).unwrap();
    assert_eq!(kept.dequantize()[5 * 32 + 7], f16::MIN);
    // Codes that don't occur don't overflow.
    assert!(largest(9, 8200.0).is_ok());
}

#[test]
fn code() {
    let refused = Error::Code { row: 40, column: 1, found: 8, bits: bits(3) };
    assert_eq!(assemble(|p| p.codes[40 * 32 + 1] = 8), Err(refused));
}

#[test]
fn scale_index() {
    let refused = Error::ScaleIndex { group: 1, column: 2, found: 16 };
    assert_eq!(assemble(|p| p.scale_index[34] = 16), Err(refused));
}

#[test]
fn padding_e7_14() {
    let matrix = assemble(|p| p.codes[40 * 32 + 25] = 5).unwrap();
    assert_eq!(matrix.check_padding(26), Ok(()));
    assert_eq!(matrix.check_padding(20), Err(Error::Padding { row: 40, column: 25, found: 5 }));
}
