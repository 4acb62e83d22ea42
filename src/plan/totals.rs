//! Sizes of a plan, and what its widths were chosen by.

use super::{BiasDecision, Decision, PlannedModule};
use crate::arch::DenseTensor;
use serde::Serialize;

/// Sizes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Totals {
    /// Weights (k · n) of the decoder linears that are EXL2 in the output.
    pub quantized_weights: u64,
    /// Bits that their tensors take, biases included.
    pub stored_bits: u64,
    /// `stored_bits / quantized_weights`.
    pub bpw: f64,
    /// The same as exllamav2 counts it: without biases.
    pub exllamav2_bpw: f64,
    /// Bytes of all tensors of the output.
    pub tensor_bytes: u64,
    /// Weights of all tensors of the output, a quantized one counted as k · n.
    pub all_weights: u64,
    /// Bits of all tensors over all weights.
    pub file_bpw: f64,
}

impl Totals {
    pub(super) fn new(modules: &[PlannedModule], dense: &[DenseTensor]) -> Self {
        let (mut quantized_weights, mut stored_bits, mut bias_bits) = (0, 0, 0);
        let (mut all_weights, mut all_bits) = (0, 0);
        for module in modules {
            let (bias, bits) = (module.bias_bits(), module.stored_bits());
            if matches!(module.decision, Decision::Exl2(_)) && !module.is_head() {
                quantized_weights += module.weights();
                stored_bits += bits;
                bias_bits += bias;
            }
            all_weights += module.weights() + bias / 16;
            all_bits += bits;
        }
        for tensor in dense {
            let elements = tensor.shape.iter().product::<usize>() as u64;
            all_weights += elements;
            all_bits += 16 * elements;
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
    pub fn bias_bits(&self) -> u64 {
        match self.bias {
            BiasDecision::Kept => 16 * self.out_features as u64,
            BiasDecision::None | BiasDecision::DroppedZeros => 0,
        }
    }
}

/// What the widths were chosen by.
///
/// The objective is the sum over modules of `out_features` times the relative squared error of the weight,
/// as measured: what uncorrelated inputs of unit variance would see at the outputs, each module's output
/// being scaled to unit variance.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Objective {
    /// Its value for the plan.
    pub value: f64,
    /// Its value for the best plan under the same budget in which each module has one width.
    pub one_width_a_module: f64,
    /// How much lower it could be at most; 0 where the plan is proven to be the best.
    pub gap: f64,
    /// Mean over modules of the relative Frobenius error of the plan.
    pub mean_relative_error: f64,
    /// The same for the best plan in which each module has one width.
    pub mean_relative_error_one_width: f64,
}
