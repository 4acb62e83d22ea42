//! The weights of both models on a device: kept there, or brought there each time.

use super::forward::{Models, id_of};
use super::weights;
use crate::model::{Block, Embedding, Head, Linear};
use requant_kernels::Operations;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Which of the two models.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Which {
    Source,
    Converted,
}

/// Weights on a device.
pub(super) struct Store<'a, O: Operations> {
    ops: &'a O,
    models: &'a Models<'a>,
    /// Whether what was brought there stays.
    keeps: bool,
    blocks: BTreeMap<(Which, usize), Arc<Block<O>>>,
    /// Linears in the source's order of rows and columns, by pair.
    linears: BTreeMap<usize, Arc<Linear<O>>>,
    embeddings: BTreeMap<Which, Arc<Embedding<O>>>,
    heads: BTreeMap<Which, Arc<Head<O>>>,
}

impl<'a, O: Operations> Store<'a, O> {
    /// Of these models on a device; with `keeps`, all that is asked for stays there.
    pub(super) fn new(ops: &'a O, models: &'a Models<'a>, keeps: bool) -> Self {
        let (blocks, linears) = (BTreeMap::new(), BTreeMap::new());
        Self { ops, models, keeps, blocks, linears, embeddings: BTreeMap::new(), heads: BTreeMap::new() }
    }

    /// Gives up all that stays there, for good.
    pub(super) fn forget(&mut self) {
        *self = Self::new(self.ops, self.models, false);
    }

    /// A block.
    ///
    /// # Errors
    /// Those of reading and of the device.
    pub(super) fn block(&mut self, which: Which, layer: usize) -> Result<Arc<Block<O>>, crate::Error> {
        let (ops, model) = (self.ops, self.model(which));
        kept(self.keeps, &mut self.blocks, (which, layer), || model.block(ops, layer))
    }

    /// The converted linear of a pair, with the source's order of rows and columns; `block` is the converted one.
    ///
    /// # Errors
    /// Those of reading and of the device.
    pub(super) fn linear(
        &mut self,
        block: &Block<O>,
        pair: usize,
    ) -> Result<Option<Arc<Linear<O>>>, crate::Error> {
        let (ops, files, of) = (self.ops, self.models.converted_files, &self.models.pairs[pair]);
        let Some((_, id)) = id_of(of) else { return Ok(None) };
        match of.is_permuted() {
            false => Ok(block.linear(id).cloned()),
            true => kept(self.keeps, &mut self.linears, pair, || weights::linear(ops, files, of)).map(Some),
        }
    }

    /// The token embedding.
    ///
    /// # Errors
    /// Those of reading and of the device.
    pub(super) fn embedding(&mut self, which: Which) -> Result<Arc<Embedding<O>>, crate::Error> {
        let (ops, model) = (self.ops, self.model(which));
        kept(self.keeps, &mut self.embeddings, which, || model.embedding(ops))
    }

    /// The last norm and the output head.
    ///
    /// # Errors
    /// Those of reading and of the device.
    pub(super) fn head(&mut self, which: Which) -> Result<Arc<Head<O>>, crate::Error> {
        let (ops, model) = (self.ops, self.model(which));
        kept(self.keeps, &mut self.heads, which, || model.head(ops))
    }

    fn model(&self, which: Which) -> &'a crate::model::Model<'a> {
        match which {
            Which::Source => self.models.source,
            Which::Converted => self.models.converted,
        }
    }
}

/// What stands at `key`; else what `make` brings, which is entered if it is to stay.
fn kept<K: Ord, T>(
    keeps: bool,
    all: &mut BTreeMap<K, Arc<T>>,
    key: K,
    make: impl FnOnce() -> Result<T, crate::Error>,
) -> Result<Arc<T>, crate::Error> {
    if let Some(there) = all.get(&key) {
        return Ok(there.clone());
    }
    let made = Arc::new(make()?);
    if keeps {
        all.insert(key, made.clone());
    }
    Ok(made)
}
