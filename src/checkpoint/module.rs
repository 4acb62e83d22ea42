//! A linear layer of a checkpoint, as its tensors say.

use super::zeros::Zeros;
use crate::arch::{Columns, Linear};
use requant_formats::exl2::GroupTable;
use requant_formats::gptq::{GIdxKind, Shape};
use safetensors::Dtype;

/// A linear layer: a weight of `[in_features, out_features]` and perhaps a bias.
#[derive(Clone, Debug)]
pub struct Module {
    pub(super) name: String,
    pub(super) in_features: usize,
    pub(super) out_features: usize,
    pub(super) layout: Layout,
    pub(super) bias: Option<Bias>,
    pub(super) linears: Vec<Linear>,
    /// Of a part: where it lies in the stored module.
    pub(super) columns: Option<Columns>,
    /// n of the stored module, of which a part has fewer.
    pub(super) whole_out_features: usize,
    /// Rows of a group as configured: needed where the groups of `scales` don't tell.
    pub(super) stated_group_size: Option<usize>,
}

impl Module {
    /// Its name: that of its tensors without `.qweight`, `.q_weight` or `.weight`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// k, rows of the weight.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// n, columns of the weight; of an EXL2 module without its padding.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Number of weights, k · n.
    pub fn weights(&self) -> u64 {
        self.in_features as u64 * self.out_features as u64
    }

    /// How it is stored.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Its bias, if there is one.
    pub fn bias(&self) -> Option<Bias> {
        self.bias
    }

    /// Its place in the architecture; `None` for the head, for a fused module, and where the architecture is
    /// unknown.
    pub fn linear(&self) -> Option<&Linear> {
        match self.linears.as_slice() {
            [linear] => Some(linear),
            _ => None,
        }
    }

    /// The architecture's linears that it holds: several in a fused module.
    pub fn linears(&self) -> &[Linear] {
        &self.linears
    }

    /// Of a part ([`Checkpoint::part`](super::Checkpoint::part)): its columns of the stored module.
    pub fn columns(&self) -> Option<&Columns> {
        self.columns.as_ref()
    }

    /// Names of its tensors, whether they exist or not: those of its layout, then `bias`.
    pub fn tensor_names(&self) -> impl Iterator<Item = String> + '_ {
        self.layout.suffixes().iter().chain(["bias"].iter()).map(|suffix| format!("{}.{suffix}", self.name))
    }
}

/// What a bias holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bias {
    /// Only zeros: AutoGPTQ and old optimum write one for every linear.
    AllZero,
    /// Something else.
    NonZero,
}

/// How a module's weight is stored: what its tensors say, never what the configuration claims.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Layout {
    /// `qweight`, `qzeros`, `scales`, perhaps `g_idx`.
    Gptq(Gptq),
    /// `q_weight`, `q_invperm`, `q_scale`, `q_scale_max`, `q_groups`.
    Exl2(Exl2),
    /// `weight`, `[out_features, in_features]`.
    Dense {
        /// Type of its elements: F16, BF16 or F32.
        dtype: Dtype,
    },
}

/// A GPTQ module.
#[derive(Clone, Debug)]
pub struct Gptq {
    /// Sizes and width.
    pub shape: Shape,
    /// Rows of a group.
    pub group_size: usize,
    /// What `g_idx` holds.
    pub g_idx: GIdxKind,
    /// Whether every group has `group_size` rows (the last one at most that).
    pub equal_groups: bool,
    /// Type of `scales`: F16, BF16 or F32.
    pub scales: Dtype,
    /// How its zero points are stored.
    pub zeros: Zeros,
}

/// An EXL2 module.
#[derive(Clone, Debug)]
pub struct Exl2 {
    /// Widths and rows of its groups.
    pub groups: GroupTable,
    /// n as stored, padded to a multiple of 32.
    pub stored_out_features: usize,
}

impl Layout {
    /// `gptq`, `exl2` or `dense`.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Gptq(_) => "gptq",
            Self::Exl2(_) => "exl2",
            Self::Dense { .. } => "dense",
        }
    }

    /// Whether it is GPTQ or EXL2.
    pub const fn is_quantized(&self) -> bool {
        !matches!(self, Self::Dense { .. })
    }

    /// Suffixes of its tensors, the bias aside; the first is there in any case.
    pub(super) const fn suffixes(&self) -> &'static [&'static str] {
        match self {
            Self::Gptq(_) => &["qweight", "qzeros", "scales", "g_idx"],
            Self::Exl2(_) => &["q_weight", "q_invperm", "q_scale", "q_scale_max", "q_groups", "q_perm"],
            Self::Dense { .. } => &["weight"],
        }
    }
}
