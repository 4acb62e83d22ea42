//! What a validation found: the schema of its JSON, and all that the page shows.

use serde::Serialize;

/// Version of the schema; raised when a field changes its meaning or goes. `docs/validation.md` has every field.
pub const SCHEMA: u32 = 1;

/// The report of a validation. It holds no time of day, host or path.
#[derive(Clone, Debug, Serialize)]
pub struct Validation {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Name and version of the tool.
    pub tool: String,
    /// The model that was converted.
    pub source: Side,
    /// The result of the conversion.
    pub converted: Side,
    /// What it was measured on and how.
    pub conditions: Conditions,
    /// Whether all of it is right: no layer broken, nothing non-finite, every gate met.
    pub verdict: Verdict,
    /// Where a NaN or an infinity was met first, if anywhere.
    pub non_finite: Option<NonFinite>,
    /// Both models, token by token; `None` where the forward pass isn't supported, and `not_run` says why.
    pub model: Option<ModelScores>,
    /// Each linear of the source, in block order.
    pub layers: Vec<LayerScores>,
    /// After each block, the source's blocks up to it replaced by the converted ones.
    pub cumulative: Vec<BlockScores>,
    /// The gates that the user set.
    pub gates: Vec<Gate>,
    /// What was left out, and why, a sentence each.
    pub not_run: Vec<String>,
    /// What was odd.
    pub warnings: Vec<crate::Warning>,
}

/// The part of a validation that the report of a conversion repeats.
#[derive(Clone, Debug, Serialize)]
pub struct Summary<'a> {
    /// The outcome.
    pub verdict: Verdict,
    /// What it was measured on.
    pub conditions: &'a Conditions,
    /// Both models.
    pub model: Option<&'a ModelScores>,
    /// The gates.
    pub gates: &'a [Gate],
}

impl Validation {
    /// Whether nothing is broken and every gate is met.
    pub fn is_good(&self) -> bool {
        matches!(self.verdict, Verdict::Exact | Verdict::Passed)
    }

    /// What the report of a conversion says of it.
    pub fn summary(&self) -> Summary<'_> {
        let Self { verdict, conditions, model, gates, .. } = self;
        Summary { verdict: *verdict, conditions, model: model.as_ref(), gates }
    }
}

/// One of the two models.
#[derive(Clone, Debug, Serialize)]
pub struct Side {
    /// The directory's name, without its path.
    pub name: String,
    /// sha256 over its files' names, sizes and headers.
    pub fingerprint: String,
    /// `architectures[0]`.
    pub architecture: Option<String>,
    /// Stored bits a weight of the quantized decoder linears.
    pub bpw: f64,
    /// Bytes of all tensors.
    pub bytes: u64,
}

/// What it was measured on.
#[derive(Clone, Debug, Serialize)]
pub struct Conditions {
    /// The text: a file's name, or `built-in`.
    pub text: String,
    /// sha256 of the token ids as little-endian u32.
    pub token_ids_sha256: String,
    /// Tokens used.
    pub tokens: usize,
    /// Tokens a window; windows don't overlap.
    pub window: usize,
    /// Whether every window begins with the BOS token.
    pub bos: bool,
    /// Tokens used for the swap-in perplexities.
    pub layer_tokens: usize,
    /// The source's perplexity on these, with which the swap-in perplexities compare; `None` without any.
    pub layer_perplexity: Option<f64>,
    /// The device in words.
    pub device: String,
}

/// The outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Every value as decoded is the source's.
    Exact,
    /// All gates met, nothing broken.
    Passed,
    /// A gate was missed.
    GateMissed,
    /// A layer doesn't hold what the conversion promised: a bug or a damaged file.
    Broken,
    /// A NaN or an infinity.
    NonFinite,
}

/// Where a NaN or an infinity was met.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NonFinite {
    /// In which model.
    pub model: ModelSide,
    /// The block whose output holds it; `None` for the logits.
    pub layer: Option<usize>,
    /// The first linear of the block whose output holds it: its name in that model. `None` where it arose
    /// elsewhere in the block, or in the logits.
    pub module: Option<String>,
    /// Place of the token in the text.
    pub token: usize,
}

/// One of the models of a validation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelSide {
    /// The source.
    Source,
    /// The converted model.
    Converted,
    /// The source with a part converted.
    Variant,
}

/// A mean over tokens, with its standard error over windows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Mean {
    /// The mean.
    pub mean: f64,
    /// Standard error over windows; 0 with one window.
    pub standard_error: f64,
}

/// Both models.
#[derive(Clone, Debug, Serialize)]
pub struct ModelScores {
    /// `exp` of the mean negative log likelihood of the source.
    pub source_perplexity: f64,
    /// Of the converted model.
    pub converted_perplexity: f64,
    /// Negative log likelihood of the converted model minus the source's, nats a token.
    pub nll_increase: Mean,
    /// KL(source ‖ converted), nats a token.
    pub kl: Mean,
    /// KL(converted ‖ source).
    pub reverse_kl: Mean,
    /// Share of tokens where both find the same token most likely.
    pub top1_agreement: Mean,
    /// 99th percentile of KL over tokens.
    pub kl_p99: f64,
    /// Largest KL of a token.
    pub kl_max: f64,
    /// Tokens that were predicted.
    pub predictions: usize,
}

/// One linear.
#[derive(Clone, Debug, Serialize)]
pub struct LayerScores {
    /// Name in the source.
    pub source: String,
    /// Name in the converted model.
    pub converted: String,
    /// Block; `None` for the head.
    pub layer: Option<usize>,
    /// `q`, `k`, `v`, `o`, `gate`, `up`, `down`, `head`; `other` where the architecture is unknown.
    pub role: String,
    /// Expert, where the block has several.
    pub expert: Option<usize>,
    /// k.
    pub in_features: usize,
    /// n.
    pub out_features: usize,
    /// Layout in the source, in words.
    pub layout_before: String,
    /// Layout in the converted model, in words.
    pub layout_after: String,
    /// The same in a word: `gptq`, `exl2` or `dense`.
    pub format: String,
    /// Stored bits a weight in the converted model.
    pub bpw: f64,
    /// Of the weights as decoded: Frobenius norm of the difference over that of the source.
    pub weight_error: f64,
    /// The same as report.json of the conversion promises.
    pub promised_error: Option<f64>,
    /// Of the outputs on real activations; `None` where there are none (unsupported architecture, an expert
    /// that no token chose).
    pub output: Option<OutputScores>,
    /// What is wrong with its layout, if anything.
    pub fault: Option<LayoutFault>,
    /// With this linear (in a mixture of experts: this projection of all experts) converted, all others the
    /// source's.
    pub swap_in: Option<SwapScores>,
}

/// Outputs of a linear on the source's activations.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct OutputScores {
    /// Rows of activations.
    pub rows: usize,
    /// Frobenius norm of the difference over that of the source's output.
    pub relative_error: f64,
    /// Cosine of the two outputs as one vector.
    pub cosine: f64,
    /// Largest difference of an element.
    pub max_error: f64,
}

/// The model with one linear converted.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct SwapScores {
    /// Perplexity.
    pub perplexity: f64,
    /// KL(source ‖ this), nats a token.
    pub kl: f64,
}

/// The model with all blocks up to one converted.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct BlockScores {
    /// The last converted block.
    pub layer: usize,
    /// Perplexity.
    pub perplexity: f64,
    /// KL(source ‖ this), nats a token.
    pub kl: f64,
}

/// Why a layer is broken, as well as can be told.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum LayoutFault {
    /// The error isn't what report.json promises, and no known cause fits.
    NotAsPromised {
        /// Promised relative error.
        promised: f64,
        /// Found relative error.
        found: f64,
    },
    /// Undoing the permutation the other way gives the promised error.
    PermutationInverted,
    /// The rows of these two groups change places.
    GroupsSwapped {
        /// One group, as stored.
        first: usize,
        /// The other.
        second: usize,
    },
    /// Scale indices are off by this.
    ScaleIndexOff {
        /// What was added to each index.
        by: i32,
    },
    /// Zero points are off by this.
    ZeroOff {
        /// What was added to each zero point.
        by: i32,
    },
}

/// A gate and what came of it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Gate {
    /// Which figure.
    pub kind: GateKind,
    /// The user's limit.
    pub limit: f64,
    /// What was measured.
    pub found: f64,
    /// Whether it is met.
    pub met: bool,
}

/// What a gate limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GateKind {
    /// Mean KL(source ‖ converted) at most.
    MaxKl,
    /// Perplexity of the converted model over the source's minus 1 at most.
    MaxPplIncrease,
    /// Top-1 agreement at least.
    MinTop1,
}
