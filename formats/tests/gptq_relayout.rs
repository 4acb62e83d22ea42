//! Exact changes of layout: GPTQ SPEC §6.
#![allow(clippy::unwrap_used)]

use half::f16;
use proptest::prelude::*;
use requant_formats::gptq::{Bits, Error, GIdx, GIdxKind, Matrix, Shape};
use requant_formats::{Permutation, exl2};

fn bits(bits: u32) -> Bits {
    Bits::try_from(bits).unwrap()
}

/// A matrix of `k` rows in groups of `size`, rows in an order that `seed` shuffles unless it is 0.
fn matrix(b: u32, k: usize, n: usize, size: usize, seed: u64, symmetric: bool) -> Matrix {
    let groups = k.div_ceil(size);
    let shape = Shape { in_features: k, out_features: n, bits: bits(b), groups };
    let mut state = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
    let mut next = move |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let mut index: Vec<i64> = (0..k).map(|i| (i / size) as i64).collect();
    if seed != 0 {
        for i in (1..k).rev() {
            index.swap(i, next(i as u64 + 1) as usize);
        }
    }
    let levels = 1u64 << b;
    let codes = (0..k * n).map(|_| next(levels) as u8).collect();
    let zeros =
        (0..groups * n).map(|_| if symmetric { 1 << (b - 1) } else { next(levels + 1) as u16 }).collect();
    let scales =
        (0..groups * n).map(|_| f16::from_f32((next(4000) as f32 - 1000.0) * 1e-5).to_f32()).collect();
    let g_idx = GIdx::new(Some(&index), k, groups, Some(size)).unwrap();
    Matrix::new(shape, codes, zeros, scales, g_idx).unwrap()
}

fn same_bits(a: &[f16], b: &[f16]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

fn shapes() -> impl Strategy<Value = (u32, usize, usize, usize, u64)> {
    let (b, k) = (prop::sample::select(vec![2u32, 3, 4, 8]), prop::sample::select(vec![64usize, 96, 128]));
    (
        b,
        k,
        prop::sample::select(vec![8usize, 24]),
        prop::sample::select(vec![16usize, 32, 64, 128]),
        0u64..1000,
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn g6_1_differences_of_few_bits_fit_a_wider_centre((b, k, n, size, seed) in shapes(), symmetric: bool) {
        prop_assume!(b < 8 || symmetric);
        let wider = match (b, symmetric) { (_, true) => b, (2 | 3, _) => 4, _ => 8 };
        let from = matrix(b, k, n, size, seed, symmetric);
        let to = from.recentred(bits(wider)).unwrap();
        prop_assert!(to.zeros().iter().all(|&z| z == bits(wider).symmetric_zero()));
        prop_assert!(same_bits(&from.dequantize(), &to.dequantize()));
    }

    #[test]
    fn g6_2_widening_keeps_the_integers((b, k, n, size, seed) in shapes()) {
        let from = matrix(b, k, n, size, seed, false);
        let to = from.widened(bits(8)).unwrap();
        prop_assert_eq!((from.codes(), from.zeros()), (to.codes(), to.zeros()));
        prop_assert!(same_bits(&from.dequantize(), &to.dequantize()));
    }

    #[test]
    fn g6_3_parts_of_a_group_repeat_its_scales((b, k, n, size, seed) in shapes(), part in 1usize..3) {
        let part = 16 * part;
        let from = matrix(b, k, n, size, seed, false);
        match from.with_group_size(part) {
            Ok(to) => {
                prop_assert!(same_bits(&from.dequantize(), &to.dequantize()));
                prop_assert!(to.g_idx().equal_groups() || !from.g_idx().equal_groups() || k % size != 0);
                prop_assert!(to.g_idx().group_size() <= part);
            }
            Err(Error::Split { rows, size, .. }) => prop_assert!(rows % size != 0),
            Err(other) => prop_assert!(false, "{other}"),
        }
    }

    #[test]
    fn g6_4_sorted_rows_are_sequential((b, k, n, size, seed) in shapes()) {
        let from = matrix(b, k, n, size, seed, false);
        let (to, order) = from.sorted().unwrap();
        prop_assert!(to.g_idx().groups().is_sorted());
        if k % size == 0 {
            prop_assert!(matches!(to.g_idx().kind(), GIdxKind::Sequential | GIdxKind::OneGroup));
        }
        let (before, after) = (from.dequantize(), to.dequantize());
        for (j, &row) in order.map().iter().enumerate() {
            prop_assert!(same_bits(&before[row as usize * n..][..n], &after[j * n..][..n]));
        }
    }

    #[test]
    fn g6_5_columns_move_with_their_scales((b, k, n, size, seed) in shapes()) {
        let from = matrix(b, k, n, size, seed, false);
        let order = Permutation::new((0..n as u32).map(|j| (j * 5 + 3) % n as u32).collect()).unwrap();
        let to = from.with_columns(&order).unwrap();
        let (before, after) = (from.dequantize(), to.dequantize());
        for i in 0..k {
            for j in 0..n {
                prop_assert_eq!(after[i * n + j].to_bits(), before[i * n + order.map()[j] as usize].to_bits());
            }
        }
    }

    #[test]
    fn g6_6_exl2_becomes_symmetric_gptq(
        groups in prop::collection::vec((prop::sample::select(vec![2u32, 3, 4, 5, 6, 8]), 1usize..4), 1..5),
        seed in 1u64..1000,
        padding in 0usize..9,
    ) {
        let mut groups: Vec<exl2::Group> = groups
            .iter()
            .map(|&(b, units)| exl2::Group { bits: exl2::Bits::try_from(b).unwrap(), rows: 32 * units })
            .collect();
        groups.sort_by_key(|g| std::cmp::Reverse(g.bits));
        let table = exl2::GroupTable::new(groups.clone()).unwrap();
        let (k, n) = (table.rows(), 32);
        let mut state = seed;
        let mut next = move |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        let widths = groups.iter().flat_map(|g| std::iter::repeat_n(g.bits.get(), g.rows * n));
        let codes = widths.map(|b| next(1 << b) as u8).collect();
        let index = (0..groups.len() * n).map(|_| next(16) as u8).collect();
        let ceilings = groups.iter().map(|_| f16::from_f32(1e-4 + next(1000) as f32 * 1e-4)).collect();
        let mut rows: Vec<u32> = (0..k as u32).collect();
        for i in (1..k).rev() {
            rows.swap(i, next(i as u64 + 1) as usize);
        }
        let invperm = Permutation::new(rows).unwrap();
        let from = exl2::Matrix::new(table, n, codes, index, ceilings, invperm).unwrap();
        let kept = n - padding;
        let wanted: Vec<f16> = from.dequantize().chunks_exact(n).flat_map(|row| row[..kept].to_vec()).collect();
        let widest = groups[0].bits.get();
        for b in [4, 8] {
            match Matrix::from_exl2(&from, kept, bits(b)) {
                Ok(to) => {
                    prop_assert!(same_bits(&to.dequantize(), &wanted));
                    prop_assert!(to.g_idx().equal_groups());
                    prop_assert!(groups.iter().all(|g| g.rows % to.g_idx().group_size() == 0));
                }
                Err(Error::Recentre { .. }) => prop_assert!(b == 4 && widest > 4),
                Err(other) => prop_assert!(false, "{other}"),
            }
        }
    }
}

#[test]
fn g6_1_a_difference_that_does_not_fit_is_refused() {
    let shape = Shape { in_features: 32, out_features: 8, bits: bits(4), groups: 1 };
    let g_idx = GIdx::new(None, 32, 1, None).unwrap();
    let codes = vec![8; 32 * 8];
    // 8 − 0 is one too many for 4 bits around their centre: −8 to 7.
    let matrix = Matrix::new(shape, codes, vec![0; 8], vec![1.0; 8], g_idx).unwrap();
    let refused = Error::Recentre { row: 0, column: 0, difference: 8, bits: bits(4) };
    assert_eq!(matrix.recentred(bits(4)), Err(refused));
    assert!(matrix.recentred(bits(8)).is_ok());
}

#[test]
fn g6_2_narrowing_is_refused() {
    let refused = Error::Narrower { from: bits(8), to: bits(4) };
    assert_eq!(matrix(8, 64, 8, 32, 0, true).widened(bits(4)), Err(refused));
}

#[test]
fn g6_3_parts_must_divide() {
    let refused = Error::Split { group: 0, rows: 32, size: 24 };
    assert_eq!(matrix(4, 64, 8, 32, 0, true).with_group_size(24), Err(refused));
    assert!(matches!(matrix(4, 64, 8, 32, 0, true).with_group_size(0), Err(Error::Split { size: 0, .. })));
    // One group may end in a short part.
    let split = matrix(4, 96, 8, 96, 0, true).with_group_size(64).unwrap();
    assert_eq!((split.shape().groups, split.g_idx().equal_groups()), (2, true));
}
