//! What each module becomes.
//!
//! Takes an open checkpoint and what the user wants, measures what every option would cost and do, and gives
//! a [`Plan`]: a decision for each module, what it was chosen from, and the totals. Must not write anything:
//! `convert` executes a plan, and nothing else decides.

mod choose;
mod error;
mod fold;
mod head;
mod keep;
mod losses;
mod memory;
mod options;
mod overflow;
pub mod readers;
mod relayout;
mod rules;
mod sets;
pub mod solve;
mod tensors;
#[cfg(test)]
mod tests;
mod totals;

pub use error::Error;
pub(crate) use fold::{columns_that_follow, stored_rows};
pub use losses::Losses;
pub use options::{GROUP_SIZES, ModuleOption, Price};
pub(crate) use overflow::as_half;
pub use relayout::{GptqDecision, GptqOptions, Order};
pub use rules::WidthRule;
pub use sets::{BiasDecision, DenseMembers};
pub(crate) use tensors::{dense_spec, specs};
pub use totals::{Objective, Totals};

use crate::arch::{Columns, Dims};
use crate::checkpoint::Checkpoint;
use crate::progress::Observer;
use crate::quantize::{RowOrder, SimdPath};
use crate::warning::{Warning, WarningCode};
use choose::Measurements;
use options::{Job, Outcome};
use requant_formats::exl2::{Bits, MAX_GROUP_ROWS, ROW_UNIT};
use safetensors::Dtype;
use serde::{Deserialize, Serialize};

/// What is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// EXL2 with at most this many stored bits a weight, widths chosen by measured error.
    Bpw(f64),
    /// EXL2 with one width and one group size for all.
    Uniform {
        /// Width of every code.
        bits: Bits,
        /// Rows of a group, a multiple of 32.
        group_size: usize,
    },
    /// GPTQ, exactly.
    Gptq,
    /// Every linear decoded.
    Dense(DenseType),
    /// The same tensors in new files.
    Same,
}

impl Target {
    /// Whether the output is for exllamav2.
    pub const fn is_exl2(&self) -> bool {
        matches!(self, Self::Bpw(_) | Self::Uniform { .. })
    }
}

/// Type of dense weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum DenseType {
    Fp16,
    Bf16,
}

impl DenseType {
    /// As safetensors names it.
    pub const fn dtype(self) -> Dtype {
        match self {
            Self::Fp16 => Dtype::F16,
            Self::Bf16 => Dtype::BF16,
        }
    }
}

/// What a plan is made for.
#[derive(Clone, Debug)]
pub struct PlanOptions {
    /// Widths of the decoder's linears.
    pub target: Target,
    /// Width of the output head; `None` keeps it dense.
    pub head_bits: Option<Bits>,
    /// What happens to dense members of a set that is otherwise quantized.
    pub dense_members: DenseMembers,
    /// Widths that are fixed, by module name; the first rule that matches counts.
    pub set: Vec<WidthRule>,
    /// Widths that are a floor, by module name; the first rule that matches counts.
    pub min: Vec<WidthRule>,
    /// Whether GPTQ modules may stay as they are where exllamav2 reads them; with [`Target::Bpw`] only.
    pub keep_gptq: bool,
}

impl PlanOptions {
    /// Options with nothing but a target.
    pub fn new(target: Target) -> Self {
        Self {
            target,
            head_bits: None,
            dense_members: DenseMembers::default(),
            set: Vec::new(),
            min: Vec::new(),
            keep_gptq: false,
        }
    }
}

/// A decision for every module, and what led to it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// What was asked for.
    pub target: Target,
    /// Decoder linears in block order, then the head if it has tensors of its own.
    pub modules: Vec<PlannedModule>,
    /// Sizes.
    pub totals: Totals,
    /// What the widths were chosen by; `None` where there was nothing to choose.
    pub objective: Option<Objective>,
    /// What is odd, and what it changes.
    pub warnings: Vec<Warning>,
    /// The tensors that belong to no linear.
    pub dense_tensors: Vec<PlannedTensor>,
    /// Whether the output's head has a tensor of its own although the source's is tied.
    pub untied: bool,
}

/// What becomes of a tensor that belongs to no linear.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlannedTensor {
    /// Name in the output.
    pub name: String,
    /// Name in the source.
    pub source: String,
    /// Type in the output.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<usize>,
}

/// What becomes of one linear.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PlannedModule {
    /// Name in the output.
    pub name: String,
    /// Name in the source.
    pub source: String,
    /// Of a linear that is fused with others in the source: its columns there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub columns: Option<Columns>,
    /// Whether it is the output head.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub head: bool,
    /// k.
    pub in_features: usize,
    /// n.
    pub out_features: usize,
    /// What its weight becomes.
    pub decision: Decision,
    /// What its bias becomes.
    pub bias: BiasDecision,
    /// Bits of its tensors in the output, the bias included.
    pub stored_bits: u64,
    /// What the decision was chosen from: each width for all of the module, at each group size.
    pub options: Vec<ModuleOption>,
    /// The next option that costs more.
    pub step_up: Option<Price>,
    /// The next option that costs less.
    pub step_down: Option<Price>,
}

/// What becomes of a weight.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "layout")]
pub enum Decision {
    /// The same tensors, byte for byte.
    Kept,
    /// `.weight`, `[out_features, in_features]`.
    Dense(DenseType),
    /// The five tensors of EXL2.
    Exl2(Exl2Decision),
    /// The four tensors of GPTQ, with the same weights.
    Gptq(GptqDecision),
}

/// An EXL2 layout, decided.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Exl2Decision {
    /// Rows of a group; the last may be shorter.
    pub group_size: usize,
    /// Width of each group, in the order of the source's rows.
    pub bits: Vec<Bits>,
    /// In which order rows are grouped.
    pub order: RowOrder,
    /// Whether rows are stored in the model's order after all: in that of their groups, which the columns of the
    /// modules that feed them follow.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub folded: bool,
    /// The module of the source whose folded rows give the order of this module's columns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub columns_follow: Option<String>,
    /// What exllamav2 multiplies its scales by when it loads it: codes and scales are chosen for the weight times this,
    /// and its error is that of the product as decoded.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub prescale: f64,
    /// Groups that hold rows of several source groups without holding these whole.
    pub straddling_groups: usize,
    /// Bits of the five tensors and the bias.
    pub stored_bits: u64,
    /// Frobenius norm of the difference over that of the weight, if it was measured.
    pub relative_error: Option<f64>,
}

fn one() -> f64 {
    1.0
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde asks with a reference")]
fn is_one(prescale: &f64) -> bool {
    *prescale == 1.0
}

impl Exl2Decision {
    /// Rows of each width, the widest first.
    pub fn widths(&self, in_features: usize) -> Vec<(Bits, usize)> {
        options::widths(&self.bits, self.group_size, in_features)
    }
}

impl PlannedModule {
    /// n as stored: padded to a multiple of 32 where the weight is EXL2.
    pub fn stored_out_features(&self) -> usize {
        match self.decision {
            Decision::Exl2(_) => self.out_features.next_multiple_of(ROW_UNIT),
            Decision::Kept | Decision::Dense(_) | Decision::Gptq(_) => self.out_features,
        }
    }

    /// Number of weights, k · n.
    pub fn weights(&self) -> u64 {
        self.in_features as u64 * self.out_features as u64
    }

    /// Whether it is the output head, which is outside bpw.
    pub fn is_head(&self) -> bool {
        self.head
    }
}

impl Plan {
    /// Plans the conversion of `checkpoint` to EXL2.
    ///
    /// # Errors
    /// [`Error`] for a target that can't be met, an architecture or a module that can't be converted, and
    /// what reading a module finds; [`crate::Error::Cancelled`].
    pub fn new(
        checkpoint: &Checkpoint,
        options: &PlanOptions,
        observer: &dyn Observer,
    ) -> Result<Self, crate::Error> {
        let budgets = if let Target::Bpw(bpw) = options.target { vec![bpw] } else { Vec::new() };
        Self::measured(checkpoint, options, &mut Measurements::of(budgets, None), observer)
    }

    /// Plans one conversion for each of several budgets in bpw, and measures once for all. The target of
    /// `options` doesn't count.
    ///
    /// # Errors
    /// As [`Plan::new`]; a budget that can't be met is found before anything is measured.
    pub fn for_budgets(
        checkpoint: &Checkpoint,
        options: &PlanOptions,
        budgets: &[f64],
        observer: &dyn Observer,
    ) -> Result<Vec<Self>, crate::Error> {
        Self::for_budgets_by(checkpoint, options, budgets, None, observer)
    }

    /// The same, with the widths chosen for the least divergence of the model that a calibration expects; the
    /// objective's value is that divergence then.
    ///
    /// # Errors
    /// Those of [`Plan::for_budgets`] and of the calibration.
    pub fn for_budgets_by(
        checkpoint: &Checkpoint,
        options: &PlanOptions,
        budgets: &[f64],
        losses: Option<&mut dyn Losses>,
        observer: &dyn Observer,
    ) -> Result<Vec<Self>, crate::Error> {
        let mut measurements = Measurements::of(budgets.to_vec(), losses);
        let mut plan = |&bpw: &f64| {
            let options = PlanOptions { target: Target::Bpw(bpw), ..options.clone() };
            Self::measured(checkpoint, &options, &mut measurements, observer)
        };
        budgets.iter().map(&mut plan).collect()
    }

    fn measured(
        checkpoint: &Checkpoint,
        options: &PlanOptions,
        measurements: &mut Measurements<'_>,
        observer: &dyn Observer,
    ) -> Result<Self, crate::Error> {
        SimdPath::chosen().map_err(Error::from)?;
        let (Some(arch), Some(dims)) = (checkpoint.architecture(), checkpoint.dims()) else {
            let found = checkpoint.config().get("architectures").map(ToString::to_string);
            return Err(Error::Architecture { found }.into());
        };
        if !arch.exllamav2 {
            let found = checkpoint.config().get("architectures").map(ToString::to_string);
            return Err(Error::Architecture { found }.into());
        }
        if let Target::Uniform { group_size: found, .. } = options.target
            && (found == 0 || found % ROW_UNIT != 0 || found > MAX_GROUP_ROWS)
        {
            return Err(Error::GroupSize { found }.into());
        }
        checkpoint.require_decodable()?;
        let (members, mut warnings) = sets::members(checkpoint, arch, dims, options)?;
        let heads = [checkpoint.naming().head, arch.exl2_names().head];
        rules::check_used(&options.set, &members, heads)?;
        rules::check_used(&options.min, &members, heads)?;
        let head = head::plan(checkpoint, arch, dims, options, &mut warnings)?;
        let jobs: Vec<Job<'_>> = members
            .iter()
            .map(|member| Job::new(member, &members, dims, options))
            .collect::<Result<_, _>>()?;
        let quantized: Vec<&Job<'_>> = jobs.iter().filter(|job| job.space.is_some()).collect();
        if quantized.is_empty() {
            return Err(Error::NothingToQuantize.into());
        }
        let naming = checkpoint.naming();
        let mut dense_tensors: Vec<PlannedTensor> = (arch.dense_tensors(dims, naming).into_iter())
            .map(|t| PlannedTensor { name: t.exl2_name, source: t.name, dtype: Dtype::F16, shape: t.shape })
            .collect();
        let mut halves = overflow::stored_as_half(&dense_tensors, head.as_slice());
        halves.extend(members.iter().flat_map(|member| {
            let dense = (member.treatment == sets::Treatment::Dense).then_some("weight");
            let bias = (member.bias == BiasDecision::Kept).then_some("bias");
            dense.into_iter().chain(bias).map(|suffix| format!("{}.{suffix}", member.module.name()))
        }));
        overflow::check(checkpoint, &halves)?;
        let (outcomes, objective) = match options.target {
            Target::Bpw(bpw) => {
                let (outcomes, objective) =
                    choose::by_error(checkpoint, &quantized, bpw, measurements, observer)?;
                (outcomes, Some(objective))
            }
            _ => (quantized.iter().map(|job| job.only_outcome(checkpoint)).collect(), None),
        };
        let mut outcomes = outcomes.into_iter();
        let mut modules: Vec<PlannedModule> = jobs
            .iter()
            .map(|job| {
                let outcome = if job.space.is_some() { outcomes.next() } else { None };
                job.planned(checkpoint, outcome.unwrap_or_else(Outcome::dense))
            })
            .collect();
        fold::fold_biased(checkpoint, &members, &mut modules);
        let stored_bits: Vec<u64> = modules.iter().map(|m| m.stored_bits).collect();
        warnings.extend(sets::dense_members_quantized(&members, &stored_bits));
        warnings.extend(modules.iter().filter_map(straddling));
        warnings.extend(multiplied(&members, dims, &modules));
        let untied = dims.tied && head.is_some();
        modules.extend(head);
        dense_tensors.extend(checkpoint.other_tensors().filter_map(|tensor| {
            Some(PlannedTensor {
                name: arch.other_exl2_name(naming, tensor.name())?,
                source: tensor.name().into(),
                dtype: tensor.dtype(),
                shape: tensor.shape().to_vec(),
            })
        }));
        let totals = Totals::new(checkpoint, &modules, &dense_tensors);
        Ok(Self { target: options.target, modules, totals, objective, warnings, dense_tensors, untied })
    }
}

/// The scales of GPTQ modules times the factor are rounded to fp16 at load. Those of EXL2 are chosen for it.
fn multiplied(members: &[sets::Member<'_>], dims: &Dims, modules: &[PlannedModule]) -> Option<Warning> {
    let is_gptq = |planned: &PlannedModule| matches!(planned.decision, Decision::Kept | Decision::Gptq(_));
    let pairs = || members.iter().zip(modules);
    let (first, _) = pairs().find(|(m, planned)| is_gptq(planned) && dims.prescale(&m.linear) != 1.0)?;
    Some(Warning {
        code: WarningCode::ScalesMultiplied,
        subject: "config.json".into(),
        message: format!(
            "exllamav2 multiplies the scales of o_proj and down_proj by {:.4} when it loads them: it rounds those that \
             stay GPTQ, as {} does, once more",
            dims.residual_scale,
            first.module.name()
        ),
    })
}

fn straddling(module: &PlannedModule) -> Option<Warning> {
    let Decision::Exl2(Exl2Decision { straddling_groups: count @ 1.., ref bits, .. }) = module.decision
    else {
        return None;
    };
    Some(Warning {
        code: WarningCode::StraddlingGroups,
        subject: module.source.clone(),
        message: format!(
            "{count} of {} groups hold parts of several source groups, so that their scales can't follow one \
             grid; the measured error includes what that costs",
            bits.len()
        ),
    })
}
