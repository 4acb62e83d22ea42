//! What a checkpoint is: a summary for people and programs.
//!
//! Takes an open checkpoint; gives an [`Inspection`] of its modules, a [`Verdict`] for each program that might
//! load it, and at which numbers of GPUs it can be cut ([`Parallel`]). Must not write, and must not decide what
//! becomes of anything.

mod parallel;
mod verdict;

pub use parallel::Parallel;
pub use verdict::Verdict;

use crate::checkpoint::{Bias, Checkpoint, Gptq, Layout, Module, ZeroEvidence, Zeros};
use crate::verify;
use crate::warning::{Warning, WarningCode};
use requant_formats::exl2::Bits;
use requant_formats::gptq::{GIdxKind, ZeroConvention};
use serde::Serialize;

/// A checkpoint, summarised.
#[derive(Clone, Debug, Serialize)]
pub struct Inspection {
    /// `architectures[0]`, known or not.
    pub architecture: Option<String>,
    /// Files of weights, with their sizes in bytes.
    pub files: Vec<(String, u64)>,
    /// Each linear, in block order.
    pub modules: Vec<InspectedModule>,
    /// Sums.
    pub totals: InspectedTotals,
    /// What is odd.
    pub warnings: Vec<Warning>,
}

/// Sums over a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct InspectedTotals {
    /// Linears.
    pub modules: usize,
    /// Of these, quantized ones.
    pub quantized_modules: usize,
    /// Weights of quantized linears, the head left out.
    pub quantized_weights: u64,
    /// Bits of their tensors, biases and group indices included.
    pub stored_bits: u64,
    /// `stored_bits / quantized_weights`; 0 without quantized linears.
    pub bpw: f64,
    /// Weights of all tensors, a quantized one counted as k · n.
    pub all_weights: u64,
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
    /// Bits of all tensors over all weights.
    pub file_bpw: f64,
}

/// A linear, summarised.
#[derive(Clone, Debug, Serialize)]
pub struct InspectedModule {
    /// Its name.
    pub name: String,
    /// k.
    pub in_features: usize,
    /// n.
    pub out_features: usize,
    /// How its weight is stored.
    #[serde(flatten)]
    pub layout: InspectedLayout,
    /// Its bias.
    pub bias: Option<Bias>,
    /// Bits of its tensors over its weights.
    pub bpw: f64,
}

/// How a weight is stored.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case", tag = "layout")]
pub enum InspectedLayout {
    /// GPTQ.
    Gptq {
        /// Width of a code.
        bits: u32,
        /// Rows of a group.
        group_size: usize,
        /// Number of groups.
        groups: usize,
        /// What `g_idx` holds.
        g_idx: GIdxKind,
        /// Whether all groups but the last have `group_size` rows.
        equal_groups: bool,
        /// How zero points are stored, and how that is known.
        zeros: Zeros,
        /// Type of `scales`.
        scales: String,
    },
    /// EXL2.
    Exl2 {
        /// Rows of each width, the widest first.
        widths: Vec<(Bits, usize)>,
        /// Number of groups.
        groups: usize,
        /// n as stored.
        stored_out_features: usize,
    },
    /// Not quantized.
    Dense {
        /// Type of its elements.
        dtype: String,
    },
}

/// What is said of a subject, and of how many others the same.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Counted {
    /// The modules, tensors or files, the first first.
    pub subjects: Vec<String>,
    /// What is said.
    pub message: String,
}

impl Counted {
    fn add(all: &mut Vec<Self>, subject: &str, message: String) {
        match all.iter_mut().find(|counted| counted.message == message) {
            Some(counted) if counted.subjects.iter().any(|known| known == subject) => {}
            Some(counted) => counted.subjects.push(subject.into()),
            None => all.push(Self { subjects: vec![subject.into()], message }),
        }
    }
}

/// What the files are, in short: whether the download is whole, how zero points are stored, and act-order.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Whether every tensor that the architecture has is there; `None` where the architecture is unknown. Files
    /// cut short, and tensors that an index promises and no file has, are errors before there is a summary.
    pub complete: Option<bool>,
    /// Modules by the convention of their zero points and what tells it.
    pub zeros: Vec<CountedZeros>,
    /// GPTQ modules.
    pub gptq_modules: usize,
    /// Of these, how many have rows in act-order.
    pub act_order_modules: usize,
    /// `desc_act` of the configuration.
    pub desc_act: Option<bool>,
}

/// Modules whose zero points are stored and known alike.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CountedZeros {
    /// The convention.
    pub convention: ZeroConvention,
    /// What tells it.
    pub evidence: ZeroEvidence,
    /// Modules.
    pub modules: usize,
}

impl Summary {
    /// Summarises an open checkpoint.
    pub fn new(checkpoint: &Checkpoint) -> Self {
        let modules = checkpoint.modules().iter();
        let gptq: Vec<&Gptq> = modules
            .filter_map(|module| match module.layout() {
                Layout::Gptq(gptq) => Some(gptq),
                _ => None,
            })
            .collect();
        let mut zeros: Vec<CountedZeros> = Vec::new();
        for Zeros { convention, evidence, .. } in gptq.iter().map(|gptq| gptq.zeros) {
            match zeros.iter_mut().find(|z| z.convention == convention && z.evidence == evidence) {
                Some(same) => same.modules += 1,
                None => zeros.push(CountedZeros { convention, evidence, modules: 1 }),
            }
        }
        Self {
            complete: checkpoint.architecture().map(|_| true),
            zeros,
            gptq_modules: gptq.len(),
            act_order_modules: gptq.iter().filter(|gptq| gptq.g_idx == GIdxKind::ActOrder).count(),
            desc_act: checkpoint.quant_config().and_then(|quant| quant.desc_act),
        }
    }
}

impl Inspection {
    /// Summarises an open checkpoint.
    pub fn new(checkpoint: &Checkpoint) -> Self {
        let architecture = (checkpoint.config().get("architectures"))
            .and_then(|names| Some(names.as_array()?.first()?.as_str()?.to_string()));
        let modules: Vec<InspectedModule> =
            checkpoint.modules().iter().map(|m| InspectedModule::new(checkpoint, m)).collect();
        Self {
            architecture,
            files: checkpoint.files().iter().map(|f| (f.name().to_string(), f.size())).collect(),
            totals: totals(checkpoint),
            modules,
            warnings: checkpoint.warnings().iter().cloned().chain(misread(checkpoint)).collect(),
        }
    }
}

/// What the loader of an EXL2 directory would fail on or read otherwise than meant.
fn misread(checkpoint: &Checkpoint) -> impl Iterator<Item = Warning> {
    verify::exllamav2_faults(checkpoint).into_iter().map(|fault| Warning {
        code: WarningCode::Exllamav2Misreads,
        subject: fault.tensor.or(fault.file).unwrap_or_default(),
        message: fault.message,
    })
}

impl InspectedModule {
    fn new(checkpoint: &Checkpoint, module: &Module) -> Self {
        Self {
            name: module.name().into(),
            in_features: module.in_features(),
            out_features: module.out_features(),
            layout: InspectedLayout::new(module.layout()),
            bias: module.bias(),
            bpw: stored_bits(checkpoint, module) as f64 / module.weights().max(1) as f64,
        }
    }
}

impl InspectedLayout {
    fn new(layout: &Layout) -> Self {
        match layout {
            Layout::Gptq(gptq) => Self::Gptq {
                bits: gptq.shape.bits.get(),
                group_size: gptq.group_size,
                groups: gptq.shape.groups,
                g_idx: gptq.g_idx,
                equal_groups: gptq.equal_groups,
                zeros: gptq.zeros,
                scales: format!("{:?}", gptq.scales),
            },
            Layout::Exl2(exl2) => Self::Exl2 {
                widths: exl2.groups.rows_of_widths(),
                groups: exl2.groups.groups().len(),
                stored_out_features: exl2.stored_out_features,
            },
            Layout::Dense { dtype } => Self::Dense { dtype: format!("{dtype:?}") },
        }
    }
}

fn stored_bits(checkpoint: &Checkpoint, module: &Module) -> u64 {
    let bytes = |name: String| checkpoint.tensor(&name).map_or(0, |t| t.bytes().len() as u64);
    8 * module.tensor_names().map(bytes).sum::<u64>()
}

fn totals(checkpoint: &Checkpoint) -> InspectedTotals {
    let mut totals = InspectedTotals { modules: checkpoint.modules().len(), ..InspectedTotals::default() };
    for module in checkpoint.modules() {
        let bits = stored_bits(checkpoint, module);
        totals.all_weights += module.weights();
        totals.tensor_bytes += bits / 8;
        if module.layout().is_quantized() {
            totals.quantized_modules += 1;
            if module.name() != checkpoint.naming().head {
                totals.quantized_weights += module.weights();
                totals.stored_bits += bits;
            }
        }
    }
    for tensor in checkpoint.other_tensors() {
        totals.all_weights += tensor.elements() as u64;
        totals.tensor_bytes += tensor.byte_len() as u64;
    }
    totals.bpw = totals.stored_bits as f64 / totals.quantized_weights.max(1) as f64;
    totals.file_bpw = 8.0 * totals.tensor_bytes as f64 / totals.all_weights.max(1) as f64;
    totals
}
