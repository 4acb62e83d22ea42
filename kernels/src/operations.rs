//! The trait that every device implements.

use super::Error;
use super::weight::Weight;
use half::f16;

/// What a device does: all that a model's forward pass, and comparing two models, need.
///
/// Activations are [`Tensor`](Self::Tensor)s: fp32, `[rows, columns]`, row-major, in the device's memory. A row
/// is a token; the rows of several windows of text stand one after the other, each window of the same length
/// but perhaps the last. All sums are fp32 or wider. A device adds in a fixed order: the same call gives the
/// same bits each time, and for any number of threads. The order may differ from another device's.
///
/// Sizes that don't fit together are [`Error::Shape`], which names the operation; what the device itself fails
/// at is [`Error::Device`]. No operation panics for its arguments.
pub trait Operations: Sync {
    /// A weight where the device can use it: its memory is the device's until it is dropped.
    type Weight: Send + Sync;
    /// Activations, fp32 `[rows, columns]`.
    type Tensor: Send + Sync;

    /// The device in words, as a report names it: `2 threads of an AMD EPYC (AVX2)`, `NVIDIA H200`.
    fn name(&self) -> String;

    /// Bytes of the device's own memory that can still be allocated; `None` of a device that works in the host's.
    fn free_memory(&self) -> Result<Option<u64>, Error>;

    // Weights.

    /// Brings a weight to the device, packed or in any other form of the same numbers.
    fn upload_weight(&self, weight: &Weight) -> Result<Self::Weight, Error>;

    /// The decoded weight `[k, n]` in fp16, rows in the model's order. The same bits on every device: those of
    /// [`gptq::Matrix::dequantize`](requant_formats::gptq::Matrix::dequantize) and
    /// [`exl2::Matrix::dequantize`](requant_formats::exl2::Matrix::dequantize) without padding columns; of a
    /// dense weight its values rounded to fp16.
    fn dequantize(&self, weight: &Self::Weight) -> Result<Vec<f16>, Error>;

    // Activations.

    /// Brings activations to the device. `values.len()` is a multiple of `columns`.
    fn upload(&self, values: &[f32], columns: usize) -> Result<Self::Tensor, Error>;

    /// Brings them back.
    fn download(&self, tensor: &Self::Tensor) -> Result<Vec<f32>, Error>;

    /// Rows and columns.
    fn shape(&self, tensor: &Self::Tensor) -> (usize, usize);

    /// A copy.
    fn copy(&self, tensor: &Self::Tensor) -> Result<Self::Tensor, Error>;

    /// These rows, in this order; a row may come several times.
    fn select_rows(&self, x: &Self::Tensor, rows: &[u32]) -> Result<Self::Tensor, Error>;

    /// These columns.
    fn select_columns(
        &self,
        x: &Self::Tensor,
        columns: std::ops::Range<usize>,
    ) -> Result<Self::Tensor, Error>;

    // The forward pass.

    /// Rows `tokens` of a dense table `[vocabulary, hidden]` (an uploaded [`Weight`] with
    /// `out_features` = vocabulary, `in_features` = hidden), times `scale`.
    fn embed(&self, table: &Self::Weight, tokens: &[u32], scale: f32) -> Result<Self::Tensor, Error>;

    /// `x` `[m, k]` times the decoded weight `[k, n]`, plus `bias` `[1, n]`.
    ///
    /// The factor is the weight as decoded to fp16 for GPTQ and EXL2, and as stored for a dense one. A row of
    /// the product does not depend on the other rows.
    fn matmul(
        &self,
        x: &Self::Tensor,
        weight: &Self::Weight,
        bias: Option<&Self::Tensor>,
    ) -> Result<Self::Tensor, Error>;

    /// `x / sqrt(mean(x²) + epsilon) · weight` over each run of `c` columns, for `weight` `[1, c]`: of a whole row,
    /// or of each head.
    fn rms_norm(&self, x: &Self::Tensor, weight: &Self::Tensor, epsilon: f32) -> Result<Self::Tensor, Error>;

    /// Rotates the first `2 · rope.frequencies.len()` columns of each head of `head_dim` columns, in place. Row
    /// r stands at position r mod `window`.
    fn rotate(&self, x: &mut Self::Tensor, head_dim: usize, window: usize, rope: &Rope) -> Result<(), Error>;

    /// Causal attention inside each window of `shape.window` rows. `q` `[m, heads · head_dim]`, `k` and `v`
    /// `[m, kv_heads · head_dim]`; gives `[m, heads · head_dim]`.
    fn attention(
        &self,
        q: &Self::Tensor,
        k: &Self::Tensor,
        v: &Self::Tensor,
        shape: &Attention,
    ) -> Result<Self::Tensor, Error>;

    /// `activation(gate) · up`, element by element.
    fn gate(
        &self,
        gate: &Self::Tensor,
        up: &Self::Tensor,
        activation: Activation,
    ) -> Result<Self::Tensor, Error>;

    /// `x += scale · y`.
    fn add(&self, x: &mut Self::Tensor, y: &Self::Tensor, scale: f32) -> Result<(), Error>;

    /// `x[rows[i]] += weights[i] · y[i]`: the output of an expert to its tokens. No row comes twice.
    fn add_rows(
        &self,
        x: &mut Self::Tensor,
        rows: &[u32],
        weights: &[f32],
        y: &Self::Tensor,
    ) -> Result<(), Error>;

    /// `x = cap · tanh(x / cap)`, in place.
    fn soft_cap(&self, x: &mut Self::Tensor, cap: f32) -> Result<(), Error>;

    // Comparing.

    /// The first row that holds a NaN or an infinity.
    fn first_non_finite(&self, x: &Self::Tensor) -> Result<Option<usize>, Error>;

    /// How far `converted` is from `source`, of the same shape; sums in fp64.
    fn difference(&self, source: &Self::Tensor, converted: &Self::Tensor) -> Result<Difference, Error>;

    /// For each row of logits `[m, vocabulary]` the negative log likelihood of its target, in nats.
    fn negative_log_likelihood(&self, logits: &Self::Tensor, targets: &[u32]) -> Result<Vec<f32>, Error>;

    /// Compares the distributions that two models' logits `[m, vocabulary]` give, row by row. Equal logits
    /// give a divergence of exactly 0.
    fn compare_logits(
        &self,
        source: &Self::Tensor,
        converted: &Self::Tensor,
        targets: &[u32],
    ) -> Result<Vec<TokenScore>, Error>;
}

/// Rotary position embedding: pair j of a head (columns j and j + pairs: the half-split kind) turns by
/// `position · frequencies[j]`; cosine and sine are then multiplied by `scale`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Radians a position, one a pair of columns.
    pub frequencies: Vec<f32>,
    /// The factor that YaRN and LongRoPE put on cosine and sine; 1 elsewhere.
    pub scale: f32,
}

/// Shape of an attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Columns of a head.
    pub head_dim: usize,
    /// Factor on q · k, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Rows of a window of text.
    pub window: usize,
    /// How many tokens back a token sees, itself included; all where absent.
    pub sliding: Option<usize>,
    /// `cap · tanh(score / cap)` before the softmax.
    pub soft_cap: Option<f32>,
}

/// The function of a gated MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + exp(−x))`.
    Silu,
    /// GELU by tanh (`gelu_pytorch_tanh`, `gelu_new`).
    GeluTanh,
    /// GELU by erf (`gelu`).
    Gelu,
}

/// How far one matrix is from another.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Difference {
    /// Σ (source − converted)².
    pub squared_error: f64,
    /// Σ source².
    pub squared_source: f64,
    /// Σ converted².
    pub squared_converted: f64,
    /// Σ source · converted.
    pub product: f64,
    /// max |source − converted|.
    pub max_error: f64,
}

/// What two models say of one token.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TokenScore {
    /// Negative log likelihood of the target by the source, nats.
    pub source_nll: f32,
    /// The same by the converted model.
    pub converted_nll: f32,
    /// KL(source ‖ converted), nats; rounding can make it a little negative.
    pub kl: f32,
    /// KL(converted ‖ source).
    pub reverse_kl: f32,
    /// Whether both find the same token most likely (of equals, the first).
    pub top1_agrees: bool,
}
