//! A test for each numbered statement of the EXL2 SPEC. What must be refused is in `exl2_errors.rs`.

mod vectors;

use half::f16;
use requant_formats::Permutation;
use requant_formats::exl2::{
    Bits, Group, GroupTable, Matrix, Tensors, ceiling_for, decode_ceiling, decode_scale,
};
use requant_formats::gptq::GIdx;
use sha2::{Digest, Sha256};
use vectors::{hex, int, ints, list, load, text, words};

fn group(width: u32, rows: usize) -> Group {
    Group { bits: Bits::try_from(width).expect("a width of the format"), rows }
}

fn sha256(bytes: impl IntoIterator<Item = u8>) -> String {
    let bytes: Vec<u8> = bytes.into_iter().collect();
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn sha256_words(words: &[u32]) -> String {
    sha256(words.iter().flat_map(|word| word.to_le_bytes()))
}

fn sha256_weights(weights: &[f16]) -> String {
    sha256(weights.iter().flat_map(|weight| weight.to_le_bytes()))
}

/// The matrix of the vectors' generator: groups of 32 rows of the given widths, 32 columns.
fn generated(widths: &[u32], scale_max: Vec<f16>) -> Matrix {
    let k = 32 * widths.len() as u32;
    let groups = GroupTable::new(widths.iter().map(|&width| group(width, 32)).collect());
    let each = |f: &dyn Fn(u32, u32, u32) -> u32, rows: u32| -> Vec<u8> {
        (0..widths.len() as u32)
            .flat_map(|g| (0..rows).flat_map(move |i| (0..32).map(move |c| f(g, i, c) as u8)))
            .collect()
    };
    let codes = each(&|g, i, c| (7 * i + 3 * c + 1 + g) % (1 << widths[g as usize]), 32);
    let scale_index = each(&|g, _, c| (5 * c + 3 + g) % 16, 1);
    let invperm = Permutation::new((0..k).map(|i| (5 * i + 3) % k).collect());
    Matrix::new(
        groups.expect("groups"),
        32,
        codes,
        scale_index,
        scale_max,
        invperm.expect("5 and k have no common factor"),
    )
    .expect("a matrix")
}

fn half_of(value: &serde_json::Value) -> f16 {
    f16::from_bits(hex(value) as u16)
}

/// A matrix of one column pattern: 32 rows of `codes` in 32 columns, rows in the model's order.
fn plain(width: u32, codes: &[u8], index: u8, scale_max: f16) -> Matrix {
    let groups = GroupTable::new(vec![group(width, 32)]).expect("groups");
    let codes = codes.iter().flat_map(|&code| [code; 32]).collect();
    Matrix::new(groups, 32, codes, vec![index; 32], vec![scale_max], Permutation::identity(32))
        .expect("a matrix")
}

#[test]
fn e1_1_sizes_of_the_five_tensors() {
    let packed = generated(&[8, 6, 5, 4, 3, 2], vec![f16::ONE; 6]).pack();
    let sizes = [
        packed.q_weight.len(),
        packed.q_invperm.len(),
        packed.q_scale.len(),
        packed.q_scale_max.len(),
        packed.q_groups.len(),
    ];
    assert_eq!(sizes, [28 * 32, 192, 6 * 4, 6, 12]);
}

#[test]
fn e2_1_widths() {
    let widths: Vec<u32> = (0..40).filter(|&width| Bits::try_from(width).is_ok()).collect();
    assert_eq!(widths, [2, 3, 4, 5, 6, 8]);
}

#[test]
fn e2_2_pairs_of_width_and_first_word_row() {
    let mixed = &load("exl2")["mixed"];
    let table = GroupTable::new([8, 6, 5, 4, 3, 2].map(|width| group(width, 32)).to_vec()).unwrap();
    assert_eq!(table.to_q_groups(), ints::<i16>(&mixed["q_groups"]));
    assert_eq!(table.word_rows() as i64, int(&mixed["word_rows"]));
    assert_eq!(GroupTable::parse(&table.to_q_groups(), table.word_rows()).unwrap(), table);
}

#[test]
fn e2_4_groups_differ_in_size() {
    let groups = vec![group(4, 128), group(4, 32), group(3, 64), group(3, 96), group(2, 32)];
    let table = GroupTable::new(groups.clone()).unwrap();
    assert_eq!(table.to_q_groups(), [4, 0, 4, 16, 3, 20, 3, 26, 2, 35]);
    assert_eq!((table.word_rows(), table.rows()), (37, 352));
    assert_eq!(GroupTable::parse(&table.to_q_groups(), 37).unwrap().groups(), groups);
}

#[test]
fn e2_5_the_largest_group() {
    assert!(GroupTable::new(vec![group(8, 65_504), group(2, 32)]).is_ok());
    let table = GroupTable::parse(&[8, 0, 8, 8], 8 * 2047).unwrap();
    assert_eq!(table.rows(), 65_504);
}

#[test]
fn e3_1_codes_are_a_stream_of_bits_down_the_rows() {
    let file = load("exl2");
    for case in list(&file["packing"]) {
        let width = int(&case["bits"]) as u32;
        let codes: Vec<u8> = (0..32u32).map(|i| (i % (1 << width)) as u8).collect();
        let packed = plain(width, &codes, 0, f16::ONE).pack();
        let expected: Vec<u32> = words(&case["words"]).iter().flat_map(|&word| [word; 32]).collect();
        assert_eq!(packed.q_weight, expected, "{width} bits");
        let unpacked = Matrix::unpack(packed.tensors(), 32).unwrap();
        assert!(unpacked.codes().chunks(32).zip(&codes).all(|(row, &code)| row == [code; 32]));
    }
    for case in list(&file["single"]["cases"]) {
        let width = int(&case["bits"]) as u32;
        let matrix = generated(&[width], vec![f16::ONE]);
        let column: Vec<u8> = matrix.codes().iter().step_by(32).copied().collect();
        assert_eq!(column, ints::<u8>(&case["codes_column_0"]), "{width} bits");
        let packed = matrix.pack();
        for (column, expected) in list(&case["q_weight_columns"]).iter().enumerate() {
            let stored: Vec<u32> = packed.q_weight.iter().skip(column).step_by(32).copied().collect();
            assert_eq!(stored, words(expected), "{width} bits, column {column}");
        }
        assert_eq!(sha256_words(&packed.q_weight), text(&case["q_weight_sha256"]), "{width} bits");
        assert_eq!(Matrix::unpack(packed.tensors(), 32).unwrap(), matrix, "{width} bits");
    }
}

#[test]
fn e3_2_each_group_begins_a_word() {
    // 32 rows of 3 bits, all ones, between groups of zeros.
    let groups = GroupTable::new(vec![group(4, 32), group(3, 32), group(2, 32)]).unwrap();
    let codes = [0u8, 7, 0].iter().flat_map(|&code| vec![code; 32 * 32]).collect();
    let identity = Permutation::identity(96);
    let packed = Matrix::new(groups, 32, codes, vec![0; 96], vec![f16::ONE; 3], identity).unwrap().pack();
    let column: Vec<u32> = packed.q_weight.iter().step_by(32).copied().collect();
    assert_eq!(column, [0, 0, 0, 0, u32::MAX, u32::MAX, u32::MAX, 0, 0]);
}

#[test]
fn e4_1_a_word_holds_the_indices_of_eight_columns() {
    let file = load("exl2");
    let matrix = generated(&[4], vec![f16::ONE]);
    assert_eq!(matrix.pack().q_scale, words(&file["single"]["q_scale_row"]));
    let mixed = generated(&[8, 6, 5, 4, 3, 2], vec![f16::ONE; 6]);
    assert_eq!(sha256_words(&mixed.pack().q_scale), text(&file["mixed"]["q_scale_sha256"]));
}

#[test]
fn e4_2_e4_3_e4_4_e4_5_weights_of_all_widths() {
    for case in list(&load("exl2")["single"]["cases"]) {
        let width = int(&case["bits"]) as u32;
        for ceiling in list(&case["ceilings"]) {
            let stored = half_of(&ceiling["q_scale_max"]);
            let m1 = decode_ceiling(stored, 1.0);
            assert_eq!(m1, half_of(&ceiling["m1"]));
            let matrix = generated(&[width], vec![stored]);
            let weights = matrix.dequantize();
            for column in 0..2 {
                let m2 = decode_scale(m1, matrix.scale_index()[column]);
                assert_eq!(m2, half_of(&list(&ceiling["m2_columns"])[column]));
                let found: Vec<u32> = (0..8).map(|i| u32::from(weights[i * 32 + column].to_bits())).collect();
                assert_eq!(found, words(&list(&ceiling["weights_rows_0_to_7"])[column]), "{width} bits");
            }
            assert_eq!(sha256_weights(&weights), text(&ceiling["weights_sha256"]), "{width} bits");
        }
    }
}

#[test]
fn e4_5_and_e5_2_weights_of_mixed_widths() {
    let mixed = &load("exl2")["mixed"];
    let scale_max =
        words(&mixed["q_scale_max"]).into_iter().map(|bits| f16::from_bits(bits as u16)).collect();
    let matrix = generated(&[8, 6, 5, 4, 3, 2], scale_max);
    let packed = matrix.pack();
    assert_eq!(packed.q_groups, ints::<i16>(&mixed["q_groups"]));
    assert_eq!(sha256_words(&packed.q_weight), text(&mixed["q_weight_sha256"]));
    let weights = Matrix::unpack(packed.tensors(), 32).unwrap().dequantize();
    for run in list(&mixed["weights"]) {
        let (first, column) = (int(&run["first_row"]) as usize, int(&run["column"]) as usize);
        let found: Vec<u32> =
            (first..first + 12).map(|i| u32::from(weights[i * 32 + column].to_bits())).collect();
        assert_eq!(found, words(&run["values"]), "rows from {first}");
    }
    assert_eq!(sha256_weights(&weights), text(&mixed["weights_sha256"]));
}

#[test]
fn e4_3_small_ceilings_have_a_grid_and_then_vanish() {
    let m1 = |exponent: i32, factor: f32| {
        decode_ceiling(f16::from_f32(2f32.powi(exponent) * factor), 1.0).to_bits()
    };
    assert_eq!(m1(-6, 1.0), 0x0400, "the least normal half");
    assert_eq!(m1(-16, 1.0), 1);
    assert_eq!(m1(-16, 1.5), 2, "a tie goes to the even neighbour");
    assert_eq!(m1(-17, 1.0), 0, "a tie goes to the even neighbour");
    assert_eq!(m1(-17, 1.125), 1);
    // Ceilings of one grid cell decode alike.
    assert_eq!(m1(-7, 1.0), m1(-7, 1.0 + 1.0 / 1024.0));
}

#[test]
fn e4_6_other_orders_of_rounding_give_other_bits() {
    let stored = f16::from_bits(0x0123);
    let matrix = plain(8, &[1; 32], 8, stored);
    // (q − 128) · (s + 1)² · q_scale_max / 256 in one go.
    let at_once = f16::from_f32(-127.0 * 81.0 * stored.to_f32() / 256.0);
    assert_ne!(matrix.dequantize()[0], at_once);
}

#[test]
fn e4_7_signs_of_zero() {
    let codes: Vec<u8> = (0..32).map(|i| 7 + i % 2).collect();
    // m1 is 2⁻²⁴ and m2 the same: code 7 is −2⁻²⁴, code 8 is +0.
    let weights = plain(4, &codes, 0, f16::from_bits(0x0123)).dequantize();
    assert_eq!((weights[0].to_bits(), weights[32].to_bits()), (0x8001, 0x0000));
    // A vanishing group of zero codes is +0.
    let weights = plain(4, &[8; 32], 15, f16::from_bits(0x0001)).dequantize();
    assert!(weights.iter().all(|weight| weight.to_bits() == 0));
}

#[test]
fn e4_8_a_ceiling_that_decodes_to_the_chosen_one() {
    for bits in 0..0x7C00u16 {
        let chosen = f16::from_bits(bits);
        match ceiling_for(chosen, 1.0) {
            Some(stored) => assert_eq!(decode_ceiling(stored, 1.0).to_bits(), bits),
            None => assert!(chosen.to_f32() * 256.0 > f16::MAX.to_f32()),
        }
    }
}

#[test]
fn e5_1_and_e5_2_a_model_row_is_the_packed_row_that_q_invperm_names() {
    // Packed row p holds code p in 8 bits, the permutation turns by one.
    let groups = GroupTable::new(vec![group(8, 32)]).unwrap();
    let codes = (0..32u8).flat_map(|code| [code; 32]).collect();
    let invperm = Permutation::new((0..32).map(|i| (i + 1) % 32).collect()).unwrap();
    let scale_max = vec![f16::from_f32(256.0)];
    let matrix = Matrix::new(groups, 32, codes, vec![0; 32], scale_max, invperm).unwrap();
    let weights: Vec<f32> = matrix.dequantize().iter().step_by(32).map(|w| w.to_f32()).collect();
    let expected: Vec<f32> = (0..32).map(|i| ((i + 1) % 32) as f32 - 128.0).collect();
    assert_eq!(weights, expected);
}

#[test]
fn e5_3_rows_sorted_by_gptq_group() {
    let index: Vec<i64> = (0..64).map(|row| (row * 7 + 3) % 2).collect();
    let sorted = GIdx::new(Some(&index), 64, 2, None).unwrap().sorted_rows();
    // Place j holds model row sorted[j]; its code is that row's number.
    let codes = sorted.map().iter().flat_map(|&row| [row as u8; 32]).collect();
    let groups = GroupTable::new(vec![group(8, 32), group(8, 32)]).unwrap();
    let scale_max = vec![f16::from_f32(256.0); 2];
    let matrix = Matrix::new(groups, 32, codes, vec![0; 64], scale_max, sorted.inverse()).unwrap();
    let weights: Vec<f32> = matrix.dequantize().iter().step_by(32).map(|w| w.to_f32()).collect();
    assert_eq!(weights, (0..64).map(|row| row as f32 - 128.0).collect::<Vec<f32>>());
}

#[test]
fn e6_1_size_is_that_of_the_tensors() {
    let matrix = generated(&[8, 6, 5, 4, 3, 2], vec![f16::ONE; 6]);
    let packed = matrix.pack();
    let words = packed.q_weight.len() + packed.q_scale.len() + packed.q_invperm.len();
    let halves = packed.q_scale_max.len() + packed.q_groups.len();
    assert_eq!(matrix.groups().stored_bits(32), (32 * words + 16 * halves) as u64);
    // exllamav2's formula: rows · n · b a group, 16·G + 32·G + 4·G·n, 32·k.
    let codes = 32 * 32 * (8 + 6 + 5 + 4 + 3 + 2);
    assert_eq!(matrix.groups().stored_bits(32), codes + 48 * 6 + 4 * 6 * 32 + 32 * 192);
}

#[test]
fn e7_14_padding_decodes_to_zero() {
    let mut codes = vec![3u8; 32 * 32];
    codes.chunks_mut(32).for_each(|row| row[20..].fill(8));
    let groups = GroupTable::new(vec![group(4, 32)]).unwrap();
    let identity = Permutation::identity(32);
    let matrix = Matrix::new(groups, 32, codes, vec![15; 32], vec![f16::ONE], identity).unwrap();
    assert_eq!(matrix.check_padding(20), Ok(()));
    assert_eq!(matrix.check_padding(32), Ok(()));
    assert!(matrix.dequantize().chunks(32).all(|row| row[20..].iter().all(|w| w.to_bits() == 0)));
}

#[test]
fn tensors_with_a_ragged_last_group_unpack() {
    let groups = GroupTable::new(vec![group(5, 128), group(5, 128), group(5, 64)]).unwrap();
    let codes: Vec<u8> = (0..320 * 32).map(|i| (i * 13 % 32) as u8).collect();
    let identity = Permutation::identity(320);
    let matrix = Matrix::new(groups, 32, codes, vec![7; 96], vec![f16::ONE; 3], identity).unwrap();
    let packed = matrix.pack();
    assert_eq!(packed.q_groups, [5, 0, 5, 20, 5, 40]);
    let tensors = Tensors { q_groups: &[5, 0, 5, 20, 5, 40], ..packed.tensors() };
    assert_eq!(Matrix::unpack(tensors, 32).unwrap(), matrix);
}

/// E4.9: the product is one of fp32, with a factor rounded to fp32, rounded to half once.
#[test]
fn e4_9_a_prescale_multiplies_ceilings_before_they_are_rounded() {
    // By hand: 0x2a3d is 1597 · 2⁻¹⁵; times 0.5 / 256 that is 798.5 · 2⁻²³ = 1597 · 2⁻²⁴, a subnormal of 1597 steps
    // where 1024 and more are normal: the same digits.
    assert_eq!(decode_ceiling(f16::from_bits(0x2a3d), 0.5).to_bits(), 0x063d);
    // 0x0123 is 291 · 2⁻²⁴, and 1 · 2⁻²⁴ without; times 8 it is 9.09 steps.
    assert_eq!(decode_ceiling(f16::from_bits(0x0123), 8.0).to_bits(), 9);
    let matrix = plain(4, &[15; 32], 15, f16::from_bits(0x0123));
    // 7 · 256 · m1, m1 of 1 and of 9 steps of 2⁻²⁴: not eight times the first.
    let step = 2f32.powi(-24);
    assert_eq!(matrix.dequantize()[0].to_f32(), 7.0 * 256.0 * step);
    assert_eq!(matrix.dequantize_prescaled(8.0)[0].to_f32(), 7.0 * 256.0 * 9.0 * step);
    assert_eq!(matrix.dequantize_prescaled(1.0), matrix.dequantize());
}

/// E4.9: whatever a `q_scale_max` decodes to under a prescale has one that decodes to it, and the nearest is found of
/// what none does.
#[test]
fn e4_9_ceilings_are_met_under_a_prescale() {
    for prescale in [0.22, 0.125, 1.0 / 3.0, 1.4 / 62f64.sqrt(), 0.7, 1.0, 3.0] {
        let stored = || (1..0x7c00).map(f16::from_bits);
        let mut reached: Vec<f32> = stored().map(|s| decode_ceiling(s, prescale).to_f32()).collect();
        reached.dedup();
        for &ceiling in reached.iter().filter(|ceiling| **ceiling != 0.0) {
            let found = ceiling_for(f16::from_f32(ceiling), prescale).unwrap();
            assert_eq!(decode_ceiling(found, prescale).to_f32(), ceiling, "{prescale}");
        }
        for wanted in (1..0x5c00).step_by(7).map(f16::from_bits) {
            let Some(found) = ceiling_for(wanted, prescale) else {
                assert!(wanted.to_f64() * 256.0 / prescale > 65_504.0, "{wanted} {prescale}");
                continue;
            };
            let miss = |ceiling: f32| (ceiling - wanted.to_f32()).abs();
            let at = reached.partition_point(|ceiling| *ceiling < wanted.to_f32());
            let near = &reached[at.saturating_sub(1)..reached.len().min(at + 1)];
            let best = near.iter().map(|c| miss(*c)).fold(f32::INFINITY, f32::min);
            assert_eq!(miss(decode_ceiling(found, prescale).to_f32()), best, "{wanted} {prescale}");
        }
    }
}
