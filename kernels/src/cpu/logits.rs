//! What logits say of the next token.

use super::rows::{exp, largest, sum_of, wide};
use crate::operations::TokenScore;

/// `ln Σ e^logit`, less the largest logit, which comes with it.
#[inline(always)]
fn log_sum(logits: &[f32]) -> (f32, f64) {
    let max = largest(logits);
    (max, sum_of(logits, logits, |logit, _| exp(logit - max)).ln())
}

/// Negative log likelihood of `target`.
pub(super) fn nll(logits: &[f32], target: usize) -> f32 {
    let (max, sum) = wide(
        #[inline(always)]
        || log_sum(logits),
    );
    (sum - f64::from(logits[target] - max)) as f32
}

/// KL(s ‖ c) = Σ p (s − c) − (ln Σ e^s − ln Σ e^c), which is exactly 0 for equal logits.
pub(super) fn compare(source: &[f32], converted: &[f32], target: usize) -> TokenScore {
    wide(
        #[inline(always)]
        || compare_rows(source, converted, target),
    )
}

#[inline(always)]
fn compare_rows(source: &[f32], converted: &[f32], target: usize) -> TokenScore {
    let ((s_max, s_sum), (c_max, c_sum)) = (log_sum(source), log_sum(converted));
    // Both sums relative to both maxima, taken out of the differences as well.
    let shift = s_max - c_max;
    let between = s_sum - c_sum;
    let forward = sum_of(source, converted, |s, c| exp(s - s_max) * ((s - c) - shift)) / s_sum.exp();
    let backward = sum_of(source, converted, |s, c| exp(c - c_max) * ((c - s) + shift)) / c_sum.exp();
    TokenScore {
        source_nll: (s_sum - f64::from(source[target] - s_max)) as f32,
        converted_nll: (c_sum - f64::from(converted[target] - c_max)) as f32,
        kl: (forward - between) as f32,
        reverse_kl: (backward + between) as f32,
        top1_agrees: first(source, s_max) == first(converted, c_max),
    }
}

fn first(values: &[f32], value: f32) -> Option<usize> {
    values.iter().position(|&other| other == value)
}
