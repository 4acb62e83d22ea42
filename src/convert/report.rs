//! `report.json`: what was converted, how exactly, and from what.

use super::done::Outcome;
use crate::arch::Columns;
use crate::checkpoint::{Checkpoint, Layout};
use crate::output::{ShardFile, SideFiles};
use crate::plan::{
    BiasDecision, Decision, ModuleOption, Objective, Plan, PlannedModule, Price, Target, Totals,
};
use crate::quantize::Uncalibrated;
use crate::warning::Warning;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Version of the schema; raised when a field changes its meaning or goes.
pub const SCHEMA: u32 = 1;

/// The report of a conversion. It holds no time, host or path: the same input and options give the same
/// bytes.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Name and version of the tool.
    pub tool: String,
    /// The source.
    pub source: SourceFacts,
    /// The flags that were given, by name; empty where a program made the output through the library.
    pub flags: Map<String, Value>,
    /// What was asked for.
    pub target: Target,
    /// Sizes.
    pub totals: Totals,
    /// What the widths were chosen by.
    pub objective: Option<Objective>,
    /// Mean over the decoder linears that are quantized in the output of [`ReportModule::relative_error`].
    pub mean_relative_error: f64,
    /// Each linear, in block order.
    pub modules: Vec<ReportModule>,
    /// Where each tensor of the output comes from.
    pub tensors: Vec<TensorOrigin>,
    /// The files that hold the tensors.
    pub shards: Vec<ShardFile>,
    /// Other files: what was copied, what not and why.
    pub side_files: SideFiles,
    /// What was odd, what was assumed, what it changes.
    pub warnings: Vec<Warning>,
    /// What a validation found, if one was made: its `verdict`, `conditions`, `model` and `gates`, as
    /// validation.json has them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation: Option<Value>,
}

/// What the source was.
#[derive(Clone, Debug, Serialize)]
pub struct SourceFacts {
    /// sha256 over its files' names, sizes and headers.
    pub fingerprint: String,
    /// `architectures[0]`.
    pub architecture: Option<String>,
}

/// What a conversion did to a tensor, from best to worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Exactness {
    /// The same bytes.
    Identical,
    /// Other bytes, the same values as decoded.
    Exact,
    /// Rounded once more.
    Rounded,
    /// Quantized anew; the error is measured.
    Requantized,
}

/// One linear.
#[derive(Clone, Debug, Serialize)]
pub struct ReportModule {
    /// Name in the output.
    pub name: String,
    /// Name in the source.
    pub source: String,
    /// Of a linear that is fused with others in the source: its columns there, as ranges `[begin, end]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub columns: Option<Columns>,
    /// k.
    pub in_features: usize,
    /// n.
    pub out_features: usize,
    /// n as stored, padded to a multiple of 32.
    pub stored_out_features: usize,
    /// Layout in the source, in words: `gptq 4-bit g32 act-order v1`.
    pub layout_before: String,
    /// Layout in the output: `exl2`, `gptq` or `dense`; `decision` has the rest.
    pub layout_after: &'static str,
    /// What the plan decided.
    pub decision: Decision,
    /// Rows of a group, if it was laid out anew.
    pub group_size: Option<usize>,
    /// Rows of each width, the widest first.
    pub widths: Vec<(u32, usize)>,
    /// Groups that hold parts of several source groups.
    pub straddling_groups: usize,
    /// Bits of its tensors, the bias included.
    pub stored_bits: u64,
    /// Stored bits a weight.
    pub bpw: f64,
    /// What happened to the weight.
    pub exactness: Exactness,
    /// Frobenius norm of the difference over that of the weight, of the bytes as written.
    pub relative_error: f64,
    /// The order of its rows, where they were sorted: entry j is the row of the source at place j. The columns
    /// of the modules that feed it stand in the same order.
    pub row_order: Option<Vec<u32>>,
    /// How it was calibrated, if it was to be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calibration: Option<Calibration>,
    /// What happened to the bias.
    pub bias: BiasDecision,
    /// What the layout was chosen from: each width for all of the module, at each group size.
    pub options: Vec<ModuleOption>,
    /// The next option that costs more, and what it would bring.
    pub step_up: Option<Price>,
    /// The next option that costs less, and what it would lose.
    pub step_down: Option<Price>,
}

/// How a module was calibrated.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// Tokens that reached it.
    pub tokens: usize,
    /// Squared error of its outputs on them over their squares; `None` where there was nothing to weigh errors by.
    pub output_error: Option<f64>,
    /// What it would be if its weights alone counted.
    pub output_error_by_weights: Option<f64>,
    /// What was added to the diagonal of the Hessian, as a share of its mean.
    pub damping: Option<f64>,
    /// Why its weights alone counted, if they did.
    pub uncalibrated: Option<Uncalibrated>,
}

/// Where a tensor of the output comes from.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TensorOrigin {
    /// Name in the output.
    pub name: String,
    /// Tensors of the source that it was made of.
    pub sources: Vec<String>,
    /// Of a linear that is fused with others in the source: the columns of the weight that it was made of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub columns: Option<Columns>,
    /// What happened to it.
    pub exactness: Exactness,
}

impl ReportModule {
    pub(super) fn new(checkpoint: &Checkpoint, planned: &PlannedModule, outcome: Outcome) -> Self {
        let Outcome { relative_error, exactness, row_order, calibration } = outcome;
        let before = checkpoint.part(&planned.source, planned.columns.as_ref()).map(|module| module.layout());
        let (group_size, widths, straddling_groups) = match &planned.decision {
            Decision::Kept | Decision::Dense(_) => (None, Vec::new(), 0),
            Decision::Gptq(d) => (Some(d.group_size), vec![(d.bits.get(), planned.in_features)], 0),
            Decision::Exl2(d) => {
                let widths = d.widths(planned.in_features).into_iter().map(|(b, rows)| (b.get(), rows));
                (Some(d.group_size), widths.collect(), d.straddling_groups)
            }
        };
        let layout_before = before.map_or_else(|| "dense (tied embedding)".into(), describe);
        let layout_after = match &planned.decision {
            Decision::Kept => before.map_or("dense", Layout::name),
            Decision::Dense(_) => "dense",
            Decision::Exl2(_) => "exl2",
            Decision::Gptq(_) => "gptq",
        };
        let stored_bits = planned.stored_bits;
        Self {
            name: planned.name.clone(),
            source: planned.source.clone(),
            columns: planned.columns.clone(),
            in_features: planned.in_features,
            out_features: planned.out_features,
            stored_out_features: planned.stored_out_features(),
            layout_before,
            layout_after,
            decision: planned.decision.clone(),
            group_size,
            widths,
            straddling_groups,
            stored_bits,
            bpw: stored_bits as f64 / planned.weights().max(1) as f64,
            exactness,
            relative_error,
            row_order,
            calibration,
            bias: planned.bias,
            options: planned.options.clone(),
            step_up: planned.step_up.clone(),
            step_down: planned.step_down.clone(),
        }
    }
}

/// A layout in a few words.
pub fn describe(layout: &Layout) -> String {
    match layout {
        Layout::Gptq(gptq) => {
            let size = match gptq.group_size {
                size if size == gptq.shape.in_features => "per column".to_string(),
                size => format!("g{size}"),
            };
            let order = match gptq.g_idx {
                requant_formats::gptq::GIdxKind::ActOrder => " act-order",
                _ => "",
            };
            format!("gptq {}-bit {size}{order}", gptq.shape.bits.get())
        }
        Layout::Exl2(exl2) => {
            let widths = exl2.groups.rows_of_widths();
            let widths: Vec<String> = widths.iter().map(|(bits, _)| bits.get().to_string()).collect();
            format!("exl2 {}-bit", widths.join("/"))
        }
        Layout::Dense { dtype } => format!("dense {}", float_name(&format!("{dtype:?}"))),
    }
}

/// The usual name of a type that safetensors calls `F16`, `BF16`, `F32`.
pub fn float_name(dtype: &str) -> String {
    let name = dtype.to_lowercase();
    match name.strip_prefix('f') {
        Some(bits) => format!("fp{bits}"),
        None => name,
    }
}

impl Report {
    #[allow(clippy::too_many_arguments, reason = "each is a part of the report")]
    pub(super) fn new(
        checkpoint: &Checkpoint,
        plan: &Plan,
        flags: Map<String, Value>,
        modules: Vec<ReportModule>,
        tensors: Vec<TensorOrigin>,
        shards: Vec<ShardFile>,
        side_files: SideFiles,
        warnings: Vec<Warning>,
    ) -> Self {
        let quantized = || {
            plan.modules
                .iter()
                .zip(&modules)
                .filter(|(planned, _)| planned.is_quantized(checkpoint) && !planned.is_head())
        };
        let mean =
            quantized().map(|(_, m)| m.relative_error).sum::<f64>() / quantized().count().max(1) as f64;
        Self {
            schema: SCHEMA,
            tool: crate::output::TOOL.into(),
            source: SourceFacts {
                fingerprint: checkpoint.fingerprint(),
                architecture: checkpoint.architecture().map(|a| a.name.into()),
            },
            flags,
            target: plan.target,
            totals: plan.totals.clone(),
            objective: plan.objective.clone(),
            mean_relative_error: mean,
            modules,
            tensors,
            shards,
            side_files,
            warnings,
            validation: None,
        }
    }

    /// The bytes of `report.json`.
    pub fn to_json(&self) -> String {
        // Maps have string keys and floats are finite: nothing here can fail to serialise.
        let mut json = serde_json::to_string_pretty(self).unwrap_or_default();
        json.push('\n');
        json
    }
}
