//! How a family of files names its tensors.

use serde::{Deserialize, Serialize};

/// The names of one model's tensors. Those within a block are relative to it (`model.layers.0.`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Names {
    /// What stands before a block's number: `model.layers.`.
    pub blocks: &'static str,
    /// Module of the token embedding.
    pub embedding: &'static str,
    /// Module of learned positions, where the architecture has them.
    pub positions: &'static str,
    /// Module of the last norm.
    pub norm: &'static str,
    /// Module of the output head.
    pub head: &'static str,
    /// Norms of a block.
    pub block_norms: &'static [&'static str],
    /// Linears of attention.
    pub attention: AttentionNames,
    /// Linears of a plain MLP.
    pub mlp: MlpNames,
    /// Router and linears of experts.
    pub experts: ExpertNames,
    /// What stands before tensors of other parts (vision, projector), which stay as they are.
    pub others: &'static [&'static str],
}

/// Linears of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionNames {
    /// q, k, v, o.
    Separate([&'static str; 4]),
    /// One linear whose columns are q, k and v; and o.
    Fused([&'static str; 2]),
    /// The same with, for each key-value head, the columns of its query heads, its key and its value.
    Interleaved([&'static str; 2]),
}

/// Linears of an MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MlpNames {
    /// gate, up, down.
    Gated([&'static str; 3]),
    /// One linear whose columns are gate and up; and down.
    Fused([&'static str; 2]),
    /// up, down: nothing gates.
    Plain([&'static str; 2]),
}

/// How a family of files names the linears of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertNames {
    /// Module that holds the router (`gate`) and `experts`.
    pub module: &'static str,
    /// gate, up, down.
    pub projections: [&'static str; 3],
}

impl ExpertNames {
    /// The names of nearly all models.
    pub const MLP: Self = Self { module: "mlp", projections: ["gate_proj", "up_proj", "down_proj"] };
    /// Mixtral's own names.
    pub const MIXTRAL: Self = Self { module: "block_sparse_moe", projections: ["w1", "w3", "w2"] };
}

impl Names {
    /// The names of nearly all models.
    pub const LLAMA: Self = Self {
        blocks: "model.layers.",
        embedding: "model.embed_tokens",
        positions: "model.wpe",
        norm: "model.norm",
        head: super::HEAD,
        block_norms: &["input_layernorm", "post_attention_layernorm"],
        attention: AttentionNames::Separate([
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
        ]),
        mlp: MlpNames::Gated(["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]),
        experts: ExpertNames::MLP,
        others: &[],
    };

    /// Name of the embedding's tensor, `[vocab, hidden]`.
    pub fn embedding_weight(&self) -> String {
        format!("{}.weight", self.embedding)
    }
}

/// Columns of a linear of the source, in the order that they take in one of the architecture's linears that
/// it holds: ranges, each its begin and its end. They ascend and don't overlap.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "Vec<[usize; 2]>")]
pub struct Columns(Vec<[usize; 2]>);

/// Ranges of columns that overlap, are empty or don't ascend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("columns {begin} to {end}: ranges must ascend and not overlap")]
pub struct NotColumns {
    begin: usize,
    end: usize,
}

impl TryFrom<Vec<[usize; 2]>> for Columns {
    type Error = NotColumns;

    fn try_from(ranges: Vec<[usize; 2]>) -> Result<Self, NotColumns> {
        let mut least = 0;
        for &[begin, end] in &ranges {
            if begin < least || end <= begin {
                return Err(NotColumns { begin, end });
            }
            least = end;
        }
        Ok(Self(ranges))
    }
}

impl Columns {
    /// One range.
    pub(super) fn range(begin: usize, length: usize) -> Self {
        Self(vec![[begin, begin + length]])
    }

    /// `count` ranges of `length`, `step` apart.
    pub(super) fn strided(begin: usize, length: usize, step: usize, count: usize) -> Self {
        Self((0..count).map(|i| [begin + i * step, begin + i * step + length]).collect())
    }

    /// How many columns these are.
    pub fn count(&self) -> usize {
        self.0.iter().map(|[begin, end]| end - begin).sum()
    }

    /// The first column beyond all.
    pub fn end(&self) -> usize {
        self.0.last().map_or(0, |range| range[1])
    }

    /// Each column.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().flat_map(|&[begin, end]| begin..end)
    }

    /// These columns of a matrix `[rows, width]`, or elements of a vector (one row).
    ///
    /// # Panics
    /// If `width` is less than [`end`](Self::end).
    pub fn of<T: Copy>(&self, matrix: &[T], width: usize) -> Vec<T> {
        let rows = matrix.chunks_exact(width.max(1));
        rows.flat_map(|row| self.0.iter().flat_map(|&[begin, end]| &row[begin..end])).copied().collect()
    }

    /// The rows of a transposed matrix, `[columns, width]`, that these columns are.
    ///
    /// # Panics
    /// If it has fewer than [`end`](Self::end) rows.
    pub fn rows_of<T: Copy>(&self, matrix: &[T], width: usize) -> Vec<T> {
        self.0.iter().flat_map(|&[begin, end]| &matrix[begin * width..end * width]).copied().collect()
    }
}
