//! Both models over the text, block by block in step: where they don't stay on the device, one block of each is
//! in memory at a time.

use super::layer::Checked;
use super::memory::{CHUNK_TOKENS, LOGIT_BYTES, Room};
use super::pair::Pair;
use super::report::{ModelSide, NonFinite, OutputScores};
use super::scores::Tally;
use super::states::{Shelf, State};
use super::store::{Store, Which};
use super::text::Windows;
use crate::arch::HEAD;
use crate::checkpoint::Checkpoint;
use crate::model::{Block, Embedding, Linear, LinearId, Model};
use crate::progress::{Event, Observer};
use requant_kernels::{Difference, Error, Operations};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Tokens whose activations each converted linear is checked on, in whole windows: more rows change its error by
/// a few percent. They go through a block together, or in smaller pieces.
const CHECK_TOKENS: usize = 1024;

/// Tokens that the head is checked on, and as many more as logits are made at a time.
const CHECK_LOGITS: usize = 1024;

/// The two models, and how their linears belong together.
pub(super) struct Models<'a> {
    pub(super) source: &'a Model<'a>,
    pub(super) converted: &'a Model<'a>,
    pub(super) converted_files: &'a Checkpoint,
    pub(super) pairs: &'a [Pair],
    pub(super) checked: &'a [Checked],
}

/// A device, and what is done on it.
pub(super) struct Worker<'a, O: Operations> {
    pub(super) ops: &'a O,
    pub(super) models: &'a Models<'a>,
    pub(super) room: Room,
    pub(super) store: Store<'a, O>,
}

/// What the pass found.
pub(super) struct Found {
    pub(super) tally: Tally,
    /// By index of the pair.
    pub(super) outputs: BTreeMap<usize, OutputScores>,
    pub(super) non_finite: Option<NonFinite>,
    /// Of one token through one block, and through the head of one model.
    pub(super) block_time: Duration,
    pub(super) head_time: Duration,
}

/// Windows that go through the model together, so many tokens of them; those that linears are checked on end where
/// a chunk does.
pub(super) fn chunks(tokens: &[u32], window: usize, chunk: usize) -> Vec<&[u32]> {
    let chunk = (chunk / window).max(1) * window;
    let (checked, rest) = tokens.split_at(checked(window).min(tokens.len()));
    checked.chunks(chunk).chain(rest.chunks(chunk)).collect()
}

fn checked(window: usize) -> usize {
    (CHECK_TOKENS / window).max(1) * window
}

/// The place of a pair's linear in its block; `None` for the head.
pub(super) fn id_of(pair: &Pair) -> Option<(usize, LinearId)> {
    pair.linear.as_ref().map(|linear| (linear.layer, LinearId { role: linear.role, expert: linear.expert }))
}

impl Models<'_> {
    /// The pairs of a block, by place.
    pub(super) fn pairs_of(&self, layer: usize) -> BTreeMap<LinearId, usize> {
        let places = self.pairs.iter().enumerate();
        places
            .filter_map(|(i, pair)| id_of(pair).filter(|(l, _)| *l == layer).map(|(_, id)| (id, i)))
            .collect()
    }

    /// Bytes of converted linears that are on a device in the source's order, decoded to fp16.
    pub(super) fn reordered_bytes(&self) -> u64 {
        let permuted = self.pairs.iter().filter(|pair| pair.is_permuted() && !pair.is_head());
        permuted.map(|pair| 2 * pair.in_features as u64 * pair.out_features as u64).sum()
    }
}

impl<'a, O: Operations> Worker<'a, O> {
    /// # Errors
    /// Those of the device.
    pub(super) fn new(
        ops: &'a O,
        models: &'a Models<'a>,
        windows: &Windows,
        memory: u64,
    ) -> Result<Self, crate::Error> {
        let room = Room::new(ops, models, windows, memory)?;
        let store = Store::new(ops, models, room.resident);
        Ok(Self { ops, models, room, store })
    }

    /// Gives up memory; whether there was any to give up.
    pub(super) fn shrink(&mut self) -> bool {
        self.store.forget();
        self.room.shrink()
    }

    /// The hidden states of some tokens, whole windows, before the first block.
    pub(super) fn embed(
        &mut self,
        which: Which,
        shelf: &Shelf<'_, O>,
        tokens: &[u32],
        window: usize,
    ) -> Result<Vec<State<O>>, crate::Error> {
        let (ops, embedding) = (self.ops, self.store.embedding(which)?);
        let chunks = chunks(tokens, window, self.room.chunk);
        chunks.into_iter().map(|tokens| Ok(shelf.put(embedding.forward(ops, tokens)?)?)).collect()
    }
}

/// Where in a block a NaN or an infinity arises: the first linear whose output of these states holds one.
fn culprit<O: Operations>(
    ops: &O,
    block: &Block<O>,
    before: &O::Tensor,
    window: usize,
) -> Result<Option<LinearId>, Error> {
    let mut first = None;
    let mut tap = |id: LinearId, _: &O::Tensor, output: &O::Tensor| {
        if first.is_none() && ops.first_non_finite(output)?.is_some() {
            first = Some(id);
        }
        Ok(())
    };
    block.forward(ops, before, window, &mut tap)?;
    Ok(first)
}

/// Runs both models, and each converted linear on the source's activations of the first tokens.
///
/// # Errors
/// Those of reading weights and of the device; [`crate::Error::Cancelled`].
pub(super) fn run<O: Operations>(
    worker: &mut Worker<'_, O>,
    windows: &Windows,
    observer: &dyn Observer,
) -> Result<Found, crate::Error> {
    let (ops, models, window) = (worker.ops, worker.models, windows.window);
    let layers = models.source.layers();
    let mut found = Found {
        tally: Tally::default(),
        outputs: BTreeMap::new(),
        non_finite: None,
        block_time: Duration::ZERO,
        head_time: Duration::ZERO,
    };
    observer.event(&Event::Stage { name: "forward", modules: layers + 1, weights: 0 });
    let shelf = Shelf::new(ops, worker.room.on_device());
    let mut source = worker.embed(Which::Source, &shelf, &windows.tokens, window)?;
    let mut converted = worker.embed(Which::Converted, &shelf, &windows.tokens, window)?;
    let mut differences: BTreeMap<usize, (usize, Difference)> = BTreeMap::new();
    let mut time = Duration::ZERO;
    for layer in 0..layers {
        let block = worker.store.block(Which::Source, layer)?;
        let other = worker.store.block(Which::Converted, layer)?;
        let pairs = models.pairs_of(layer);
        let mut linears: BTreeMap<LinearId, Arc<Linear<O>>> = BTreeMap::new();
        for (&id, &pair) in pairs.iter().filter(|(_, pair)| !models.checked[**pair].exact) {
            if let Some(linear) = worker.store.linear(&other, pair)? {
                linears.insert(id, linear);
            }
        }
        let mut token = 0;
        for (source, converted) in source.iter_mut().zip(&mut converted) {
            cancel(observer)?;
            let checks = token < checked(window);
            let mut tap = |id: LinearId, input: &O::Tensor, output: &O::Tensor| {
                let Some(&pair) = pairs.get(&id).filter(|_| checks) else { return Ok(()) };
                let difference = match linears.get(&id) {
                    Some(linear) => ops.difference(output, &linear.forward(ops, input)?)?,
                    // The same weight gives the same output.
                    None => Difference::default(),
                };
                let (rows, sums) = differences.entry(pair).or_default();
                *rows += ops.shape(input).0;
                add(sums, &difference);
                Ok(())
            };
            let mut broken: Option<(ModelSide, usize, Option<LinearId>)> = None;
            shelf.replace(source, |before| {
                let after = block.forward(ops, before, window, &mut tap)?;
                if let Some(row) = ops.first_non_finite(&after)? {
                    broken = Some((ModelSide::Source, row, culprit(ops, &block, before, window)?));
                }
                Ok(after)
            })?;
            if broken.is_none() {
                let started = Instant::now();
                shelf.replace(converted, |before| {
                    let after = other.forward(ops, before, window, &mut |_, _, _| Ok(()))?;
                    if let Some(row) = ops.first_non_finite(&after)? {
                        broken = Some((ModelSide::Converted, row, culprit(ops, &other, before, window)?));
                    }
                    Ok(after)
                })?;
                time += started.elapsed();
            }
            if let Some((model, row, id)) = broken {
                let pair = id.and_then(|id| pairs.get(&id)).map(|&pair| &models.pairs[pair]);
                let name = |pair: &Pair| match model {
                    ModelSide::Converted => pair.converted.clone(),
                    _ => pair.source.clone(),
                };
                let (module, token) = (pair.map(name), token + row);
                found.non_finite = Some(NonFinite { model, layer: Some(layer), module, token });
                found.outputs = outputs(&differences);
                return Ok(found);
            }
            token += shelf.count(source);
        }
        observer.event(&Event::Module { name: &format!("block {layer}"), weights: 0 });
    }
    found.block_time = time / (layers * windows.tokens.len()).max(1) as u32;
    let started = Instant::now();
    let heads = (worker.store.head(Which::Source)?, worker.store.head(Which::Converted)?);
    let head_pair = models.pairs.iter().position(Pair::is_head);
    let mut first = 0;
    for (source, converted) in source.iter().zip(&converted) {
        let part = Logits { vocabulary: models.source.vocabulary(), windows, first };
        // What the head is checked on doesn't depend on the device's memory, where that is not small.
        let most = if first < CHECK_LOGITS { LOGIT_BYTES } else { usize::MAX };
        for rows in part.parts(shelf.count(source), most.min(worker.room.logits)) {
            cancel(observer)?;
            let source = shelf.rows(source, &rows)?;
            let converted = shelf.rows(converted, &rows)?;
            let logits = heads.0.logits(ops, &source)?;
            if let Some(pair) = head_pair.filter(|_| first + (rows[0] as usize) < CHECK_LOGITS) {
                let of_head = match models.checked[pair].exact {
                    true => Difference::default(),
                    false => ops.difference(&logits, &heads.1.logits(ops, &source)?)?,
                };
                let (count, sums) = differences.entry(pair).or_default();
                *count += rows.len();
                add(sums, &of_head);
            }
            let others = heads.1.logits(ops, &converted)?;
            for (model, logits) in [(ModelSide::Source, &logits), (ModelSide::Converted, &others)] {
                if let Some(row) = ops.first_non_finite(logits)? {
                    let token = first + rows[row] as usize;
                    found.non_finite = Some(NonFinite { model, layer: None, module: None, token });
                    found.outputs = outputs(&differences);
                    return Ok(found);
                }
            }
            part.score(ops, &logits, &others, &rows, &mut found.tally)?;
        }
        first += shelf.count(source);
    }
    found.head_time = started.elapsed() / (2 * windows.tokens.len()).max(1) as u32;
    found.outputs = outputs(&differences);
    observer.event(&Event::Module { name: HEAD, weights: 0 });
    Ok(found)
}

/// The hidden states of all windows before the first block.
pub(super) fn embed<O: Operations>(
    ops: &O,
    embedding: &Embedding<O>,
    windows: &Windows,
) -> Result<Vec<O::Tensor>, crate::Error> {
    let chunks = chunks(&windows.tokens, windows.window, CHUNK_TOKENS);
    chunks.into_iter().map(|tokens| Ok(embedding.forward(ops, tokens)?)).collect()
}

pub(super) fn cancel(observer: &dyn Observer) -> Result<(), crate::Error> {
    if observer.cancelled() { Err(crate::Error::Cancelled) } else { Ok(()) }
}

/// Logits of a chunk of windows, a part at a time.
pub(super) struct Logits<'a> {
    pub(super) vocabulary: usize,
    pub(super) windows: &'a Windows,
    /// The place of the chunk's first token in the text.
    pub(super) first: usize,
}

impl Logits<'_> {
    /// The rows of a chunk in parts whose logits take so many bytes.
    pub(super) fn parts(&self, rows: usize, bytes: usize) -> Vec<Vec<u32>> {
        let most = (bytes / (4 * self.vocabulary.max(1))).max(1);
        let all: Vec<u32> = (0..rows as u32).collect();
        all.chunks(most).map(<[u32]>::to_vec).collect()
    }

    /// The token after a row's, in the same window.
    pub(super) fn target(&self, row: u32) -> Option<u32> {
        let next = self.first + row as usize + 1;
        self.windows.tokens.get(next).copied().filter(|_| !next.is_multiple_of(self.windows.window))
    }

    /// Adds what both models say of these rows.
    pub(super) fn score<O: Operations>(
        &self,
        ops: &O,
        source: &O::Tensor,
        other: &O::Tensor,
        rows: &[u32],
        tally: &mut Tally,
    ) -> Result<(), crate::Error> {
        let window = self.windows.window;
        let target = |row| self.target(row);
        // A token that is the last of its window predicts nothing, so any target will do.
        let targets: Vec<u32> = rows.iter().map(|&row| target(row).unwrap_or(0)).collect();
        let scores = ops.compare_logits(source, other, &targets)?;
        for (score, &row) in scores.iter().zip(rows) {
            tally.add((self.first + row as usize) / window, score, target(row).is_some());
        }
        Ok(())
    }
}

fn add(sums: &mut Difference, more: &Difference) {
    sums.squared_error += more.squared_error;
    sums.squared_source += more.squared_source;
    sums.squared_converted += more.squared_converted;
    sums.product += more.product;
    sums.max_error = sums.max_error.max(more.max_error);
}

fn outputs(differences: &BTreeMap<usize, (usize, Difference)>) -> BTreeMap<usize, OutputScores> {
    let scores = |&(rows, d): &(usize, Difference)| OutputScores {
        rows,
        relative_error: ratio(d.squared_error, d.squared_source).sqrt(),
        // Equal outputs have a cosine of 1, whatever rounding says.
        cosine: match d.squared_error == 0.0 {
            true => 1.0,
            false => ratio(d.product, (d.squared_source * d.squared_converted).sqrt()),
        },
        max_error: d.max_error,
    };
    differences.iter().map(|(&pair, difference)| (pair, scores(difference))).collect()
}

fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { part }
}
