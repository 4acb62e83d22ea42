//! Limits that the user sets.

use super::report::{Gate, GateKind, ModelScores};

/// The limits; a figure without one may be anything.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Gates {
    /// Mean KL(source ‖ converted) at most, nats a token.
    pub max_kl: Option<f64>,
    /// Perplexity of the converted model over the source's, minus 1, at most.
    pub max_ppl_increase: Option<f64>,
    /// Share of tokens where both find the same token most likely, at least.
    pub min_top1: Option<f64>,
}

impl Gates {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// What came of them. A figure that is no number, or that could not be measured, meets none.
    pub(super) fn outcome(&self, scores: Option<&ModelScores>) -> Vec<Gate> {
        let most = |kind, limit: f64, found: f64| Gate { kind, limit, found, met: found <= limit };
        let least = |kind, limit: f64, found: f64| Gate { kind, limit, found, met: found >= limit };
        let of = |figure: fn(&ModelScores) -> f64| scores.map_or(f64::NAN, figure);
        let increase = of(|scores| scores.converted_perplexity / scores.source_perplexity - 1.0);
        let gates = [
            self.max_kl.map(|limit| most(GateKind::MaxKl, limit, of(|scores| scores.kl.mean))),
            self.max_ppl_increase.map(|limit| most(GateKind::MaxPplIncrease, limit, increase)),
            self.min_top1
                .map(|limit| least(GateKind::MinTop1, limit, of(|scores| scores.top1_agreement.mean))),
        ];
        gates.into_iter().flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::validate::report::Mean;

    fn scores() -> ModelScores {
        let mean = |mean| Mean { mean, standard_error: 0.0 };
        ModelScores {
            source_perplexity: 10.0,
            converted_perplexity: 11.0,
            nll_increase: mean(0.1),
            kl: mean(0.05),
            reverse_kl: mean(0.06),
            top1_agreement: mean(0.9),
            kl_p99: 0.5,
            kl_max: 1.0,
            predictions: 100,
        }
    }

    #[test]
    fn limits_are_met_at_the_limit_and_missed_beyond() {
        let met =
            |gates: Gates| gates.outcome(Some(&scores())).iter().map(|gate| gate.met).collect::<Vec<_>>();
        let all =
            |kl, ppl, top1| Gates { max_kl: Some(kl), max_ppl_increase: Some(ppl), min_top1: Some(top1) };
        assert_eq!(met(all(0.05, 0.11, 0.9)), [true; 3]);
        assert_eq!(met(all(0.0499, 0.0999, 0.9001)), [false; 3]);
        assert_eq!(met(Gates::default()), [false; 0]);
    }

    #[test]
    fn what_was_not_measured_meets_nothing() {
        let gates = Gates { max_kl: Some(1.0), max_ppl_increase: Some(1.0), min_top1: Some(0.0) };
        assert!(gates.outcome(None).iter().all(|gate| !gate.met));
    }
}
