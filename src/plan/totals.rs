//! Sizes of a plan, and what its widths were chosen by.

use super::tensors::specs;
use super::{BiasDecision, Decision, PlannedModule, PlannedTensor};
use crate::checkpoint::{Checkpoint, Layout};
use crate::output::TensorSpec;
use serde::{Deserialize, Serialize};

/// Sizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    /// Weights (k · n) of the decoder linears that are quantized in the output.
    pub quantized_weights: u64,
    /// Bits that their tensors take, biases included.
    pub stored_bits: u64,
    /// `stored_bits / quantized_weights`.
    pub bpw: f64,
    /// The same without biases, as exllamav2 counts it.
    pub exllamav2_bpw: f64,
    /// Bytes of all tensors of the output.
    pub tensor_bytes: u64,
    /// Weights of all tensors of the output, a quantized one counted as k · n.
    pub all_weights: u64,
    /// Bits of all tensors over all weights.
    pub file_bpw: f64,
}

impl Totals {
    pub(super) fn new(checkpoint: &Checkpoint, modules: &[PlannedModule], dense: &[PlannedTensor]) -> Self {
        let (mut quantized_weights, mut stored_bits, mut bias_bits) = (0, 0, 0);
        let (mut all_weights, mut all_bits) = (0, 0);
        for module in modules {
            let bits = module.stored_bits;
            if module.is_quantized(checkpoint) && !module.is_head() {
                quantized_weights += module.weights();
                stored_bits += bits;
                bias_bits += module.bias_bits();
            }
            all_weights += module.weights() + module.bias_bits() / 16;
            all_bits += bits;
        }
        for tensor in dense {
            let elements = tensor.shape.iter().product::<usize>() as u64;
            all_weights += elements;
            all_bits += tensor.dtype.bitsize() as u64 * elements;
        }
        let per_weight = |bits: u64, weights: u64| bits as f64 / weights.max(1) as f64;
        Self {
            quantized_weights,
            stored_bits,
            bpw: per_weight(stored_bits, quantized_weights),
            exllamav2_bpw: per_weight(stored_bits - bias_bits, quantized_weights),
            tensor_bytes: all_bits / 8,
            all_weights,
            file_bpw: per_weight(all_bits, all_weights),
        }
    }
}

impl PlannedModule {
    /// Bits that its bias takes.
    pub(super) fn bias_bits(&self) -> u64 {
        match self.bias {
            BiasDecision::Kept => 16 * self.out_features as u64,
            BiasDecision::None | BiasDecision::DroppedZeros => 0,
        }
    }

    /// Bits of the tensors that its decision stores.
    pub(super) fn count_bits(&self, checkpoint: &Checkpoint) -> u64 {
        let bits = |spec: &TensorSpec| {
            spec.dtype.bitsize() as u64 * spec.shape.iter().map(|&size| size as u64).product::<u64>()
        };
        specs(checkpoint, self).iter().map(bits).sum()
    }

    /// Whether it is quantized in the output.
    pub fn is_quantized(&self, checkpoint: &Checkpoint) -> bool {
        match self.decision {
            Decision::Exl2(_) | Decision::Gptq(_) => true,
            Decision::Dense(_) => false,
            Decision::Kept => checkpoint
                .part(&self.source, self.columns.as_ref())
                .is_some_and(|module| !matches!(module.layout(), Layout::Dense { .. })),
        }
    }
}

/// What the widths were chosen by.
///
/// The objective is the sum over modules of `out_features` times the relative squared error of the weight,
/// as measured: what uncorrelated inputs of unit variance would see at the outputs, each module's output
/// being scaled to unit variance. With a calibration it is the KL divergence that is expected of the model, in nats a
/// token, and errors are those of outputs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Objective {
    /// Its value for the plan.
    pub value: f64,
    /// Whether it is an expected divergence.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub calibrated: bool,
    /// Its value for the best plan under the same budget in which each module has one width.
    pub one_width_a_module: f64,
    /// How much lower it could be at most; 0 where the plan is proven to be the best.
    pub gap: f64,
    /// Mean over modules of the relative Frobenius error of the plan.
    pub mean_relative_error: f64,
    /// The same for the best plan in which each module has one width.
    pub mean_relative_error_one_width: f64,
}
