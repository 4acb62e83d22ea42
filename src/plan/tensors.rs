//! The tensors that a decision stores.

use super::{BiasDecision, Decision, PlannedModule, PlannedTensor};
use crate::checkpoint::Checkpoint;
use crate::output::TensorSpec;
use requant_formats::gptq::Shape;
use safetensors::Dtype;

/// The tensors that a module has in the output, the bias last.
pub(crate) fn specs(checkpoint: &Checkpoint, planned: &PlannedModule) -> Vec<TensorSpec> {
    let (k, n) = (planned.in_features, planned.stored_out_features());
    let named = |suffix: &str, dtype, shape: &[usize]| TensorSpec {
        name: format!("{}.{suffix}", planned.name),
        dtype,
        shape: shape.to_vec(),
    };
    let mut specs = match &planned.decision {
        Decision::Kept => kept(checkpoint, planned),
        Decision::Dense(dtype) => vec![named("weight", dtype.dtype(), &[n, k])],
        Decision::Exl2(decision) => {
            let groups = decision.bits.len();
            let words = decision.widths(k).iter().map(|(bits, rows)| rows * bits.get() as usize / 32).sum();
            vec![
                named("q_weight", Dtype::I32, &[words, n]),
                named("q_invperm", Dtype::I32, &[k]),
                named("q_scale", Dtype::I32, &[groups, n / 8]),
                named("q_scale_max", Dtype::F16, &[groups]),
                named("q_groups", Dtype::I16, &[2 * groups]),
            ]
        }
        Decision::Gptq(decision) => {
            let (bits, groups) = (decision.bits, decision.groups);
            let shape = Shape { in_features: k, out_features: n, bits, groups };
            vec![
                named("qweight", Dtype::I32, &shape.qweight()),
                named("qzeros", Dtype::I32, &shape.qzeros()),
                named("scales", decision.scales, &shape.scales()),
                named("g_idx", Dtype::I32, &[k]),
            ]
        }
    };
    if planned.bias == BiasDecision::Kept {
        let stored = checkpoint.tensor(&format!("{}.bias", planned.source)).map(|bias| bias.dtype());
        let dtype = match &planned.decision {
            Decision::Kept | Decision::Gptq(_) => stored.unwrap_or(Dtype::F16),
            Decision::Dense(dtype) => dtype.dtype(),
            Decision::Exl2(_) => Dtype::F16,
        };
        specs.push(named("bias", dtype, &[planned.out_features]));
    }
    specs
}

/// A tensor that belongs to no module.
pub(crate) fn dense_spec(tensor: &PlannedTensor) -> TensorSpec {
    TensorSpec { name: tensor.name.clone(), dtype: tensor.dtype, shape: tensor.shape.clone() }
}

/// The source's own tensors, the bias aside.
fn kept(checkpoint: &Checkpoint, planned: &PlannedModule) -> Vec<TensorSpec> {
    let Some(module) = checkpoint.module(&planned.source) else { return Vec::new() };
    let tensors = module.tensor_names().filter(|name| !name.ends_with(".bias"));
    let tensors = tensors.filter_map(|name| checkpoint.tensor(&name));
    let spec = |tensor: crate::checkpoint::TensorView<'_>| TensorSpec {
        name: tensor.name().replacen(&planned.source, &planned.name, 1),
        dtype: tensor.dtype(),
        shape: tensor.shape().to_vec(),
    };
    tensors.map(spec).collect()
}
