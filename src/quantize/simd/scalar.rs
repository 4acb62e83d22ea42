//! Plain Rust: the reference of the other paths, and the path of processors without them.

use crate::quantize::feedback::kernel::{self as feedback, Rows};
use crate::quantize::kernel::{self, Vector};
use crate::quantize::panel::{LANES, Lanes, Panel, Range, Steps, Window};

/// Four columns, which any compiler target has registers for.
#[derive(Clone, Copy)]
struct F32x4([f32; 4]);

impl F32x4 {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        F32x4(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

impl Vector for F32x4 {
    const WIDTH: usize = 4;
    type Index = [i32; 4];

    #[inline(always)]
    fn splat(x: f32) -> Self {
        F32x4([x; 4])
    }
    #[inline(always)]
    fn load(from: &Lanes, at: usize) -> Self {
        F32x4([from[at], from[at + 1], from[at + 2], from[at + 3]])
    }
    #[inline(always)]
    fn store(self, to: &mut Lanes, at: usize) {
        to[at..at + 4].copy_from_slice(&self.0);
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }
    #[inline(always)]
    fn mul_add(self, factor: Self, term: Self) -> Self {
        self.mul(factor).add(term)
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn if_less(self, other: Self, yes: Self, no: Self) -> Self {
        F32x4(std::array::from_fn(|i| if self.0[i] < other.0[i] { yes.0[i] } else { no.0[i] }))
    }
    #[inline(always)]
    fn first(self, scales: &[f32; 16]) -> [i32; 4] {
        let mut first = [0; 4];
        for &scale in &scales[..15] {
            for (first, &wanted) in first.iter_mut().zip(&self.0) {
                *first += i32::from(scale < wanted);
            }
        }
        first
    }
    #[inline(always)]
    fn moved(index: [i32; 4], offset: i32) -> [i32; 4] {
        index.map(|index| (index + offset).clamp(0, 15))
    }
    #[inline(always)]
    fn lookup(table: &[f32; 16], index: [i32; 4]) -> Self {
        F32x4(index.map(|index| table[index as usize & 15]))
    }
}

pub(super) fn add_best_errors(
    panel: Panel<'_>,
    window: Window<'_>,
    ceilings: &[Steps],
    range: Range,
    sums: &mut [f64],
) {
    kernel::add_best_errors::<F32x4>(panel, window, ceilings, range, sums);
}

pub(super) fn best_index(panel: Panel<'_>, steps: &Steps, range: Range) -> [u8; LANES] {
    kernel::best_index::<F32x4>(panel, steps, range)
}

pub(super) fn encode(
    panel: Panel<'_>,
    scale: &Lanes,
    range: Range,
    table: &mut Vec<[u8; LANES]>,
    errors: &mut [f64; LANES],
) {
    kernel::encode(panel, scale, range, table, errors);
}

pub(super) fn pull(coefficients: &[f32], stride: usize, errors: &[Lanes], targets: &mut [Lanes]) {
    feedback::pull::<F32x4>(coefficients, stride, errors, targets);
}

pub(super) fn encode_with_feedback(
    rows: Rows<'_>,
    scale: &Lanes,
    range: Range,
    codes: &mut [[u8; LANES]],
    errors: &mut [Lanes],
) -> [f64; LANES] {
    feedback::encode_with_feedback::<F32x4>(rows, scale, range, codes, errors)
}
