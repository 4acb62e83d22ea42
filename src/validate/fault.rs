//! Names what is wrong with a weight that doesn't hold what was promised.
//!
//! Each known fault of layouts is undone on the unpacked weight; the one that brings the promised error is the
//! cause. The promise is met to a millionth, so that none is named by chance.

use super::pair::{Pair, Promise, reorder};
use super::report::LayoutFault;
use crate::quantize;
use half::f16;
use requant_formats::exl2::{self, MAX_GROUP_ROWS};
use requant_formats::{Permutation, gptq};

/// How far a relative error may be from the promised one, as a part of it: both are sums of the same numbers
/// in fp64, in another order.
const TOLERANCE: f64 = 1e-6;

/// What a value moves at most when it is rounded to bf16 (8 bits of mantissa), which is the coarsest rounding
/// of a conversion; two roundings (of a scale, then of the product) are allowed for.
const ROUNDING: f64 = 1.0 / 128.0;

/// Groups that are tried in pairs, the worst first: a swap concerns two.
const SUSPECTS: usize = 12;

/// A converted weight, unpacked from the bytes on disk.
pub(super) enum Unpacked {
    Exl2(exl2::Matrix),
    Gptq(gptq::Matrix),
    Dense,
}

impl Promise {
    /// Whether this is the error that was promised.
    pub(super) fn is_met(self, error: f64) -> bool {
        match self {
            Self::Exact => error == 0.0,
            Self::Rounded => error <= ROUNDING,
            Self::Error(promised) => (error - promised).abs() <= TOLERANCE * promised,
        }
    }

    /// The promised error.
    pub(super) fn error(self) -> f64 {
        match self {
            Self::Exact | Self::Rounded => 0.0,
            Self::Error(error) => error,
        }
    }
}

/// Frobenius norm of the difference over that of `wanted`.
pub(super) fn relative_error(found: &[f32], wanted: &[f32]) -> f64 {
    quantize::relative_error(squares(found, wanted))
}

fn squares(found: &[f32], wanted: &[f32]) -> (f64, f64) {
    quantize::squares(found.iter().copied().zip(wanted.iter().copied()))
}

/// The cause of a weight's being off. `wanted` is the source's weight `[k, n]`, `found` the relative error.
pub(super) fn name(
    pair: &Pair,
    unpacked: &Unpacked,
    wanted: &[f32],
    promise: Promise,
    found: f64,
) -> LayoutFault {
    let fits = |weights: Option<Vec<f32>>| {
        weights.is_some_and(|weights| promise.is_met(relative_error(&weights, wanted)))
    };
    let in_order = |weights: Vec<f32>| pair.to_source_order(weights);
    if fits(inverted(pair, unpacked)) {
        return LayoutFault::PermutationInverted;
    }
    for by in [1, -1] {
        match unpacked {
            Unpacked::Exl2(matrix) => {
                if fits(exl2_index_off(matrix, pair.out_features, by, wanted, pair)) {
                    return LayoutFault::ScaleIndexOff { by };
                }
                if fits(Some(in_order(exl2_zero_off(matrix, pair.out_features, by)))) {
                    return LayoutFault::ZeroOff { by };
                }
            }
            Unpacked::Gptq(matrix) => {
                if fits(Some(in_order(gptq_with(matrix, |g| g, |z| z - by)))) {
                    return LayoutFault::ZeroOff { by };
                }
                let shift = |group: i64| group - i64::from(by);
                if fits(Some(in_order(gptq_with(matrix, shift, |z| z)))) {
                    return LayoutFault::ScaleIndexOff { by };
                }
            }
            Unpacked::Dense => {}
        }
    }
    match swapped(pair, unpacked, wanted, promise) {
        Some((first, second)) => LayoutFault::GroupsSwapped { first, second },
        None => LayoutFault::NotAsPromised { promised: promise.error(), found },
    }
}

/// The weight with its permutation undone the other way.
fn inverted(pair: &Pair, unpacked: &Unpacked) -> Option<Vec<f32>> {
    match unpacked {
        Unpacked::Exl2(matrix) if !matrix.invperm().is_identity() => {
            let rows = matrix.in_features();
            let other = rebuild(matrix, matrix.scale_index().to_vec(), matrix.invperm().inverse())?;
            debug_assert_eq!(other.in_features(), rows);
            Some(pair.to_source_order(exl2_values(&other, pair.out_features)))
        }
        Unpacked::Gptq(matrix) if pair.is_permuted() => {
            let inverse = |order: &Option<Permutation>| order.as_ref().map(Permutation::inverse);
            let (rows, columns) = (inverse(&pair.rows), inverse(&pair.columns));
            let weights = gptq_with(matrix, |g| g, |z| z);
            Some(reorder(weights, pair.out_features, rows.as_ref(), columns.as_ref()))
        }
        _ => None,
    }
}

fn rebuild(matrix: &exl2::Matrix, scale_index: Vec<u8>, invperm: Permutation) -> Option<exl2::Matrix> {
    let (codes, max) = (matrix.codes().to_vec(), matrix.scale_max().to_vec());
    exl2::Matrix::new(matrix.groups().clone(), matrix.out_features(), codes, scale_index, max, invperm).ok()
}

/// The decoded weight `[k, n]` without padding.
fn exl2_values(matrix: &exl2::Matrix, n: usize) -> Vec<f32> {
    let weights = matrix.dequantize();
    let rows = weights.chunks_exact(matrix.out_features());
    rows.flat_map(|row| row[..n].iter().map(|w| w.to_f32())).collect()
}

/// The weight with `by` taken from each scale index. One that would leave 0 to 15 has either wrapped or stayed
/// at the end: of the values that it may have been, the one nearer to the source is taken, a column of a
/// group at a time.
fn exl2_index_off(matrix: &exl2::Matrix, n: usize, by: i32, wanted: &[f32], pair: &Pair) -> Option<Vec<f32>> {
    let shifted = |clamp: bool| -> Vec<u8> {
        let shift = |&index: &u8| {
            let before = i32::from(index) - by;
            let at_end = if by > 0 { index == 15 } else { index == 0 };
            match clamp && at_end {
                true => index,
                false => before.rem_euclid(16) as u8,
            }
        };
        matrix.scale_index().iter().map(shift).collect()
    };
    let invperm = || matrix.invperm().clone();
    let wrapped = rebuild(matrix, shifted(false), invperm())?;
    let clamped = rebuild(matrix, shifted(true), invperm())?;
    let values = |matrix: &exl2::Matrix| pair.to_source_order(exl2_values(matrix, n));
    let (mut values_wrapped, values_clamped) = (values(&wrapped), values(&clamped));
    for rows in group_rows(&matrix_groups(matrix), matrix.invperm()) {
        for column in 0..n {
            let miss = |values: &[f32]| -> f64 {
                let miss =
                    |&row: &usize| f64::from(values[row * n + column] - wanted[row * n + column]).powi(2);
                rows.iter().map(miss).sum()
            };
            if miss(&values_clamped) < miss(&values_wrapped) {
                rows.iter()
                    .for_each(|row| values_wrapped[row * n + column] = values_clamped[row * n + column]);
            }
        }
    }
    Some(values_wrapped)
}

fn matrix_groups(matrix: &exl2::Matrix) -> Vec<usize> {
    matrix.groups().groups().iter().map(|group| group.rows.min(MAX_GROUP_ROWS)).collect()
}

/// The model's rows of each group, in packed order.
fn group_rows(sizes: &[usize], invperm: &Permutation) -> Vec<Vec<usize>> {
    let perm = invperm.inverse();
    let mut packed = perm.map().iter().map(|&row| row as usize);
    sizes.iter().map(|&size| packed.by_ref().take(size).collect()).collect()
}

/// The weight with `by` taken from each zero point, which EXL2 has none of: that is, added to each code.
fn exl2_zero_off(matrix: &exl2::Matrix, n: usize, by: i32) -> Vec<f32> {
    let stored = matrix.out_features();
    let perm = matrix.invperm().inverse();
    let mut weights = vec![0.0; matrix.in_features() * n];
    let mut packed = perm.map().iter().zip(matrix.codes().chunks_exact(stored));
    for (group, table) in matrix.groups().groups().iter().enumerate() {
        let (scales, zero) = (matrix.scales_of(group), table.bits.zero() as i32);
        for (&row, codes) in packed.by_ref().take(table.rows) {
            let values = codes.iter().zip(&scales).take(n);
            for (weight, (&code, &scale)) in weights[row as usize * n..][..n].iter_mut().zip(values) {
                *weight = f16::from_f32((i32::from(code) - zero + by) as f32 * scale).to_f32();
            }
        }
    }
    weights
}

/// The weight with other zero points, or other groups' scales and zero points.
fn gptq_with(matrix: &gptq::Matrix, group: impl Fn(i64) -> i64, zero: impl Fn(i32) -> i32) -> Vec<f32> {
    let (n, groups) = (matrix.shape().out_features, matrix.shape().groups as i64);
    let mut weights = Vec::with_capacity(matrix.codes().len());
    for (codes, &of_row) in matrix.codes().chunks_exact(n).zip(matrix.g_idx().groups()) {
        let at = group(i64::from(of_row)).rem_euclid(groups) as usize * n;
        let parts = matrix.zeros()[at..][..n].iter().zip(&matrix.scales()[at..][..n]);
        weights.extend(codes.iter().zip(parts).map(|(&code, (&z, &scale))| {
            f16::from_f32((i32::from(code) - zero(i32::from(z))) as f32 * scale).to_f32()
        }));
    }
    weights
}

/// Two groups whose rows bring the promise when they change places: all of them, or only what scales them.
fn swapped(pair: &Pair, unpacked: &Unpacked, wanted: &[f32], promise: Promise) -> Option<(usize, usize)> {
    let n = pair.out_features;
    let (groups, weights) = match unpacked {
        Unpacked::Exl2(matrix) => {
            (group_rows(&matrix_groups(matrix), matrix.invperm()), exl2_values(matrix, n))
        }
        Unpacked::Gptq(matrix) => {
            let mut groups = vec![Vec::new(); matrix.shape().groups];
            for (row, &group) in matrix.g_idx().groups().iter().enumerate() {
                groups[group as usize].push(row);
            }
            (groups, gptq_with(matrix, |g| g, |z| z))
        }
        Unpacked::Dense => return None,
    };
    // The source in the converted model's order, so that groups are the same on both sides.
    let inverse = |order: &Option<Permutation>| order.as_ref().map(Permutation::inverse);
    let wanted = reorder(wanted.to_vec(), n, inverse(&pair.rows).as_ref(), inverse(&pair.columns).as_ref());
    let row = |values: &[f32], row: usize| values[row * n..][..n].to_vec();
    let miss_of = |weights: &[f32], rows: &[usize], of: &[usize]| -> f64 {
        rows.iter().zip(of).map(|(&from, &to)| squares(&row(weights, from), &row(&wanted, to)).0).sum()
    };
    let misses: Vec<f64> = groups.iter().map(|rows| miss_of(&weights, rows, rows)).collect();
    let norm: f64 = wanted.iter().map(|&w| f64::from(w).powi(2)).sum();
    let total: f64 = misses.iter().sum();
    let mut suspects: Vec<usize> = (0..groups.len()).collect();
    let size = |group: usize| {
        let rows = &groups[group];
        let norm: f64 =
            rows.iter().map(|&r| row(&wanted, r).iter().map(|&w| f64::from(w).powi(2)).sum::<f64>()).sum();
        misses[group] / norm.max(f64::MIN_POSITIVE)
    };
    suspects.sort_by(|&a, &b| size(b).total_cmp(&size(a)));
    suspects.truncate(SUSPECTS);
    suspects.sort_unstable();
    for (i, &first) in suspects.iter().enumerate() {
        for &second in &suspects[i + 1..] {
            let (a, b) = (&groups[first], &groups[second]);
            if a.len() != b.len() {
                continue;
            }
            let rest = total - misses[first] - misses[second];
            let rest = if promise == Promise::Exact && rest < f64::EPSILON * total { 0.0 } else { rest };
            let whole = rest + miss_of(&weights, a, b) + miss_of(&weights, b, a);
            let error = |miss: f64| (miss.max(0.0) / norm).sqrt();
            if promise.is_met(error(whole)) {
                return Some((first, second));
            }
            if let Some(scaled) = with_scales_swapped(unpacked, n, first, second) {
                let scaled = rest + miss_of(&scaled, a, a) + miss_of(&scaled, b, b);
                if promise.is_met(error(scaled)) {
                    return Some((first, second));
                }
            }
        }
    }
    None
}

/// The weight where two groups have each other's scales (and zero points).
fn with_scales_swapped(unpacked: &Unpacked, n: usize, first: usize, second: usize) -> Option<Vec<f32>> {
    match unpacked {
        Unpacked::Gptq(matrix) => {
            let (first, second) = (first as i64, second as i64);
            let other = |group| match group {
                g if g == first => second,
                g if g == second => first,
                g => g,
            };
            Some(gptq_with(matrix, other, |z| z))
        }
        Unpacked::Exl2(matrix) => {
            let stored = matrix.out_features();
            let mut index = matrix.scale_index().to_vec();
            let mut max = matrix.scale_max().to_vec();
            max.swap(first, second);
            for column in 0..stored {
                index.swap(first * stored + column, second * stored + column);
            }
            let (groups, codes) = (matrix.groups().clone(), matrix.codes().to_vec());
            let other =
                exl2::Matrix::new(groups, stored, codes, index, max, matrix.invperm().clone()).ok()?;
            Some(exl2_values(&other, n))
        }
        Unpacked::Dense => None,
    }
}
