//! Proves what a conversion did: each linear from the bytes on disk, and both models on a text.
//!
//! Takes a source, what was made of it, and a device; gives a [`Validation`]. Must not write. What is wrong
//! with the converted model is a result, not an error.

mod devices;
mod error;
mod fault;
mod forward;
mod gates;
mod layer;
mod memory;
mod options;
pub mod page;
mod pair;
mod perplexity;
pub mod report;
mod scores;
mod sensitivity;
mod states;
mod store;
pub mod summary;
mod swap;
mod text;
mod variant;
mod weights;

pub use error::{Error, LineProblem};
pub use gates::Gates;
pub use options::{DEFAULT_TOKENS, Layers, Options, SwapIn};
pub use perplexity::{Perplexity, perplexity};
pub use report::Validation;
pub use sensitivity::{DEFAULT_SENSITIVITY_TOKENS, sensitivities};
pub use text::{Text, Windows};

use crate::checkpoint::Checkpoint;
use crate::model::Model;
use crate::progress::{Event, Observer};
use devices::{Device, Shares, Spare};
use layer::Checked;
use report::{BlockScores, Conditions, ModelSide, NonFinite, Side, SwapScores, Verdict};
use requant_kernels::Operations;
use variant::Variant;

/// Tokens of a window where none is named.
pub const DEFAULT_WINDOW: usize = 512;

/// Validates `converted`, which was made of `source`, on a device; see [`validate_on`].
///
/// # Errors
/// Those of [`validate_on`].
pub fn validate<O: Operations>(
    source: &Checkpoint,
    converted: &Checkpoint,
    options: &Options,
    ops: &O,
    observer: &dyn Observer,
) -> Result<Validation, crate::Error> {
    validate_on(source, converted, options, std::slice::from_ref(ops), observer)
}

/// Validates `converted`, which was made of `source`, on any number of devices: the models as wholes on the first,
/// single layers on all. Equal devices give the same figures as one of them.
///
/// What doesn't fit into a device's memory is loaded block by block and kept in the host's; where it runs out
/// nevertheless, pieces get smaller, and at last the CPU takes over: a warning of the [`Validation`] says so.
///
/// # Errors
/// No device, a text or a report that can't be used, models that don't belong together, weights that don't decode, a
/// device that fails; [`crate::Error::Cancelled`]. Faults of the converted model are in the [`Verdict`].
pub fn validate_on<O: Operations>(
    source: &Checkpoint,
    converted: &Checkpoint,
    options: &Options,
    devices: &[O],
    observer: &dyn Observer,
) -> Result<Validation, crate::Error> {
    if devices.is_empty() {
        return Err(Error::NoDevices.into());
    }
    source.require_decodable()?;
    converted.require_decodable()?;
    let pairs = pair::pairs(source, converted)?;
    let models = Model::new(source).and_then(|source| Ok((source, Model::new(converted)?)));
    // What can be refused is refused before anything long begins.
    let windows = match &models {
        Ok(_) => Some(Windows::new(&options.text, source, options.tokens, options.window, options.bos)?),
        Err(_) => None,
    };
    let checked = layer::check(source, converted, &pairs, observer)?;
    let mut validation = begin(source, converted, windows.as_ref(), devices::in_words(devices), &checked);
    match (&models, &windows) {
        (Ok((a, b)), Some(windows)) => {
            let models = forward::Models {
                source: a,
                converted: b,
                converted_files: converted,
                pairs: &pairs,
                checked: &checked,
            };
            compare(devices, &models, windows, options, &mut validation, observer)?;
        }
        (Err(why), _) => validation.not_run.push(format!("Perplexity, KL and the outputs of layers: {why}.")),
        _ => {}
    }
    let exact = checked.iter().all(|checked| checked.exact) && rest_is_same(source, converted);
    finish(&mut validation, options, exact);
    Ok(validation)
}

/// Checks what can be known of a validation before there is anything to validate: the text, the tokens, the
/// window.
///
/// # Errors
/// Those of [`Windows::new`].
pub fn check_options(source: &Checkpoint, options: &Options) -> Result<(), crate::Error> {
    if Model::new(source).is_ok() {
        Windows::new(&options.text, source, options.tokens, options.window, options.bos)?;
    }
    Ok(())
}

fn begin(
    source: &Checkpoint,
    converted: &Checkpoint,
    windows: Option<&Windows>,
    device: String,
    checked: &[Checked],
) -> Validation {
    let warnings = source.warnings().iter().chain(converted.warnings()).cloned().collect();
    Validation {
        schema: report::SCHEMA,
        tool: crate::output::TOOL.into(),
        source: side(source),
        converted: side(converted),
        conditions: Conditions {
            text: windows.map_or(String::new(), |w| w.name.clone()),
            token_ids_sha256: windows.map_or(String::new(), Windows::sha256),
            tokens: windows.map_or(0, |w| w.tokens.len()),
            window: windows.map_or(0, |w| w.window),
            bos: windows.is_some_and(|w| w.bos),
            layer_tokens: 0,
            layer_perplexity: None,
            device,
        },
        verdict: Verdict::Passed,
        non_finite: None,
        model: None,
        layers: checked.iter().map(|checked| checked.scores.clone()).collect(),
        cumulative: Vec::new(),
        gates: Vec::new(),
        not_run: Vec::new(),
        warnings,
    }
}

/// The whole models, then one layer at a time.
fn compare<O: Operations>(
    devices: &[O],
    models: &forward::Models<'_>,
    windows: &Windows,
    options: &Options,
    validation: &mut Validation,
    observer: &dyn Observer,
) -> Result<(), crate::Error> {
    // The host's memory is shared, and a device's own is not.
    let memory = options.memory / devices.len() as u64;
    let spare = Spare::new();
    let device = |ops| Device::new(ops, &spare, models, windows, memory);
    let mut devices: Vec<Device<'_, O>> = devices.iter().map(device).collect::<Result<_, _>>()?;
    let (count, tokens) = match &options.swap_in {
        // How many there will be doesn't depend on the errors.
        Some(SwapIn { layers, tokens }) => {
            let errors = vec![0.0; models.pairs.len()];
            (variant::variants(models, layers, &errors)?.len(), windows.first(*tokens))
        }
        None => (0, &windows.tokens[..0]),
    };
    for device in &devices {
        device.state_memory(count.div_ceil(devices.len()), tokens.len(), observer);
    }
    let measured = measure(&mut devices, models, windows, options, validation, observer);
    validation.warnings.extend(devices.into_iter().flat_map(|device| device.warnings));
    measured
}

fn measure<O: Operations>(
    devices: &mut [Device<'_, O>],
    models: &forward::Models<'_>,
    windows: &Windows,
    options: &Options,
    validation: &mut Validation,
    observer: &dyn Observer,
) -> Result<(), crate::Error> {
    let Some(first) = devices.first_mut() else { return Err(Error::NoDevices.into()) };
    let found = first.forward(observer)?;
    for (&pair, &output) in &found.outputs {
        validation.layers[pair].output = Some(output);
    }
    if found.non_finite.is_some() {
        validation.non_finite = found.non_finite;
        validation.not_run.push("Perplexity and KL: a hidden state is not finite.".into());
        return Ok(());
    }
    validation.model = Some(found.tally.model());
    let Some(swap_in) = &options.swap_in else {
        validation.not_run.push("Perplexity of each layer alone: it was not asked for.".into());
        return Ok(());
    };
    let errors: Vec<f64> = validation
        .layers
        .iter()
        .map(|layer| layer.output.map_or(layer.weight_error, |o| o.relative_error))
        .collect();
    let variants = variant::variants(models, &swap_in.layers, &errors)?;
    let tokens = windows.first(swap_in.tokens);
    validation.conditions.layer_tokens = tokens.len();
    let shares = Shares::new(devices, variants.len(), windows, tokens.len());
    let mut scores = Vec::new();
    if !variants.is_empty() {
        let time = shares.estimate(&variants, models.source.layers(), &found);
        observer.event(&Event::Estimate { stage: "swap-in", time });
        scores = devices::swap_in(devices, windows, tokens, &variants, &shares, observer)?;
    }
    let perplexity = found.tally.source_perplexity(tokens.len().div_ceil(windows.window));
    validation.conditions.layer_perplexity = Some(perplexity);
    enter(validation, models, &variants, perplexity, &scores, &swap_in.layers);
    Ok(())
}

/// Puts the scores of variants where they belong.
fn enter(
    validation: &mut Validation,
    models: &forward::Models<'_>,
    variants: &[Variant],
    source_perplexity: f64,
    scores: &[SwapScores],
    layers: &Layers,
) {
    for (variant, &scores) in variants.iter().zip(scores) {
        if !(scores.perplexity.is_finite() && scores.kl.is_finite()) {
            let (layer, pair) = match variant {
                Variant::Linear { layer, pairs } => (Some(*layer), pairs.first()),
                Variant::Blocks { layer } => (Some(*layer), None),
                Variant::Head { pair } => (None, Some(pair)),
            };
            let module = pair.map(|&pair| models.pairs[pair].source.clone());
            validation.non_finite = Some(NonFinite { model: ModelSide::Variant, layer, module, token: 0 });
        }
        match variant {
            Variant::Linear { pairs, .. } => {
                pairs.iter().for_each(|&pair| validation.layers[pair].swap_in = Some(scores));
            }
            Variant::Head { pair } => validation.layers[*pair].swap_in = Some(scores),
            Variant::Blocks { layer } => {
                let SwapScores { perplexity, kl } = scores;
                validation.cumulative.push(BlockScores { layer: *layer, perplexity, kl });
            }
        }
    }
    if *layers != Layers::All {
        return;
    }
    // An exact linear changes nothing.
    for (layer, checked) in validation.layers.iter_mut().zip(models.checked) {
        if checked.exact && layer.swap_in.is_none() {
            layer.swap_in = Some(SwapScores { perplexity: source_perplexity, kl: 0.0 });
        }
    }
    let mut before = SwapScores { perplexity: source_perplexity, kl: 0.0 };
    let measured = std::mem::take(&mut validation.cumulative);
    for layer in 0..models.source.layers() {
        let found = measured.iter().find(|block| block.layer == layer);
        before = found.map_or(before, |block| SwapScores { perplexity: block.perplexity, kl: block.kl });
        let SwapScores { perplexity, kl } = before;
        validation.cumulative.push(BlockScores { layer, perplexity, kl });
    }
}

fn finish(validation: &mut Validation, options: &Options, exact: bool) {
    validation.gates = match validation.non_finite {
        None => options.gates.outcome(validation.model.as_ref()),
        Some(_) => options.gates.outcome(None),
    };
    let broken = validation.layers.iter().any(|layer| layer.fault.is_some());
    let missed = validation.gates.iter().any(|gate| !gate.met);
    validation.verdict = match () {
        () if broken => Verdict::Broken,
        () if validation.non_finite.is_some() => Verdict::NonFinite,
        () if missed => Verdict::GateMissed,
        () if exact => Verdict::Exact,
        () => Verdict::Passed,
    };
}

fn side(checkpoint: &Checkpoint) -> Side {
    let quantized = || {
        checkpoint
            .modules()
            .iter()
            .filter(|m| m.layout().is_quantized() && m.name() != checkpoint.naming().head)
    };
    let bits: u64 = quantized().map(|module| layer::stored_bits(checkpoint, module)).sum();
    let weights: u64 = quantized().map(|module| module.weights()).sum();
    let of_modules = checkpoint.modules().iter().map(|m| layer::stored_bits(checkpoint, m) / 8);
    let others = checkpoint.other_tensors().map(|tensor| tensor.byte_len() as u64);
    Side {
        name: checkpoint.dir().file_name().map_or(String::new(), |name| name.to_string_lossy().into_owned()),
        fingerprint: checkpoint.fingerprint(),
        architecture: checkpoint.architecture().map(|architecture| architecture.name.into()),
        bpw: if weights == 0 { 0.0 } else { bits as f64 / weights as f64 },
        bytes: of_modules.chain(others).sum(),
    }
}

/// Whether embedding, norms and routers hold the same numbers. A head that only one of the two stores is among
/// the pairs.
fn rest_is_same(source: &Checkpoint, converted: &Checkpoint) -> bool {
    let names = |checkpoint: &Checkpoint| -> Vec<String> {
        match (checkpoint.architecture(), checkpoint.dims()) {
            (Some(architecture), Some(dims)) => {
                let tensors = architecture.dense_tensors(dims, checkpoint.naming());
                tensors.into_iter().map(|tensor| tensor.name).collect()
            }
            _ => checkpoint.other_tensors().map(|tensor| tensor.name().into()).collect(),
        }
    };
    let (ours, theirs) = (names(source), names(converted));
    ours.len() == theirs.len()
        && ours.iter().zip(&theirs).all(|(ours, theirs)| {
            match (source.tensor(ours), converted.tensor(theirs)) {
                (Some(a), Some(b)) => a.bytes() == b.bytes() || a.floats() == b.floats(),
                (None, None) => true,
                _ => false,
            }
        })
}
