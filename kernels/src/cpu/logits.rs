//! What logits say of the next token.

use super::rows::{exp, largest, sum_of, sums_of, wide};
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
    let (s_max, c_max) = (largest(source), largest(converted));
    let shift = s_max - c_max;
    let [s_sum, c_sum, forward, backward] = sums_of(source, converted, |s, c| {
        // Relative to both maxima, which are taken out of the difference as well.
        let (p, q, apart) = (exp(s - s_max), exp(c - c_max), (s - c) - shift);
        [p, q, p * apart, q * apart]
    });
    let (forward, backward) = (forward / s_sum, backward / c_sum);
    let (s_sum, c_sum) = (s_sum.ln(), c_sum.ln());
    let between = s_sum - c_sum;
    TokenScore {
        source_nll: (s_sum - f64::from(source[target] - s_max)) as f32,
        converted_nll: (c_sum - f64::from(converted[target] - c_max)) as f32,
        kl: (forward - between) as f32,
        reverse_kl: (between - backward) as f32,
        top1_agrees: first(source, s_max) == first(converted, c_max),
    }
}

fn first(values: &[f32], value: f32) -> Option<usize> {
    values.iter().position(|&other| other == value)
}
