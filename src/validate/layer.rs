//! The layer check: each converted linear as unpacked from the bytes on disk, against the source's.

use super::fault::{self, Unpacked, Wanted, relative_error};
use super::pair::{Pair, source_values};
use super::report::LayerScores;
use crate::arch::Role;
use crate::checkpoint::{Checkpoint, Layout, Module};
use crate::convert::report::describe;
use crate::progress::{Event, Observer};
use rayon::prelude::*;
use requant_formats::Permutation;

/// Modules that are decoded at a time, so that memory stays bounded by a few of them.
const AT_A_TIME: usize = 4;

/// What the bytes of a pair say.
#[derive(Debug)]
pub(super) struct Checked {
    /// The scores, without those that need activations.
    pub(super) scores: LayerScores,
    /// Whether every value as decoded, and the bias, is the source's.
    pub(super) exact: bool,
}

/// Compares the weights of all pairs, in their order.
///
/// # Errors
/// A module that doesn't decode; [`crate::Error::Cancelled`].
pub(super) fn check(
    source: &Checkpoint,
    converted: &Checkpoint,
    pairs: &[Pair],
    observer: &dyn Observer,
) -> Result<Vec<Checked>, crate::Error> {
    let weights = pairs.iter().map(weights_of).sum();
    observer.event(&Event::Stage { name: "weights", modules: pairs.len(), weights });
    let mut all = Vec::with_capacity(pairs.len());
    for some in pairs.chunks(AT_A_TIME) {
        if observer.cancelled() {
            return Err(crate::Error::Cancelled);
        }
        let checked: Vec<Result<Checked, crate::Error>> = some
            .par_iter()
            .map(|pair| {
                let checked = check_pair(source, converted, pair)?;
                observer.event(&Event::Module { name: &pair.source, weights: weights_of(pair) });
                Ok(checked)
            })
            .collect();
        for checked in checked {
            all.push(checked?);
        }
    }
    Ok(all)
}

fn weights_of(pair: &Pair) -> u64 {
    pair.in_features as u64 * pair.out_features as u64
}

/// The name of a linear's role, as reports have it.
pub(super) fn role_name(role: Option<Role>) -> &'static str {
    match role {
        None => "other",
        Some(Role::Q) => "q",
        Some(Role::K) => "k",
        Some(Role::V) => "v",
        Some(Role::O) => "o",
        Some(Role::Gate) => "gate",
        Some(Role::Up) => "up",
        Some(Role::Down) => "down",
    }
}

fn check_pair(source: &Checkpoint, converted: &Checkpoint, pair: &Pair) -> Result<Checked, crate::Error> {
    // Pairs name modules that exist.
    let Some(module) = pair.converted_module(converted) else {
        return Err(super::Error::NothingInCommon.into());
    };
    let wanted = source_values(source, pair)?;
    let found = pair.to_source_order(converted.loaded(module)?);
    let weight_error = relative_error(&found, &wanted);
    let fault = match pair.promise {
        Some(promise) if !promise.is_met(weight_error) => {
            let unpacked = unpack(converted, module)?;
            let grouped_rows = grouped_rows(source, pair)?;
            let wanted = Wanted { weights: &wanted, grouped_rows, promise };
            Some(fault::name(pair, &unpacked, &wanted, weight_error))
        }
        _ => None,
    };
    let bias_is_same =
        bias_of(source, pair.source_module(source), None)? == bias_of(converted, Some(module), Some(pair))?;
    let before = pair.source_module(source).map(Module::layout);
    let scores = LayerScores {
        source: pair.source.clone(),
        converted: pair.converted.clone(),
        layer: pair.linear.as_ref().map(|linear| linear.layer),
        role: match pair.is_head() {
            true => "head".into(),
            false => role_name(pair.linear.as_ref().map(|linear| linear.role)).into(),
        },
        expert: pair.linear.as_ref().and_then(|linear| linear.expert),
        in_features: pair.in_features,
        out_features: pair.out_features,
        layout_before: before.map_or_else(|| "dense (tied embedding)".into(), describe),
        layout_after: describe(module.layout()),
        format: module.layout().name().into(),
        bpw: stored_bits(converted, module) as f64 / weights_of(pair).max(1) as f64,
        weight_error,
        promised_error: pair.promise.map(|promise| promise.error()),
        output: None,
        fault,
        swap_in: None,
    };
    Ok(Checked { exact: weight_error == 0.0 && bias_is_same, scores })
}

/// A bias in the source's order; zeros are as good as none.
fn bias_of(
    checkpoint: &Checkpoint,
    module: Option<&Module>,
    pair: Option<&Pair>,
) -> Result<Option<Vec<f32>>, crate::Error> {
    let Some(bias) = module.map(|module| checkpoint.bias(module)).transpose()?.flatten() else {
        return Ok(None);
    };
    let bias = match pair.and_then(|pair| pair.columns.as_ref()) {
        Some(columns) => super::pair::reorder(bias.clone(), bias.len(), None, Some(columns)),
        None => bias,
    };
    Ok(bias.iter().any(|&b| b != 0.0).then_some(bias))
}

fn unpack(converted: &Checkpoint, module: &Module) -> Result<Unpacked, crate::Error> {
    Ok(match module.layout() {
        Layout::Exl2(_) => Unpacked::Exl2(converted.exl2(module)?, converted.prescale(module)),
        Layout::Gptq(_) => Unpacked::Gptq(converted.gptq(module)?),
        Layout::Dense { .. } => Unpacked::Dense,
    })
}

/// The source's rows in the order of its groups, where that isn't the order in which they stand.
fn grouped_rows(source: &Checkpoint, pair: &Pair) -> Result<Option<Permutation>, crate::Error> {
    let Some(module) = pair.source_module(source) else { return Ok(None) };
    let rows = match module.layout() {
        Layout::Gptq(_) => source.gptq_g_idx(module)?.sorted_rows(),
        Layout::Exl2(_) => source.exl2(module)?.invperm().inverse(),
        Layout::Dense { .. } => return Ok(None),
    };
    Ok(Some(rows).filter(|rows| !rows.is_identity()))
}

/// Bits of a module's tensors, the bias included.
pub(super) fn stored_bits(checkpoint: &Checkpoint, module: &Module) -> u64 {
    module
        .tensor_names()
        .filter_map(|name| checkpoint.tensor(&name))
        .map(|t| t.bytes().len() as u64 * 8)
        .sum()
}
