//! The options of a module: widths and group sizes, their sizes and measured errors.

use super::fold::{can_fold, needs_identity};
use super::losses::Losses;
use super::rules;
use super::sets::{Member, Treatment};
use super::solve::Choice;
use super::{BiasDecision, Decision, DenseType, Error, Exl2Decision, PlanOptions, PlannedModule, Target};
use crate::arch::Dims;
use crate::checkpoint::{Checkpoint, Layout, Module};
use crate::quantize::{Cut, GroupLosses, RowOrder, Samples, Source, fit_group};
use rayon::prelude::*;
use requant_formats::exl2::Bits;
use requant_formats::gptq::GIdxKind;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Group sizes that a plan chooses from.
pub const GROUP_SIZES: [usize; 3] = [32, 64, 128];

/// Mixes of widths kept a module and group size, besides the uniform ones.
pub(super) const MOST_MIXES: usize = 64;

/// One way to store a module.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModuleOption {
    /// Rows of a group.
    pub group_size: usize,
    /// Rows of each width, the widest first.
    pub widths: Vec<(Bits, usize)>,
    /// Bits of its tensors, the bias included.
    pub stored_bits: u64,
    /// Frobenius norm of the difference over that of the weight; with a calibration that of the outputs, as expected.
    pub relative_error: f64,
    /// Whether the module stays GPTQ.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub kept: bool,
}

/// What another option would cost and bring.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Price {
    /// Bits more; negative for fewer.
    pub bits: i64,
    /// The option.
    pub option: ModuleOption,
}

/// A linear, and the options that it may have.
pub(super) struct Job<'a> {
    pub(super) member: &'a Member<'a>,
    /// `None`: it becomes dense.
    pub(super) space: Option<Space>,
    /// Whether it may stay GPTQ.
    keep: bool,
}

/// Options, before anything is measured.
pub(super) struct Space {
    pub(super) group_sizes: Vec<usize>,
    /// Ascending.
    pub(super) widths: Vec<Bits>,
    /// What they would be without `set` and `min`.
    unruled: Vec<Bits>,
    order: RowOrder,
    /// What exllamav2 multiplies the scales by at load.
    prescale: f64,
}

/// What a linear becomes, and what that was chosen from.
pub(super) struct Outcome {
    decision: Decision,
    options: Vec<ModuleOption>,
    step_up: Option<Price>,
    step_down: Option<Price>,
}

/// A measured option.
pub(super) struct Candidate {
    pub(super) group_size: usize,
    /// Width of each group, in the order of the source's rows.
    pub(super) bits: Vec<Bits>,
    pub(super) uniform: bool,
    /// What it becomes if it stays GPTQ.
    pub(super) kept: Option<Decision>,
    pub(super) stored_bits: u64,
    /// Squared error over squared norm; of the outputs where they are calibrated, else of the weights.
    pub(super) squared_error: f64,
    calibrated: bool,
    /// What the solver counts for a squared error of 1.
    pub(super) weight: f64,
    straddling: usize,
}

impl Outcome {
    pub(super) fn dense() -> Self {
        Self {
            decision: Decision::Dense(DenseType::Fp16),
            options: Vec::new(),
            step_up: None,
            step_down: None,
        }
    }
}

impl<'a> Job<'a> {
    /// `members` are all of the model.
    pub(super) fn new(
        member: &'a Member<'a>,
        members: &[Member<'_>],
        dims: &Dims,
        options: &PlanOptions,
    ) -> Result<Self, Error> {
        if member.treatment == Treatment::Dense {
            return Ok(Self { member, space: None, keep: false });
        }
        let set = rules::width(&options.set, member)?;
        let min = rules::width(&options.min, member)?;
        if let (Some(set), Some(min)) = (set, min)
            && set < min
        {
            let (set, min) = (set.get(), min.get());
            return Err(Error::RulesDisagree { module: member.linear.name.clone(), set, min });
        }
        let (mut group_sizes, asked) = match options.target {
            Target::Uniform { bits, group_size } => {
                (vec![group_size], vec![min.map_or(bits, |min| min.max(bits))])
            }
            _ => (aligned_group_sizes(member), Bits::ALL.to_vec()),
        };
        let mut unruled = asked.clone();
        let mut widths = match (set, min) {
            (Some(set), _) => vec![set],
            (None, min) => asked.into_iter().filter(|&b| min.is_none_or(|min| b >= min)).collect(),
        };
        if member.treatment == Treatment::QuantizeWidest {
            widths.drain(..widths.len() - 1);
            unruled.drain(..unruled.len() - 1);
            group_sizes.truncate(1);
        }
        let (order, prescale) = (row_order(member, members), dims.prescale(&member.linear));
        let space = Some(Space { group_sizes, widths, unruled, order, prescale });
        // A width that the user fixed is not the source's.
        Ok(Self { member, space, keep: options.keep_gptq && set.is_none() })
    }

    fn bias_bits(&self) -> u64 {
        match self.member.bias {
            BiasDecision::Kept => 16 * self.member.linear.out_features as u64,
            BiasDecision::None | BiasDecision::DroppedZeros => 0,
        }
    }

    /// Bits of all tensors, given the width of each group.
    fn stored_bits(&self, group_size: usize, bits: &[Bits]) -> u64 {
        let (k, n) = (self.member.linear.in_features, self.member.linear.out_features);
        stored_bits(k, n, group_size, bits) + self.bias_bits()
    }

    /// The cheapest and the dearest option.
    pub(super) fn range(&self) -> (u64, u64) {
        self.space.as_ref().map_or((0, 0), |space| self.range_of(space, &space.widths))
    }

    /// The same as if the user had given no rules.
    pub(super) fn unruled_range(&self) -> (u64, u64) {
        self.space.as_ref().map_or((0, 0), |space| self.range_of(space, &space.unruled))
    }

    fn range_of(&self, space: &Space, widths: &[Bits]) -> (u64, u64) {
        let all = || {
            let sizes = space.group_sizes.iter();
            sizes.flat_map(|&size| {
                let groups = self.member.linear.in_features.div_ceil(size);
                widths.iter().map(move |&bits| self.stored_bits(size, &vec![bits; groups]))
            })
        };
        (all().min().unwrap_or(0), all().max().unwrap_or(0))
    }

    /// The outcome where there is one option, which needs no measuring.
    pub(super) fn only_outcome(&self, checkpoint: &Checkpoint) -> Outcome {
        let Some(space) = &self.space else { return Outcome::dense() };
        let (group_size, k) = (space.group_sizes[0], self.member.linear.in_features);
        let bits = vec![space.widths[0]; k.div_ceil(group_size)];
        Outcome {
            decision: Decision::Exl2(Exl2Decision {
                group_size,
                order: space.order,
                folded: false,
                columns_follow: None,
                prescale: space.prescale,
                straddling_groups: straddling(checkpoint, self.member.module, space.order, group_size),
                stored_bits: self.stored_bits(group_size, &bits),
                bits,
                relative_error: None,
            }),
            ..Outcome::dense()
        }
    }

    /// Measures all options.
    pub(super) fn measure(
        &self,
        checkpoint: &Checkpoint,
        losses: &mut Option<&mut dyn Losses>,
    ) -> Result<Vec<Candidate>, crate::Error> {
        let Some(space) = &self.space else { return Ok(Vec::new()) };
        let source = source(checkpoint, self.member.module, space.order)?.prescaled(space.prescale);
        let name = &self.member.linear.exl2_name;
        let weight = match losses {
            Some(losses) => losses.sensitivity(name),
            None => self.member.linear.out_features as f64,
        };
        let mut candidates = Vec::new();
        for &group_size in &space.group_sizes {
            let cut = source.cut(group_size);
            let calibrated = match losses {
                Some(losses) => losses.group_losses(name, &source, &cut, &space.widths)?,
                None => None,
            };
            let is_calibrated = calibrated.is_some();
            let GroupLosses { losses: measured, norm } =
                calibrated.unwrap_or_else(|| errors_of_weights(&source, &cut, &space.widths));
            if !norm.is_finite() {
                return Err(not_finite(checkpoint, self.member.module, &source).into());
            }
            let share = |error: f64| if norm == 0.0 { 0.0 } else { error / norm };
            let candidate = |choice: &[usize], uniform| {
                let bits: Vec<Bits> = choice.iter().map(|&w| space.widths[w]).collect();
                Candidate {
                    group_size,
                    uniform,
                    kept: None,
                    stored_bits: self.stored_bits(group_size, &bits),
                    squared_error: share(measured.iter().zip(choice).map(|(m, &w)| m[w]).sum()),
                    calibrated: is_calibrated,
                    weight,
                    straddling: cut.straddling,
                    bits,
                }
            };
            for width in 0..space.widths.len() {
                candidates.push(candidate(&vec![width; cut.groups.len()], true));
            }
            // Widths must fall along the stored rows, which natural order doesn't allow to arrange.
            if space.order == RowOrder::Grouped {
                let errors: Vec<&[f64]> = measured.iter().map(Vec::as_slice).collect();
                let mixes = mixes(&cut.groups, &space.widths, &errors);
                candidates.extend(mixes.iter().map(|choice| candidate(choice, false)));
            }
        }
        candidates.extend(self.kept(checkpoint)?);
        Ok(candidates)
    }

    /// The option of staying GPTQ.
    fn kept(&self, checkpoint: &Checkpoint) -> Result<Option<Candidate>, crate::Error> {
        let module = self.member.module;
        let decision = match self.keep {
            true => super::keep::decision(checkpoint, module, self.member.bias)?,
            false => None,
        };
        let (Some(decision), Layout::Gptq(gptq)) = (decision, module.layout()) else { return Ok(None) };
        let outcome = Outcome { decision: decision.clone(), ..Outcome::dense() };
        let stored_bits = self.planned(checkpoint, outcome).stored_bits;
        let groups = module.in_features().div_ceil(gptq.group_size);
        Ok(Some(Candidate {
            group_size: gptq.group_size,
            bits: vec![Bits::ALL[2]; groups],
            uniform: true,
            kept: Some(decision),
            stored_bits,
            squared_error: 0.0,
            calibrated: false,
            weight: 0.0,
            straddling: 0,
        }))
    }

    /// The outcome of choosing one of the measured candidates.
    pub(super) fn outcome(&self, candidates: &[Candidate], pick: usize) -> Outcome {
        let Some(space) = &self.space else { return Outcome::dense() };
        let k = self.member.linear.in_features;
        let chosen = &candidates[pick];
        let mut ladder: Vec<&Candidate> = candidates.iter().collect();
        ladder.sort_by(|a, b| {
            a.stored_bits.cmp(&b.stored_bits).then(a.squared_error.total_cmp(&b.squared_error))
        });
        let step = |to: &Candidate| Price {
            bits: to.stored_bits as i64 - chosen.stored_bits as i64,
            option: to.option(k),
        };
        let mut best = f64::INFINITY;
        ladder.retain(|c| {
            let keep = c.squared_error < best;
            best = best.min(c.squared_error);
            keep
        });
        Outcome {
            step_up: ladder.iter().find(|c| c.stored_bits > chosen.stored_bits).map(|c| step(c)),
            step_down: ladder.iter().rfind(|c| c.stored_bits < chosen.stored_bits).map(|c| step(c)),
            options: candidates.iter().filter(|c| c.uniform).map(|c| c.option(k)).collect(),
            decision: chosen.kept.clone().unwrap_or_else(|| {
                Decision::Exl2(Exl2Decision {
                    group_size: chosen.group_size,
                    bits: chosen.bits.clone(),
                    order: space.order,
                    folded: false,
                    columns_follow: None,
                    prescale: space.prescale,
                    straddling_groups: chosen.straddling,
                    stored_bits: chosen.stored_bits,
                    relative_error: (!chosen.calibrated).then(|| chosen.squared_error.sqrt()),
                })
            }),
        }
    }

    pub(super) fn planned(&self, checkpoint: &Checkpoint, outcome: Outcome) -> PlannedModule {
        let linear = &self.member.linear;
        let mut planned = PlannedModule {
            name: linear.exl2_name.clone(),
            source: linear.name.clone(),
            columns: linear.columns.clone(),
            head: false,
            in_features: linear.in_features,
            out_features: linear.out_features,
            decision: outcome.decision,
            bias: self.member.bias,
            stored_bits: 0,
            options: outcome.options,
            step_up: outcome.step_up,
            step_down: outcome.step_down,
        };
        planned.stored_bits = planned.count_bits(checkpoint);
        planned
    }
}

impl Candidate {
    /// As the solver takes it.
    pub(super) fn choice(&self) -> Choice {
        Choice { cost: self.stored_bits, error: self.weight * self.squared_error }
    }

    fn option(&self, in_features: usize) -> ModuleOption {
        ModuleOption {
            group_size: self.group_size,
            widths: widths(&self.bits, self.group_size, in_features),
            stored_bits: self.stored_bits,
            relative_error: self.squared_error.sqrt(),
            kept: self.kept.is_some(),
        }
    }
}

/// The squared errors of each group's weights at each width, and the squared norm of all.
fn errors_of_weights(source: &Source, cut: &Cut, widths: &[Bits]) -> GroupLosses {
    let measured: Vec<(Vec<f64>, f64)> = (cut.groups.par_iter())
        .map(|places| {
            let samples = Samples::new(source, places.clone());
            let errors = widths.iter().map(|&bits| fit_group(&samples, bits).squared_error).collect();
            (errors, samples.squared_norm())
        })
        .collect();
    let norm = measured.iter().map(|m| m.1).sum();
    GroupLosses { losses: measured.into_iter().map(|m| m.0).collect(), norm }
}

/// A module's weights as the quantizer takes them.
pub(crate) fn source(
    checkpoint: &Checkpoint,
    module: &Module,
    order: RowOrder,
) -> Result<Source, crate::checkpoint::Error> {
    Ok(match module.layout() {
        Layout::Gptq(_) => Source::gptq(checkpoint.gptq(module)?, order),
        _ => Source::dense(checkpoint.dense(module)?, module.in_features(), module.out_features()),
    })
}

/// The first weight that isn't finite. Conversion looks at all tensors before it writes; an error of infinity
/// would mislead the choice of widths long before.
fn not_finite(checkpoint: &Checkpoint, module: &Module, source: &Source) -> Error {
    let suffix = if module.layout().is_quantized() { "scales" } else { "weight" };
    let tensor = format!("{}.{suffix}", module.name());
    let decoded = source.decoded();
    let position = decoded.iter().position(|w| !w.is_finite()).unwrap_or(0);
    let n = source.out_features();
    Error::NotFinite {
        file: checkpoint.tensor(&tensor).map(|t| t.file().into()).unwrap_or_default(),
        tensor,
        row: position / n,
        column: position % n,
        value: decoded[position],
    }
}

/// Rows of each group, in order; the last may be shorter.
fn group_rows(group_size: usize, in_features: usize) -> impl Iterator<Item = usize> {
    (0..in_features).step_by(group_size).map(move |start| group_size.min(in_features - start))
}

/// Rows of each width, the widest first.
pub(super) fn widths(bits: &[Bits], group_size: usize, in_features: usize) -> Vec<(Bits, usize)> {
    let rows_of = |width: Bits| {
        let groups = bits.iter().zip(group_rows(group_size, in_features));
        groups.filter(|(bits, _)| **bits == width).map(|(_, rows)| rows).sum()
    };
    let widths = Bits::ALL.into_iter().rev().map(|width| (width, rows_of(width)));
    widths.filter(|(_, rows)| *rows > 0).collect()
}

/// Bits of the five tensors, given the width of each group in any order: what `GroupTable::stored_bits`
/// counts for groups in stored order. A test compares the two.
pub(super) fn stored_bits(in_features: usize, out_features: usize, group_size: usize, bits: &[Bits]) -> u64 {
    let (k, n, groups) = (in_features as u64, out_features as u64, bits.len() as u64);
    let rows = group_rows(group_size, in_features);
    let code_bits = |(rows, bits): (usize, &Bits)| rows as u64 * n * u64::from(bits.get());
    rows.zip(bits).map(code_bits).sum::<u64>() + (4 * n + 48) * groups + 32 * k
}

/// exllamav2 permutes the columns of gate and up to match down_proj's rows, but not their biases: with biases the
/// rows are grouped only if their order can be folded into gate and up.
fn row_order(member: &Member<'_>, members: &[Member<'_>]) -> RowOrder {
    match needs_identity(&member.linear) && !can_fold(member, members) {
        true => RowOrder::Natural,
        false => RowOrder::Grouped,
    }
}

/// Sizes that hold whole source groups or equal parts of one; all sizes where none does.
fn aligned_group_sizes(member: &Member<'_>) -> Vec<usize> {
    let k = member.linear.in_features;
    let aligned: Vec<usize> = match member.module.layout() {
        Layout::Gptq(gptq) if gptq.equal_groups => {
            let size = gptq.group_size;
            let fits = |s: &usize| size.is_multiple_of(*s) || s.is_multiple_of(size);
            GROUP_SIZES.into_iter().filter(fits).collect()
        }
        _ => GROUP_SIZES.to_vec(),
    };
    let sizes = if aligned.is_empty() { GROUP_SIZES.to_vec() } else { aligned };
    // Of the sizes that make one group of the whole module, the first is enough.
    let more_than_one = sizes.iter().filter(|&&s| s < k).count();
    sizes.into_iter().take(more_than_one + 1).collect()
}

/// [`Cut::straddling`] of a module whose weights needn't be read for it.
pub(super) fn straddling(
    checkpoint: &Checkpoint,
    module: &Module,
    order: RowOrder,
    group_size: usize,
) -> usize {
    let Some(mut groups) = groups_of_rows(checkpoint, module) else { return 0 };
    if order == RowOrder::Grouped {
        groups.sort_unstable();
    }
    Cut::new(module.in_features(), group_size, Some(&groups)).straddling
}

/// The source group of each row; `None` where there are none.
pub(super) fn groups_of_rows(checkpoint: &Checkpoint, module: &Module) -> Option<Vec<u32>> {
    let Layout::Gptq(gptq) = module.layout() else { return None };
    let stored = match gptq.g_idx {
        GIdxKind::ActOrder => checkpoint.tensor(&format!("{}.g_idx", module.name())),
        _ => None,
    };
    // Opening has checked that the index has k entries, none negative.
    Some(match stored.and_then(|tensor| tensor.integers()) {
        Some(index) => index.into_iter().map(|group| group as u32).collect(),
        None => (0..module.in_features()).map(|row| (row / gptq.group_size) as u32).collect(),
    })
}

/// Mixes of widths along the lower convex hull of size and error, from all lowest to all highest: the
/// exchange that saves most error a bit comes first. Gives an index into `widths` for each group.
pub(super) fn mixes(groups: &[Range<usize>], widths: &[Bits], errors: &[&[f64]]) -> Vec<Vec<usize>> {
    let mut steps: Vec<(f64, usize, usize)> = Vec::new();
    for (g, errors) in errors.iter().enumerate() {
        let rows = groups[g].len() as f64;
        let slope = |a: usize, b: usize| {
            (errors[a] - errors[b]) / (rows * f64::from(widths[b].get() - widths[a].get()))
        };
        let mut hull = vec![0];
        for w in 1..widths.len() {
            while let [.., a, b] = hull[..]
                && slope(a, b) <= slope(b, w)
            {
                hull.pop();
            }
            hull.push(w);
        }
        steps.extend(hull.windows(2).map(|pair| (slope(pair[0], pair[1]), g, pair[1])));
    }
    steps.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    let every = steps.len().div_ceil(MOST_MIXES).max(1);
    let mut choice = vec![0; groups.len()];
    let mut mixes = Vec::new();
    for (i, (_, group, width)) in steps.into_iter().enumerate() {
        choice[group] = width;
        if (i + 1) % every == 0 {
            mixes.push(choice.clone());
        }
    }
    mixes
}
