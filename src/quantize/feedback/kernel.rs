//! The arithmetic of error feedback on sixteen columns, once for all instruction sets. Unlike the search's it
//! fuses multiplication and addition where the instruction set can, so sets differ in the last bits.

use crate::quantize::kernel::{ROUND, Vector, to_half};
use crate::quantize::panel::{LANES, Lanes, Range};

/// The rows of a group in some columns. A row's target is what it would best decode to, given the errors of all
/// rows that are settled; its residual is what is left of that.
#[derive(Clone, Copy, Debug)]
pub(in crate::quantize) struct Rows<'a> {
    /// Targets as far as rows outside the group decide.
    pub(in crate::quantize) targets: &'a [Lanes],
    /// What errors of the group's rows are counted from.
    pub(in crate::quantize) base: &'a [Lanes],
    /// Weight of each row's squared residual.
    pub(in crate::quantize) weights: &'a [f32],
    /// `[rows, rows]`: entry (j, i) is how much of the error of row i < j row j takes over.
    pub(in crate::quantize) coefficients: &'a [f32],
}

/// `targets[j] += Σ coefficients[j][i] · errors[i]`, rows of coefficients `stride` apart.
#[inline(always)]
pub(in crate::quantize) fn pull<V: Vector>(
    coefficients: &[f32],
    stride: usize,
    errors: &[Lanes],
    targets: &mut [Lanes],
) {
    const AT_ONCE: usize = 8;
    for at in (0..LANES).step_by(V::WIDTH) {
        for (block, targets) in targets.chunks_mut(AT_ONCE).enumerate() {
            let row = |j: usize| &coefficients[(block * AT_ONCE + j.min(targets.len() - 1)) * stride..];
            let rows: [&[f32]; AT_ONCE] = std::array::from_fn(|j| &row(j)[..errors.len()]);
            let mut sums: [V; AT_ONCE] = [V::splat(0.0); AT_ONCE];
            for (i, error) in errors.iter().enumerate() {
                let error = V::load(error, at);
                for j in 0..AT_ONCE {
                    sums[j] = V::splat(rows[j][i]).mul_add(error, sums[j]);
                }
            }
            for (target, sum) in targets.iter_mut().zip(sums) {
                V::load(target, at).add(sum).store(target, at);
            }
        }
    }
}

/// Codes of the rows under the scales chosen, and the errors of the weights as decoded, counted from `base`.
/// Gives the weighted squares of the residuals.
#[inline(always)]
pub(in crate::quantize) fn encode_with_feedback<V: Vector>(
    rows: Rows<'_>,
    scale: &Lanes,
    range: Range,
    codes: &mut [[u8; LANES]],
    errors: &mut [Lanes],
) -> [f64; LANES] {
    let mut sums = [0.0; LANES];
    for (j, codes) in codes.iter_mut().enumerate() {
        let mut targets = [rows.targets[j]];
        let (before, error) = errors.split_at_mut(j);
        let coefficients = &rows.coefficients[j * rows.targets.len()..][..j];
        for at in (0..LANES).step_by(V::WIDTH) {
            let mut target = V::load(&targets[0], at);
            for (&coefficient, error) in coefficients.iter().zip(&*before) {
                target = V::splat(coefficient).mul_add(V::load(error, at), target);
            }
            target.store(&mut targets[0], at);
        }
        for lane in 0..LANES {
            let wanted = targets[0][lane] / scale[lane];
            let above = if wanted > range.low { wanted } else { range.low };
            let code = ((if above < range.high { above } else { range.high }) + ROUND) - ROUND;
            let decoded = to_half(code * scale[lane]);
            let residual = f64::from(targets[0][lane]) - f64::from(decoded);
            sums[lane] += f64::from(rows.weights[j]) * (residual * residual);
            codes[lane] = (code - range.low) as i32 as u8;
            error[0][lane] = rows.base[j][lane] - decoded;
        }
    }
    sums
}
