//! Both models over the text, block by block in step: one block of each is in memory at a time.

use super::layer::Checked;
use super::pair::Pair;
use super::report::{ModelSide, NonFinite, OutputScores};
use super::scores::Tally;
use super::text::Windows;
use super::weights;
use crate::arch::HEAD;
use crate::checkpoint::Checkpoint;
use crate::model::{Block, Linear, LinearId, Model};
use crate::progress::{Event, Observer};
use requant_kernels::{Difference, Operations};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Tokens that go through a block at a time: what a block needs in between is bounded by these.
const CHUNK_TOKENS: usize = 2048;

/// Bytes of logits of one model that are made at a time.
const LOGIT_BYTES: usize = 64 << 20;

/// The two models, and how their linears belong together.
pub(super) struct Models<'a> {
    pub(super) source: &'a Model<'a>,
    pub(super) converted: &'a Model<'a>,
    pub(super) converted_files: &'a Checkpoint,
    pub(super) pairs: &'a [Pair],
    pub(super) checked: &'a [Checked],
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

/// Windows that go through the model together: tokens and the rows of the first window's first token.
pub(super) fn chunks(tokens: &[u32], window: usize) -> std::slice::Chunks<'_, u32> {
    tokens.chunks((CHUNK_TOKENS / window).max(1) * window)
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

    /// The converted linear of a pair, with the source's order of rows and columns.
    pub(super) fn linear<O: Operations>(
        &self,
        ops: &O,
        block: &Block<O>,
        pair: usize,
    ) -> Result<Option<Arc<Linear<O>>>, crate::Error> {
        let Some((_, id)) = id_of(&self.pairs[pair]) else { return Ok(None) };
        match self.pairs[pair].is_permuted() {
            false => Ok(block.linear(id).cloned()),
            true => weights::linear(ops, self.converted_files, &self.pairs[pair]).map(Some),
        }
    }
}

/// Runs both models, and each converted linear on the source's activations of the first `check_tokens` tokens.
///
/// # Errors
/// Those of reading weights and of the device; [`crate::Error::Cancelled`].
pub(super) fn run<O: Operations>(
    ops: &O,
    models: &Models<'_>,
    windows: &Windows,
    check_tokens: usize,
    observer: &dyn Observer,
) -> Result<Found, crate::Error> {
    let layers = models.source.layers();
    let mut found = Found {
        tally: Tally::default(),
        outputs: BTreeMap::new(),
        non_finite: None,
        block_time: Duration::ZERO,
        head_time: Duration::ZERO,
    };
    observer.event(&Event::Stage { name: "forward", modules: layers + 1, weights: 0 });
    let mut source = embed(ops, models.source, windows)?;
    let mut converted = embed(ops, models.converted, windows)?;
    let mut differences: BTreeMap<usize, (usize, Difference)> = BTreeMap::new();
    let mut time = Duration::ZERO;
    for layer in 0..layers {
        let block = models.source.block(ops, layer)?;
        let other = models.converted.block(ops, layer)?;
        let pairs = models.pairs_of(layer);
        let mut linears: BTreeMap<LinearId, Arc<Linear<O>>> = BTreeMap::new();
        for (&id, &pair) in &pairs {
            if let Some(linear) = models.linear(ops, &other, pair)?.filter(|_| !models.checked[pair].exact) {
                linears.insert(id, linear);
            }
        }
        let mut token = 0;
        for (source, converted) in source.iter_mut().zip(&mut converted) {
            cancel(observer)?;
            let checks = token < check_tokens;
            let mut tap = |id: LinearId, input: &O::Tensor, output: &O::Tensor| {
                let Some(&pair) = pairs.get(&id).filter(|_| checks) else { return Ok(()) };
                let difference = match linears.get(&id) {
                    Some(linear) => ops.difference(output, &linear.forward(ops, input)?)?,
                    // The same weight gives the same output.
                    None => ops.difference(output, output)?,
                };
                let (rows, sums) = differences.entry(pair).or_default();
                *rows += ops.shape(input).0;
                add(sums, &difference);
                Ok(())
            };
            *source = block.forward(ops, source, windows.window, &mut tap)?;
            let started = Instant::now();
            *converted = other.forward(ops, converted, windows.window, &mut |_, _, _| Ok(()))?;
            time += started.elapsed();
            for (model, hidden) in [(ModelSide::Source, &*source), (ModelSide::Converted, &*converted)] {
                if let Some(row) = ops.first_non_finite(hidden)? {
                    found.non_finite = Some(NonFinite { model, layer: Some(layer), token: token + row });
                    found.outputs = outputs(&differences);
                    return Ok(found);
                }
            }
            token += ops.shape(source).0;
        }
        observer.event(&Event::Module { name: &format!("block {layer}"), weights: 0 });
    }
    found.block_time = time / (layers * windows.tokens.len()).max(1) as u32;
    let started = Instant::now();
    let heads = (models.source.head(ops)?, models.converted.head(ops)?);
    let head_pair = models.pairs.iter().position(Pair::is_head);
    let mut first = 0;
    for (source, converted) in source.iter().zip(&converted) {
        let part = Logits { vocabulary: models.source.vocabulary(), windows, first };
        for rows in part.parts(ops.shape(source).0) {
            cancel(observer)?;
            let source = ops.select_rows(source, &rows)?;
            let converted = ops.select_rows(converted, &rows)?;
            let logits = heads.0.logits(ops, &source)?;
            if let Some(pair) = head_pair.filter(|_| first + (rows[0] as usize) < check_tokens) {
                let of_head = match models.checked[pair].exact {
                    true => ops.difference(&logits, &logits)?,
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
                    found.non_finite = Some(NonFinite { model, layer: None, token });
                    found.outputs = outputs(&differences);
                    return Ok(found);
                }
            }
            part.score(ops, &logits, &others, &rows, &mut found.tally)?;
        }
        first += ops.shape(source).0;
    }
    found.head_time = started.elapsed() / (2 * windows.tokens.len()).max(1) as u32;
    found.outputs = outputs(&differences);
    observer.event(&Event::Module { name: HEAD, weights: 0 });
    Ok(found)
}

/// The hidden states of all windows before the first block.
pub(super) fn embed<O: Operations>(
    ops: &O,
    model: &Model<'_>,
    windows: &Windows,
) -> Result<Vec<O::Tensor>, crate::Error> {
    embed_tokens(ops, model, &windows.tokens, windows.window)
}

/// Those of some tokens, whole windows.
pub(super) fn embed_tokens<O: Operations>(
    ops: &O,
    model: &Model<'_>,
    tokens: &[u32],
    window: usize,
) -> Result<Vec<O::Tensor>, crate::Error> {
    let embedding = model.embedding(ops)?;
    chunks(tokens, window).map(|tokens| Ok(embedding.forward(ops, tokens)?)).collect()
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
    /// The rows of a chunk in parts whose logits fit.
    pub(super) fn parts(&self, rows: usize) -> Vec<Vec<u32>> {
        let most = (LOGIT_BYTES / (4 * self.vocabulary.max(1))).max(1);
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
