//! Values that fp16 can't hold, found while nothing has been measured yet.

use super::{Decision, DenseType, Error, PlannedModule, PlannedTensor};
use crate::checkpoint::{Checkpoint, TensorView};
use crate::quantize::to_half;
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
    let (at, value) = match tensor.f16s() {
        Some(halves) => {
            let at = halves.iter().position(|half| !half.is_finite())?;
            (at, halves[at].to_f32())
        }
        // What holds no floats is refused when it is stored.
        None => to_half(&tensor.floats()?).err().map(|found| (found.position, found.value))?,
    };
    let mut rest = at;
    let mut position: Vec<usize> = Vec::new();
    for &size in tensor.shape().iter().rev() {
        position.insert(0, rest % size.max(1));
        rest /= size.max(1);
    }
    Some(Error::Overflow { file: tensor.file().into(), tensor: tensor.name().into(), position, value })
}
