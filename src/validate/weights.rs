//! A converted weight whose rows or columns stand in another order, brought into the source's.

use super::pair::{Pair, reorder};
use crate::checkpoint::{Checkpoint, transpose};
use crate::model::Linear;
use requant_kernels::{Dense, DenseType, Operations, Weight};
use std::sync::Arc;

/// The linear of a pair as a dense one: the numbers that its packed weight decodes to.
pub(super) fn linear<O: Operations>(
    ops: &O,
    converted: &Checkpoint,
    pair: &Pair,
) -> Result<Arc<Linear<O>>, crate::Error> {
    // Pairs name modules that exist.
    let Some(module) = pair.converted_module(converted) else {
        return Err(super::Error::NothingInCommon.into());
    };
    let (k, n) = (pair.in_features, pair.out_features);
    let weights = pair.to_source_order(converted.decoded(module)?);
    let bytes: Vec<u8> = transpose(&weights, k, n).iter().flat_map(|w| w.to_le_bytes()).collect();
    let weight = Weight::Dense(Dense {
        dtype: DenseType::F32,
        out_features: n,
        in_features: k,
        bytes: Arc::new(bytes),
    });
    let bias = (converted.bias(module)?).map(|bias| reorder(bias, n, None, pair.columns.as_ref()));
    let bias = bias.map(|bias| ops.upload(&bias, n)).transpose()?;
    Ok(Arc::new(Linear::new(ops.upload_weight(&weight)?, bias)))
}
