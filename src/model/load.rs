//! Brings weights from a checkpoint to a device.

use super::LinearId;
use super::block::{Block, Embedding, Head, Linear, Router};
use super::spec::Spec;
use crate::arch::QkNorm;
use crate::checkpoint::{Checkpoint, Layout, Module, transpose};
use rayon::prelude::*;
use requant_kernels::{Dense, DenseType, Operations, Weight};
use safetensors::Dtype;
use std::collections::BTreeMap;
use std::sync::Arc;

pub(super) fn embedding<O: Operations>(
    checkpoint: &Checkpoint,
    spec: &Spec,
    ops: &O,
) -> Result<Embedding<O>, crate::Error> {
    let table = ops.upload_weight(&table(checkpoint, &spec.names.embedding_weight())?)?;
    Ok(Embedding { table, scale: spec.embedding_scale })
}

pub(super) fn block<O: Operations>(
    checkpoint: &Checkpoint,
    spec: &Arc<Spec>,
    ops: &O,
    layer: usize,
) -> Result<Block<O>, crate::Error> {
    // Unpacking takes as long as a product with few rows: all linears at once.
    let linears = (spec.arch.block(&spec.dims, spec.names, layer).into_par_iter())
        // Opening found a module for every linear.
        .filter_map(|linear| Some((checkpoint.of_linear(&linear)?, linear)))
        .map(|(module, of)| {
            let id = LinearId { role: of.role, expert: of.expert };
            Ok((id, Arc::new(linear(checkpoint, ops, module)?)))
        })
        .collect::<Result<BTreeMap<_, _>, crate::Error>>()?;
    let in_block = |name: &str| format!("{}{layer}.{name}.weight", spec.names.blocks);
    let norm = |name: &str| norm(checkpoint, spec, ops, &in_block(name));
    let norms =
        spec.names.block_norms.iter().map(|name| norm(name).map(Arc::new)).collect::<Result<_, _>>()?;
    let qk_norms = match spec.arch.qk_norm {
        QkNorm::Always => Some([Arc::new(norm("self_attn.q_norm")?), Arc::new(norm("self_attn.k_norm")?)]),
        QkNorm::Never | QkNorm::EachHeadIfUsed => None,
    };
    let router = match (spec.routing, spec.dims.experts_of(layer)) {
        (Some(routing), Some(experts)) => {
            let of =
                |name: &str| table(checkpoint, &in_block(&format!("{}.{name}", spec.names.experts.module)));
            let shared = spec.dims.shared_intermediate.map(|_| of("shared_expert_gate")).transpose()?;
            Some(Arc::new(Router {
                weight: ops.upload_weight(&of("gate")?)?,
                shared: shared.map(|weight| ops.upload_weight(&weight)).transpose()?,
                experts,
                routing,
            }))
        }
        _ => None,
    };
    Ok(Block { spec: spec.clone(), layer, linears, norms, qk_norms, router })
}

pub(super) fn head<O: Operations>(
    checkpoint: &Checkpoint,
    spec: &Spec,
    ops: &O,
) -> Result<Head<O>, crate::Error> {
    let linear = match checkpoint.module(spec.names.head) {
        Some(module) => linear(checkpoint, ops, module)?,
        None => Linear::new(ops.upload_weight(&table(checkpoint, &spec.names.embedding_weight())?)?, None),
    };
    let norm = norm(checkpoint, spec, ops, &format!("{}.weight", spec.names.norm))?;
    Ok(Head { norm, linear, epsilon: spec.epsilon, cap: spec.logit_cap })
}

/// A module's weight in its own layout, and its bias.
fn linear<O: Operations>(
    checkpoint: &Checkpoint,
    ops: &O,
    module: &Module,
) -> Result<Linear<O>, crate::Error> {
    let weight = match module.layout() {
        Layout::Gptq(_) => Weight::from(checkpoint.gptq(module)?),
        // Kernels know no prescale.
        Layout::Exl2(_) if checkpoint.prescale(module) != 1.0 => {
            let (k, n) = (module.in_features(), module.out_features());
            dense(&transpose(&checkpoint.loaded(module)?, k, n), k, n)
        }
        Layout::Exl2(_) => {
            Weight::Exl2 { matrix: Arc::new(checkpoint.exl2(module)?), out_features: module.out_features() }
        }
        Layout::Dense { .. } if module.columns().is_none() => {
            table(checkpoint, &format!("{}.weight", module.name()))?
        }
        Layout::Dense { .. } => {
            // Rows of a fused weight: few enough to copy.
            let (k, n) = (module.in_features(), module.out_features());
            dense(&transpose(&checkpoint.dense(module)?, k, n), k, n)
        }
    };
    let bias = checkpoint.bias(module)?.map(|bias| ops.upload(&bias, bias.len())).transpose()?;
    Ok(Linear::new(ops.upload_weight(&weight)?, bias))
}

/// A dense weight `[n, k]`.
fn dense(rows: &[f32], k: usize, n: usize) -> Weight {
    let bytes: Vec<u8> = rows.iter().flat_map(|value| value.to_le_bytes()).collect();
    Dense { dtype: DenseType::F32, out_features: n, in_features: k, bytes: Arc::new(bytes) }.into()
}

/// A dense tensor `[out_features, in_features]` where it lies in its file.
fn table(checkpoint: &Checkpoint, name: &str) -> Result<Weight, crate::Error> {
    let tensor = checkpoint.require_tensor(name)?;
    let dtype = match tensor.dtype() {
        Dtype::BF16 => DenseType::Bf16,
        Dtype::F32 => DenseType::F32,
        // Opening refuses all others here.
        _ => DenseType::F16,
    };
    let shape = tensor.shape();
    let (out_features, in_features) = (shape[0], shape[1..].iter().product());
    let bytes = Arc::new(checkpoint.mapped(name)?);
    Ok(Dense { dtype, out_features, in_features, bytes }.into())
}

fn norm<O: Operations>(
    checkpoint: &Checkpoint,
    spec: &Spec,
    ops: &O,
    name: &str,
) -> Result<O::Tensor, crate::Error> {
    let mut weight = checkpoint.require_tensor(name)?.floats().unwrap_or_default();
    weight.iter_mut().for_each(|weight| *weight += spec.norm_offset);
    Ok(ops.upload(&weight, weight.len())?)
}
