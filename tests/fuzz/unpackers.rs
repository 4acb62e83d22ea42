//! Unpackers on any numbers: an error, or what holds together.

use super::cases;
use half::f16;
use proptest::prelude::*;
use requant::formats::gptq::{self, GIdx, Shape, ZeroEncoding};
use requant::formats::{Permutation, exl2};

/// Numbers for large slices.
struct Stream(u64);

impl Stream {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as u32
    }

    fn words(&mut self, len: usize) -> Vec<u32> {
        (0..len).map(|_| self.next()).collect()
    }
}

/// What a GPTQ module may be said to be, and numbers to fill it with.
#[derive(Clone, Debug)]
struct AnyGptq {
    in_features: usize,
    out_features: usize,
    groups: usize,
    /// Words more than the sizes ask for, of `qweight` and `qzeros`.
    more: [usize; 2],
    stated: Option<usize>,
    /// How far g_idx may be out of range; `None`: absent.
    g_idx: Option<i64>,
    seed: u64,
}

fn any_gptq() -> impl Strategy<Value = AnyGptq> {
    let size = || prop_oneof![8 => 0usize..140, 1 => Just(usize::MAX), 1 => Just(1usize << 61)];
    // Mostly the words that the sizes ask for.
    let more = || prop_oneof![6 => Just(0usize), 1 => 0usize..3];
    let sizes = (size(), size(), 0usize..9, [more(), more()]);
    (sizes, prop::option::of(0usize..140), prop::option::of(0i64..3), any::<u64>()).prop_map(
        |((in_features, out_features, groups, more), stated, g_idx, seed)| AnyGptq {
            in_features,
            out_features,
            groups,
            more,
            stated,
            g_idx,
            seed: seed | 1,
        },
    )
}

/// Unpacks a module of any numbers: an error, or a matrix whose decoding, packing and re-laying hold together.
fn unpack_gptq(bits: gptq::Bits, any: &AnyGptq) {
    let AnyGptq { in_features, out_features, groups, more, stated, g_idx, seed } = *any;
    let shape = Shape { in_features, out_features, bits, groups };
    let mut stream = Stream(seed);
    let small = |[rows, columns]: [usize; 2]| rows.checked_mul(columns).filter(|&len| len < 1 << 20);
    let (Some(words), Some(zero_words)) = (small(shape.qweight()), small(shape.qzeros())) else {
        // No slice is so long; the shortest must be refused.
        assert!(gptq::unpack_codes(&shape, &[0]).is_err());
        assert!(gptq::survey_zeros(&shape, &[0]).is_err());
        return;
    };
    let qweight = stream.words(words + more[0]);
    let qzeros = stream.words(zero_words + more[1]);
    let index: Option<Vec<i64>> = g_idx.map(|beyond| {
        let range = groups as i64 + beyond;
        (0..in_features.min(1 << 12)).map(|_| i64::from(stream.next()) % range.max(1) - beyond / 2).collect()
    });
    let dimensions = |[rows, columns]: [usize; 2]| [rows + more[0], columns];
    let _ = Shape::from_dimensions(in_features, dimensions(shape.qweight()), shape.qzeros(), shape.scales());
    let codes = gptq::unpack_codes(&shape, &qweight);
    if let Ok(codes) = &codes {
        // Bits beyond the last row are lost, all others are not.
        let again = gptq::pack_codes(&shape, codes).unwrap();
        assert_eq!(gptq::unpack_codes(&shape, &again).as_ref(), Ok(codes));
        if in_features.is_multiple_of(32) {
            assert_eq!(again, qweight);
        }
    }
    let _ = gptq::survey_zeros(&shape, &qzeros);
    let encodings =
        [ZeroEncoding::V2, ZeroEncoding::V1PlusOne, ZeroEncoding::V1Wrap, ZeroEncoding::V1WordWise];
    let index = GIdx::new(index.as_deref(), in_features, groups, stated);
    for encoding in encodings {
        let zeros = gptq::decode_zeros(&shape, &qzeros, encoding);
        let (Ok(zeros), Ok(codes), Ok(index)) = (zeros, &codes, &index) else { continue };
        if let (Ok(words), true) =
            (gptq::encode_zeros(&shape, &zeros, encoding.convention()), encoding != ZeroEncoding::V1WordWise)
        {
            assert_eq!(gptq::decode_zeros(&shape, &words, encoding).as_ref(), Ok(&zeros));
        }
        let scales: Vec<f32> = (0..zeros.len()).map(|i| f32::from_bits(qzeros[i % qzeros.len()])).collect();
        let _ = gptq::check_scales(&shape, &scales);
        let scales: Vec<f32> = (0..zeros.len()).map(|i| 0.01 + (i % 7) as f32).collect();
        let matrix = gptq::Matrix::new(shape, codes.clone(), zeros, scales, index.clone()).unwrap();
        let weights = matrix.dequantize();
        assert_eq!(weights.len(), in_features * out_features);
        if let Ok((sorted, rows)) = matrix.sorted() {
            let sorted = sorted.dequantize();
            for (j, &row) in rows.map().iter().enumerate() {
                let [moved, stayed] =
                    [j, row as usize].map(|row| row * out_features..(row + 1) * out_features);
                assert_eq!(sorted[moved], weights[stayed]);
            }
        }
        for wider in gptq::Bits::ALL {
            if let Ok(widened) = matrix.widened(wider) {
                assert_eq!(widened.dequantize(), weights);
            }
            if let Ok(recentred) = matrix.recentred(wider) {
                assert_eq!(recentred.dequantize(), weights);
            }
        }
        if let Ok(split) = matrix.with_group_size(stated.unwrap_or(32)) {
            assert_eq!(split.dequantize(), weights);
        }
    }
}

macro_rules! gptq_unpackers {
    ($($name:ident $bits:literal)*) => { proptest! {
        #![proptest_config(cases(2000))]
        $(#[test]
        fn $name(any in any_gptq()) {
            unpack_gptq(gptq::Bits::try_from($bits).unwrap(), &any);
        })*
    } };
}

gptq_unpackers! { unpacking_gptq_2 2  unpacking_gptq_3 3  unpacking_gptq_4 4  unpacking_gptq_8 8 }

proptest! {
    #![proptest_config(cases(4000))]

    /// A table of groups of any numbers: an error, or a table that is written as it was read.
    #[test]
    fn unpacking_exl2_groups(
        q_groups in prop_oneof![
            prop::collection::vec(any::<i16>(), 0..12),
            prop::collection::vec(prop_oneof![-1i16..10, 0i16..64], 0..12),
        ],
        word_rows in prop_oneof![0usize..80, Just(usize::MAX), any::<usize>()],
    ) {
        if let Ok(table) = exl2::GroupTable::parse(&q_groups, word_rows) {
            prop_assert_eq!(table.to_q_groups(), q_groups);
            prop_assert_eq!(table.word_rows(), word_rows);
            prop_assert_eq!(table.rows_of_widths().iter().map(|(_, rows)| rows).sum::<usize>(), table.rows());
            prop_assert!(table.common_rows() >= 32);
        }
    }

    /// Groups of every width, whole or nearly so: an error, or a matrix that is packed as it was read.
    #[test]
    fn unpacking_exl2_matrices(
        widths in prop::collection::vec((0usize..6, 1usize..4), 1..7),
        in_order in prop::bool::weighted(0.9),
        columns in prop_oneof![8 => (1usize..4).prop_map(|n| 32 * n), 1 => 0usize..70],
        wrong in prop::option::weighted(0.3, (0usize..5, any::<u8>())),
        seed in any::<u64>(),
    ) {
        let mut stream = Stream(seed | 1);
        let mut widths = widths;
        if in_order {
            widths.sort_by_key(|(width, _)| std::cmp::Reverse(*width));
        }
        let (mut q_groups, mut word_rows, mut k): (Vec<i16>, usize, usize) = (Vec::new(), 0, 0);
        for &(width, units) in &widths {
            let bits = exl2::Bits::ALL[width].get() as usize;
            q_groups.extend([bits as i16, word_rows as i16]);
            word_rows += units * bits;
            k += 32 * units;
        }
        let mut q_weight = stream.words(word_rows * columns);
        let mut invperm: Vec<u32> = (0..k as u32).collect();
        for i in (1..k).rev() {
            invperm.swap(i, stream.next() as usize % (i + 1));
        }
        let mut q_scale = stream.words(widths.len() * columns / 8);
        let mut q_scale_max: Vec<f16> =
            stream.words(widths.len()).iter().map(|&bits| f16::from_bits(bits as u16 & 0x5fff)).collect();
        match wrong {
            Some((0, by)) => q_weight.truncate(q_weight.len().saturating_sub(usize::from(by))),
            Some((1, by)) => invperm[usize::from(by) % k] = u32::from(by),
            Some((2, by)) => q_scale.extend(std::iter::repeat_n(0, usize::from(by))),
            Some((3, by)) => q_scale_max[usize::from(by) % widths.len()] = f16::from_bits(u16::from(by) << 8),
            Some((_, by)) => {
                let at = usize::from(by) % q_groups.len();
                q_groups[at] = q_groups[at].wrapping_add(i16::from(by) - 128);
            }
            None => {}
        }
        let tensors = exl2::Tensors {
            q_weight: &q_weight,
            q_invperm: &invperm,
            q_scale: &q_scale,
            q_scale_max: &q_scale_max,
            q_groups: &q_groups,
        };
        if let Ok(matrix) = exl2::Matrix::unpack(tensors, columns) {
            let packed = matrix.pack();
            prop_assert_eq!(&packed.q_weight, &q_weight);
            prop_assert_eq!(&packed.q_scale, &q_scale);
            prop_assert_eq!(&packed.q_groups, &q_groups);
            prop_assert_eq!(&packed.q_invperm, &invperm);
            let weights = matrix.dequantize();
            prop_assert_eq!(weights.len(), k * columns);
            prop_assert!(weights.iter().all(|weight| weight.is_finite()));
            let _ = matrix.check_padding(columns - 1);
            for bits in gptq::Bits::ALL {
                // The same weights, in the order of the model's rows.
                if let Ok(gptq) = gptq::Matrix::from_exl2(&matrix, columns, bits) {
                    let same = gptq.dequantize().iter().zip(&weights).all(|(a, b)| a.to_f32() == b.to_f32());
                    prop_assert!(same);
                }
            }
        }
    }

    /// Numbers that should be a permutation.
    #[test]
    fn unpacking_permutations(map in prop::collection::vec(prop_oneof![0u32..9, any::<u32>()], 0..9)) {
        if let Ok(permutation) = Permutation::new(map.clone()) {
            let back = permutation.inverse();
            prop_assert!(map.iter().enumerate().all(|(i, &to)| back.map()[to as usize] as usize == i));
        }
    }
}
