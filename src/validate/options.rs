//! What a validation is to measure.

use super::{Gates, Text};

/// Tokens where no number is given.
pub const DEFAULT_TOKENS: usize = 8192;

/// What a validation is to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// What the models are compared on.
    pub text: Text,
    /// Tokens at most.
    pub tokens: usize,
    /// Tokens a window; 512 or the model's positions, whichever is less, where absent.
    pub window: Option<usize>,
    /// Whether each window begins with the BOS token.
    pub bos: bool,
    /// The perplexity of each converted layer alone; not measured where absent.
    pub swap_in: Option<SwapIn>,
    /// Limits.
    pub gates: Gates,
    /// Bytes of the host's memory that hidden states of variants may take, of all devices together: those that a
    /// device with its own memory has no room for. What needs more is measured in several passes over the model.
    pub memory: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            text: Text::Sample,
            tokens: DEFAULT_TOKENS,
            window: None,
            bos: false,
            swap_in: None,
            gates: Gates::default(),
            memory: 4 << 30,
        }
    }
}

/// Which layers are swapped in, and on how much text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwapIn {
    /// Which.
    pub layers: Layers,
    /// Tokens at most: the first windows of the text.
    pub tokens: usize,
}

/// A choice of linears.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Layers {
    /// All, and the models of both block by block.
    #[default]
    All,
    /// So many: those whose outputs are furthest off.
    Worst(usize),
    /// Those whose name in the source this regular expression finds.
    Matching(String),
}
