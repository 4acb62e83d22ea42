//! A hostile input for each error of the GPTQ layout, named after it and the SPEC statement it breaks.

use requant_formats::gptq::{
    Bits, Error, GIdx, Matrix, Shape, ZeroConvention, ZeroEncoding, check_scales, decode_zeros, encode_zeros,
    pack_codes, survey_zeros, unpack_codes,
};

fn four_bits() -> Bits {
    Bits::try_from(4).expect("a width of the format")
}

fn shape(in_features: usize, out_features: usize, groups: usize) -> Shape {
    Shape { in_features, out_features, bits: four_bits(), groups }
}

/// What a matrix is put together from.
struct Parts {
    codes: Vec<u8>,
    zeros: Vec<u16>,
    scales: Vec<f32>,
    g_idx: GIdx,
}

/// A matrix of 32 rows and columns in 2 groups, after a change.
fn matrix(change: impl FnOnce(&mut Parts)) -> Result<Matrix, Error> {
    let g_idx = GIdx::new(None, 32, 2, None)?;
    let mut parts = Parts { codes: vec![8; 32 * 32], zeros: vec![8; 64], scales: vec![1.0; 64], g_idx };
    change(&mut parts);
    Matrix::new(shape(32, 32, 2), parts.codes, parts.zeros, parts.scales, parts.g_idx)
}

#[test]
fn bits_g1_1() {
    for found in [0, 1, 5, 6, 7, 16, u32::MAX] {
        assert_eq!(Bits::try_from(found), Err(Error::Bits { found }));
    }
}

#[test]
fn dimensions_g1_3() {
    let [qweight, qzeros, scales] = [[4, 64], [1, 8], [1, 64]];
    assert!(Shape::from_dimensions(32, qweight, qzeros, scales).is_ok());
    assert_eq!(
        Shape::from_dimensions(32, [4, 56], qzeros, scales),
        Err(Error::Dimensions { tensor: "qweight", found: [4, 56], axis: 1, expected: 64 })
    );
    assert_eq!(
        Shape::from_dimensions(32, qweight, [2, 8], scales),
        Err(Error::Dimensions { tensor: "qzeros", found: [2, 8], axis: 0, expected: 1 })
    );
}

#[test]
fn no_width_fits_g1_4() {
    let refused = |in_features, qweight, qzeros| {
        let found = Shape::from_dimensions(in_features, qweight, qzeros, [1, 64]);
        assert_eq!(found, Err(Error::NoWidthFits { in_features, out_features: 64, qweight, qzeros }));
    };
    refused(32, [5, 64], [1, 10]); // 5 bits
    refused(32, [4, 64], [1, 6]); // 4 bits down, 3 bits across
    refused(32, [32, 64], [1, 8]); // not packed along k
    refused(40, [4, 64], [1, 8]); // AutoGPTQ drops the last 8 of 40 rows
    refused(usize::MAX, [4, 64], [1, 8]);
}

#[test]
fn several_widths_fit_g1_4() {
    let found = Shape::from_dimensions(8, [1, 8], [1, 1], [1, 8]);
    assert!(
        matches!(found, Err(Error::SeveralWidthsFit { in_features: 8, out_features: 8, .. })),
        "{found:?}"
    );
}

#[test]
fn size_g1_5() {
    let no_rows = Err(Error::Size { axis: "in_features", found: 0 });
    assert_eq!(Shape::from_dimensions(0, [0, 64], [1, 8], [1, 64]), no_rows);
    let no_columns = Error::Size { axis: "out_features", found: 0 };
    assert_eq!(Shape::from_dimensions(32, [4, 0], [1, 0], [1, 0]), Err(no_columns.clone()));
    let empty = shape(32, 0, 1);
    assert_eq!(unpack_codes(&empty, &[]), Err(no_columns.clone()));
    assert_eq!(pack_codes(&empty, &[]), Err(no_columns.clone()));
    assert_eq!(survey_zeros(&empty, &[]), Err(no_columns.clone()));
    assert_eq!(decode_zeros(&empty, &[], ZeroEncoding::V2), Err(no_columns.clone()));
    assert_eq!(encode_zeros(&empty, &[], ZeroConvention::V2), Err(no_columns));
    assert_eq!(GIdx::new(None, 0, 1, None), Err(Error::Size { axis: "in_features", found: 0 }));
    let huge = shape(usize::MAX, usize::MAX, 1);
    assert!(matches!(unpack_codes(&huge, &[]), Err(Error::Size { found: usize::MAX, .. })));
}

#[test]
fn group_count_g1_5() {
    let refused = |groups| Error::GroupCount { in_features: 32, groups };
    assert_eq!(Shape::from_dimensions(32, [4, 64], [0, 8], [0, 64]), Err(refused(0)));
    assert_eq!(Shape::from_dimensions(32, [4, 64], [33, 8], [33, 64]), Err(refused(33)));
    assert_eq!(GIdx::new(None, 32, 0, Some(32)), Err(refused(0)));
    assert_eq!(GIdx::new(Some(&[0; 32]), 32, usize::MAX, None), Err(refused(usize::MAX)));
}

#[test]
fn length_g1_2() {
    let shape = shape(32, 32, 2);
    let length = |tensor, found, expected| Error::Length { tensor, found, expected };
    for found in [0, 127, 129] {
        assert_eq!(unpack_codes(&shape, &vec![0; found]), Err(length("qweight", found, 128)));
    }
    assert_eq!(pack_codes(&shape, &[0; 1023]), Err(length("codes", 1023, 1024)));
    assert_eq!(survey_zeros(&shape, &[0; 7]), Err(length("qzeros", 7, 8)));
    assert_eq!(decode_zeros(&shape, &[0; 9], ZeroEncoding::V2), Err(length("qzeros", 9, 8)));
    assert_eq!(encode_zeros(&shape, &[1; 63], ZeroConvention::V1), Err(length("zeros", 63, 64)));
    assert_eq!(check_scales(&shape, &[1.0; 65]), Err(length("scales", 65, 64)));
    assert_eq!(matrix(|p| p.codes.truncate(1)), Err(length("codes", 1, 1024)));
    assert_eq!(matrix(|p| p.zeros.push(8)), Err(length("zeros", 65, 64)));
    assert_eq!(matrix(|p| p.scales.clear()), Err(length("scales", 0, 64)));
}

#[test]
fn code_g2_4() {
    let mut codes = vec![15; 32 * 32];
    assert!(pack_codes(&shape(32, 32, 2), &codes).is_ok());
    codes[77] = 16;
    codes[99] = 255;
    let refused = Error::Code { position: 77, found: 16, bits: four_bits() };
    assert_eq!(pack_codes(&shape(32, 32, 2), &codes), Err(refused.clone()));
    assert_eq!(matrix(|p| p.codes = codes), Err(refused));
}

#[test]
fn group_index_g3_8() {
    for found in [-1, 2, i64::MIN, i64::from(i32::MAX), i64::MAX] {
        let mut index = vec![0, 1, 0, 1];
        index[2] = found;
        assert_eq!(
            GIdx::new(Some(&index), 4, 2, None),
            Err(Error::GroupIndex { position: 2, found, groups: 2 })
        );
    }
    // An index of three groups in a matrix of two.
    let mut three = vec![0; 32];
    three[7] = 2;
    let three = GIdx::new(Some(&three), 32, 3, None).unwrap();
    let found = matrix(|p| p.g_idx = three);
    assert_eq!(found, Err(Error::GroupIndex { position: 7, found: 2, groups: 2 }));
}

#[test]
fn g_idx_length_g3_8() {
    for found in [1, 3, 5] {
        let index = vec![0; found];
        assert_eq!(GIdx::new(Some(&index), 4, 2, None), Err(Error::GIdxLength { found, expected: 4 }));
    }
    let short = GIdx::new(None, 16, 2, None).unwrap();
    let found = matrix(|p| p.g_idx = short);
    assert_eq!(found, Err(Error::GIdxLength { found: 16, expected: 32 }));
}

#[test]
fn group_size_g3_6() {
    for stated in [None, Some(0), Some(3), Some(usize::MAX)] {
        let refused = Err(Error::GroupSize { in_features: 5, groups: 3, stated });
        assert_eq!(GIdx::new(None, 5, 3, stated), refused);
        assert_eq!(GIdx::new(Some(&[0; 5]), 5, 3, stated), refused);
    }
}

#[test]
fn scale_g5_4() {
    for found in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        let error = matrix(|p| p.scales[34] = found).unwrap_err();
        assert!(matches!(error, Error::Scale { group: 1, column: 2, .. }), "{error}");
    }
}

#[test]
fn zero_g4_3() {
    assert!(matrix(|p| p.zeros[34] = 16).is_ok());
    for found in [17, 32_768, u16::MAX] {
        let refused = Error::Zero { group: 1, column: 2, found, bits: four_bits() };
        assert_eq!(matrix(|p| p.zeros[34] = found), Err(refused));
    }
}

#[test]
fn encoding_width_g4_9() {
    let found = decode_zeros(&shape(32, 32, 2), &[0; 8], ZeroEncoding::V1ThreeBitSwapped);
    assert_eq!(found, Err(Error::EncodingWidth { bits: four_bits() }));
}

#[test]
fn zero_not_representable_g4_13_g4_14() {
    let refused = |convention, found| {
        let mut zeros = vec![5; 64];
        zeros[34] = found;
        let error = Error::ZeroNotRepresentable { group: 1, column: 2, found, convention };
        assert_eq!(encode_zeros(&shape(32, 32, 2), &zeros, convention), Err(error));
    };
    refused(ZeroConvention::V1, 0);
    refused(ZeroConvention::V1, 17);
    refused(ZeroConvention::V2, 16);
    refused(ZeroConvention::V2, u16::MAX);
}
