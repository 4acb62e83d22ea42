//! The forward pass of the supported architectures, over any device's operations.
//!
//! Takes an open checkpoint in any layout and a device; gives hidden states and logits. One block is read and
//! in memory at a time; what is kept longer is the caller's business. Must not choose a device, read text, or
//! judge. The residual stream is fp32 everywhere.
//!
//! Two checkpoints of one architecture have the same [`LinearId`]s, whatever their tensors are called and
//! however their linears are fused: that is what lets a block borrow another model's linears
//! ([`Block::with`]).

mod block;
mod load;
mod rope;
mod sizes;
mod spec;

pub use block::{Block, Embedding, Head, Linear, Tap};
pub use spec::Unsupported;

use crate::arch::Role;
use crate::checkpoint::Checkpoint;
use requant_kernels::Operations;
use spec::Spec;
use std::sync::Arc;

/// A linear's place in its block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinearId {
    /// What it does.
    pub role: Role,
    /// Its expert; none for the MLP that all tokens share.
    pub expert: Option<usize>,
}

/// A model, ready to be read block by block.
#[derive(Debug)]
pub struct Model<'a> {
    checkpoint: &'a Checkpoint,
    spec: Arc<Spec>,
}

impl<'a> Model<'a> {
    /// Reads from the configuration what the forward pass is.
    ///
    /// # Errors
    /// The architecture or a setting that isn't supported.
    pub fn new(checkpoint: &'a Checkpoint) -> Result<Self, Unsupported> {
        Ok(Self { checkpoint, spec: Arc::new(Spec::read(checkpoint)?) })
    }

    /// Blocks.
    pub fn layers(&self) -> usize {
        self.spec.dims.layers
    }

    /// Columns of the hidden state.
    pub fn hidden(&self) -> usize {
        self.spec.dims.hidden
    }

    /// Columns of the logits.
    pub fn vocabulary(&self) -> usize {
        self.spec.dims.vocab
    }

    /// The token embedding.
    ///
    /// # Errors
    /// Those of reading and of the device.
    pub fn embedding<O: Operations>(&self, ops: &O) -> Result<Embedding<O>, crate::Error> {
        load::embedding(self.checkpoint, &self.spec, ops)
    }

    /// Reads a block and brings it to the device.
    ///
    /// # Errors
    /// Those of reading and of the device.
    pub fn block<O: Operations>(&self, ops: &O, layer: usize) -> Result<Block<O>, crate::Error> {
        load::block(self.checkpoint, &self.spec, ops, layer)
    }

    /// The last norm and the output head.
    ///
    /// # Errors
    /// Those of reading and of the device.
    pub fn head<O: Operations>(&self, ops: &O) -> Result<Head<O>, crate::Error> {
        load::head(self.checkpoint, &self.spec, ops)
    }
}
