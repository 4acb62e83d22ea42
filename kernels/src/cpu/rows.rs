//! What is done to the elements of a row.

use crate::operations::{Difference, Rope};
use rayon::prelude::*;

/// Runs loops compiled for the widest vectors that the processor has. Their results are the same on all: sums
/// are cut into [`LANES`] by hand, and products are never fused with sums.
#[inline(always)]
pub(super) fn wide<R>(work: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(work)
}

/// `e^x` to 2 units in the last place for results that are normal numbers, 0 below, ∞ above; NaN stays NaN.
///
/// Branch-free, so that loops over it vectorise: `x = n·ln 2 + r`, a polynomial of degree 6 in r (Cephes),
/// and n put into the exponent.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // ln 2 in two parts, the first with few bits, so that n · LN2_HIGH is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding and subtracting 1.5 · 2²³ rounds to an integer.
    const ROUND: f32 = 12_582_912.0;
    // Beyond these the result is 0 or ∞; clamped, n fits the exponent. A NaN passes both comparisons.
    let clamped = if x < -87.33 { -87.33 } else { x };
    let clamped = if clamped > 88.72 { 88.72 } else { clamped };
    let n = (clamped * std::f32::consts::LOG2_E + ROUND) - ROUND;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_2e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 5e-1;
    p = p * r * r + r + 1.0;
    // 2^n in two factors: n may be 128.
    let half = (n as i32) >> 1;
    let power = |n: i32| f32::from_bits(((n + 127) as u32) << 23);
    let value = p * power(half) * power(n as i32 - half);
    let value = if x < -87.33 { 0.0 } else { value };
    if x > 88.72 { f32::INFINITY } else { value }
}

/// Number of partial sums; elements i, i + LANES, … go into the same.
const LANES: usize = 16;
/// Elements after which partial sums in fp32 are added up in fp64.
const BLOCK: usize = 1024;

/// Σ x, in a fixed order: fp32 within a block, fp64 over blocks.
#[inline(always)]
pub(super) fn sum(values: &[f32]) -> f64 {
    sum_of(values, values, |x, _| x)
}

/// Σ f(a, b), likewise.
#[inline(always)]
pub(super) fn sum_of(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) -> f64 {
    let [sum] = sums_of(a, b, |a, b| [f(a, b)]);
    sum
}

/// Σ f(a, b) of several f, likewise.
#[inline(always)]
pub(super) fn sums_of<const N: usize>(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> [f32; N]) -> [f64; N] {
    let mut totals = [0.0; N];
    for (a, b) in a.chunks(BLOCK).zip(b.chunks(BLOCK)) {
        let mut lanes = [[0f32; LANES]; N];
        let mut add = |lane: usize, a: f32, b: f32| {
            for (lanes, value) in lanes.iter_mut().zip(f(a, b)) {
                lanes[lane] += value;
            }
        };
        let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
        for (a, b) in a.iter().zip(b) {
            for lane in 0..LANES {
                add(lane, a[lane], b[lane]);
            }
        }
        for (lane, (&a, &b)) in a_rest.iter().zip(b_rest).enumerate() {
            add(lane, a, b);
        }
        for (total, lanes) in totals.iter_mut().zip(lanes) {
            *total += lanes.iter().map(|&lane| f64::from(lane)).sum::<f64>();
        }
    }
    totals
}

/// The largest element; −∞ of none.
#[inline(always)]
pub(super) fn largest(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = if value > *lane { value } else { *lane };
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a })
}

/// `y = x / sqrt(mean(x²) + epsilon) · weight`.
#[inline(always)]
pub(super) fn rms_norm(x: &[f32], weight: &[f32], epsilon: f32, y: &mut [f32]) {
    let mean = sum_of(x, x, |a, b| a * b) / x.len() as f64;
    let factor = (1.0 / (mean + f64::from(epsilon)).sqrt()) as f32;
    for ((y, &x), &w) in y.iter_mut().zip(x).zip(weight) {
        *y = x * factor * w;
    }
}

/// Cosine and sine of each pair, scaled, at positions `0..window`.
pub(super) fn angles(window: usize, rope: &Rope) -> Vec<(f32, f32)> {
    let angle = |i: usize| {
        let (position, pair) = (i / rope.frequencies.len(), i % rope.frequencies.len());
        // The angle in fp32, as transformers has it; its sine and cosine to full precision.
        let (sin, cos) = f64::from(position as f32 * rope.frequencies[pair]).sin_cos();
        (cos as f32 * rope.scale, sin as f32 * rope.scale)
    };
    (0..window * rope.frequencies.len()).into_par_iter().with_min_len(BLOCK).map(angle).collect()
}

/// Rotates each head of a row by the angles of its position.
pub(super) fn rotate(row: &mut [f32], head_dim: usize, angles: &[(f32, f32)]) {
    for head in row.chunks_exact_mut(head_dim) {
        let (first, second) = head.split_at_mut(angles.len());
        for ((a, b), &(cos, sin)) in first.iter_mut().zip(second).zip(angles) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}

/// `x / (1 + e^−x)`.
#[inline(always)]
pub(super) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// GELU by tanh.
pub(super) fn gelu_tanh(x: f32) -> f32 {
    // √(2/π)
    const FACTOR: f32 = 0.797_884_6;
    0.5 * x * (1.0 + (FACTOR * (x + 0.044_715 * x * x * x)).tanh())
}

/// GELU by erf.
pub(super) fn gelu(x: f32) -> f32 {
    (0.5 * f64::from(x) * libm::erfc(-f64::from(x) / std::f64::consts::SQRT_2)) as f32
}

/// `cap · tanh(x / cap)`.
pub(super) fn soft_cap(values: &mut [f32], cap: f32) {
    values.iter_mut().for_each(|value| *value = cap * (*value / cap).tanh());
}

/// How far apart two arrays are, in pieces of `piece` elements added in order.
pub(super) fn difference(source: &[f32], converted: &[f32], piece: usize) -> Difference {
    let parts: Vec<Difference> = source
        .par_chunks(piece)
        .zip(converted.par_chunks(piece))
        .map(|(source, converted)| wide(|| difference_of(source, converted)))
        .collect();
    parts.into_iter().fold(Difference::default(), joined)
}

#[inline(always)]
fn difference_of(source: &[f32], converted: &[f32]) -> Difference {
    let mut lanes = [Difference::default(); LANES];
    for (source, converted) in source.chunks(LANES).zip(converted.chunks(LANES)) {
        for (lane, (&s, &c)) in lanes.iter_mut().zip(source.iter().zip(converted)) {
            let (s, c) = (f64::from(s), f64::from(c));
            lane.squared_error += (s - c) * (s - c);
            lane.squared_source += s * s;
            lane.squared_converted += c * c;
            lane.product += s * c;
            lane.max_error = lane.max_error.max((s - c).abs());
        }
    }
    lanes.into_iter().fold(Difference::default(), joined)
}

fn joined(a: Difference, b: Difference) -> Difference {
    Difference {
        squared_error: a.squared_error + b.squared_error,
        squared_source: a.squared_source + b.squared_source,
        squared_converted: a.squared_converted + b.squared_converted,
        product: a.product + b.product,
        max_error: a.max_error.max(b.max_error),
    }
}

#[cfg(test)]
mod tests {
    use super::exp;

    #[test]
    fn exp_is_near_the_exact_one() {
        let mut worst = 0.0f64;
        for i in -873_000..887_000 {
            let x = i as f32 * 1e-4;
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) / exact - 1.0).abs());
        }
        // Two units in the last place.
        assert!(worst < 2.0 * f64::from(f32::EPSILON), "{worst:e}");
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-200.0), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }
}
