//! A converted weight whose rows or columns stand in another order, brought into the source's.

use super::pair::{Pair, reorder};
use crate::checkpoint::{Checkpoint, transpose};
use crate::model::Linear;
use half::f16;
use requant_kernels::{Dense, DenseType, Operations, Weight};
use std::sync::Arc;

/// The linear of a pair as a dense one: the numbers that its packed weight decodes to.
pub(super) fn linear<O: Operations>(
    ops: &O,
    converted: &Checkpoint,
    pair: &Pair,
) -> Result<Linear<O>, crate::Error> {
    // Pairs name modules that exist.
    let Some(module) = pair.converted_module(converted) else {
        return Err(super::Error::NothingInCommon.into());
    };
    let (k, n) = (pair.in_features, pair.out_features);
    let weights = pair.to_source_order(converted.loaded(module)?);
    let weights = transpose(&weights, k, n);
    // What packed weights decode to is fp16: half the memory, and the arithmetic that they are multiplied with.
    let halves: Vec<f16> = weights.iter().map(|&weight| f16::from_f32(weight)).collect();
    let fit = halves.iter().zip(&weights).all(|(half, weight)| half.to_f32().to_bits() == weight.to_bits());
    let (dtype, bytes): (_, Vec<u8>) = match fit {
        true => (DenseType::F16, halves.iter().flat_map(|half| half.to_le_bytes()).collect()),
        false => (DenseType::F32, weights.iter().flat_map(|weight| weight.to_le_bytes()).collect()),
    };
    let weight = Weight::Dense(Dense { dtype, out_features: n, in_features: k, bytes: Arc::new(bytes) });
    let bias = (converted.bias(module)?).map(|bias| reorder(bias, n, None, pair.columns.as_ref()));
    let bias = bias.map(|bias| ops.upload(&bias, n)).transpose()?;
    Ok(Linear::new(ops.upload_weight(&weight)?, bias))
}
