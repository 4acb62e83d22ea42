//! Why no plan can be made.

use crate::{Diagnose, Kind};
use requant_formats::exl2::MAX_GROUP_ROWS;
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
        /// Name in the source.
        module: String,
        /// The flag of `config.json` that makes it expected, where that would work.
        way_out: Option<&'static str>,
    },
    /// A bias that exllamav2 can't do without.
    #[error("exllamav2 expects a bias, and the source has none")]
    MissingBias {
        /// Name in the source.
        module: String,
    },
    /// A bias on the output head.
    #[error("the output head has a bias, which exllamav2 does not support")]
    HeadBias,
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
    },
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
            Self::HeadBias => "plan.head_bias",
            Self::NotFinite { .. } => "plan.not_finite",
            Self::HeadSize { .. } => "plan.head_size",
            Self::GroupSize { .. } => "plan.group_size",
            Self::Pattern { .. } => "plan.pattern",
            Self::UnusedRule { .. } => "plan.unused_rule",
            Self::RulesDisagree { .. } => "plan.rules_disagree",
        }
    }

    fn kind(&self) -> Kind {
        match self {
            Self::Infeasible { .. }
            | Self::GroupSize { .. }
            | Self::Pattern { .. }
            | Self::UnusedRule { .. }
            | Self::RulesDisagree { .. } => Kind::Usage,
            _ => Kind::Input,
        }
    }

    fn file(&self) -> Option<&Path> {
        match self {
            Self::NotFinite { file, .. } => Some(file),
            _ => None,
        }
    }

    fn tensor(&self) -> Option<&str> {
        match self {
            Self::NotFinite { tensor, .. } => Some(tensor),
            Self::AlreadyExl2 { module }
            | Self::DenseMember { module }
            | Self::UnexpectedBias { module, .. }
            | Self::MissingBias { module }
            | Self::RulesDisagree { module, .. } => Some(module),
            _ => None,
        }
    }

    fn hint(&self) -> Option<String> {
        Some(match self {
            Self::Architecture { .. } => {
                let names: Vec<&str> = crate::arch::ARCHITECTURES.iter().map(|a| a.name).collect();
                format!("these can: {}", names.join(", "))
            }
            Self::NothingToQuantize => {
                "the source has no quantized module of sizes that EXL2 can hold (multiples of 32)".into()
            }
            Self::Infeasible { lowest, highest, .. } => format!("choose a --bpw from {lowest:.4} to {highest:.4}"),
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
            Self::MissingBias { .. } => "the checkpoint is incomplete: download it again".into(),
            Self::NotFinite { .. } => {
                "EXL2 stores fp16; the file may be damaged: compare its hash with the hub's".into()
            }
            Self::HeadSize { .. } => "leave --head-bits out: the head then stays fp16".into(),
            Self::GroupSize { .. } => "32, 64 and 128 are usual".into(),
            Self::UnusedRule { .. } => "`requant inspect` lists the modules' names".into(),
            Self::HeadBias | Self::Pattern { .. } | Self::RulesDisagree { .. } => return None,
        })
    }
}
