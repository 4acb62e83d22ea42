//! Sums of what two models say of tokens, and the figures made of them.

use super::report::{Mean, ModelScores, SwapScores};
use requant_kernels::TokenScore;

/// Sums of a window, or of all.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    /// Tokens that had one to predict.
    predictions: usize,
    /// Tokens.
    positions: usize,
    source_nll: f64,
    converted_nll: f64,
    kl: f64,
    reverse_kl: f64,
    agreements: usize,
}

/// A divergence of a token. That of equal logits is computed as 0; what rounding brings below 0 is next to nothing, yet
/// not the 0 that is called exact.
fn divergence(computed: f32) -> f32 {
    if computed < 0.0 { f32::MIN_POSITIVE } else { computed }
}

/// Collects the scores of all tokens of all windows.
///
/// Divergences count at every token. The last of a window has no target, so that likelihoods leave it out.
#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    windows: Vec<Sums>,
    divergences: Vec<f32>,
}

impl Tally {
    /// Adds a token of a window, which counts from 0.
    pub(super) fn add(&mut self, window: usize, score: &TokenScore, has_target: bool) {
        if self.windows.len() <= window {
            self.windows.resize_with(window + 1, Sums::default);
        }
        let sums = &mut self.windows[window];
        sums.positions += 1;
        let (kl, reverse_kl) = (divergence(score.kl), divergence(score.reverse_kl));
        sums.kl += f64::from(kl);
        sums.reverse_kl += f64::from(reverse_kl);
        sums.agreements += usize::from(score.top1_agrees);
        self.divergences.push(kl);
        if has_target {
            sums.predictions += 1;
            sums.source_nll += f64::from(score.source_nll);
            sums.converted_nll += f64::from(score.converted_nll);
        }
    }

    /// Adds what was collected of other windows.
    pub(super) fn append(&mut self, other: Self) {
        if self.windows.len() < other.windows.len() {
            self.windows.resize_with(other.windows.len(), Sums::default);
        }
        for (sums, more) in self.windows.iter_mut().zip(other.windows).filter(|(_, more)| more.positions > 0)
        {
            debug_assert_eq!(sums.positions, 0, "a window belongs to one pass");
            *sums = more;
        }
        self.divergences.extend(other.divergences);
    }

    fn total(&self) -> Sums {
        self.windows.iter().fold(Sums::default(), |total, sums| Sums {
            predictions: total.predictions + sums.predictions,
            positions: total.positions + sums.positions,
            source_nll: total.source_nll + sums.source_nll,
            converted_nll: total.converted_nll + sums.converted_nll,
            kl: total.kl + sums.kl,
            reverse_kl: total.reverse_kl + sums.reverse_kl,
            agreements: total.agreements + sums.agreements,
        })
    }

    /// The figures of the whole model.
    pub(super) fn model(&self) -> ModelScores {
        let total = self.total();
        let of_predictions = |sum: f64| sum / total.predictions.max(1) as f64;
        let positions = |sums: &Sums| sums.positions;
        let mut sorted = self.divergences.clone();
        sorted.sort_by(f32::total_cmp);
        let at = (sorted.len() as f64 * 0.99).ceil() as usize;
        let largest = |i: usize| sorted.get(i).copied().map_or(0.0, f64::from);
        ModelScores {
            source_perplexity: of_predictions(total.source_nll).exp(),
            converted_perplexity: of_predictions(total.converted_nll).exp(),
            nll_increase: self.mean(|sums| sums.converted_nll - sums.source_nll, |sums| sums.predictions),
            kl: self.mean(|sums| sums.kl, positions),
            reverse_kl: self.mean(|sums| sums.reverse_kl, positions),
            top1_agreement: self.mean(|sums| sums.agreements as f64, positions),
            kl_p99: largest(at.saturating_sub(1)),
            kl_max: largest(sorted.len().saturating_sub(1)),
            predictions: total.predictions,
        }
    }

    /// The two figures of a variant.
    pub(super) fn variant(&self) -> SwapScores {
        let total = self.total();
        SwapScores {
            perplexity: (total.converted_nll / total.predictions.max(1) as f64).exp(),
            kl: total.kl / total.positions.max(1) as f64,
        }
    }

    /// The source's perplexity on the first windows.
    pub(super) fn source_perplexity(&self, windows: usize) -> f64 {
        let first = || self.windows.iter().take(windows);
        let predictions: usize = first().map(|sums| sums.predictions).sum();
        (first().map(|sums| sums.source_nll).sum::<f64>() / predictions.max(1) as f64).exp()
    }

    /// A mean over tokens. Its standard error is that of a ratio of sums over windows, since the last window
    /// may be shorter: `sqrt(Σ (s − m·n)² · w / (w − 1)) / Σ n`.
    fn mean(&self, sum: impl Fn(&Sums) -> f64, count: impl Fn(&Sums) -> usize) -> Mean {
        let tokens = self.windows.iter().map(&count).sum::<usize>().max(1) as f64;
        let mean = self.windows.iter().map(&sum).sum::<f64>() / tokens;
        let windows = self.windows.len() as f64;
        if self.windows.len() < 2 {
            return Mean { mean, standard_error: 0.0 };
        }
        let squares: f64 =
            self.windows.iter().map(|sums| (sum(sums) - mean * count(sums) as f64).powi(2)).sum();
        Mean { mean, standard_error: (squares * windows / (windows - 1.0)).sqrt() / tokens }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn score(kl: f32, nll: f32) -> TokenScore {
        TokenScore { source_nll: 1.0, converted_nll: nll, kl, reverse_kl: kl, top1_agrees: kl < 0.5 }
    }

    #[test]
    fn means_and_standard_errors_are_those_of_windows() {
        let mut tally = Tally::default();
        // Window means 0.1, 0.2 and 0.6: mean 0.3, deviation sqrt(0.07), over sqrt(3).
        for (window, kl) in [(0, 0.1), (1, 0.2), (2, 0.6)] {
            tally.add(window, &score(kl, 2.0), true);
            tally.add(window, &score(kl, 9.0), false);
        }
        let model = tally.model();
        assert!((model.kl.mean - 0.3).abs() < 1e-7);
        assert!((model.kl.standard_error - (0.07f64 / 3.0).sqrt()).abs() < 1e-7);
        assert_eq!(model.predictions, 3);
        assert!((model.source_perplexity - 1f64.exp()).abs() < 1e-12);
        assert!((model.converted_perplexity - 2f64.exp()).abs() < 1e-12);
        assert_eq!(model.nll_increase, Mean { mean: 1.0, standard_error: 0.0 });
        assert!((model.top1_agreement.mean - 2.0 / 3.0).abs() < 1e-12);
        assert_eq!(model.kl_max, f64::from(0.6f32));
    }

    #[test]
    fn the_99th_percentile_is_the_least_that_99_percent_do_not_pass() {
        let mut tally = Tally::default();
        (1..=200).for_each(|i| tally.add(0, &score(i as f32, 1.0), true));
        assert_eq!(tally.model().kl_p99, 198.0);
    }

    #[test]
    fn only_equal_logits_give_0_and_a_nan_stays_one() {
        let mut tally = Tally::default();
        tally.add(0, &score(0.0, 1.0), true);
        assert_eq!((tally.variant().kl, tally.model().kl_max), (0.0, 0.0));
        tally.add(0, &score(-1e-9, 1.0), true);
        let model = tally.model();
        for divergence in [tally.variant().kl, model.kl.mean, model.reverse_kl.mean, model.kl_max] {
            assert!(divergence > 0.0 && divergence < 1e-30, "{divergence}");
        }
        tally.add(0, &score(f32::NAN, 1.0), true);
        assert!(tally.variant().kl.is_nan() && tally.model().reverse_kl.mean.is_nan());
    }
}
