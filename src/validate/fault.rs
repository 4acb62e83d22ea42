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
    /// With what exllamav2 multiplies its scales by when it loads them.
    Exl2(exl2::Matrix, f64),
    Gptq(gptq::Matrix),
    Dense,
}

/// What a weight should be.
pub(super) struct Wanted<'a> {
    /// The source's weight `[k, n]`.
    pub(super) weights: &'a [f32],
    /// The source's rows in the order of its groups; `None` where they stand in that order.
    pub(super) grouped_rows: Option<Permutation>,
    pub(super) promise: Promise,
}

impl Wanted<'_> {
    fn is_met_by(&self, weights: &[f32]) -> bool {
        self.promise.is_met(relative_error(weights, self.weights))
    }
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

/// The cause of a weight's being off, whose relative error is `found`.
pub(super) fn name(pair: &Pair, unpacked: &Unpacked, wanted: &Wanted<'_>, found: f64) -> LayoutFault {
    if is_inverted(pair, unpacked, wanted) {
        return LayoutFault::PermutationInverted;
    }
    for by in [1, -1] {
        let (index_off, zero_off) = match unpacked {
            // EXL2 has no zero points.
            Unpacked::Exl2(matrix, prescale) => {
                (exl2_index_off(pair, matrix, *prescale, by, wanted.weights), None)
            }
            Unpacked::Gptq(matrix) => (
                Some(gptq_index_off(pair, matrix, by, wanted.weights)),
                Some(gptq_with(matrix, |_, group| group, |zero| zero - by)),
            ),
            Unpacked::Dense => (None, None),
        };
        if zero_off.is_some_and(|weights| wanted.is_met_by(&pair.to_source_order(weights))) {
            return LayoutFault::ZeroOff { by };
        }
        if index_off.is_some_and(|weights| wanted.is_met_by(&weights)) {
            return LayoutFault::ScaleIndexOff { by };
        }
    }
    match swapped(pair, unpacked, wanted) {
        Some((first, second)) => LayoutFault::GroupsSwapped { first, second },
        None => LayoutFault::NotAsPromised { promised: wanted.promise.error(), found },
    }
}

/// Whether the promise is met with a permutation undone the other way.
fn is_inverted(pair: &Pair, unpacked: &Unpacked, wanted: &Wanted<'_>) -> bool {
    let n = pair.out_features;
    match unpacked {
        Unpacked::Exl2(matrix, prescale) if !matrix.invperm().is_identity() => {
            let other = rebuild(matrix, matrix.scale_index().to_vec(), matrix.invperm().inverse());
            other.is_some_and(|other| {
                wanted.is_met_by(&pair.to_source_order(exl2_values(&other, *prescale, n)))
            })
        }
        Unpacked::Gptq(matrix) if pair.is_permuted() => {
            let (rows, columns) = (inverse(&pair.rows), inverse(&pair.columns));
            wanted.is_met_by(&reorder(gptq_values(matrix), n, rows.as_ref(), columns.as_ref()))
        }
        Unpacked::Gptq(matrix) => {
            wanted.grouped_rows.as_ref().is_some_and(|rows| is_grouped_inversely(matrix, rows, wanted))
        }
        _ => false,
    }
}

/// Whether a GPTQ weight, whose rows belong in the model's order, was written with `rows`, the order of its groups,
/// the other way: its g_idx alone, or the rows too.
fn is_grouped_inversely(matrix: &gptq::Matrix, rows: &Permutation, wanted: &Wanted<'_>) -> bool {
    let n = matrix.shape().out_features;
    let mut groups = matrix.g_idx().groups().to_vec();
    let stored = groups.clone();
    groups.sort_unstable();
    let places = rows.inverse();
    if rows.map().iter().zip(&stored).all(|(&place, &group)| groups[place as usize] == group) {
        let right = |row: usize, _| i64::from(groups[places.map()[row] as usize]);
        if wanted.is_met_by(&gptq_with(matrix, right, |zero| zero)) {
            return true;
        }
    }
    let weights = gptq_values(matrix);
    [rows.then(rows), places.then(&places)]
        .iter()
        .any(|twice| wanted.is_met_by(&reorder(weights.clone(), n, Some(twice), None)))
}

fn inverse(order: &Option<Permutation>) -> Option<Permutation> {
    order.as_ref().map(Permutation::inverse)
}

fn rebuild(matrix: &exl2::Matrix, scale_index: Vec<u8>, invperm: Permutation) -> Option<exl2::Matrix> {
    let (codes, max) = (matrix.codes().to_vec(), matrix.scale_max().to_vec());
    exl2::Matrix::new(matrix.groups().clone(), matrix.out_features(), codes, scale_index, max, invperm).ok()
}

/// The weight `[k, n]` without padding and without the prescale that it is loaded with.
fn exl2_values(matrix: &exl2::Matrix, prescale: f64, n: usize) -> Vec<f32> {
    let weights = matrix.dequantize_prescaled(prescale);
    let rows = weights.chunks_exact(matrix.out_features());
    rows.flat_map(|row| row[..n].iter().map(|w| (w.to_f64() / prescale) as f32)).collect()
}

/// The weight, in the source's order, with `by` taken from each scale index. One that would leave 0 to 15 has
/// either wrapped or stayed at the end: of the values that it may have been, the one nearer to the source is taken,
/// a column of a group at a time.
fn exl2_index_off(
    pair: &Pair,
    matrix: &exl2::Matrix,
    prescale: f64,
    by: i32,
    wanted: &[f32],
) -> Option<Vec<f32>> {
    let n = pair.out_features;
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
    let values = |clamp| {
        let matrix = rebuild(matrix, shifted(clamp), matrix.invperm().clone())?;
        Some(pair.to_source_order(exl2_values(&matrix, prescale, n)))
    };
    let (mut wrapped, clamped) = (values(false)?, values(true)?);
    for rows in group_rows(&matrix_groups(matrix), matrix.invperm()) {
        for column in 0..n {
            let at = |row: usize| row * n + column;
            take_nearer(&mut wrapped, &clamped, wanted, rows.iter().map(|&row| at(row)));
        }
    }
    Some(wrapped)
}

/// The weight, in the source's order, with `by` taken from the group of each row, which has likewise wrapped or
/// stayed at the end, a row at a time.
fn gptq_index_off(pair: &Pair, matrix: &gptq::Matrix, by: i32, wanted: &[f32]) -> Vec<f32> {
    let (n, last) = (pair.out_features, matrix.shape().groups as i64 - 1);
    let by = i64::from(by);
    let wrapped = gptq_with(matrix, |_, group| group - by, |zero| zero);
    let stayed = |group| if by > 0 { group == last } else { group == 0 };
    let clamped = gptq_with(matrix, |_, group| if stayed(group) { group } else { group - by }, |zero| zero);
    let (mut wrapped, clamped) = (pair.to_source_order(wrapped), pair.to_source_order(clamped));
    for row in 0..pair.in_features {
        take_nearer(&mut wrapped, &clamped, wanted, row * n..(row + 1) * n);
    }
    wrapped
}

/// Replaces some weights by others where these are nearer to what is wanted, all of them or none.
fn take_nearer(
    weights: &mut [f32],
    others: &[f32],
    wanted: &[f32],
    places: impl Iterator<Item = usize> + Clone,
) {
    let miss =
        |values: &[f32]| -> f64 { places.clone().map(|at| f64::from(values[at] - wanted[at]).powi(2)).sum() };
    if miss(others) < miss(weights) {
        places.for_each(|at| weights[at] = others[at]);
    }
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

fn gptq_values(matrix: &gptq::Matrix) -> Vec<f32> {
    gptq_with(matrix, |_, group| group, |zero| zero)
}

/// The weight with other zero points, or another group's scales and zero points for each row.
fn gptq_with(
    matrix: &gptq::Matrix,
    group: impl Fn(usize, i64) -> i64,
    zero: impl Fn(i32) -> i32,
) -> Vec<f32> {
    let (n, groups) = (matrix.shape().out_features, matrix.shape().groups as i64);
    let mut weights = Vec::with_capacity(matrix.codes().len());
    let rows = matrix.codes().chunks_exact(n).zip(matrix.g_idx().groups());
    for (row, (codes, &of_row)) in rows.enumerate() {
        let at = group(row, i64::from(of_row)).rem_euclid(groups) as usize * n;
        let parts = matrix.zeros()[at..][..n].iter().zip(&matrix.scales()[at..][..n]);
        weights.extend(codes.iter().zip(parts).map(|(&code, (&z, &scale))| {
            f16::from_f32((i32::from(code) - zero(i32::from(z))) as f32 * scale).to_f32()
        }));
    }
    weights
}

/// Two groups whose rows bring the promise when they change places: all of them, or only what scales them, or only
/// their codes.
fn swapped(pair: &Pair, unpacked: &Unpacked, wanted: &Wanted<'_>) -> Option<(usize, usize)> {
    let n = pair.out_features;
    let (groups, weights) = match unpacked {
        Unpacked::Exl2(matrix, prescale) => {
            (group_rows(&matrix_groups(matrix), matrix.invperm()), exl2_values(matrix, *prescale, n))
        }
        Unpacked::Gptq(matrix) => {
            let mut groups = vec![Vec::new(); matrix.shape().groups];
            for (row, &group) in matrix.g_idx().groups().iter().enumerate() {
                groups[group as usize].push(row);
            }
            (groups, gptq_values(matrix))
        }
        Unpacked::Dense => return None,
    };
    let promise = wanted.promise;
    // The source in the converted model's order, so that groups are the same on both sides.
    let (rows, columns) = (inverse(&pair.rows), inverse(&pair.columns));
    let wanted = reorder(wanted.weights.to_vec(), n, rows.as_ref(), columns.as_ref());
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
            let across = |weights: &[f32]| rest + miss_of(weights, a, b) + miss_of(weights, b, a);
            let in_place = |weights: &[f32]| rest + miss_of(weights, a, a) + miss_of(weights, b, b);
            let is_met = |miss: f64| promise.is_met((miss.max(0.0) / norm).sqrt());
            if is_met(across(&weights)) {
                return Some((first, second));
            }
            let scaled = with_scales_swapped(unpacked, n, first, second);
            if scaled.is_some_and(|scaled| is_met(in_place(&scaled)) || is_met(across(&scaled))) {
                return Some((first, second));
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
            let other = |_, group| match group {
                g if g == first => second,
                g if g == second => first,
                g => g,
            };
            Some(gptq_with(matrix, other, |zero| zero))
        }
        Unpacked::Exl2(matrix, prescale) => {
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
            Some(exl2_values(&other, *prescale, n))
        }
        Unpacked::Dense => None,
    }
}
