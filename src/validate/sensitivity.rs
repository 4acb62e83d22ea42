//! How much the error of a linear's outputs matters to the model.

use super::{Layers, Options, SwapIn, Text, validate};
use crate::checkpoint::{Checkpoint, OpenOptions};
use crate::convert::{ConvertOptions, convert};
use crate::plan::{Plan, PlanOptions, Target};
use crate::progress::Observer;
use requant_formats::exl2::Bits;
use requant_kernels::Operations;
use std::collections::BTreeMap;
use std::path::Path;

/// The width of the conversion that sensitivities are measured with: its errors are as large as those that a budget
/// leaves to choose between, and one linear's is still a small one.
const BITS: Bits = Bits::ALL[1];

/// Tokens that the change of the model is measured on where no number is given.
pub const DEFAULT_SENSITIVITY_TOKENS: usize = 1024;

/// For each linear, by its name in an EXL2 output, the KL divergence of the model in nats a token over the relative
/// squared error of the linear's outputs: of a conversion to one width, which is written to `dir` and removed again,
/// each linear alone is put into the source. All experts of a projection have one figure.
///
/// # Errors
/// Those of converting and validating.
pub fn sensitivities<O: Operations>(
    source: &Checkpoint,
    dir: &Path,
    (text, tokens): (&Text, usize),
    ops: &O,
    observer: &dyn Observer,
) -> Result<BTreeMap<String, f64>, crate::Error> {
    let measured = measure(source, dir, (text, tokens), ops, observer);
    // What can't be removed is in the way of nothing but the next measurement, which says so.
    let _ = std::fs::remove_dir_all(dir);
    measured
}

fn measure<O: Operations>(
    source: &Checkpoint,
    dir: &Path,
    (text, tokens): (&Text, usize),
    ops: &O,
    observer: &dyn Observer,
) -> Result<BTreeMap<String, f64>, crate::Error> {
    let target = Target::Uniform { bits: BITS, group_size: 64 };
    let plan = Plan::new(source, &PlanOptions::new(target), observer)?;
    convert(source, &plan, dir, &ConvertOptions::default(), observer)?;
    let converted = Checkpoint::open(dir, &OpenOptions::default())?;
    let swap_in = SwapIn { layers: Layers::Matching(".".into()), tokens };
    let options = Options { text: text.clone(), tokens, swap_in: Some(swap_in), ..Options::default() };
    let validation = validate(source, &converted, &options, ops, observer)?;
    // The experts of a projection are put in together: each has its share of the divergence.
    let mut units: BTreeMap<(usize, &str), f64> = BTreeMap::new();
    for layer in &validation.layers {
        if let (Some(block), Some(output)) = (layer.layer, &layer.output) {
            *units.entry((block, &layer.role)).or_default() += output.relative_error * output.relative_error;
        }
    }
    let mut sensitivities = BTreeMap::new();
    for layer in &validation.layers {
        let unit = layer.layer.and_then(|block| units.get(&(block, layer.role.as_str())));
        if let (Some(&errors), Some(swapped)) = (unit, &layer.swap_in)
            && errors > 0.0
        {
            sensitivities.insert(layer.converted.clone(), swapped.kl.max(0.0) / errors);
        }
    }
    Ok(sensitivities)
}
