//! Looks at every value that could stop the conversion, before anything is written.

use super::Error;
use super::module::{floats, not_finite};
use crate::arch::EMBEDDING;
use crate::checkpoint::{Checkpoint, Layout, TensorView};
use crate::plan::{BiasDecision, Decision, DenseType, Plan, PlannedModule};
use crate::progress::Observer;
use crate::quantize::to_half;
use crate::warning::{Warning, WarningCode};
use half::f16;
use rayon::prelude::*;
use safetensors::Dtype;

/// Checks all tensors that are stored as fp16, and that every weight decodes to a finite fp16. Gives a
/// warning for each tensor that fp16 rounds.
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
    // A tied head is made of the embedding, which is in the list already.
    halves.dedup_by(|a, b| a == b && a == EMBEDDING);
    let views: Vec<TensorView<'_>> = halves.iter().filter_map(|name| checkpoint.tensor(name)).collect();
    let warnings: Vec<Option<Warning>> =
        views.par_iter().map(|&tensor| rounding(tensor)).collect::<Result<_, _>>()?;
    for module in plan.modules.iter().filter(|module| becomes_half(module)) {
        if observer.cancelled() {
            return Err(crate::Error::Cancelled);
        }
        check_weights(checkpoint, &module.source)?;
    }
    Ok(warnings.into_iter().flatten().collect())
}

/// Whether a module's weights or scales go through fp16.
fn becomes_half(module: &PlannedModule) -> bool {
    matches!(module.decision, Decision::Exl2(_) | Decision::Dense(DenseType::Fp16))
}

fn rounding(tensor: TensorView<'_>) -> Result<Option<Warning>, crate::Error> {
    let (_, rounding) = to_half(&floats(tensor)?).map_err(|e| not_finite(tensor, e))?;
    Ok((tensor.dtype() != Dtype::F16 && !rounding.is_exact()).then(|| Warning {
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

/// A scale that is finite can still give a weight that isn't.
fn check_weights(checkpoint: &Checkpoint, name: &str) -> Result<(), crate::Error> {
    let Some(module) = checkpoint.module(name) else { return Ok(()) };
    let Layout::Gptq(gptq) = module.layout() else { return Ok(()) };
    let tensor = format!("{name}.scales");
    let Some(scales) = checkpoint.tensor(&tensor) else { return Ok(()) };
    // No |q − z| is larger than 2^bits.
    let limit = f16::MAX.to_f32() / (1u32 << gptq.shape.bits.get()) as f32;
    if floats(scales)?.iter().all(|s| s.abs() <= limit) {
        return Ok(());
    }
    let weights = checkpoint.dequantize(module)?;
    match weights.iter().position(|w| !w.is_finite()) {
        None => Ok(()),
        Some(i) => {
            let (row, column) = (i / module.out_features(), i % module.out_features());
            let file = scales.file().into();
            Err(Error::WeightOverflow { file, tensor, row, column, value: weights[i].to_f32() }.into())
        }
    }
}
