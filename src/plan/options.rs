//! The options of a module: widths and group sizes, their sizes and measured errors.

use super::rules;
use super::sets::{Member, Treatment};
use super::{BiasDecision, Decision, DenseType, Error, Exl2Decision, PlanOptions, PlannedModule, Target};
use crate::arch::Role;
use crate::checkpoint::{Checkpoint, Layout};
use crate::quantize::{RowOrder, Samples, Source, fit_group};
use rayon::prelude::*;
use requant_formats::exl2::{Bits, ROW_UNIT};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Group sizes that a plan chooses from.
pub const GROUP_SIZES: [usize; 3] = [32, 64, 128];

/// Mixes of widths kept a module and group size, besides the uniform ones.
const MOST_MIXES: usize = 64;

/// One way to store a module.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModuleOption {
    /// Rows of a group.
    pub group_size: usize,
    /// Rows of each width, the widest first.
    pub widths: Vec<(Bits, usize)>,
    /// Bits of its tensors, the bias included.
    pub stored_bits: u64,
    /// Frobenius norm of the difference over that of the weight.
    pub relative_error: f64,
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
}

/// Options, before anything is measured.
pub(super) struct Space {
    pub(super) group_sizes: Vec<usize>,
    /// Ascending.
    pub(super) widths: Vec<Bits>,
    order: RowOrder,
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
    pub(super) stored_bits: u64,
    /// Squared error over squared norm.
    pub(super) squared_error: f64,
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
    pub(super) fn new(member: &'a Member<'a>, options: &PlanOptions) -> Result<Self, Error> {
        if member.treatment == Treatment::Dense {
            return Ok(Self { member, space: None });
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
                if group_size == 0 || group_size % ROW_UNIT != 0 {
                    return Err(Error::GroupSize { found: group_size });
                }
                (vec![group_size], vec![min.map_or(bits, |min| min.max(bits))])
            }
            _ => (aligned_group_sizes(member), Bits::ALL.to_vec()),
        };
        let mut widths = match (set, min) {
            (Some(set), _) => vec![set],
            (None, min) => asked.into_iter().filter(|&b| min.is_none_or(|min| b >= min)).collect(),
        };
        if member.treatment == Treatment::QuantizeWidest {
            widths.drain(..widths.len() - 1);
            group_sizes.truncate(1);
        }
        Ok(Self { member, space: Some(Space { group_sizes, widths, order: row_order(member) }) })
    }

    fn bias_bits(&self) -> u64 {
        match self.member.bias {
            BiasDecision::Kept => 16 * self.member.linear.out_features as u64,
            BiasDecision::None | BiasDecision::DroppedZeros => 0,
        }
    }

    /// Bits of one width and one group size.
    fn uniform_bits(&self, bits: Bits, group_size: usize) -> u64 {
        let (k, n) = (self.member.linear.in_features as u64, self.member.linear.out_features as u64);
        let groups = k.div_ceil(group_size as u64);
        // What GroupTable::stored_bits counts; a test compares the two.
        k * n * u64::from(bits.get()) + (4 * n + 48) * groups + 32 * k + self.bias_bits()
    }

    /// The cheapest and the dearest option.
    pub(super) fn range(&self) -> (u64, u64) {
        let Some(space) = &self.space else { return (0, 0) };
        let all = || {
            let sizes = space.group_sizes.iter();
            sizes.flat_map(|&size| space.widths.iter().map(move |&bits| self.uniform_bits(bits, size)))
        };
        (all().min().unwrap_or(0), all().max().unwrap_or(0))
    }

    /// The outcome where there is one option, which needs no measuring.
    pub(super) fn only_outcome(&self) -> Outcome {
        let Some(space) = &self.space else { return Outcome::dense() };
        let (group_size, bits) = (space.group_sizes[0], space.widths[0]);
        let k = self.member.linear.in_features;
        let straddling_groups = match self.member.module.layout() {
            Layout::Gptq(gptq) if space.order == RowOrder::Grouped && gptq.equal_groups => {
                straddling(k, gptq.group_size, group_size)
            }
            _ => 0,
        };
        Outcome {
            decision: Decision::Exl2(Exl2Decision {
                group_size,
                bits: vec![bits; k.div_ceil(group_size)],
                order: space.order,
                straddling_groups,
                stored_bits: self.uniform_bits(bits, group_size),
                relative_error: None,
            }),
            ..Outcome::dense()
        }
    }

    /// Measures all options.
    pub(super) fn measure(&self, checkpoint: &Checkpoint) -> Result<Vec<Candidate>, crate::Error> {
        let Some(space) = &self.space else { return Ok(Vec::new()) };
        let source = source(checkpoint, self.member.module, space.order)?;
        let mut candidates = Vec::new();
        for &group_size in &space.group_sizes {
            let cut = source.cut(group_size);
            let measured: Vec<(Vec<f64>, f64)> = cut
                .groups
                .par_iter()
                .map(|places| {
                    let samples = Samples::new(&source, places.clone());
                    let errors = space.widths.iter().map(|&b| fit_group(&samples, b).squared_error).collect();
                    (errors, samples.squared_norm())
                })
                .collect();
            let norm: f64 = measured.iter().map(|m| m.1).sum();
            let share = |error: f64| if norm == 0.0 { 0.0 } else { error / norm };
            let candidate = |choice: &[usize], uniform| {
                let bits: Vec<Bits> = choice.iter().map(|&w| space.widths[w]).collect();
                let n = self.member.linear.out_features as u64;
                let code_bits =
                    |(places, b): (&Range<usize>, &Bits)| places.len() as u64 * n * u64::from(b.get());
                let lowest = space.widths[0];
                let k = self.member.linear.in_features as u64;
                Candidate {
                    group_size,
                    uniform,
                    stored_bits: self.uniform_bits(lowest, group_size) - k * n * u64::from(lowest.get())
                        + cut.groups.iter().zip(&bits).map(code_bits).sum::<u64>(),
                    squared_error: share(measured.iter().zip(choice).map(|(m, &w)| m.0[w]).sum()),
                    straddling: cut.straddling,
                    bits,
                }
            };
            for width in 0..space.widths.len() {
                candidates.push(candidate(&vec![width; cut.groups.len()], true));
            }
            // Widths must fall along the stored rows, which natural order doesn't allow to arrange.
            if space.order == RowOrder::Grouped {
                let errors: Vec<&[f64]> = measured.iter().map(|m| m.0.as_slice()).collect();
                let mixes = mixes(&cut.groups, &space.widths, &errors);
                candidates.extend(mixes.iter().map(|choice| candidate(choice, false)));
            }
        }
        Ok(candidates)
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
            decision: Decision::Exl2(Exl2Decision {
                group_size: chosen.group_size,
                bits: chosen.bits.clone(),
                order: space.order,
                straddling_groups: chosen.straddling,
                stored_bits: chosen.stored_bits,
                relative_error: Some(chosen.squared_error.sqrt()),
            }),
        }
    }

    pub(super) fn planned(&self, outcome: Outcome) -> PlannedModule {
        let linear = &self.member.linear;
        PlannedModule {
            name: linear.exl2_name.clone(),
            source: linear.name.clone(),
            in_features: linear.in_features,
            out_features: linear.out_features,
            decision: outcome.decision,
            bias: self.member.bias,
            options: outcome.options,
            step_up: outcome.step_up,
            step_down: outcome.step_down,
        }
    }
}

impl Candidate {
    fn option(&self, in_features: usize) -> ModuleOption {
        ModuleOption {
            group_size: self.group_size,
            widths: widths(&self.bits, self.group_size, in_features),
            stored_bits: self.stored_bits,
            relative_error: self.squared_error.sqrt(),
        }
    }
}

/// A module's weights as the quantizer takes them.
pub(crate) fn source(
    checkpoint: &Checkpoint,
    module: &crate::checkpoint::Module,
    order: RowOrder,
) -> Result<Source, crate::checkpoint::Error> {
    Ok(match module.layout() {
        Layout::Gptq(_) => Source::gptq(checkpoint.gptq(module)?, order),
        _ => Source::dense(checkpoint.dense(module)?, module.in_features(), module.out_features()),
    })
}

/// Rows of each width, the widest first.
pub(super) fn widths(bits: &[Bits], group_size: usize, in_features: usize) -> Vec<(Bits, usize)> {
    let rows = |i: usize| group_size.min(in_features - i * group_size);
    Bits::ALL
        .into_iter()
        .rev()
        .map(|width| {
            (width, bits.iter().enumerate().filter(|(_, b)| **b == width).map(|(i, _)| rows(i)).sum())
        })
        .filter(|(_, rows)| *rows > 0)
        .collect()
}

/// exllamav2 permutes the columns of gate and up to match down_proj's rows, but not their biases.
fn row_order(member: &Member<'_>) -> RowOrder {
    let linear = &member.linear;
    if linear.role == Role::Down && linear.bias { RowOrder::Natural } else { RowOrder::Grouped }
}

/// Sizes that hold whole source groups or equal parts of one; all sizes where none does.
fn aligned_group_sizes(member: &Member<'_>) -> Vec<usize> {
    let k = member.linear.in_features;
    let aligned: Vec<usize> = match member.module.layout() {
        Layout::Gptq(gptq) if gptq.equal_groups => {
            let size = gptq.group_size;
            let fits = |s: &usize| size % s == 0 || s % size == 0;
            GROUP_SIZES.into_iter().filter(fits).collect()
        }
        _ => GROUP_SIZES.to_vec(),
    };
    let sizes = if aligned.is_empty() { GROUP_SIZES.to_vec() } else { aligned };
    // Of the sizes that make one group of the whole module, the first is enough.
    let more_than_one = sizes.iter().filter(|&&s| s < k).count();
    sizes.into_iter().take(more_than_one + 1).collect()
}

/// Groups of `group_size` rows that hold parts of several of the source's groups of `from` rows.
fn straddling(k: usize, from: usize, group_size: usize) -> usize {
    let whole = |start: usize, end: usize| start % from == 0 && (end % from == 0 || end == k);
    (0..k)
        .step_by(group_size)
        .map(|start| (start, k.min(start + group_size)))
        .filter(|&(start, end)| start / from != (end - 1) / from && !whole(start, end))
        .count()
}

/// Mixes of widths along the lower convex hull of size and error, from all lowest to all highest: the
/// exchange that saves most error a bit comes first. Gives an index into `widths` for each group.
fn mixes(groups: &[Range<usize>], widths: &[Bits], errors: &[&[f64]]) -> Vec<Vec<usize>> {
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
