//! Decoding packed weights, and multiplying by them.

use super::Stream;
use crate::{Operations, Weight};
use half::f16;
use proptest::prelude::*;
use requant_formats::Permutation;
use requant_formats::exl2::{self, Group, GroupTable};
use requant_formats::gptq::{self, GIdx, Shape};
use std::sync::Arc;

/// A weight, and what it decodes to by definition.
#[derive(Clone, Debug)]
pub(super) struct Case {
    weight: Weight,
    decoded: Vec<f16>,
}
pub(super) fn gptq_case() -> impl Strategy<Value = Case> {
    let bits = proptest::sample::select(gptq::Bits::ALL.to_vec());
    (bits, 1usize..4, 1usize..40, 1usize..4, any::<u64>()).prop_map(|(bits, units, n, groups, seed)| {
        let mut random = Stream(seed | 1);
        let k = 32 * units;
        let codes: Vec<u8> = (0..k * n).map(|_| random.below(bits.max_code() + 1) as u8).collect();
        let zeros: Vec<u16> = (0..groups * n).map(|_| random.below(bits.max_code() + 2) as u16).collect();
        let scales: Vec<f32> =
            (0..groups * n).map(|_| f16::from_f32(random.activation() * 0.01).to_f32()).collect();
        // Act-order; the first rows make sure that each group occurs.
        let group_of: Vec<usize> =
            (0..k).map(|i| if i < groups { i } else { random.below(groups as u32) as usize }).collect();
        let decoded = (0..k * n)
            .map(|i| {
                let at = group_of[i / n] * n + i % n;
                f16::from_f64(f64::from(scales[at]) * (f64::from(codes[i]) - f64::from(zeros[at])))
            })
            .collect();
        let index: Vec<i64> = group_of.iter().map(|&group| group as i64).collect();
        let g_idx = GIdx::new(Some(&index), k, groups, Some(k)).expect("groups in range");
        let shape = Shape { in_features: k, out_features: n, bits, groups };
        let matrix = gptq::Matrix::new(shape, codes, zeros, scales, g_idx).expect("a matrix");
        Case { weight: Weight::from(matrix), decoded }
    })
}

pub(super) fn exl2_case() -> impl Strategy<Value = Case> {
    let group = (proptest::sample::select(exl2::Bits::ALL.to_vec()), 1usize..3)
        .prop_map(|(bits, units)| Group { bits, rows: 32 * units });
    // Up to 7 of the 32 columns are padding.
    (proptest::collection::vec(group, 1..4), 25usize..=32, any::<u64>()).prop_map(
        |(mut groups, out_features, seed)| {
            groups.sort_by_key(|group| std::cmp::Reverse(group.bits));
            let mut random = Stream(seed | 1);
            let n = 32;
            // From where m1 is a coarse subnormal to ordinary ceilings.
            let scale_max: Vec<f16> =
                groups.iter().map(|_| f16::from_bits(0x0100 + random.below(0x3800) as u16)).collect();
            let scale_index: Vec<u8> = (0..groups.len() * n).map(|_| random.below(16) as u8).collect();
            let (mut codes, mut packed_rows) = (Vec::new(), Vec::new());
            for (g, group) in groups.iter().enumerate() {
                let m1 = f16::from_f64(scale_max[g].to_f64() / 256.0).to_f64();
                for _ in 0..group.rows {
                    packed_rows.push(
                        (0..n)
                            .map(|column| {
                                let code = random.below(group.bits.max_code() + 1);
                                codes.push(code as u8);
                                let step = f64::from(scale_index[g * n + column]) + 1.0;
                                let m2 = f16::from_f64(step * step * m1).to_f64();
                                f16::from_f64((f64::from(code) - f64::from(group.bits.zero())) * m2)
                            })
                            .collect::<Vec<f16>>(),
                    );
                }
            }
            let table = GroupTable::new(groups).expect("multiples of 32 rows, widths that fall");
            let k = table.rows();
            let mut map: Vec<u32> = (0..k as u32).collect();
            (1..k).for_each(|i| map.swap(i, random.below(i as u32 + 1) as usize));
            let decoded =
                map.iter().flat_map(|&row| packed_rows[row as usize][..out_features].to_vec()).collect();
            let invperm = Permutation::new(map).expect("swaps of the identity");
            let matrix =
                exl2::Matrix::new(table, n, codes, scale_index, scale_max, invperm).expect("a matrix");
            Case { weight: Weight::Exl2 { matrix: Arc::new(matrix), out_features }, decoded }
        },
    )
}

fn bits(weights: &[f16]) -> Vec<u16> {
    weights.iter().map(|weight| weight.to_bits()).collect()
}

pub(super) fn decodes_to_the_defined_bits<O: Operations>(ops: &O, case: &Case) -> Result<(), TestCaseError> {
    let weight = ops.upload_weight(&case.weight).expect("room for a small weight");
    let decoded = bits(&ops.dequantize(&weight).expect("a decoded weight"));
    prop_assert_eq!(&decoded, &bits(&case.decoded));
    Ok(())
}

pub(super) fn multiplies<O: Operations>(
    ops: &O,
    case: &Case,
    m: usize,
    seed: u64,
) -> Result<(), TestCaseError> {
    let (k, n) = (case.weight.in_features(), case.weight.out_features());
    let mut random = Stream(seed | 1);
    let activations: Vec<f32> = (0..m * k).map(|_| random.activation()).collect();
    let weight = ops.upload_weight(&case.weight).expect("room for a small weight");
    let product = |x: &[f32]| {
        let y = ops.matmul(&super::tensor(ops, x, k), &weight, None).expect("activations [m, k]");
        super::values(ops, &y)
    };
    let products = product(&activations);
    prop_assert_eq!(products.len(), m * n);
    for (i, &product) in products.iter().enumerate() {
        let (row, column) = (i / n, i % n);
        let terms =
            (0..k).map(|t| f64::from(activations[row * k + t]) * case.decoded[t * n + column].to_f64());
        let (sum, magnitude) = terms.fold((0.0, 0.0), |(s, a), term| (s + term, a + term.abs()));
        let bound = accumulation_bound(k) * magnitude;
        prop_assert!(
            (f64::from(product) - sum).abs() <= bound,
            "row {}, column {}: {} for {}",
            row,
            column,
            product,
            sum
        );
    }
    // The same bits again, and row by row.
    let again = product(&activations);
    prop_assert!(products.iter().zip(&again).all(|(a, b)| a.to_bits() == b.to_bits()));
    for (row, expected) in activations.chunks(k).zip(products.chunks(n)) {
        let alone = product(row);
        prop_assert!(alone.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
    Ok(())
}

/// How far a sum of `k` products in fp32 may be from the exact one, relative to the sum of magnitudes, in
/// any order of additions: one rounding for the product, at most k − 1 for the sums (and as many again
/// below the first order, for k up to 2¹²).
fn accumulation_bound(k: usize) -> f64 {
    let unit = f64::from(f32::EPSILON) / 2.0;
    k as f64 * unit * 1.001
}
