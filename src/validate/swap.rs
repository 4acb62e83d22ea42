//! The source with one linear converted, and with all blocks up to one converted.
//!
//! All variants pass through the model together: each block is loaded once a pass, and only what comes after
//! the converted linear is computed. Their hidden states share a budget of memory; where it doesn't hold all
//! windows, or not even one window of all variants, several passes are made.

use super::forward::{Logits, Worker, cancel, chunks, id_of};
use super::scores::Tally;
use super::states::{Shelf, State};
use super::store::Which;
use super::text::Windows;
use super::variant::Variant;
use crate::model::{Block, Linear, LinearId};
use crate::progress::{Event, Observer};
use requant_kernels::Operations;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

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

    /// How long it will take, by what a token took before.
    pub(super) fn estimate(
        &self,
        variants: &[Variant],
        layers: usize,
        tokens: usize,
        block_time: Duration,
        head_time: Duration,
    ) -> Duration {
        let groups = variants.len().div_ceil(self.variants.max(1));
        let blocks = block_time.as_secs_f64() * block_count(variants, layers, groups) as f64;
        let heads = head_time.as_secs_f64() * (variants.len() + groups) as f64;
        Duration::from_secs_f64((blocks + heads) * tokens as f64)
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

/// Some variants over some windows.
pub(super) struct Pass<'a> {
    pub(super) windows: &'a Windows,
    pub(super) part: &'a [u32],
    /// The place of its first token in the text.
    pub(super) first: usize,
    pub(super) variants: &'a [Variant],
    /// Which of the variants.
    pub(super) group: &'a [usize],
}

impl<'a> Pass<'a> {
    /// All passes of some of the variants.
    pub(super) fn all(
        windows: &'a Windows,
        tokens: &'a [u32],
        variants: &'a [Variant],
        share: &'a [usize],
        schedule: &Schedule,
    ) -> Vec<Self> {
        let mut passes = Vec::new();
        let mut first = 0;
        for part in tokens.chunks(schedule.windows * windows.window) {
            let groups = share.chunks(schedule.variants.max(1));
            passes.extend(groups.map(|group| Self { windows, part, first, variants, group }));
            first += part.len();
        }
        passes
    }
}

/// Hidden states, a chunk of windows each.
type States<O> = Vec<State<O>>;

/// A linear and its place in a block.
type Placed<O> = (LinearId, Arc<Linear<O>>);

impl<O: Operations> Worker<'_, O> {
    /// What a pass says of each of its variants.
    ///
    /// # Errors
    /// Those of reading weights and of the device; [`crate::Error::Cancelled`].
    pub(super) fn pass(
        &mut self,
        pass: &Pass<'_>,
        observer: &dyn Observer,
    ) -> Result<BTreeMap<usize, Tally>, crate::Error> {
        let (ops, models, window) = (self.ops, self.models, pass.windows.window);
        let shelf = Shelf::new(ops, self.room.on_device());
        let through = |block: &Block<O>, states: &mut States<O>| {
            states.iter_mut().try_for_each(|state| {
                cancel(observer)?;
                let work = |hidden: &O::Tensor| block.forward(ops, hidden, window, &mut |_, _, _| Ok(()));
                Ok::<(), crate::Error>(shelf.replace(state, work)?)
            })
        };
        let copy = |states: &States<O>| -> Result<States<O>, crate::Error> {
            states.iter().map(|state| Ok(shelf.copy(state)?)).collect()
        };
        let mut source = self.embed(Which::Source, &shelf, pass.part, window)?;
        let cumulative = pass.group.iter().any(|&v| matches!(pass.variants[v], Variant::Blocks { .. }));
        let mut converted = match cumulative {
            true => self.embed(Which::Converted, &shelf, pass.part, window)?,
            false => Vec::new(),
        };
        let mut live: BTreeMap<usize, States<O>> = BTreeMap::new();
        for layer in 0..models.source.layers() {
            cancel(observer)?;
            let block = self.store.block(Which::Source, layer)?;
            live.values_mut().try_for_each(|states| through(&block, states))?;
            let born: Vec<usize> =
                pass.group.iter().copied().filter(|&v| pass.variants[v].layer() == Some(layer)).collect();
            if cumulative || !born.is_empty() {
                let other = self.store.block(Which::Converted, layer)?;
                for &variant in &born {
                    if let Variant::Linear { pairs, .. } = &pass.variants[variant] {
                        let swapped = block.with(&self.linears(&other, pairs)?);
                        let mut states = copy(&source)?;
                        through(&swapped, &mut states)?;
                        live.insert(variant, states);
                    }
                }
                if cumulative {
                    through(&other, &mut converted)?;
                }
                for &variant in &born {
                    if let Variant::Blocks { .. } = &pass.variants[variant] {
                        live.insert(variant, copy(&converted)?);
                    }
                }
            }
            through(&block, &mut source)?;
            observer.event(&Event::Module { name: &format!("block {layer}"), weights: 0 });
        }
        let tallies = self.score(pass, &shelf, &source, &live, observer)?;
        observer.event(&Event::Module { name: crate::arch::HEAD, weights: 0 });
        Ok(tallies)
    }

    fn linears(&mut self, other: &Block<O>, pairs: &[usize]) -> Result<Vec<Placed<O>>, crate::Error> {
        let mut linears = Vec::with_capacity(pairs.len());
        for &pair in pairs {
            let linear = self.store.linear(other, pair)?;
            if let (Some((_, id)), Some(linear)) = (id_of(&self.models.pairs[pair]), linear) {
                linears.push((id, linear));
            }
        }
        Ok(linears)
    }

    /// Compares all variants with the source, whose logits are made once.
    fn score(
        &mut self,
        pass: &Pass<'_>,
        shelf: &Shelf<'_, O>,
        source: &States<O>,
        live: &BTreeMap<usize, States<O>>,
        observer: &dyn Observer,
    ) -> Result<BTreeMap<usize, Tally>, crate::Error> {
        let (ops, windows) = (self.ops, pass.windows);
        let head = self.store.head(Which::Source)?;
        let is_head = |&&v: &&usize| matches!(pass.variants[v], Variant::Head { .. });
        let of_head = pass.group.iter().find(is_head).copied();
        let other = of_head.map(|_| self.store.head(Which::Converted)).transpose()?;
        let mut tallies: BTreeMap<usize, Tally> = BTreeMap::new();
        let mut first = pass.first;
        for (chunk, _) in chunks(pass.part, windows.window, self.room.chunk).into_iter().enumerate() {
            let part = Logits { vocabulary: self.models.source.vocabulary(), windows, first };
            let count = shelf.count(&source[chunk]);
            for rows in part.parts(count, self.room.logits) {
                cancel(observer)?;
                let states = shelf.rows(&source[chunk], &rows)?;
                let logits = head.logits(ops, &states)?;
                if let (Some(variant), Some(other)) = (of_head, &other) {
                    let others = other.logits(ops, &states)?;
                    part.score(ops, &logits, &others, &rows, tallies.entry(variant).or_default())?;
                }
                for (&variant, states) in live {
                    let others = head.logits(ops, &shelf.rows(&states[chunk], &rows)?)?;
                    part.score(ops, &logits, &others, &rows, tallies.entry(variant).or_default())?;
                }
            }
            first += count;
        }
        Ok(tallies)
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
