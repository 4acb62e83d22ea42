//! Values that fp16 can't hold, found while nothing has been measured yet.

use super::{Decision, DenseType, Error, PlannedModule, PlannedTensor};
use crate::checkpoint::{Checkpoint, TensorView};
use crate::quantize::{NotFinite, Rounding, to_half};
use rayon::prelude::*;
use safetensors::Dtype;

/// Checks those of the tensors `names` that are there: they are to be stored as fp16.
///
/// # Errors
/// [`Error::Overflow`] for the first, in their order, with a value that isn't finite as fp16.
pub(super) fn check(checkpoint: &Checkpoint, names: &[String]) -> Result<(), Error> {
    let found: Vec<Option<Error>> = names.par_iter().map(|name| overflow(checkpoint.tensor(name)?)).collect();
    found.into_iter().flatten().next().map_or(Ok(()), Err)
}

/// The tensors that a plan stores as fp16 without quantizing them.
pub(super) fn stored_as_half(tensors: &[PlannedTensor], modules: &[PlannedModule]) -> Vec<String> {
    let halves = tensors.iter().filter(|tensor| tensor.dtype == Dtype::F16).map(|t| t.source.clone());
    let dense = modules.iter().filter(|m| matches!(m.decision, Decision::Dense(DenseType::Fp16)));
    halves
        .chain(dense.flat_map(|m| ["weight", "bias"].map(|suffix| format!("{}.{suffix}", m.source))))
        .collect()
}

fn overflow(tensor: TensorView<'_>) -> Option<Error> {
    // What holds no floats is refused when it is stored.
    let NotFinite { position, value } = as_half(tensor)?.err()?;
    let (file, name, position) = (tensor.file().into(), tensor.name().into(), tensor.position(position));
    Some(Error::Overflow { file, tensor: name, position, value })
}

/// What storing a tensor as fp16 does to its values; `None` where it holds no floats.
pub(crate) fn as_half(tensor: TensorView<'_>) -> Option<Result<Rounding, NotFinite>> {
    let Some(halves) = tensor.f16s() else {
        return Some(to_half(&tensor.floats()?).map(|(_, rounding)| rounding));
    };
    Some(match halves.iter().position(|half| !half.is_finite()) {
        None => Ok(Rounding::default()),
        Some(position) => Err(NotFinite { position, value: halves[position].to_f32() }),
    })
}
