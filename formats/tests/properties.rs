//! Round trips and hostile inputs, each property over [`CASES`] random cases.

use half::f16;
use proptest::prelude::*;
use requant_formats::Permutation;
use requant_formats::exl2::{self, Group, GroupTable, Tensors};
use requant_formats::gptq::{self, GIdx, Shape, ZeroConvention, ZeroEncoding};

/// Random cases of each property.
const CASES: u32 = 3000;

/// A generator for large slices (xorshift), for which proptest's own would take most of the time.
struct Stream(u64);

impl Stream {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as u32
    }

    fn below(&mut self, limit: u32) -> u32 {
        self.next() % limit
    }

    fn words(&mut self, len: usize) -> Vec<u32> {
        (0..len).map(|_| self.next()).collect()
    }

    fn permutation(&mut self, len: usize) -> Permutation {
        let mut map: Vec<u32> = (0..len as u32).collect();
        for i in (1..len).rev() {
            map.swap(i, self.below(i as u32 + 1) as usize);
        }
        Permutation::new(map).expect("swaps of the identity")
    }
}

fn stream() -> impl Strategy<Value = Stream> {
    any::<u64>().prop_map(|seed| Stream(seed | 1))
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Stream({})", self.0)
    }
}

fn gptq_bits() -> impl Strategy<Value = gptq::Bits> {
    proptest::sample::select(gptq::Bits::ALL.to_vec())
}

/// Shapes that weights can have, sizes that aren't multiples of 32 included.
fn shape() -> impl Strategy<Value = Shape> {
    (gptq_bits(), 1usize..100, 1usize..100, 1usize..5).prop_map(
        |(bits, in_features, out_features, groups)| Shape {
            in_features,
            out_features,
            bits,
            groups: groups.min(in_features),
        },
    )
}

/// Any fields at all, mostly small.
fn any_shape() -> impl Strategy<Value = Shape> {
    let size = || prop_oneof![8 => 0usize..70, 1 => any::<usize>()];
    (gptq_bits(), size(), size(), size()).prop_map(|(bits, in_features, out_features, groups)| Shape {
        in_features,
        out_features,
        bits,
        groups,
    })
}

fn encoding() -> impl Strategy<Value = ZeroEncoding> {
    proptest::sample::select(vec![
        ZeroEncoding::V2,
        ZeroEncoding::V1PlusOne,
        ZeroEncoding::V1Wrap,
        ZeroEncoding::V1WordWise,
        ZeroEncoding::V1ThreeBitSwapped,
    ])
}

/// An EXL2 matrix of any mix of widths and group sizes (the last one included), any order of rows, any
/// ceilings, and the columns that don't pad.
fn exl2_matrix() -> impl Strategy<Value = (exl2::Matrix, usize)> {
    let group = (proptest::sample::select(exl2::Bits::ALL.to_vec()), 1usize..4)
        .prop_map(|(bits, units)| Group { bits, rows: 32 * units });
    (proptest::collection::vec(group, 1..6), 1usize..4, 0usize..32, stream()).prop_map(
        |(mut groups, columns, padding, mut random)| {
            groups.sort_by_key(|group| std::cmp::Reverse(group.bits));
            let (n, count) = (32 * columns, groups.len());
            let used = n - padding;
            let mut codes = Vec::new();
            let mut scale_max = Vec::new();
            for group in &groups {
                // Some groups vanish and have zero codes only; no ceiling overflows with 8 bits.
                let vanishes = random.below(8) == 0;
                let ceiling = if vanishes { random.below(0x81) } else { 0x81 + random.below(0x5F00) };
                scale_max.push(f16::from_bits(ceiling as u16));
                for _ in 0..group.rows {
                    codes.extend((0..n).map(|column| match column < used && !vanishes {
                        true => (random.next() & group.bits.max_code()) as u8,
                        false => group.bits.zero() as u8,
                    }));
                }
            }
            let scale_index = (0..count * n).map(|_| random.below(16) as u8).collect();
            let table = GroupTable::new(groups).expect("multiples of 32 rows, widths that fall");
            let invperm = random.permutation(table.rows());
            let matrix = exl2::Matrix::new(table, n, codes, scale_index, scale_max, invperm);
            (matrix.expect("no part breaks a rule"), used)
        },
    )
}

/// Rounds to fp16, ties to even, subnormals kept: written from the definition, for values that don't
/// overflow. `value` is exact.
fn round_to_half(value: f64) -> u16 {
    let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
    let magnitude = value.abs();
    // Steps of 2⁻²⁴ below 2⁻¹⁴, then of 2⁻¹⁰ of the power of two below the value.
    let mut exponent = -14;
    while magnitude >= 2f64.powi(exponent + 1) {
        exponent += 1;
    }
    let steps = (magnitude / 2f64.powi(exponent - 10)).round_ties_even() as u16;
    // From 1024 steps on, they carry into the exponent's field by themselves.
    sign | ((exponent + 14) as u16 * 1024 + steps)
}

/// The value of a finite half.
fn half_value(bits: u16) -> f64 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    let magnitude = match exponent {
        0 => fraction * 2f64.powi(-24),
        _ => (1024.0 + fraction) * 2f64.powi(exponent - 25),
    };
    if bits & 0x8000 == 0 { magnitude } else { -magnitude }
}

/// EXL2 SPEC §3 to §5 a weight at a time, from the tensors themselves.
fn exl2_weight(tensors: &Tensors<'_>, n: usize, model_row: usize, column: usize) -> u16 {
    let packed_row = tensors.q_invperm[model_row] as usize;
    let count = tensors.q_scale_max.len();
    let mut first_row = 0;
    for group in 0..count {
        let width = tensors.q_groups[2 * group] as usize;
        let start = tensors.q_groups[2 * group + 1] as usize;
        let end = match group + 1 < count {
            true => tensors.q_groups[2 * group + 3] as usize,
            false => tensors.q_weight.len() / n,
        };
        let rows = (end - start) * 32 / width;
        if packed_row < first_row + rows {
            let bit = |i: usize| tensors.q_weight[(start + i / 32) * n + column] >> (i % 32) & 1;
            let at = (packed_row - first_row) * width;
            let code: u32 = (0..width).map(|t| bit(at + t) << t).sum();
            let index = tensors.q_scale[group * n / 8 + column / 8] >> (4 * (column % 8)) & 15;
            let m1 = round_to_half(half_value(tensors.q_scale_max[group].to_bits()) / 256.0);
            let m2 = round_to_half(f64::from((index + 1) * (index + 1)) * half_value(m1));
            return round_to_half((f64::from(code) - f64::from(1u32 << (width - 1))) * half_value(m2));
        }
        first_row += rows;
    }
    unreachable!("the groups hold all rows")
}

#[test]
fn the_twin_of_half_rounds_like_it() {
    for bits in 0..0x7C00u16 {
        assert_eq!(round_to_half(half_value(bits)), bits);
        assert_eq!(half_value(bits), f64::from(f16::from_bits(bits).to_f32()));
        // Halfway to the next one, and beside it.
        let (low, high) = (half_value(bits), half_value((bits + 1).min(0x7BFF)));
        for value in [(low + high) / 2.0, low + (high - low) * 0.499, low + (high - low) * 0.501] {
            assert_eq!(round_to_half(value), f16::from_f64(value).to_bits(), "{value:e}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn gptq_codes_pack_and_unpack((shape, mut random) in (shape(), stream())) {
        let codes: Vec<u8> = (0..shape.in_features * shape.out_features)
            .map(|_| (random.next() & shape.bits.max_code()) as u8)
            .collect();
        let words = gptq::pack_codes(&shape, &codes).unwrap();
        prop_assert_eq!(words.len(), shape.qweight()[0] * shape.qweight()[1]);
        prop_assert_eq!(gptq::unpack_codes(&shape, &words).unwrap(), codes);
    }

    #[test]
    fn gptq_words_unpack_and_pack((bits, units, n, mut random) in (gptq_bits(), 1usize..4, 1usize..70, stream())) {
        let shape = Shape { in_features: 32 * units, out_features: n, bits, groups: 1 };
        let words = random.words(shape.qweight()[0] * n);
        let codes = gptq::unpack_codes(&shape, &words).unwrap();
        prop_assert_eq!(gptq::pack_codes(&shape, &codes).unwrap(), words);
    }

    #[test]
    fn gptq_zeros_encode_and_decode((shape, mut random) in (shape(), stream())) {
        let most = shape.bits.max_code() as u16;
        let fields: Vec<u16> =
            (0..shape.groups * shape.out_features).map(|_| (random.next() & u32::from(most)) as u16).collect();
        let words = gptq::encode_zeros(&shape, &fields, ZeroConvention::V2).unwrap();
        prop_assert_eq!(&gptq::decode_zeros(&shape, &words, ZeroEncoding::V2).unwrap(), &fields);

        let zeros: Vec<u16> = fields.iter().map(|field| field + 1).collect();
        let words = gptq::encode_zeros(&shape, &zeros, ZeroConvention::V1).unwrap();
        prop_assert_eq!(&gptq::decode_zeros(&shape, &words, ZeroEncoding::V1PlusOne).unwrap(), &zeros);
        let wrapped: Vec<u16> = zeros.iter().map(|z| z & most).collect();
        prop_assert_eq!(&gptq::decode_zeros(&shape, &words, ZeroEncoding::V1Wrap).unwrap(), &wrapped);

        // Where no field is all ones, the v1 encodings agree (G4.11).
        let survey = gptq::survey_zeros(&shape, &words).unwrap();
        prop_assert_eq!(survey.all_ones, fields.iter().filter(|&&field| field == most).count());
        if survey.all_ones == 0 {
            prop_assert_eq!(&gptq::decode_zeros(&shape, &words, ZeroEncoding::V1WordWise).unwrap(), &zeros);
            prop_assert_eq!(survey.smears, 0);
        }
    }

    #[test]
    fn word_wise_zeros_come_back_whatever_they_are((mut shape, mut random) in (shape(), stream())) {
        // 3 bits are corrected field by field.
        if shape.bits.get() == 3 {
            shape.bits = gptq::Bits::ALL[2];
        }
        // The writer subtracts a word of ones from the words of v2.
        let zeros: Vec<u16> = (0..shape.groups * shape.out_features)
            .map(|_| (random.next() & shape.bits.max_code()) as u16)
            .collect();
        let constant = match shape.bits.get() { 2 => 0x5555_5555, 4 => 0x1111_1111u32, _ => 0x0101_0101 };
        let words: Vec<u32> = gptq::encode_zeros(&shape, &zeros, ZeroConvention::V2)
            .unwrap()
            .into_iter()
            .map(|word| word.wrapping_sub(constant))
            .collect();
        prop_assert_eq!(gptq::decode_zeros(&shape, &words, ZeroEncoding::V1WordWise).unwrap(), zeros);
    }

    #[test]
    fn gptq_weights_are_one_rounding_of_the_product((shape, mut random) in (shape(), stream())) {
        let (k, n, groups) = (shape.in_features, shape.out_features, shape.groups);
        let codes: Vec<u8> = (0..k * n).map(|_| (random.next() & shape.bits.max_code()) as u8).collect();
        let zeros: Vec<u16> =
            (0..groups * n).map(|_| random.below(shape.bits.max_code() + 2) as u16).collect();
        // Finite halves of both signs whose products don't overflow.
        let scales: Vec<u16> = (0..groups * n).map(|_| (random.next() & 0x8000) as u16 | random.below(0x5B00) as u16).collect();
        let index: Vec<i64> = (0..k).map(|_| i64::from(random.below(groups as u32))).collect();
        let g_idx = GIdx::new(Some(&index), k, groups, Some(k.div_ceil(groups)));
        prop_assume!(g_idx.is_ok());
        let g_idx = g_idx.unwrap();
        let group_of = g_idx.groups().to_vec();
        let floats = scales.iter().map(|&bits| f16::from_bits(bits).to_f32()).collect();
        let matrix = gptq::Matrix::new(shape, codes.clone(), zeros.clone(), floats, g_idx).unwrap();
        for (i, weight) in matrix.dequantize().into_iter().enumerate() {
            let at = group_of[i / n] as usize * n + i % n;
            let exact = half_value(scales[at]) * (f64::from(codes[i]) - f64::from(zeros[at]));
            prop_assert_eq!(weight.to_bits(), round_to_half(exact));
        }
    }

    #[test]
    fn gptq_never_panics(
        (shape, words, encoding) in (any_shape(), proptest::collection::vec(any::<u32>(), 0..64), encoding()),
        (lengths_fit, stated) in (any::<bool>(), proptest::option::of(any::<usize>())),
        index in proptest::option::of(proptest::collection::vec(prop_oneof![-1i64..6, any::<i64>()], 0..70)),
    ) {
        // Lengths that fit the shape where that is possible, so that more than the length check runs.
        let sized = |[rows, columns]: [usize; 2]| match rows.checked_mul(columns) {
            Some(len) if lengths_fit && len < 10_000 => words.iter().copied().cycle().take(len).collect(),
            _ => words.clone(),
        };
        let _ = gptq::unpack_codes(&shape, &sized(shape.qweight()));
        let _ = gptq::survey_zeros(&shape, &sized(shape.qzeros()));
        let _ = gptq::decode_zeros(&shape, &sized(shape.qzeros()), encoding);
        let zeros: Vec<u16> = sized(shape.scales()).iter().map(|&word| word as u16).collect();
        let _ = gptq::encode_zeros(&shape, &zeros, encoding.convention());
        let scales: Vec<f32> = sized(shape.scales()).iter().map(|&word| f32::from_bits(word)).collect();
        let _ = gptq::check_scales(&shape, &scales);
        let codes: Vec<u8> = sized([shape.in_features, shape.out_features]).iter().map(|&w| w as u8).collect();
        let _ = gptq::pack_codes(&shape, &codes);
        // An absent index makes as many entries as the caller says there are rows.
        if (index.is_some() || shape.in_features < 10_000)
            && let Ok(g_idx) = GIdx::new(index.as_deref(), shape.in_features, shape.groups, stated)
        {
            prop_assert!(g_idx.groups().iter().all(|&g| (g as usize) < shape.groups));
            prop_assert_eq!(g_idx.groups().len(), shape.in_features);
            let _ = gptq::Matrix::new(shape, codes, zeros, scales, g_idx).map(|m| m.dequantize());
        }
        let _ = Shape::from_dimensions(shape.in_features, shape.qweight(), shape.qzeros(), shape.scales());
    }

    #[test]
    fn exl2_matrices_pack_and_unpack((matrix, used) in exl2_matrix()) {
        let packed = matrix.pack();
        prop_assert_eq!(&exl2::Matrix::unpack(packed.tensors(), matrix.out_features()).unwrap(), &matrix);
        prop_assert_eq!(matrix.check_padding(used), Ok(()));
    }

    #[test]
    fn exl2_weights_are_those_of_the_scalar_twin((matrix, _) in exl2_matrix(), mut random in stream()) {
        let packed = matrix.pack();
        let (tensors, n) = (packed.tensors(), matrix.out_features());
        let weights = matrix.dequantize();
        for _ in 0..200 {
            let row = random.below(matrix.in_features() as u32) as usize;
            let column = random.below(n as u32) as usize;
            let expected = exl2_weight(&tensors, n, row, column);
            prop_assert_eq!(weights[row * n + column].to_bits(), expected, "row {}, column {}", row, column);
        }
    }

    #[test]
    fn exl2_never_panics(
        q_groups in proptest::collection::vec(prop_oneof![3 => 0i16..40, 1 => any::<i16>()], 0..12),
        q_weight in proptest::collection::vec(any::<u32>(), 0..600),
        q_invperm in proptest::collection::vec(prop_oneof![0u32..70, any::<u32>()], 0..70),
        (q_scale, q_scale_max) in (
            proptest::collection::vec(any::<u32>(), 0..20),
            proptest::collection::vec(any::<u16>().prop_map(f16::from_bits), 0..6),
        ),
        out_features in prop_oneof![Just(32usize), Just(64), 0usize..100, any::<usize>()],
    ) {
        let tensors = Tensors {
            q_weight: &q_weight,
            q_invperm: &q_invperm,
            q_scale: &q_scale,
            q_scale_max: &q_scale_max,
            q_groups: &q_groups,
        };
        let _ = exl2::Matrix::unpack(tensors, out_features);
        let _ = GroupTable::parse(&q_groups, out_features);
    }

    #[test]
    fn what_exl2_accepts_after_a_change_packs_to_the_same_tensors(
        (matrix, _) in exl2_matrix(),
        (tensor, at, value) in (0usize..5, any::<usize>(), any::<u32>()),
        (cut, small) in (any::<bool>(), any::<bool>()),
    ) {
        fn change<T>(slice: &mut Vec<T>, at: usize, cut: bool, value: T) {
            let at = at % slice.len();
            if cut { slice.truncate(at) } else { slice[at] = value }
        }
        let mut packed = matrix.pack();
        let value = if small { value % 70 } else { value };
        match tensor {
            0 => change(&mut packed.q_weight, at, cut, value),
            1 => change(&mut packed.q_invperm, at, cut, value),
            2 => change(&mut packed.q_scale, at, cut, value),
            3 => change(&mut packed.q_scale_max, at, cut, f16::from_bits(value as u16)),
            _ => change(&mut packed.q_groups, at, cut, value as i16),
        }
        if let Ok(read) = exl2::Matrix::unpack(packed.tensors(), matrix.out_features()) {
            prop_assert!(read.dequantize().iter().all(|weight| weight.is_finite()));
            prop_assert_eq!(read.pack(), packed);
        }
    }
}
