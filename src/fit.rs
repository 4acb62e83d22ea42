//! Whether a checkpoint fits into the memory of a device, with a cache for a context.
//!
//! Takes an open checkpoint and two sizes; gives a [`Fit`], counted from the tensors as they are stored. Must
//! not look at a device.

use crate::checkpoint::Checkpoint;
use crate::inspect::Inspection;
use serde::Serialize;

/// What a loader takes beside weights and cache. Assumed, not measured: a CUDA context with its kernels takes 0.3
/// to 0.5 GiB, and exllamav2 keeps the hidden states of a chunk of 2048 tokens, one linear unpacked to fp16 and
/// fp32 logits, which for models of 7 to 13 B weights come to about as much again.
pub const OVERHEAD_BYTES: u64 = 1 << 30;

/// Bytes of a number in the cache: fp16.
const CACHE_NUMBER: u64 = 2;

/// A checkpoint against a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Fit {
    /// Bytes of the memory.
    pub vram_bytes: u64,
    /// Tokens that the cache is to hold.
    pub context: u64,
    /// Bytes of all tensors, the embedding included, which some loaders leave in the host's memory.
    pub weight_bytes: u64,
    /// Bytes of a token in the cache: 2 (keys and values) · layers · kv_heads · head_dim · 2 (fp16).
    pub cache_bytes_per_token: u64,
    /// Bytes of the cache for `context` tokens. Sliding windows don't make it smaller: exllamav2 keeps all.
    pub cache_bytes: u64,
    /// [`OVERHEAD_BYTES`].
    pub overhead_bytes: u64,
    /// Bytes of all of these.
    pub total_bytes: u64,
    /// Whether the memory holds them.
    pub fits: bool,
    /// Tokens of the longest context that it holds; `None` where not even the weights fit.
    pub largest_context: Option<u64>,
    /// Tokens that the model has positions for, where config.json says so.
    pub positions: Option<u64>,
}

impl Fit {
    /// Counts what a checkpoint, whose inspection this is, takes. `None` if config.json doesn't give its dimensions.
    pub fn new(
        checkpoint: &Checkpoint,
        inspection: &Inspection,
        vram_bytes: u64,
        context: u64,
    ) -> Option<Self> {
        let dims = checkpoint.dims()?;
        let weight_bytes = inspection.totals.tensor_bytes;
        // Numbers of config.json, which may be anything: what overflows fits nowhere.
        let of_token = [dims.layers as u64, dims.kv_heads as u64, dims.head_dim as u64]
            .into_iter()
            .fold(2 * CACHE_NUMBER, u64::saturating_mul);
        let cache_bytes = of_token.saturating_mul(context);
        let fixed = weight_bytes.saturating_add(OVERHEAD_BYTES);
        let total_bytes = fixed.saturating_add(cache_bytes);
        Some(Self {
            vram_bytes,
            context,
            weight_bytes,
            cache_bytes_per_token: of_token,
            cache_bytes,
            overhead_bytes: OVERHEAD_BYTES,
            total_bytes,
            fits: total_bytes <= vram_bytes,
            largest_context: vram_bytes.checked_sub(fixed).map(|rest| rest / of_token.max(1)),
            positions: dims.positions.map(|positions| positions as u64),
        })
    }
}
