//! Looks at every value that could stop the conversion, before anything is written.

use super::Error;
use super::module::{floats, not_a_float, not_finite};
use crate::checkpoint::{Checkpoint, Layout, TensorView};
use crate::plan::{BiasDecision, Decision, DenseType, Plan, PlannedModule, as_half};
use crate::progress::Observer;
use crate::warning::{Warning, WarningCode};
use half::f16;
use rayon::prelude::*;
use safetensors::Dtype;
use std::collections::BTreeSet;

/// Checks all tensors that are stored as fp16, and that every weight decodes to a finite fp16. Gives a
/// warning for each tensor that fp16 rounds, and for scales that are too small for it.
pub(super) fn check(
    checkpoint: &Checkpoint,
    plan: &Plan,
    observer: &dyn Observer,
) -> Result<Vec<Warning>, crate::Error> {
    let mut halves: Vec<String> =
        plan.dense_tensors.iter().filter(|t| t.dtype == Dtype::F16).map(|t| t.source.clone()).collect();
    for module in plan.modules.iter().filter(|module| becomes_half(module)) {
        halves.push(format!("{}.weight", module.source));
        if module.bias == BiasDecision::Kept {
            halves.push(format!("{}.bias", module.source));
        }
    }
    // A tied head is made of the embedding, several linears of a fused one.
    let mut seen = BTreeSet::new();
    halves.retain(|name| seen.insert(name.clone()));
    let views: Vec<TensorView<'_>> = halves.iter().filter_map(|name| checkpoint.tensor(name)).collect();
    let mut warnings: Vec<Option<Warning>> =
        views.par_iter().map(|&tensor| rounding(tensor)).collect::<Result<_, _>>()?;
    let mut seen = BTreeSet::new();
    for module in plan.modules.iter().filter(|module| becomes_half(module)) {
        if !seen.insert(module.source.as_str()) {
            continue;
        }
        if observer.cancelled() {
            return Err(crate::Error::Cancelled);
        }
        warnings.push(check_weights(checkpoint, &module.source)?);
    }
    Ok(warnings.into_iter().flatten().collect())
}

/// Whether a module's weights or scales go through fp16.
fn becomes_half(module: &PlannedModule) -> bool {
    matches!(module.decision, Decision::Exl2(_) | Decision::Dense(DenseType::Fp16))
}

fn rounding(tensor: TensorView<'_>) -> Result<Option<Warning>, crate::Error> {
    let rounding = as_half(tensor).ok_or_else(|| not_a_float(tensor))?.map_err(|e| not_finite(tensor, e))?;
    Ok((!rounding.is_exact()).then(|| Warning {
        code: WarningCode::RoundedToHalf,
        subject: tensor.name().into(),
        message: format!(
            "{} of {} values are rounded to fp16, {} of them below 2^-14; the largest error is {:e}",
            rounding.rounded,
            tensor.info().elements(),
            rounding.below_normal,
            rounding.largest_error
        ),
    }))
}

/// A scale that is finite can still give a weight that isn't, and one of a wider type weights that fp16
/// flushes.
fn check_weights(checkpoint: &Checkpoint, name: &str) -> Result<Option<Warning>, crate::Error> {
    let Some(module) = checkpoint.module(name) else { return Ok(None) };
    let Layout::Gptq(gptq) = module.layout() else { return Ok(None) };
    let tensor = format!("{name}.scales");
    let Some(stored) = checkpoint.tensor(&tensor) else { return Ok(None) };
    let scales = floats(stored)?;
    // No |q − z| is larger than 2^bits.
    let limit = f16::MAX.to_f32() / (1u32 << gptq.shape.bits.get()) as f32;
    if scales.iter().any(|s| s.abs() > limit) {
        let weights = checkpoint.dequantize(module)?;
        if let Some(i) = weights.iter().position(|w| !w.is_finite()) {
            let (row, column) = (i / module.out_features(), i % module.out_features());
            let file = stored.file().into();
            return Err(
                Error::WeightOverflow { file, tensor, row, column, value: weights[i].to_f32() }.into()
            );
        }
    }
    let small = scales.iter().filter(|s| **s != 0.0 && s.abs() < f16::MIN_POSITIVE.to_f32()).count();
    Ok((stored.dtype() != Dtype::F16 && small > 0).then(|| Warning {
        code: WarningCode::RoundedToHalf,
        subject: tensor,
        message: format!(
            "{small} of {} scales are below 2^-14: their weights lose digits in fp16, or become 0",
            scales.len()
        ),
    }))
}
