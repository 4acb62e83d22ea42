//! What a model takes in memory.

use super::Model;
use crate::checkpoint::Module;
use std::collections::BTreeMap;

impl Model<'_> {
    /// Bytes of all weights as they lie in the files; of a head that isn't stored, the embedding's once more.
    pub fn weight_bytes(&self) -> u64 {
        let of_modules: u64 = self.checkpoint.modules().iter().map(|module| self.module_bytes(module)).sum();
        let others: u64 = self.checkpoint.other_tensors().map(|tensor| tensor.byte_len() as u64).sum();
        let tied = self.checkpoint.module(self.spec.names.head).is_none();
        of_modules + others + if tied { self.embedding_bytes() } else { 0 }
    }

    /// Bytes of the largest of embedding, head and blocks, as they lie in the files.
    pub fn largest_part_bytes(&self) -> u64 {
        let mut blocks: BTreeMap<usize, u64> = BTreeMap::new();
        for module in self.checkpoint.modules() {
            if let Some(linear) = module.linears().first() {
                *blocks.entry(linear.layer).or_default() += self.module_bytes(module);
            }
        }
        let head = self.checkpoint.module(self.spec.names.head);
        let head = head.map_or(0, |module| self.module_bytes(module));
        blocks.into_values().chain([head, self.embedding_bytes()]).max().unwrap_or(0)
    }

    /// Bytes that a token takes inside a block at the most, whatever the device keeps of them: fp32 activations,
    /// and those of one linear in three parts of 16 bits.
    pub fn work_bytes_of_token(&self) -> u64 {
        let dims = &self.spec.dims;
        let (q, kv) = (dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim);
        let inner =
            dims.intermediate.max(dims.expert_intermediate).max(dims.shared_intermediate.unwrap_or(0));
        let attention = 4 * (5 * dims.hidden + 3 * q + 2 * kv) + 6 * q.max(dims.hidden);
        let mlp = 4 * (6 * dims.hidden + 4 * inner) + 6 * inner.max(dims.hidden);
        attention.max(mlp) as u64
    }

    fn embedding_bytes(&self) -> u64 {
        let table = self.checkpoint.tensor(&self.spec.names.embedding_weight());
        table.map_or(0, |table| table.bytes().len() as u64)
    }

    fn module_bytes(&self, module: &Module) -> u64 {
        let tensors = module.tensor_names().filter_map(|name| self.checkpoint.tensor(&name));
        tensors.map(|tensor| tensor.bytes().len() as u64).sum()
    }
}
