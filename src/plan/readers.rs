//! What each reader accepts: one table, for `convert --for` and `inspect --for`.
//!
//! Facts are those of the readers' own code, as far as it was read; `why` texts are shown to the user.

use super::relayout::{self, GptqDecision};
use super::{Decision, Error, GptqOptions, Plan, PlannedModule};
use crate::checkpoint::{Checkpoint, Gptq, Layout, Module};
use requant_formats::gptq::ZeroConvention;

/// A program that loads GPTQ checkpoints, and perhaps EXL2.
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
    /// Whether it reads a last group that is shorter than the others.
    pub short_group: ShortGroup,
    /// Conventions of zero points that it reads.
    pub zeros: &'static [ZeroConvention],
    /// Its columns are multiples of this.
    pub column_multiple: usize,
    /// Whether it joins q/k/v and gate/up, whose parts must then be stored alike.
    pub fuses: bool,
    /// Whether each module may have a width and group size of its own.
    pub mixes_widths: bool,
    /// Whether it looks at `g_idx` only where the configuration says `desc_act`.
    pub obeys_desc_act: bool,
    /// Whether every GPTQ module must have a `g_idx`.
    pub needs_g_idx: bool,
    /// Whether it insists on `bits`, `group_size` and `desc_act` in the configuration, and loads by it alone.
    pub needs_keys: bool,
    /// Whether it loads EXL2.
    pub exl2: bool,
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

/// Whether a reader takes a last group with fewer rows than the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShortGroup {
    /// Always.
    Read,
    /// Where the rows are in order: it gives every group but the last in order the same number of rows.
    ReadInOrder,
    /// Never: rows must be a multiple of the group size.
    Refused,
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
    short_group: ShortGroup::Read,
    zeros: BOTH,
    column_multiple: 32,
    fuses: false,
    mixes_widths: true,
    obeys_desc_act: false,
    needs_g_idx: false,
    needs_keys: false,
    exl2: false,
};

/// Before 2026: act-order, and asymmetric files by the exllama kernel, which reads v1 only.
const VLLM_0_10: Reader = Reader {
    name: "vllm-0.10",
    bits: &[2, 3, 4, 8],
    symmetric_only: false,
    group_sizes: GroupSizes::MultiplesOf32,
    act_order: true,
    equal_groups: true,
    short_group: ShortGroup::Refused,
    zeros: V1,
    column_multiple: 32,
    fuses: true,
    mixes_widths: true,
    obeys_desc_act: true,
    needs_g_idx: false,
    needs_keys: true,
    exl2: false,
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
        short_group: ShortGroup::Refused,
        zeros: BOTH,
        column_multiple: 64,
        fuses: true,
        mixes_widths: true,
        obeys_desc_act: false,
        needs_g_idx: false,
        needs_keys: true,
        exl2: false,
    },
    VLLM_0_10,
    Reader {
        name: "sglang",
        bits: &[4, 8],
        symmetric_only: true,
        group_sizes: MARLIN_SIZES,
        act_order: true,
        equal_groups: true,
        short_group: ShortGroup::Refused,
        zeros: BOTH,
        column_multiple: 64,
        fuses: true,
        mixes_widths: true,
        obeys_desc_act: true,
        needs_g_idx: false,
        needs_keys: true,
        exl2: false,
    },
    Reader {
        name: "exllamav2",
        bits: &[4],
        symmetric_only: false,
        group_sizes: GroupSizes::PowersOfTwo,
        act_order: true,
        equal_groups: true,
        short_group: ShortGroup::ReadInOrder,
        zeros: V1,
        column_multiple: 32,
        fuses: false,
        mixes_widths: true,
        obeys_desc_act: false,
        needs_g_idx: false,
        needs_keys: false,
        exl2: true,
    },
    GPTQMODEL,
    // Loads through GPTQModel.
    Reader { name: "transformers", ..GPTQMODEL },
    // Marlin, or where that doesn't do exllamav2's kernels or Triton, which reads no 3 bits; 3.x of 2025. Triton
    // alone takes a short last group, and Marlin is tried first.
    Reader {
        name: "tgi",
        bits: &[2, 4, 8],
        symmetric_only: false,
        group_sizes: GroupSizes::PowersOfTwo,
        act_order: true,
        equal_groups: true,
        short_group: ShortGroup::Refused,
        zeros: V1,
        column_multiple: 32,
        fuses: true,
        mixes_widths: false,
        obeys_desc_act: true,
        needs_g_idx: true,
        needs_keys: false,
        exl2: true,
    },
    // Its kernels are those of vLLM before 2025, and its configuration has one width for all.
    Reader { name: "aphrodite", mixes_widths: false, exl2: true, ..VLLM_0_10 },
];

impl Reader {
    /// The reader of that name.
    pub fn named(name: &str) -> Option<&'static Self> {
        READERS.iter().find(|reader| reader.name == name)
    }

    /// Whether it is exllamav2, which reads tensors and hardly any configuration.
    pub fn is_exllamav2(&self) -> bool {
        self.name == "exllamav2"
    }

    /// Whether it undoes a borrow among stored zero points, as GPTQModel does, which caused it.
    pub fn reads_word_wise(&self) -> bool {
        matches!(self.name, "gptqmodel" | "transformers")
    }

    /// Why it wouldn't read a GPTQ module as it is stored, as far as its tensors tell. Zero points are left out:
    /// what a reader takes them for, its configuration decides.
    pub fn objection_to(&self, module: &Module, gptq: &Gptq) -> Option<Objection> {
        let any_zeros = Self { zeros: BOTH, ..*self };
        let stored = relayout::from_gptq(module, gptq, &GptqOptions::default()).ok()?;
        any_zeros.objection(&stored, module.in_features(), module.out_features())
    }

    /// The first module, by its name, that is stored otherwise than those which this reader joins it with.
    pub fn objection_to_siblings(&'static self, checkpoint: &Checkpoint) -> Option<String> {
        let modules = Plan::same(checkpoint).modules;
        match relayout::check_siblings(checkpoint, self, &modules) {
            Err(crate::Error::Plan(Error::ReaderRefuses { module, .. })) if self.fuses => Some(module),
            _ => None,
        }
    }

    /// The first module, by its name, with another width or group size than those before it, where this reader
    /// has one for all. One group of all rows goes with any size.
    pub fn objection_to_mixture(&self, checkpoint: &Checkpoint) -> Option<String> {
        self.mixed(checkpoint, &Plan::same(checkpoint).modules)
    }

    pub(super) fn mixed(&self, checkpoint: &Checkpoint, modules: &[PlannedModule]) -> Option<String> {
        let (mut width, mut size) = (None, None);
        let mut differs = |module: &PlannedModule| {
            let stored = match (&module.decision, checkpoint.module(&module.source).map(Module::layout)) {
                (Decision::Gptq(d), _) => (d.bits, d.groups, d.stated_group_size(module.in_features)),
                (Decision::Kept, Some(Layout::Gptq(g))) => (g.shape.bits, g.shape.groups, g.group_size),
                _ => return false,
            };
            let (bits, groups, rows) = stored;
            *width.get_or_insert(bits) != bits || groups > 1 && *size.get_or_insert(rows) != rows
        };
        modules
            .iter()
            .filter(|_| !self.mixes_widths)
            .find(|module| differs(module))
            .map(|module| module.source.clone())
    }

    /// Whether a module's last group is shorter than it reads.
    fn cuts_short(&self, module: &GptqDecision, k: usize) -> bool {
        let short = module.equal_groups && module.groups > 1 && !k.is_multiple_of(module.group_size);
        short
            && match self.short_group {
                ShortGroup::Read => false,
                ShortGroup::ReadInOrder => module.act_order,
                ShortGroup::Refused => true,
            }
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
        } else if self.cuts_short(module, k) {
            Some(Objection::ShortGroup { rows: k, size })
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
    /// A last group of fewer rows.
    #[error("it does not load a last group shorter than the others: {rows} rows in groups of {size}")]
    ShortGroup {
        /// k.
        rows: usize,
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
    /// Modules of different widths or group sizes.
    #[error("it has one width and group size for all modules, and this one differs from the first")]
    Mixed,
}

impl Objection {
    pub(super) fn hint(self) -> &'static str {
        match self {
            Self::Bits { .. } => {
                "--bits 4 or 8 widens exactly; a narrower width requantizes, which changes weights"
            }
            Self::Asymmetric => "--sym re-centres exactly: 2 and 3 bits to 4, 4 bits to 8",
            Self::GroupSize { .. } | Self::ShortGroup { .. } => {
                "--group-size splits groups exactly into a size that divides them"
            }
            Self::ActOrder | Self::UnequalGroups => {
                "requantizing onto groups in order would help, which requant can't do yet; --for vllm-0.10, sglang, \
                 exllamav2 and gptqmodel obey g_idx"
            }
            Self::Zeros { .. } => "--zeros chooses the convention",
            Self::Columns { .. } => "this model's sizes don't fit that engine",
            Self::Mixed => "--bits and --group-size can make them alike",
            Self::Siblings => "give q/k/v, and gate/up, the same --bits and --group-size",
        }
    }
}
