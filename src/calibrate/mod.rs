//! What each linear of a model is given to work on: text → activations → Hessians, block by block.
//!
//! Takes a model, windows of tokens and a device; gives the Hessians of one block after the other, so that those of
//! one block are in memory at a time, besides the hidden states of all windows. Linears with one input share one
//! Hessian. Must not quantize.

mod losses;
mod quantizer;
mod sample;
#[cfg(test)]
mod tests;

pub use losses::CalibratedLosses;
pub use quantizer::CalibratedQuantizer;
pub(crate) use sample::text;

use crate::arch::Role;
use crate::checkpoint::Checkpoint;
use crate::model::{LinearId, Model};
use crate::quantize::Hessian;
use crate::validate::Windows;
use requant_kernels::{Calibration, Error};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// Tokens to calibrate on where no number is given.
pub const DEFAULT_TOKENS: usize = 1 << 16;

/// Tokens that go through a block at a time.
const CHUNK_TOKENS: usize = 2048;

/// A model on its way through a text.
pub struct Calibrator<'a, O: Calibration> {
    ops: &'a O,
    model: &'a Model<'a>,
    window: usize,
    /// Before block `layer`.
    hidden: Vec<O::Tensor>,
    layer: usize,
}

/// The Hessians of a block's linears.
#[derive(Debug)]
pub struct BlockHessians {
    /// Which block.
    pub layer: usize,
    /// By the linear whose input it is; see [`BlockHessians::of`].
    hessians: BTreeMap<LinearId, Hessian>,
}

impl BlockHessians {
    /// That of a linear's inputs; `None` for an expert that no token chose.
    pub fn of(&self, id: LinearId) -> Option<&Hessian> {
        self.hessians.get(&input_of(id))
    }
}

/// Where the linears of a model are, by their names in an EXL2 output.
struct Places(BTreeMap<String, (usize, LinearId)>);

impl Places {
    fn new(checkpoint: &Checkpoint) -> Self {
        let mut places = BTreeMap::new();
        if let (Some(arch), Some(dims)) = (checkpoint.architecture(), checkpoint.dims()) {
            for layer in 0..dims.layers {
                for linear in arch.block(dims, checkpoint.naming(), layer) {
                    let id = LinearId { role: linear.role, expert: linear.expert };
                    places.insert(linear.exl2_name, (layer, id));
                }
            }
        }
        Self(places)
    }

    fn get(&self, module: &str) -> Option<(usize, LinearId)> {
        self.0.get(module).copied()
    }
}

/// The linear that stands for all with the same input.
fn input_of(id: LinearId) -> LinearId {
    let role = match id.role {
        Role::Q | Role::K | Role::V => Role::Q,
        Role::Gate | Role::Up => Role::Gate,
        other => other,
    };
    LinearId { role, expert: id.expert }
}

impl<'a, O: Calibration> Calibrator<'a, O> {
    /// Before the first block.
    ///
    /// # Errors
    /// Those of reading the embedding and of the device.
    pub fn new(ops: &'a O, model: &'a Model<'a>, windows: &Windows) -> Result<Self, crate::Error> {
        let embedding = model.embedding(ops)?;
        let chunk = (CHUNK_TOKENS / windows.window).max(1) * windows.window;
        let hidden = windows.tokens.chunks(chunk).map(|tokens| embedding.forward(ops, tokens));
        Ok(Self { ops, model, window: windows.window, hidden: hidden.collect::<Result<_, _>>()?, layer: 0 })
    }

    /// Runs blocks until `block` holds the Hessians of block `layer`, which isn't before the one that it holds.
    fn advance(&mut self, block: &mut Option<BlockHessians>, layer: usize) -> Result<(), crate::Error> {
        while block.as_ref().is_none_or(|block| block.layer < layer) {
            *block = None;
            match self.next_block()? {
                Some(next) => *block = Some(next),
                None => break,
            }
        }
        Ok(())
    }

    /// Runs the next block: its Hessians; `None` after the last.
    ///
    /// # Errors
    /// Those of reading the block and of the device.
    pub fn next_block(&mut self) -> Result<Option<BlockHessians>, crate::Error> {
        if self.layer == self.model.layers() {
            return Ok(None);
        }
        let block = self.model.block(self.ops, self.layer)?;
        let mut sums: BTreeMap<LinearId, (O::Sums, usize, usize)> = BTreeMap::new();
        for hidden in &mut self.hidden {
            let mut tap = |id: LinearId, input: &O::Tensor, _: &O::Tensor| -> Result<(), Error> {
                if input_of(id) != id {
                    return Ok(());
                }
                let (rows, columns) = self.ops.shape(input);
                let (sum, _, tokens) = match sums.entry(id) {
                    Entry::Occupied(entry) => entry.into_mut(),
                    Entry::Vacant(entry) => entry.insert((self.ops.new_sums(columns)?, columns, 0)),
                };
                self.ops.add_products(sum, input)?;
                *tokens += rows;
                Ok(())
            };
            *hidden = block.forward(self.ops, hidden, self.window, &mut tap)?;
        }
        let mut hessians = BTreeMap::new();
        for (id, (sum, columns, tokens)) in sums {
            let lower = self.ops.download_sums(sum)?;
            let hessian = Hessian::new(columns, lower, tokens).map_err(|e| Error::Shape {
                operation: "download_sums",
                found: e.found.to_string(),
                expected: format!("{} entries", e.expected),
            })?;
            hessians.insert(id, hessian);
        }
        self.layer += 1;
        Ok(Some(BlockHessians { layer: self.layer - 1, hessians }))
    }
}
