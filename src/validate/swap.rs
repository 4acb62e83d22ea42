//! The source with one linear converted, and with all blocks up to one converted.
//!
//! All variants pass through the model together: each block is loaded once a pass, and only what comes after
//! the converted linear is computed. Their hidden states share a budget of memory; where it doesn't hold all
//! windows, or not even one window of all variants, several passes are made.

use super::forward::{Logits, Models, cancel, chunks, embed_tokens, id_of};
use super::options::Layers;
use super::report::SwapScores;
use super::scores::Tally;
use super::text::Windows;
use crate::arch::Role;
use crate::model::{Block, Linear, LinearId, Model};
use crate::progress::{Event, Observer};
use fancy_regex::Regex;
use requant_kernels::Operations;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// A model that is the source but for a part.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Variant {
    /// These pairs of one block are converted: a linear, or one projection of all experts.
    Linear { layer: usize, pairs: Vec<usize> },
    /// The head is.
    Head { pair: usize },
    /// All blocks up to this one are.
    Blocks { layer: usize },
}

impl Variant {
    /// The first block after which it isn't the source any more.
    fn layer(&self) -> Option<usize> {
        match self {
            Self::Linear { layer, .. } | Self::Blocks { layer } => Some(*layer),
            Self::Head { .. } => None,
        }
    }
}

/// The variants that a choice of layers asks for; those that are the source to the bit are left out, as their
/// divergence is known to be 0.
///
/// # Errors
/// A pattern that is none, or that no name matches.
pub(super) fn variants(
    models: &Models<'_>,
    layers: &Layers,
    errors: &[f64],
) -> Result<Vec<Variant>, super::Error> {
    let mut units: BTreeMap<(usize, Role), Vec<usize>> = BTreeMap::new();
    for (i, pair) in models.pairs.iter().enumerate() {
        if let Some((layer, id)) = id_of(pair) {
            units.entry((layer, id.role)).or_default().push(i);
        }
    }
    let mut all: Vec<Variant> = (units.into_iter())
        .map(|((layer, _), pairs)| Variant::Linear { layer, pairs })
        .chain(models.pairs.iter().position(super::pair::Pair::is_head).map(|pair| Variant::Head { pair }))
        .collect();
    let members = |variant: &Variant| match variant {
        Variant::Linear { pairs, .. } => pairs.clone(),
        Variant::Head { pair } => vec![*pair],
        Variant::Blocks { .. } => Vec::new(),
    };
    let converted = |variant: &Variant| members(variant).iter().any(|&pair| !models.checked[pair].exact);
    match layers {
        Layers::All => {
            all.retain(converted);
            let changed: Vec<usize> = all.iter().filter_map(Variant::layer).collect();
            all.extend(
                (0..models.source.layers())
                    .filter(|l| changed.contains(l))
                    .map(|layer| Variant::Blocks { layer }),
            );
        }
        Layers::Worst(count) => {
            all.retain(converted);
            let error =
                |variant: &Variant| members(variant).iter().map(|&pair| errors[pair]).fold(0.0, f64::max);
            all.sort_by(|a, b| error(b).total_cmp(&error(a)));
            all.truncate(*count);
        }
        Layers::Matching(pattern) => {
            let failed = |e: fancy_regex::Error| super::Error::Pattern {
                pattern: pattern.clone(),
                message: e.to_string(),
            };
            let regex = Regex::new(pattern).map_err(failed)?;
            let mut kept = Vec::new();
            for variant in all {
                let mut matches = false;
                for pair in members(&variant) {
                    matches |= regex.is_match(&models.pairs[pair].source).map_err(failed)?;
                }
                if matches {
                    kept.push(variant);
                }
            }
            if kept.is_empty() {
                return Err(super::Error::NoLayers { pattern: pattern.clone() });
            }
            kept.retain(converted);
            all = kept;
        }
    }
    Ok(all)
}

/// How the work is cut up.
pub(super) struct Schedule {
    /// Windows a pass.
    windows: usize,
    /// Variants a pass.
    variants: usize,
}

impl Schedule {
    /// The fewest passes whose hidden states fit in `memory` bytes.
    pub(super) fn new(variants: usize, windows: usize, bytes_of_window: u64, memory: u64) -> Self {
        let fit = (memory / bytes_of_window.max(1)).max(1) as usize;
        // The source's and the converted model's own states are there, too.
        let variants = variants.max(1);
        match fit / (variants + 2) {
            0 => Self { windows: 1, variants: fit.saturating_sub(2).clamp(1, variants) },
            together => Self { windows: together.min(windows), variants },
        }
    }

    /// Passes over the model.
    pub(super) fn passes(&self, variants: usize, windows: usize) -> usize {
        windows.div_ceil(self.windows.max(1)) * variants.div_ceil(self.variants.max(1))
    }
}

/// Blocks that a run of the variants computes, counted in blocks of the whole text.
fn block_count(variants: &[Variant], layers: usize, groups: usize) -> usize {
    let blocks: usize = (variants.iter())
        .map(|variant| match variant {
            Variant::Linear { layer, .. } => layers - layer,
            Variant::Head { .. } => 0,
            Variant::Blocks { layer } => layers - layer - 1,
        })
        .sum();
    let converted = variants.iter().any(|variant| matches!(variant, Variant::Blocks { .. }));
    blocks + groups * layers * (1 + usize::from(converted))
}

/// How long it will take, by what a token took before.
pub(super) fn estimate(
    variants: &[Variant],
    schedule: &Schedule,
    layers: usize,
    tokens: usize,
    block_time: Duration,
    head_time: Duration,
) -> Duration {
    let groups = variants.len().div_ceil(schedule.variants);
    let blocks = block_time.as_secs_f64() * block_count(variants, layers, groups) as f64;
    let heads = head_time.as_secs_f64() * (variants.len() + groups) as f64;
    Duration::from_secs_f64((blocks + heads) * tokens as f64)
}

/// Each variant's scores, in their order.
///
/// # Errors
/// Those of reading weights and of the device; [`crate::Error::Cancelled`].
pub(super) fn run<O: Operations>(
    ops: &O,
    models: &Models<'_>,
    windows: &Windows,
    tokens: &[u32],
    variants: &[Variant],
    schedule: &Schedule,
    observer: &dyn Observer,
) -> Result<Vec<SwapScores>, crate::Error> {
    if variants.is_empty() {
        return Ok(Vec::new());
    }
    let mut tallies = vec![Tally::default(); variants.len()];
    let count = tokens.len().div_ceil(windows.window);
    let passes = schedule.passes(variants.len(), count);
    let layers = models.source.layers();
    observer.event(&Event::Stage { name: "swap-in", modules: passes * (layers + 1), weights: 0 });
    let indices: Vec<usize> = (0..variants.len()).collect();
    let mut first = 0;
    for part in tokens.chunks(schedule.windows * windows.window) {
        for group in indices.chunks(schedule.variants) {
            let pass = Pass { ops, models, windows, part, first, variants, group };
            pass.run(&mut tallies, observer)?;
        }
        first += part.len();
    }
    Ok(tallies.iter().map(Tally::variant).collect())
}

/// Some variants over some windows.
struct Pass<'a, O: Operations> {
    ops: &'a O,
    models: &'a Models<'a>,
    windows: &'a Windows,
    part: &'a [u32],
    /// The place of its first token in the text.
    first: usize,
    variants: &'a [Variant],
    /// Which of the variants.
    group: &'a [usize],
}

/// Hidden states, a chunk of windows each.
type States<O> = Vec<<O as Operations>::Tensor>;

/// A linear and its place in a block.
type Placed<O> = (LinearId, Arc<Linear<O>>);

impl<O: Operations> Pass<'_, O> {
    fn run(&self, tallies: &mut [Tally], observer: &dyn Observer) -> Result<(), crate::Error> {
        let (ops, window) = (self.ops, self.windows.window);
        let embed = |model: &Model<'_>| embed_tokens(ops, model, self.part, window);
        let mut source = embed(self.models.source)?;
        let cumulative = self.group.iter().any(|&v| matches!(self.variants[v], Variant::Blocks { .. }));
        let mut converted = if cumulative { embed(self.models.converted)? } else { Vec::new() };
        let mut live: BTreeMap<usize, States<O>> = BTreeMap::new();
        for layer in 0..self.models.source.layers() {
            cancel(observer)?;
            let block = self.models.source.block(ops, layer)?;
            for states in live.values_mut() {
                self.forward(&block, states, observer)?;
            }
            let born: Vec<usize> =
                self.group.iter().copied().filter(|&v| self.variants[v].layer() == Some(layer)).collect();
            if cumulative || !born.is_empty() {
                let other = self.models.converted.block(ops, layer)?;
                for &variant in &born {
                    if let Variant::Linear { pairs, .. } = &self.variants[variant] {
                        let swapped = block.with(&self.linears(&other, pairs)?);
                        let mut states = self.copy(&source)?;
                        self.forward(&swapped, &mut states, observer)?;
                        live.insert(variant, states);
                    }
                }
                if cumulative {
                    self.forward(&other, &mut converted, observer)?;
                }
                for &variant in &born {
                    if let Variant::Blocks { .. } = &self.variants[variant] {
                        live.insert(variant, self.copy(&converted)?);
                    }
                }
            }
            self.forward(&block, &mut source, observer)?;
            observer.event(&Event::Module { name: &format!("block {layer}"), weights: 0 });
        }
        self.score(&source, &live, tallies, observer)?;
        observer.event(&Event::Module { name: crate::arch::HEAD, weights: 0 });
        Ok(())
    }

    fn linears(&self, other: &Block<O>, pairs: &[usize]) -> Result<Vec<Placed<O>>, crate::Error> {
        let mut linears = Vec::with_capacity(pairs.len());
        for &pair in pairs {
            let linear = self.models.linear(self.ops, other, pair)?;
            if let (Some((_, id)), Some(linear)) = (id_of(&self.models.pairs[pair]), linear) {
                linears.push((id, linear));
            }
        }
        Ok(linears)
    }

    fn copy(&self, states: &[O::Tensor]) -> Result<States<O>, crate::Error> {
        states.iter().map(|state| Ok(self.ops.copy(state)?)).collect()
    }

    fn forward(
        &self,
        block: &Block<O>,
        states: &mut [O::Tensor],
        observer: &dyn Observer,
    ) -> Result<(), crate::Error> {
        for state in states {
            cancel(observer)?;
            *state = block.forward(self.ops, state, self.windows.window, &mut |_, _, _| Ok(()))?;
        }
        Ok(())
    }

    /// Compares all variants with the source, whose logits are made once.
    fn score(
        &self,
        source: &[O::Tensor],
        live: &BTreeMap<usize, States<O>>,
        tallies: &mut [Tally],
        observer: &dyn Observer,
    ) -> Result<(), crate::Error> {
        let ops = self.ops;
        let head = self.models.source.head(ops)?;
        let is_head = |&&v: &&usize| matches!(self.variants[v], Variant::Head { .. });
        let of_head = self.group.iter().find(is_head).copied();
        let other = of_head.map(|_| self.models.converted.head(ops)).transpose()?;
        let mut first = self.first;
        for (chunk, _) in chunks(self.part, self.windows.window).enumerate() {
            let part = Logits { vocabulary: self.models.source.vocabulary(), windows: self.windows, first };
            let count = ops.shape(&source[chunk]).0;
            for rows in part.parts(count) {
                cancel(observer)?;
                let states = ops.select_rows(&source[chunk], &rows)?;
                let logits = head.logits(ops, &states)?;
                if let (Some(variant), Some(other)) = (of_head, &other) {
                    let others = other.logits(ops, &states)?;
                    part.score(ops, &logits, &others, &rows, &mut tallies[variant])?;
                }
                for (&variant, states) in live {
                    let others = head.logits(ops, &ops.select_rows(&states[chunk], &rows)?)?;
                    part.score(ops, &logits, &others, &rows, &mut tallies[variant])?;
                }
            }
            first += count;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_cut_into_windows_first_and_variants_last() {
        let schedule = |memory| {
            let schedule = Schedule::new(10, 4, 100, memory);
            (schedule.windows, schedule.variants, schedule.passes(10, 4))
        };
        assert_eq!(schedule(12 * 400), (4, 10, 1));
        assert_eq!(schedule(12 * 400 - 1), (3, 10, 2));
        assert_eq!(schedule(12 * 100), (1, 10, 4));
        assert_eq!(schedule(12 * 100 - 1), (1, 9, 8));
        assert_eq!(schedule(0), (1, 1, 40));
    }

    #[test]
    fn a_variant_costs_the_blocks_from_its_own_on() {
        let linear = |layer| Variant::Linear { layer, pairs: vec![layer] };
        assert_eq!(block_count(&[linear(0), linear(3)], 4, 1), 4 + 1 + 4);
        assert_eq!(block_count(&[Variant::Head { pair: 0 }], 4, 1), 4);
        let blocks = [Variant::Blocks { layer: 0 }, Variant::Blocks { layer: 3 }];
        assert_eq!(block_count(&blocks, 4, 1), 3 + 8);
    }
}
