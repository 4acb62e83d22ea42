//! A test for each numbered statement of the GPTQ SPEC. What must be refused is in `gptq_errors.rs`.

mod vectors;

use half::{bf16, f16};
use requant_formats::gptq::{
    Bits, GIdx, GIdxKind, Matrix, Shape, ZeroConvention, ZeroEncoding, decode_zeros, encode_zeros,
    pack_codes, survey_zeros, unpack_codes,
};
use vectors::{hex, int, ints, list, load, words};

const V1_ENCODINGS: [ZeroEncoding; 3] =
    [ZeroEncoding::V1PlusOne, ZeroEncoding::V1Wrap, ZeroEncoding::V1WordWise];

fn bits(width: i64) -> Bits {
    Bits::try_from(width as u32).expect("a width of the format")
}

fn shape(width: i64, in_features: usize, out_features: usize, groups: usize) -> Shape {
    Shape { in_features, out_features, bits: bits(width), groups }
}

/// Decodes one row of zero points.
fn zeros(width: i64, columns: usize, qzeros: &[u32], encoding: ZeroEncoding) -> Vec<u16> {
    decode_zeros(&shape(width, 32, columns, 1), qzeros, encoding).expect("a whole row")
}

/// The same word in each of `n` columns.
fn spread(column: &[u32], n: usize) -> Vec<u32> {
    column.iter().flat_map(|&word| std::iter::repeat_n(word, n)).collect()
}

#[test]
fn g1_1_widths() {
    let widths: Vec<u32> = (0..40).filter(|&width| Bits::try_from(width).is_ok()).collect();
    assert_eq!(widths, [2, 3, 4, 8]);
}

#[test]
fn g1_2_shapes_of_tensors() {
    let shape = shape(3, 96, 64, 3);
    assert_eq!((shape.qweight(), shape.qzeros(), shape.scales()), ([9, 64], [3, 6], [3, 64]));
    // A column or row that ends inside a word takes the whole word.
    let partial = Shape { in_features: 33, out_features: 10, ..shape };
    assert_eq!((partial.qweight(), partial.qzeros()), ([4, 10], [3, 1]));
}

#[test]
fn g1_4_word_counts_tell_the_width() {
    for width in [2, 3, 4, 8] {
        let rows = 96 * width / 32;
        let columns = 64 * width / 32;
        let found = Shape::from_dimensions(96, [rows, 64], [3, columns], [3, 64]).unwrap();
        assert_eq!(found, shape(width as i64, 96, 64, 3));
    }
}

#[test]
fn g2_1_and_g2_2_codes_are_a_stream_of_bits_down_the_rows() {
    for module in list(&load("gptq")["modules"]) {
        let shape = shape(int(&module["bits"]), 32, 5, 1);
        let codes: Vec<u8> = ints(&module["codes"]);
        let qweight = spread(&words(&module["qweight_column"]), 5);
        let expected: Vec<u8> = codes.iter().flat_map(|&code| [code; 5]).collect();
        assert_eq!(unpack_codes(&shape, &qweight).unwrap(), expected, "{shape:?}");
        assert_eq!(pack_codes(&shape, &expected).unwrap(), qweight, "{shape:?}");
    }
}

#[test]
fn g2_1_columns_do_not_mix() {
    // Column j holds the code j + 1 in row j only.
    let shape = shape(4, 8, 8, 1);
    let mut codes = vec![0; 64];
    for j in 0..8 {
        codes[j * 8 + j] = j as u8 + 1;
    }
    let expected: Vec<u32> = (0..8).map(|j| (j + 1) << (4 * j)).collect();
    assert_eq!(pack_codes(&shape, &codes).unwrap(), expected);
    assert_eq!(unpack_codes(&shape, &expected).unwrap(), codes);
}

#[test]
fn g2_3_padding_bits_are_ignored_and_written_as_0() {
    let shape = shape(4, 5, 1, 1);
    assert_eq!(unpack_codes(&shape, &[0xABC5_4321]).unwrap(), [1, 2, 3, 4, 5]);
    assert_eq!(pack_codes(&shape, &[1, 2, 3, 4, 5]).unwrap(), [0x0005_4321]);
}

#[test]
fn g3_1_absent_index_means_rows_in_order() {
    for tensor in [None, Some(&[][..])] {
        let index = GIdx::new(tensor, 6, 3, None).unwrap();
        assert_eq!((index.groups(), index.kind()), (&[0, 0, 1, 1, 2, 2][..], GIdxKind::Absent));
        assert!(!index.is_act_order() && index.equal_groups());
    }
}

#[test]
fn g3_2_zeros_with_several_groups_are_a_leftover() {
    let index = GIdx::new(Some(&[0; 6]), 6, 3, None).unwrap();
    assert_eq!((index.groups(), index.kind()), (&[0, 0, 1, 1, 2, 2][..], GIdxKind::ZeroLeftover));
}

#[test]
fn g3_3_zeros_with_one_group_are_one_group() {
    let index = GIdx::new(Some(&[0; 6]), 6, 1, Some(2)).unwrap();
    assert_eq!((index.groups(), index.kind(), index.group_size()), (&[0; 6][..], GIdxKind::OneGroup, 6));
}

#[test]
fn g3_4_sequential_also_with_a_short_last_group() {
    let index = GIdx::new(Some(&[0, 0, 0, 0, 1, 1]), 6, 2, None).unwrap();
    assert_eq!((index.kind(), index.group_size(), index.equal_groups()), (GIdxKind::Sequential, 4, true));
}

#[test]
fn g3_5_anything_else_is_act_order_and_unequal_groups_are_known() {
    let index = GIdx::new(Some(&[1, 0, 0, 1, 0, 0]), 6, 2, None).unwrap();
    assert_eq!((index.kind(), index.group_size(), index.equal_groups()), (GIdxKind::ActOrder, 4, true));
    assert_eq!(index.groups(), [1, 0, 0, 1, 0, 0]);
    // A short group that isn't the last one; a group without rows, also the last one.
    for unequal in [[1, 0, 0, 1, 1, 1], [0, 0, 0, 0, 2, 2], [1, 0, 1, 0, 1, 0]] {
        let index = GIdx::new(Some(&unequal), 6, 3, Some(2)).unwrap();
        assert_eq!((index.kind(), index.equal_groups()), (GIdxKind::ActOrder, false), "{unequal:?}");
    }
}

#[test]
fn g3_6_the_index_then_the_configuration_then_even_division_give_the_size() {
    let size = |tensor: Option<&[i64]>, stated| GIdx::new(tensor, 6, 2, stated).map(|g| g.group_size());
    assert_eq!(size(Some(&[1, 0, 0, 1, 0, 0]), Some(3)), Ok(4));
    assert_eq!(size(None, Some(4)), Ok(4));
    assert_eq!(size(None, Some(2)), Ok(3), "2 rows a group would be 3 groups");
    assert_eq!(size(None, None), Ok(3));
    assert_eq!(GIdx::new(None, 6, 1, Some(4)).map(|g| g.group_size()), Ok(6));
    assert_eq!(GIdx::new(None, 5, 2, Some(4)).unwrap().groups(), [0, 0, 0, 0, 1]);
}

#[test]
fn g3_7_rows_sort_stably_by_group() {
    let case = &load("gptq")["act_order"];
    let index: Vec<i64> = ints(&case["g_idx"]);
    let index = GIdx::new(Some(&index), 8, 2, None).unwrap();
    let rows = index.sorted_rows();
    assert_eq!(rows.map(), ints::<u32>(&case["sorted_rows"]));
    assert_eq!(rows.inverse().map(), ints::<u32>(&case["inverse"]));
    let sorted: Vec<u32> = rows.map().iter().map(|&row| index.groups()[row as usize]).collect();
    assert_eq!(sorted, ints::<u32>(&case["sorted_g_idx"]));
}

#[test]
fn g4_1_g4_2_g4_4_fields_run_along_a_row_and_v1_stores_one_less() {
    for case in list(&load("gptq")["varying_zeros"]) {
        let width = int(&case["bits"]);
        let expected: Vec<u16> = ints(&case["zero_points"]);
        let (v1, v2) = (words(&case["v1"]), words(&case["v2"]));
        let shape = shape(width, 32, 32, 1);
        assert_eq!(zeros(width, 32, &v2, ZeroEncoding::V2), expected, "{width} bits");
        for encoding in V1_ENCODINGS {
            assert_eq!(zeros(width, 32, &v1, encoding), expected, "{width} bits, {encoding:?}");
        }
        assert_eq!(encode_zeros(&shape, &expected, ZeroConvention::V1).unwrap(), v1, "{width} bits");
        assert_eq!(encode_zeros(&shape, &expected, ZeroConvention::V2).unwrap(), v2, "{width} bits");
    }
}

#[test]
fn g4_1_each_group_row_begins_a_word() {
    // Three columns of 3 bits take one word a row; the padding above them is ignored.
    let qzeros = [0xFFFF_FE00 | 0o321, 0o654];
    let decoded = decode_zeros(&shape(3, 4, 3, 2), &qzeros, ZeroEncoding::V2).unwrap();
    assert_eq!(decoded, [1, 2, 3, 4, 5, 6]);
}

#[test]
fn g4_5_g4_6_g4_7_an_all_ones_field_by_encoding() {
    for width in [2, 3, 4, 8] {
        let ones = bits(width).max_code();
        let read = |encoding| zeros(width, 1, &[ones], encoding)[0];
        assert_eq!(u32::from(read(ZeroEncoding::V2)), ones);
        assert_eq!(u32::from(read(ZeroEncoding::V1PlusOne)), ones + 1);
        assert_eq!(read(ZeroEncoding::V1Wrap), 0);
    }
}

#[test]
fn g4_8_word_wise_addition_undoes_borrows() {
    for case in list(&load("gptq")["zero_point_0"]) {
        let expected: Vec<u16> = ints(&case["zero_points"]);
        let stored = [hex(&case["v1_word_wise"])];
        let width = int(&case["bits"]);
        assert_eq!(zeros(width, expected.len(), &stored, ZeroEncoding::V1WordWise), expected);
        // The borrow reached a neighbour: reading field by field is wrong.
        assert_ne!(zeros(width, expected.len(), &stored, ZeroEncoding::V1Wrap), expected);
    }
    for case in list(&load("gptq")["symmetric_zeros"]) {
        let Some(constant) = case.get("word_wise_constant") else { continue };
        let (stored, sum) = (words(&case["v1"]), words(&case["v2"]));
        assert_eq!(stored[0].wrapping_add(words(constant)[0]), sum[0]);
        let width = int(&case["bits"]);
        assert_eq!(
            zeros(width, 32 / width as usize, &stored, ZeroEncoding::V1WordWise),
            zeros(width, 32 / width as usize, &sum, ZeroEncoding::V2)
        );
    }
}

#[test]
fn g4_8_three_bits_wrap_field_by_field() {
    // All ones in column 0 of 32, 3 (z = 4) elsewhere: the neighbour is untouched.
    let stored = [0xDB6D_B6DB | 0b111, 0xB6DB_6DB6, 0x6DB6_DB6D];
    let mut expected = vec![4; 32];
    expected[0] = 0;
    assert_eq!(zeros(3, 32, &stored, ZeroEncoding::V1WordWise), expected);
}

#[test]
fn g4_7_field_wrap_vector() {
    let file = load("gptq");
    let case = &list(&file["zero_point_0"])[0];
    let expected: Vec<u16> = ints(&case["zero_points"]);
    assert_eq!(zeros(4, 8, &[hex(&case["v1_field_wrap"])], ZeroEncoding::V1Wrap), expected);
    assert_eq!(zeros(4, 8, &[hex(&case["v2"])], ZeroEncoding::V2), expected);
}

#[test]
fn g4_9_exchanged_constants_of_three_bits() {
    let file = load("gptq");
    let varying = list(&file["varying_zeros"]).iter().find(|case| int(&case["bits"]) == 3).unwrap();
    let stored = words(&varying["v1_three_bit_swapped"]);
    let expected: Vec<u16> = ints(&varying["zero_points"]);
    assert_eq!(zeros(3, 32, &stored, ZeroEncoding::V1ThreeBitSwapped), expected);
    // The pattern starts anew with each 32 columns and with each row.
    let twice = [stored.clone(), stored].concat();
    let expected = [expected.clone(), expected].concat();
    assert_eq!(zeros(3, 64, &twice, ZeroEncoding::V1ThreeBitSwapped), expected);
    let rows = decode_zeros(&shape(3, 32, 32, 2), &twice, ZeroEncoding::V1ThreeBitSwapped).unwrap();
    assert_eq!(rows, expected);
}

#[test]
fn g4_10_symmetric_words_tell_the_convention() {
    for case in list(&load("gptq")["symmetric_zeros"]) {
        let width = int(&case["bits"]);
        let shape = shape(width, 32, 32, 2);
        let symmetric = bits(width).symmetric_zero();
        let survey = |words: &[u32]| {
            let row: Vec<u32> = words.iter().copied().cycle().take(shape.qzeros()[1]).collect();
            survey_zeros(&shape, &[row.clone(), row].concat()).unwrap()
        };
        let (v1, v2) = (survey(&words(&case["v1"])), survey(&words(&case["v2"])));
        assert_eq!(v1.constant.map(u16::from), Some(symmetric - 1), "{width} bits");
        assert_eq!(v2.constant.map(u16::from), Some(symmetric), "{width} bits");
        assert!(!v1.three_bit_swapped && !v2.three_bit_swapped, "{width} bits");
        assert_eq!((v1.all_ones, v1.smears, v2.all_ones, v2.smears), (0, 0, 0, 0), "{width} bits");
        if let Some(swapped) = case.get("v1_three_bit_swapped") {
            let swapped = survey(&words(swapped));
            assert!(swapped.three_bit_swapped);
            assert_eq!(swapped.constant, None);
        }
    }
}

#[test]
fn g4_10_padding_has_no_vote() {
    let survey = survey_zeros(&shape(4, 32, 6, 1), &[0x0077_7777]).unwrap();
    assert_eq!(survey.constant, Some(7));
    let survey = survey_zeros(&shape(4, 32, 6, 1), &[0xFF77_7777]).unwrap();
    assert_eq!((survey.constant, survey.all_ones, survey.smears), (Some(7), 0, 0));
}

#[test]
fn g4_11_all_ones_fields_are_counted() {
    let survey = survey_zeros(&shape(4, 32, 8, 2), &[0xF7F7_777F, 0x7777_7777]).unwrap();
    assert_eq!((survey.all_ones, survey.constant), (3, None));
    for case in list(&load("gptq")["zero_point_0"]) {
        let fields = list(&case["zero_points"]).len();
        for stored in ["v1_word_wise", "v1_field_wrap", "v1_smear"].iter().filter_map(|v| case.get(v)) {
            let shape = shape(int(&case["bits"]), 32, fields, 1);
            let survey = survey_zeros(&shape, &[hex(stored)]).unwrap();
            assert!(survey.all_ones > 0, "{stored}");
        }
    }
}

/// One row of zero points packed as AutoGPTQ's loops do: `z − 1` as a whole u32, shifted and ORed.
fn autogptq_pack(width: usize, zero_points: &[u32]) -> Vec<u32> {
    let fields: Vec<u32> = zero_points.iter().map(|z| z.wrapping_sub(1)).collect();
    if width != 3 {
        let join = |word: &[u32]| word.iter().enumerate().fold(0, |w, (i, f)| w | f << (i * width));
        return fields.chunks(32 / width).map(join).collect();
    }
    fields
        .chunks(32)
        .flat_map(|f| {
            let run =
                |start: usize, first: u32| (0..10).fold(0, |w, i| w | f[start + i] << (3 * i as u32 + first));
            [
                run(0, 0) | f[10] << 30,
                (f[10] >> 2 & 1) | run(11, 1) | f[21] << 31,
                (f[21] >> 1 & 3) | run(22, 2),
            ]
        })
        .collect()
}

#[test]
fn g4_12_smears_are_counted_and_wrapped_zeros_are_not() {
    let file = load("gptq");
    let case = &list(&file["zero_point_0"])[0];
    assert_eq!(autogptq_pack(4, &ints(&case["zero_points"])), [hex(&case["v1_smear"])]);
    for width in [2usize, 3, 4, 8] {
        let shape = shape(width as i64, 32, 32, 1);
        let largest = bits(width as i64).max_code();
        for position in 0..32 {
            let mut zero_points: Vec<u32> = (0..32).map(|j| j % largest + 1).collect();
            zero_points[position] = 0;
            let survey = survey_zeros(&shape, &autogptq_pack(width, &zero_points)).unwrap();
            // The top field of a word has nothing above it; a straddling field is masked.
            let end = (position + 1) * width;
            let harmless = end % 32 == 0 || end / 32 != position * width / 32;
            assert_eq!(survey.smears, usize::from(!harmless), "{width} bits, column {position}");
            assert!(survey.all_ones > 0);
            // The same row with the field wrapped by itself is no smear.
            let mut fields: Vec<u16> = zero_points.iter().map(|&z| z as u16).collect();
            fields[position] = 1 << width;
            let wrapped = encode_zeros(&shape, &fields, ZeroConvention::V1).unwrap();
            let above = zero_points.get(position + 1).map_or(0, |z| z - 1);
            // At 3 bits the low bits of the straddling field above can be ones by themselves.
            let looks_like_one = width == 3
                && !harmless
                && (position == 9 && above & 3 == 3 || position == 20 && above & 1 == 1);
            let survey = survey_zeros(&shape, &wrapped).unwrap();
            assert_eq!(survey.smears, usize::from(looks_like_one), "{width} bits, column {position}");
        }
    }
}

#[test]
fn g4_13_and_g4_14_the_ends_of_the_range() {
    for width in [2, 3, 4, 8] {
        let shape = shape(width, 32, 32, 1);
        let most = 1u16 << width;
        for (convention, encoding, ends) in [
            (ZeroConvention::V1, ZeroEncoding::V1PlusOne, [1, most]),
            (ZeroConvention::V2, ZeroEncoding::V2, [0, most - 1]),
        ] {
            let row: Vec<u16> = ends.into_iter().cycle().take(32).collect();
            let stored = encode_zeros(&shape, &row, convention).unwrap();
            assert_eq!(decode_zeros(&shape, &stored, encoding).unwrap(), row);
        }
    }
}

/// A matrix of one column of codes in 32 columns, from words.
fn matrix(module: &serde_json::Value, zero_case: &serde_json::Value, v1: bool) -> Matrix {
    let shape = shape(int(&module["bits"]), 32, 32, 1);
    let codes =
        unpack_codes(&shape, &spread(&words(&module["qweight_column"]), 32)).expect("words of k rows");
    let (stored, encoding) = if v1 { ("v1", ZeroEncoding::V1PlusOne) } else { ("v2", ZeroEncoding::V2) };
    let zeros = decode_zeros(&shape, &words(&zero_case[stored]), encoding).expect("a row of zeros");
    assert!(zeros.iter().all(|&z| i64::from(z) == int(&zero_case["zero"])));
    let scale = f16::from_bits(hex(&module["scale"]) as u16).to_f32();
    let g_idx = GIdx::new(None, 32, 1, None).expect("one group");
    Matrix::new(shape, codes, zeros, vec![scale; 32], g_idx).expect("a matrix")
}

#[test]
fn g5_1_and_g5_2_weights_in_fp16() {
    for module in list(&load("gptq")["modules"]) {
        for case in list(&module["zero_points"]) {
            for v1 in [true, false] {
                let matrix = matrix(module, case, v1);
                for (code, weight) in matrix.codes().iter().zip(matrix.dequantize()) {
                    let expected = hex(&case["weights_fp16"][code.to_string()]);
                    assert_eq!(u32::from(weight.to_bits()), expected, "code {code} of {:?}", matrix.shape());
                }
            }
        }
    }
}

#[test]
fn g5_1_each_row_uses_the_scales_and_zeros_of_its_group() {
    let shape = shape(4, 4, 2, 2);
    let g_idx = GIdx::new(Some(&[1, 0, 0, 1]), 4, 2, None).unwrap();
    let matrix =
        Matrix::new(shape, vec![9; 8], vec![8, 7, 6, 5], vec![1.0, 10.0, 100.0, 1000.0], g_idx).unwrap();
    let weights: Vec<f32> = matrix.dequantize().into_iter().map(f16::to_f32).collect();
    assert_eq!(weights, [300., 4000., 1., 20., 1., 20., 300., 4000.]);
}

/// The weights of one row with one scale: code 9 in each column, and the given zero points.
fn row(scale: f32, zeros: &[u16]) -> Matrix {
    let shape = shape(4, 1, zeros.len(), 1);
    let g_idx = GIdx::new(None, 1, 1, None).expect("one group");
    Matrix::new(shape, vec![9; zeros.len()], zeros.to_vec(), vec![scale; zeros.len()], g_idx)
        .expect("a matrix")
}

#[test]
fn g5_2_one_rounding_to_nearest_even_with_subnormals() {
    let bits = |scale: f32| -> Vec<u16> {
        row(scale, &[8, 7, 6, 10]).dequantize().into_iter().map(f16::to_bits).collect()
    };
    // Differences 1, 2, 3, −1 times 2⁻²⁴, 2⁻²⁵ (a tie at odd differences) and 2⁻²⁶.
    assert_eq!(bits(2f32.powi(-24)), [1, 2, 3, 0x8001]);
    assert_eq!(bits(2f32.powi(-25)), [0, 1, 2, 0x8000]);
    assert_eq!(bits(2f32.powi(-26)), [0, 0, 1, 0x8000]);
}

#[test]
fn g5_3_weights_in_bf16_are_not_rounded_to_fp16_first() {
    let file = load("gptq");
    for module in list(&file["modules"]) {
        let case = &list(&module["zero_points"])[0];
        let matrix = matrix(module, case, true);
        for (code, weight) in matrix.codes().iter().zip(matrix.dequantize_bf16()) {
            let expected = hex(&case["weights_bf16"][code.to_string()]);
            assert_eq!(u32::from(weight.to_bits()), expected, "code {code} of {:?}", matrix.shape());
        }
    }
    let case = &file["bf16_not_by_way_of_fp16"];
    let scale = f16::from_bits(hex(&case["scale"]) as u16).to_f32();
    let shape = shape(4, 1, 1, 1);
    let g_idx = GIdx::new(None, 1, 1, None).unwrap();
    assert_eq!(int(&case["difference"]), -15);
    let matrix = Matrix::new(shape, vec![0], vec![15], vec![scale], g_idx).unwrap();
    assert_eq!(u32::from(matrix.dequantize_bf16()[0].to_bits()), hex(&case["bf16"]));
    let twice = bf16::from_f32(matrix.dequantize()[0].to_f32());
    assert_eq!(u32::from(twice.to_bits()), hex(&case["bf16_by_way_of_fp16"]));
}

#[test]
fn g5_4_zero_and_negative_scales_are_legal() {
    let weights =
        |scale: f32| -> Vec<f32> { row(scale, &[8, 10]).dequantize().into_iter().map(f16::to_f32).collect() };
    assert_eq!(weights(0.0), [0.0, 0.0]);
    assert_eq!(weights(-0.5), [-0.5, 0.5]);
}
