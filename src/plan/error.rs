//! Why no plan can be made.

use super::readers::Objection;
use crate::{Diagnose, Kind};
use requant_formats::exl2::MAX_GROUP_ROWS;
use requant_formats::gptq::ZeroConvention;
use std::path::{Path, PathBuf};

/// Why no plan can be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The architecture isn't in the table.
    #[error("architecture {} can't be converted to EXL2", found.as_deref().unwrap_or("(none given)"))]
    Architecture {
        /// `architectures` of the configuration.
        found: Option<String>,
    },
    /// Every module stays dense.
    #[error("no module would be quantized")]
    NothingToQuantize,
    /// The target is below or above what the format can do for this model.
    #[error("{asked} bpw can't be reached: this model goes from {lowest:.4} to {highest:.4} bpw")]
    Infeasible {
        /// bpw asked for.
        asked: f64,
        /// bpw of the cheapest options.
        lowest: f64,
        /// bpw of the dearest options.
        highest: f64,
        /// Both without the user's `set` and `min`, where these narrow it.
        unruled: Option<(f64, f64)>,
    },
    /// A module is EXL2 already.
    #[error("the module is EXL2 already")]
    AlreadyExl2 {
        /// Name in the source.
        module: String,
    },
    /// A dense member of a quantized set, and the user wants none.
    #[error("the module is dense while others of its set are quantized")]
    DenseMember {
        /// Name in the source.
        module: String,
    },
    /// A bias that exllamav2 would refuse.
    #[error("the bias isn't zero, but exllamav2 expects none for this architecture")]
    UnexpectedBias {
        /// The bias.
        tensor: String,
        /// The flag of `config.json` that makes it expected, where that would work.
        way_out: Option<&'static str>,
    },
    /// A bias that exllamav2 can't do without.
    #[error("exllamav2 expects a bias, and the source has none")]
    MissingBias {
        /// The bias.
        tensor: String,
    },
    /// A linear of the architecture isn't in the checkpoint.
    #[error("the module is missing")]
    MissingModule {
        /// Name in the source.
        module: String,
    },
    /// A dense linear of an architecture that stores these transposed.
    #[error("dense linears of this architecture are stored transposed, which is not supported")]
    TransposedDense {
        /// Name in the source.
        module: String,
    },
    /// A bias on the output head.
    #[error("the output head has a bias, which exllamav2 does not support")]
    HeadBias {
        /// The bias.
        tensor: String,
    },
    /// A value of a dense tensor that fp16 can't hold.
    #[error("element {position:?} is {value}, which fp16 can't hold")]
    Overflow {
        /// File of the source.
        file: PathBuf,
        /// Tensor of the source.
        tensor: String,
        /// Index of the element along each axis.
        position: Vec<usize>,
        /// Its value.
        value: f32,
    },
    /// A weight that is not finite.
    #[error("the weight at row {row}, column {column} of [in_features, out_features] is {value} as fp16")]
    NotFinite {
        /// File of the source.
        file: PathBuf,
        /// Tensor of the source: the scales of a GPTQ module, else its weight.
        tensor: String,
        /// Row of the weight.
        row: usize,
        /// Column of the weight.
        column: usize,
        /// What it decodes to.
        value: f32,
    },
    /// The hidden size keeps the head from being quantized.
    #[error("the head can't be quantized: hidden_size {hidden} is no multiple of 32, or above 65536")]
    HeadSize {
        /// k of the head.
        hidden: usize,
    },
    /// The group size isn't one of the format's.
    #[error("group size {found} is no multiple of 32 from 32 to {MAX_GROUP_ROWS}")]
    GroupSize {
        /// The size asked for.
        found: usize,
    },
    /// A rule's pattern is no regular expression.
    #[error("{pattern:?} is no regular expression: {source}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        #[source]
        source: Box<fancy_regex::Error>,
    },
    /// A rule matches nothing: most likely a typing error.
    #[error("{pattern:?} matches no quantized module")]
    UnusedRule {
        /// The pattern.
        pattern: String,
        /// Whether it matches the output head, which is outside such rules.
        head: bool,
    },
    /// Nothing is quantized, so that there is nothing to lay out anew.
    #[error("no module is quantized")]
    NothingQuantized,
    /// A module's groups can't be split into the size asked for.
    #[error("groups of {found} rows can't be split into equal groups of {asked}")]
    GroupSplit {
        /// Name in the source.
        module: String,
        /// Rows of a group.
        found: usize,
        /// The size asked for.
        asked: usize,
    },
    /// An asymmetric 8-bit module has no wider width to be re-centred in.
    #[error("the module is asymmetric at 8 bits, which can't be re-centred exactly")]
    CannotRecentre {
        /// Name in the source.
        module: String,
    },
    /// Zero points that the convention doesn't have.
    #[error("{count} zero points of {zero} can't be stored as {convention}")]
    ZeroNotStorable {
        /// Name in the source.
        module: String,
        /// The convention.
        convention: ZeroConvention,
        /// The zero point.
        zero: u16,
        /// How often it occurs.
        count: usize,
    },
    /// A scale overflows fp16.
    #[error("a scale is {value}, which fp16 can't hold")]
    ScaleOverflow {
        /// Name in the source.
        module: String,
        /// Its value.
        value: f32,
    },
    /// Scales that fp16 doesn't have.
    #[error("{count} {dtype} scales aren't representable in fp16")]
    ScaleRounded {
        /// Name in the source.
        module: String,
        /// How many.
        count: u64,
        /// Their type.
        dtype: String,
    },
    /// The program that is to read the output wouldn't.
    #[error("{reader} can't read the module: {objection}")]
    ReaderRefuses {
        /// Name in the source.
        module: String,
        /// The reader.
        reader: &'static str,
        /// Why.
        objection: Objection,
    },
    /// The instruction set that was asked for can't be taken.
    #[error(transparent)]
    Simd(#[from] crate::quantize::SimdError),
    /// A fixed width is below the floor.
    #[error("--set gives the module {set} bits, but --min asks for at least {min}")]
    RulesDisagree {
        /// Name in the source.
        module: String,
        /// The fixed width.
        set: u32,
        /// The floor.
        min: u32,
    },
}

impl Error {
    /// Whether it is config.json that says what is wrong.
    pub(crate) fn is_of_config(&self) -> bool {
        matches!(self, Self::Architecture { .. } | Self::HeadSize { .. })
    }
}

impl Diagnose for Error {
    fn code(&self) -> &'static str {
        match self {
            Self::Architecture { .. } => "plan.architecture",
            Self::NothingToQuantize => "plan.nothing_to_quantize",
            Self::Infeasible { .. } => "plan.infeasible",
            Self::AlreadyExl2 { .. } => "plan.already_exl2",
            Self::DenseMember { .. } => "plan.dense_member",
            Self::UnexpectedBias { .. } => "plan.unexpected_bias",
            Self::MissingBias { .. } => "plan.missing_bias",
            Self::MissingModule { .. } => "plan.missing_module",
            Self::TransposedDense { .. } => "plan.transposed_dense",
            Self::HeadBias { .. } => "plan.head_bias",
            Self::Overflow { .. } => "plan.overflow",
            Self::NotFinite { .. } => "plan.not_finite",
            Self::HeadSize { .. } => "plan.head_size",
            Self::GroupSize { .. } => "plan.group_size",
            Self::Pattern { .. } => "plan.pattern",
            Self::UnusedRule { .. } => "plan.unused_rule",
            Self::RulesDisagree { .. } => "plan.rules_disagree",
            Self::NothingQuantized => "plan.nothing_quantized",
            Self::GroupSplit { .. } => "plan.group_split",
            Self::CannotRecentre { .. } => "plan.cannot_recentre",
            Self::ZeroNotStorable { .. } => "plan.zero_not_storable",
            Self::ScaleOverflow { .. } => "plan.scale_overflow",
            Self::ScaleRounded { .. } => "plan.scale_rounded",
            Self::ReaderRefuses { .. } => "plan.reader_refuses",
            Self::Simd(error) => error.code(),
        }
    }

    fn kind(&self) -> Kind {
        match self {
            Self::Infeasible { .. }
            | Self::GroupSize { .. }
            | Self::Pattern { .. }
            | Self::UnusedRule { .. }
            | Self::RulesDisagree { .. } => Kind::Usage,
            Self::Simd(error) => error.kind(),
            _ => Kind::Input,
        }
    }

    fn file(&self) -> Option<&Path> {
        match self {
            Self::NotFinite { file, .. } | Self::Overflow { file, .. } => Some(file),
            _ => None,
        }
    }

    fn tensor(&self) -> Option<&str> {
        match self {
            Self::NotFinite { tensor, .. } | Self::Overflow { tensor, .. } | Self::HeadBias { tensor } => {
                Some(tensor)
            }
            Self::AlreadyExl2 { module }
            | Self::DenseMember { module }
            | Self::UnexpectedBias { tensor: module, .. }
            | Self::MissingBias { tensor: module }
            | Self::MissingModule { module }
            | Self::TransposedDense { module }
            | Self::RulesDisagree { module, .. }
            | Self::GroupSplit { module, .. }
            | Self::CannotRecentre { module }
            | Self::ZeroNotStorable { module, .. }
            | Self::ScaleOverflow { module, .. }
            | Self::ScaleRounded { module, .. }
            | Self::ReaderRefuses { module, .. } => Some(module),
            _ => None,
        }
    }

    fn hint(&self) -> Option<String> {
        Some(match self {
            Self::Architecture { .. } => {
                let known = crate::arch::ARCHITECTURES.iter().filter(|a| a.exllamav2);
                let names: Vec<&str> = known.map(|a| a.name).collect();
                format!(
                    "these can: {}; --any-arch converts another as a Llama, which exllamav2 takes it for",
                    names.join(", ")
                )
            }
            Self::NothingToQuantize => {
                "the source has no quantized module of sizes that EXL2 can hold (multiples of 32)".into()
            }
            Self::Infeasible { lowest, highest, unruled: None, .. } => {
                format!("choose a --bpw from {lowest:.4} to {highest:.4}")
            }
            Self::Infeasible { lowest, highest, unruled: Some((low, high)), .. } => format!(
                "--min and --set allow no less than {lowest:.4} and no more than {highest:.4}; without them it goes \
                 from {low:.4} to {high:.4}"
            ),
            Self::AlreadyExl2 { .. } => "convert from the GPTQ checkpoint that it was made of".into(),
            Self::DenseMember { .. } => {
                "use --dense-members quantize (it gets the widest option) or dequantize-set (the set becomes fp16)"
                    .into()
            }
            Self::UnexpectedBias { way_out: Some(flag), .. } => {
                format!("set \"{flag}\": true in the source's config.json: exllamav2 then expects the biases")
            }
            Self::UnexpectedBias { way_out: None, .. } => {
                "exllamav2 has no place for it; this model can't become EXL2 without changing it".into()
            }
            Self::MissingBias { .. } | Self::MissingModule { .. } => "the checkpoint is incomplete: download it again".into(),
            Self::NotFinite { .. } | Self::Overflow { .. } => {
                "EXL2 stores fp16; the file may be damaged: compare its hash with the hub's".into()
            }
            Self::HeadSize { .. } => "leave --head-bits out: the head then stays fp16".into(),
            Self::GroupSize { .. } => "32, 64 and 128 are usual".into(),
            Self::UnusedRule { head: true, .. } => {
                "the output head is outside these rules: --head-bits gives it a width".into()
            }
            Self::UnusedRule { .. } => "`requant inspect` lists the modules' names".into(),
            Self::NothingQuantized => "the source is dense: --to exl2 quantizes it".into(),
            Self::GroupSplit { .. } => "choose a divisor of the source's group size".into(),
            Self::CannotRecentre { .. } => "without --sym or --for it stays asymmetric; --bits 8 or 4 requantizes it, which changes weights".into(),
            Self::ZeroNotStorable { convention: ZeroConvention::V1, .. } => {
                "readers disagree on what v1 stores for 0: use --zeros v2, or --sym to re-centre exactly".into()
            }
            Self::ZeroNotStorable { .. } => "use --zeros v1, or --sym to re-centre exactly".into(),
            Self::ScaleOverflow { .. } => "leave --for out: scales then keep their type".into(),
            Self::ScaleRounded { .. } => "--allow-rounding rounds and reports them; without --for they keep their type".into(),
            Self::ReaderRefuses { objection, .. } => objection.hint().into(),
            Self::Simd(error) => return error.hint(),
            Self::TransposedDense { .. } => "a source whose decoder is all GPTQ can become EXL2 or GPTQ".into(),
            Self::HeadBias { .. } | Self::Pattern { .. } | Self::RulesDisagree { .. } => return None,
        })
    }
}
