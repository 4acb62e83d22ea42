//! The arithmetic of the search, once for all instruction sets.
//!
//! Only IEEE operations that round once (no fused multiply-add), in an order that does not depend on the
//! vector's width: a lane is a column and never meets another one, except in [`total`], which is a fixed
//! tree. So every instruction set gives the same bits; `tests::every_path_gives_the_same` checks it.

use super::panel::{LANES, Lanes, Panel, Range, Steps, Window};

/// Some columns of a panel, in the registers of an instruction set.
pub(super) trait Vector: Copy {
    /// Columns; divides 16.
    const WIDTH: usize;
    /// An index of a scale for each column, 0 to 15.
    type Index: Copy;

    /// The same number for all columns.
    fn splat(x: f32) -> Self;
    /// Columns `at` and following.
    fn load(from: &Lanes, at: usize) -> Self;
    /// The inverse of [`Vector::load`].
    fn store(self, to: &mut Lanes, at: usize);
    /// Sum.
    fn add(self, other: Self) -> Self;
    /// Difference.
    fn sub(self, other: Self) -> Self;
    /// Product.
    fn mul(self, other: Self) -> Self;
    /// `self` where it is larger, else `other`; `other` if one is NaN.
    fn max(self, other: Self) -> Self;
    /// `self` where it is smaller, else `other`; `other` if one is NaN.
    fn min(self, other: Self) -> Self;
    /// `yes` where `self` is smaller than `other`, else `no`.
    fn if_less(self, other: Self, yes: Self, no: Self) -> Self;
    /// How many of the first fifteen of `scales` (ascending, then NaN) are smaller than `self`.
    fn first(self, scales: &[f32; 16]) -> Self::Index;
    /// `index + offset`, at least 0 and at most 15.
    fn moved(index: Self::Index, offset: i32) -> Self::Index;
    /// An entry of `table` for each column.
    fn lookup(table: &[f32; 16], index: Self::Index) -> Self;
}

/// Adding and subtracting this rounds to the nearest integer, ties to even, for magnitudes below 2^22.
pub(super) const ROUND: f32 = 12_582_912.0;

/// Columns' indices that are tried at once: sums that don't wait for each other, in the registers there are.
const AT_ONCE: i32 = 4;

/// Weighted squared errors of the columns `at` and following in units of the squared scale, one for each of
/// `inverse`. Without `CLIP` no value may be out of range.
#[inline(always)]
fn errors<V: Vector, const N: usize, const CLIP: bool>(
    panel: Panel<'_>,
    at: usize,
    inverse: [V; N],
    range: Range,
) -> [V; N] {
    let (low, high, magic) = (V::splat(range.low), V::splat(range.high), V::splat(ROUND));
    let mut sum = [V::splat(0.0); N];
    for (value, weight) in panel.values.iter().zip(panel.weights) {
        let (value, weight) = (V::load(value, at), V::load(weight, at));
        for i in 0..N {
            let wanted = value.mul(inverse[i]);
            let within = if CLIP { wanted.max(low).min(high) } else { wanted };
            let miss = wanted.sub(within.add(magic).sub(magic));
            sum[i] = sum[i].add(weight.mul(miss.mul(miss)));
        }
    }
    sum
}

/// The smaller of `best` and the errors that `N` indices from `offset` on give.
#[inline(always)]
fn try_indices<V: Vector, const N: usize, const CLIP: bool>(
    panel: Panel<'_>,
    at: usize,
    (first, offset): (V::Index, i32),
    steps: &Steps,
    range: Range,
    mut best: V,
) -> V {
    let mut scale = [best; N];
    let mut inverse = [best; N];
    for i in 0..N {
        let index = V::moved(first, offset + i as i32);
        scale[i] = V::lookup(&steps.scale, index);
        inverse[i] = V::lookup(&steps.inverse, index);
    }
    let sum = errors::<V, N, CLIP>(panel, at, inverse, range);
    for i in 0..N {
        // An unusable scale gives NaN, which is never smaller.
        best = sum[i].mul(scale[i].mul(scale[i])).min(best);
    }
    best
}

/// For each ceiling the sum over the panel's columns of the smallest error that an index of the window gives;
/// added to `sums`.
#[inline(always)]
pub(super) fn add_best_errors<V: Vector>(
    panel: Panel<'_>,
    window: Window<'_>,
    ceilings: &[Steps],
    range: Range,
    sums: &mut [f64],
) {
    let (below, above) = window.reach;
    let widest = window.wanted.iter().fold(0.0f32, |a, &b| if b > a { b } else { a });
    for (steps, sum) in ceilings.iter().zip(sums) {
        // From its first index on a column clips nothing, except where the largest scale is too small.
        let fits = widest <= steps.scale[15];
        let mut best = [0.0; LANES];
        for at in (0..LANES).step_by(V::WIDTH) {
            let first = V::load(window.wanted, at).first(&steps.scale);
            let mut smallest = V::splat(f32::INFINITY);
            let mut offset = -below;
            while offset <= above {
                let clip = offset < 0 || !fits;
                let left = if offset < 0 && fits { -offset } else { above - offset + 1 };
                // Five are three and two, not four and one.
                let turns = (left + AT_ONCE - 1) / AT_ONCE;
                let count = (left + turns - 1) / turns;
                let from = (first, offset);
                smallest = match (count, clip) {
                    (1, true) => try_indices::<V, 1, true>(panel, at, from, steps, range, smallest),
                    (2, true) => try_indices::<V, 2, true>(panel, at, from, steps, range, smallest),
                    (3, true) => try_indices::<V, 3, true>(panel, at, from, steps, range, smallest),
                    (_, true) => try_indices::<V, 4, true>(panel, at, from, steps, range, smallest),
                    (1, false) => try_indices::<V, 1, false>(panel, at, from, steps, range, smallest),
                    (2, false) => try_indices::<V, 2, false>(panel, at, from, steps, range, smallest),
                    (3, false) => try_indices::<V, 3, false>(panel, at, from, steps, range, smallest),
                    (_, false) => try_indices::<V, 4, false>(panel, at, from, steps, range, smallest),
                };
                offset += count;
            }
            smallest.store(&mut best, at);
        }
        *sum += total(&best.map(f64::from));
    }
}

/// A sum over the columns of a panel: a fixed tree, whatever the vector's width.
#[inline(always)]
pub(super) fn total(of: &[f64; LANES]) -> f64 {
    let mut four = [0.0f64; 4];
    for (lane, term) in of.iter().enumerate() {
        four[lane % 4] += term;
    }
    (four[0] + four[1]) + (four[2] + four[3])
}

/// The index of each column with the smallest error under one ceiling, of all sixteen.
#[inline(always)]
pub(super) fn best_index<V: Vector>(panel: Panel<'_>, steps: &Steps, range: Range) -> [u8; LANES] {
    let mut index = [0.0; LANES];
    for at in (0..LANES).step_by(V::WIDTH) {
        let mut smallest = V::splat(f32::INFINITY);
        let mut chosen = V::splat(0.0);
        for from in (0..16).step_by(AT_ONCE as usize) {
            let inverse: [V; AT_ONCE as usize] = std::array::from_fn(|i| V::splat(steps.inverse[from + i]));
            let sum = errors::<V, { AT_ONCE as usize }, true>(panel, at, inverse, range);
            for (i, sum) in sum.into_iter().enumerate() {
                let scale = steps.scale[from + i];
                let error = sum.mul(V::splat(scale * scale));
                chosen = error.if_less(smallest, V::splat((from + i) as f32), chosen);
                smallest = error.min(smallest);
            }
        }
        chosen.store(&mut index, at);
    }
    index.map(|i| i as u8)
}

/// The code of each value, appended to `table`, and the squared error of the weights as decoded, added to
/// `errors` for each column. A plain loop: it is compiled for each instruction set.
#[inline(always)]
pub(super) fn encode(
    panel: Panel<'_>,
    scale: &Lanes,
    range: Range,
    table: &mut Vec<[u8; LANES]>,
    errors: &mut [f64; LANES],
) {
    for (value, weight) in panel.values.iter().zip(panel.weights) {
        let mut codes = [0u8; LANES];
        for lane in 0..LANES {
            let wanted = value[lane] / scale[lane];
            let above = if wanted > range.low { wanted } else { range.low };
            let code = ((if above < range.high { above } else { range.high }) + ROUND) - ROUND;
            let miss = f64::from(value[lane]) - f64::from(to_half(code * scale[lane]));
            errors[lane] += f64::from(weight[lane]) * (miss * miss);
            codes[lane] = (code - range.low) as i32 as u8;
        }
        table.push(codes);
    }
}

/// Rounds a number that fp16 has room for to fp16: to a multiple of 2^-10 of its power of two, ties to even,
/// and of 2^-24 below the normal ones.
#[inline(always)]
pub(super) fn to_half(x: f32) -> f32 {
    const SMALLEST_NORMAL: f32 = 6.103_515_6e-5;
    let power = f32::from_bits(x.to_bits() & 0x7f80_0000);
    let power = if power > SMALLEST_NORMAL { power } else { SMALLEST_NORMAL };
    // fp32 has 13 bits more: next to 2^13 · power they are cut off.
    let magic = power * 8192.0;
    let magic = f32::from_bits(magic.to_bits() | (x.to_bits() & 0x8000_0000));
    (x + magic) - magic
}
