//! What each GPTQ reader accepts: one table.
//!
//! Facts are those of the readers' own code, as far as it was read; `why` texts are shown to the user.

use super::relayout::GptqDecision;
use requant_formats::gptq::ZeroConvention;

/// A program that loads GPTQ checkpoints.
#[derive(Debug)]
pub struct Reader {
    /// Name on the command line.
    pub name: &'static str,
    /// Widths that it loads.
    pub bits: &'static [u32],
    /// Whether it takes every zero point to be `2^(bits − 1)`, whatever is stored.
    pub symmetric_only: bool,
    /// Group sizes that it loads; one group of all rows is taken by every reader.
    pub group_sizes: GroupSizes,
    /// Whether it obeys `g_idx`.
    pub act_order: bool,
    /// Whether it finds a row's group by its place among the sorted rows, so that all groups must be equal.
    pub equal_groups: bool,
    /// Conventions of zero points that it reads.
    pub zeros: &'static [ZeroConvention],
    /// Its columns are multiples of this.
    pub column_multiple: usize,
    /// Whether it joins q/k/v and gate/up, whose parts must then be stored alike.
    pub fuses: bool,
}

/// Group sizes that a reader loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupSizes {
    /// These.
    Listed(&'static [usize]),
    /// Powers of two from 32 on.
    PowersOfTwo,
    /// Multiples of 32.
    MultiplesOf32,
}

const MARLIN_SIZES: GroupSizes = GroupSizes::Listed(&[32, 64, 128]);
const GPTQMODEL_SIZES: GroupSizes = GroupSizes::Listed(&[16, 32, 64, 128, 256, 512, 1024]);
const BOTH: &[ZeroConvention] = &[ZeroConvention::V1, ZeroConvention::V2];
const V1: &[ZeroConvention] = &[ZeroConvention::V1];

const GPTQMODEL: Reader = Reader {
    name: "gptqmodel",
    bits: &[2, 3, 4, 8],
    symmetric_only: false,
    group_sizes: GPTQMODEL_SIZES,
    act_order: true,
    equal_groups: false,
    zeros: BOTH,
    column_multiple: 32,
    fuses: false,
};

/// All readers.
pub const READERS: &[Reader] = &[
    // Ignores g_idx since the removal of act-order in 2026, and stored zero points (Marlin).
    Reader {
        name: "vllm",
        bits: &[4, 8],
        symmetric_only: true,
        group_sizes: MARLIN_SIZES,
        act_order: false,
        equal_groups: true,
        zeros: BOTH,
        column_multiple: 64,
        fuses: true,
    },
    // Before 2026: act-order, and asymmetric files by the exllama kernel, which reads v1 only.
    Reader {
        name: "vllm-0.10",
        bits: &[2, 3, 4, 8],
        symmetric_only: false,
        group_sizes: GroupSizes::MultiplesOf32,
        act_order: true,
        equal_groups: true,
        zeros: V1,
        column_multiple: 32,
        fuses: true,
    },
    Reader {
        name: "sglang",
        bits: &[4, 8],
        symmetric_only: true,
        group_sizes: MARLIN_SIZES,
        act_order: true,
        equal_groups: true,
        zeros: BOTH,
        column_multiple: 64,
        fuses: true,
    },
    Reader {
        name: "exllamav2",
        bits: &[4],
        symmetric_only: false,
        group_sizes: GroupSizes::PowersOfTwo,
        act_order: true,
        equal_groups: true,
        zeros: V1,
        column_multiple: 32,
        fuses: false,
    },
    GPTQMODEL,
    // Loads through GPTQModel.
    Reader { name: "transformers", ..GPTQMODEL },
];

impl Reader {
    /// The reader of that name.
    pub fn named(name: &str) -> Option<&'static Self> {
        READERS.iter().find(|reader| reader.name == name)
    }

    /// Why it wouldn't read a module so stored, if so; and what would help.
    pub(super) fn objection(&self, module: &GptqDecision, k: usize, n: usize) -> Option<Objection> {
        let size = module.stated_group_size(k);
        let one_group = size >= k;
        let size_fits = match self.group_sizes {
            GroupSizes::Listed(sizes) => sizes.contains(&size),
            GroupSizes::PowersOfTwo => size.is_power_of_two() && size >= 32,
            GroupSizes::MultiplesOf32 => size.is_multiple_of(32),
        };
        if !self.bits.contains(&module.bits.get()) {
            Some(Objection::Bits { bits: module.bits.get() })
        } else if self.symmetric_only && !module.symmetric {
            Some(Objection::Asymmetric)
        } else if !one_group && !size_fits {
            Some(Objection::GroupSize { size })
        } else if module.act_order && !self.act_order {
            Some(Objection::ActOrder)
        } else if self.equal_groups && !module.equal_groups {
            Some(Objection::UnequalGroups)
        } else if !self.zeros.contains(&module.zeros) {
            Some(Objection::Zeros { zeros: module.zeros })
        } else if !n.is_multiple_of(self.column_multiple) {
            Some(Objection::Columns { multiple: self.column_multiple })
        } else {
            None
        }
    }
}

/// Why a reader can't take a module.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Objection {
    /// The width.
    #[error("it does not load {bits} bits")]
    Bits {
        /// The width.
        bits: u32,
    },
    /// Zero points.
    #[error("it ignores stored zero points, and the module is asymmetric")]
    Asymmetric,
    /// The size of groups.
    #[error("it does not load groups of {size} rows")]
    GroupSize {
        /// Rows of a group.
        size: usize,
    },
    /// `g_idx`.
    #[error(
        "it ignores g_idx, and the module's rows are in act-order that can't be folded into another module"
    )]
    ActOrder,
    /// Groups of different sizes.
    #[error("it finds a row's group by its place, and the module's groups differ in size")]
    UnequalGroups,
    /// The convention of zero points.
    #[error("it does not read {zeros} zero points")]
    Zeros {
        /// The convention.
        zeros: ZeroConvention,
    },
    /// Columns.
    #[error("its columns must be a multiple of {multiple}")]
    Columns {
        /// Of what.
        multiple: usize,
    },
    /// Joined modules.
    #[error("it joins the module with its siblings, which are stored differently")]
    Siblings,
}

impl Objection {
    pub(super) fn hint(self) -> &'static str {
        match self {
            Self::Bits { .. } => "--bits 4 or 8 widens exactly; a narrower width needs quantizing anew",
            Self::Asymmetric => "--sym re-centres exactly: 2 and 3 bits to 4, 4 bits to 8",
            Self::GroupSize { .. } => "--group-size splits groups exactly into a size that divides them",
            Self::ActOrder | Self::UnequalGroups => {
                "requantizing onto groups in order would help, which requant can't do yet; --for vllm-0.10, sglang, \
                 exllamav2 and gptqmodel obey g_idx"
            }
            Self::Zeros { .. } => "--zeros chooses the convention",
            Self::Columns { .. } => "this model's sizes don't fit that engine",
            Self::Siblings => "give q/k/v, and gate/up, the same --bits and --group-size",
        }
    }
}
