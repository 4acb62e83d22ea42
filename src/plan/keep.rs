//! Keeping GPTQ modules in an EXL2 directory: which exllamav2 reads, and which must be kept together.
//!
//! exllamav2 finds the layout of each linear by its tensors, and reads 4-bit GPTQ as it is (specs: its
//! loader, `make_q_matrix` and `QMatrix`). A kept module costs its stored bits and no error.

use super::options::{Candidate, Job};
use super::relayout::{self, GptqDecision, GptqOptions};
use super::solve::{Choice, Solution, solve_until};
use super::{BiasDecision, Decision};
use crate::arch::Role;
use crate::checkpoint::{Bias, Checkpoint, Layout, Module};
use requant_formats::exl2::ROW_UNIT;
use requant_formats::gptq::{Bits, ZeroConvention};
use safetensors::Dtype;

/// Rows of a group that its counting sort can number: it adds them up in a signed 16-bit integer.
const MOST_SORTED_ROWS: usize = 32_767;

/// What a module becomes when it stays GPTQ; `None` where exllamav2 would not read it, or not rightly.
pub(super) fn decision(
    checkpoint: &Checkpoint,
    module: &Module,
    bias: BiasDecision,
) -> Result<Option<Decision>, crate::Error> {
    let Layout::Gptq(gptq) = module.layout() else { return Ok(None) };
    let (k, n) = (module.in_features(), module.out_features());
    let act_order = gptq.g_idx == requant_formats::gptq::GIdxKind::ActOrder;
    let (size, groups) = (gptq.group_size, gptq.shape.groups);
    let reads = gptq.shape.bits == Bits::ALL[2]
        && k.is_multiple_of(ROW_UNIT)
        && n.is_multiple_of(ROW_UNIT)
        // It takes the smallest power of two that gives this many groups.
        && (groups == 1 || (size.is_power_of_two() && size >= ROW_UNIT))
        && (groups == 1 || gptq.equal_groups && (!act_order || k.is_multiple_of(size)))
        && (!act_order || (size <= MOST_SORTED_ROWS && k <= usize::from(u16::MAX)))
        // It drops a bias of zeros, and then misses it.
        && !(bias == BiasDecision::Kept && module.bias() == Some(Bias::AllZero))
        // It adds the bias as it is, where the model's code multiplies it: an EXL2 module's is stored multiplied.
        && (bias != BiasDecision::Kept || checkpoint.prescale(module) == 1.0);
    if !reads {
        return Ok(None);
    }
    let matrix = checkpoint.gptq(module)?;
    if matrix.zeros().contains(&0) {
        return Ok(None);
    }
    let exact = matrix.scales().iter().all(|&s| half::f16::from_f32(s).to_f32() == s);
    if !exact {
        return Ok(None);
    }
    let options = GptqOptions { zeros: Some(ZeroConvention::V1), ..GptqOptions::default() };
    let decision = GptqDecision { scales: Dtype::F16, ..relayout::from_gptq(module, gptq, &options)? };
    Ok(Some(match relayout::stays(module, gptq, &decision, checkpoint) {
        true => Decision::Kept,
        false => Decision::Gptq(decision),
    }))
}

/// Solves under the rule that gate and up stay GPTQ only together with each other and with down_proj:
/// exllamav2 permutes the columns of gate and up for a down_proj that is EXL2. `open` lists the candidates of
/// each job that may be picked; the result picks an index into it.
///
/// Where a block's MLP can be kept, its three modules are one class of the solver: kept as a whole, or any
/// mix along the convex hull of the three. What that leaves out is bounded by the solution's gap.
pub(super) fn solve_with_kept(
    jobs: &[&Job<'_>],
    measured: &[Vec<Candidate>],
    open: &[Vec<usize>],
    budget: u64,
    cancelled: &dyn Fn() -> bool,
) -> Option<Solution> {
    let choice = |job: usize, i: usize| measured[job][open[job][i]].choice();
    let is_kept = |job: usize, i: usize| measured[job][open[job][i]].kept.is_some();
    let mut classes: Vec<Vec<(Choice, Vec<usize>)>> = Vec::new();
    let mut members: Vec<Vec<usize>> = Vec::new();
    for set in sets(jobs) {
        let any_kept = |&job: &usize| (0..open[job].len()).any(|i| is_kept(job, i));
        let whole = set.len() > 1 && set.iter().all(any_kept);
        if set.len() > 1 {
            let free = |job: usize| -> Vec<(Choice, usize)> {
                let may = |i: &usize| jobs[job].member.linear.role == Role::Down || !is_kept(job, *i);
                (0..open[job].len()).filter(may).map(|i| (choice(job, i), i)).collect()
            };
            let lists: Vec<Vec<(Choice, usize)>> = set.iter().map(|&job| free(job)).collect();
            let mut options = hull_of_sums(&lists);
            if whole {
                let kept: Vec<usize> = set
                    .iter()
                    .map(|&job| (0..open[job].len()).find(|&i| is_kept(job, i)).unwrap_or(0))
                    .collect();
                let sum = set.iter().zip(&kept).map(|(&job, &i)| choice(job, i));
                let sum = sum.fold(Choice { cost: 0, error: 0.0 }, add);
                options.push((sum, kept));
            }
            classes.push(options);
            members.push(set);
        } else {
            for job in set {
                classes.push((0..open[job].len()).map(|i| (choice(job, i), vec![i])).collect());
                members.push(vec![job]);
            }
        }
    }
    let costs: Vec<Vec<Choice>> = classes.iter().map(|c| c.iter().map(|(c, _)| *c).collect()).collect();
    let solution = solve_until(&costs, budget, cancelled)?;
    let mut picks = vec![0; jobs.len()];
    for ((class, members), &pick) in classes.iter().zip(&members).zip(&solution.picks) {
        for (&job, &i) in members.iter().zip(&class[pick].1) {
            picks[job] = i;
        }
    }
    Some(Solution { picks, gap: (solution.error - solution.bound).max(0.0), ..solution })
}

fn add(a: Choice, b: Choice) -> Choice {
    Choice { cost: a.cost + b.cost, error: a.error + b.error }
}

/// Jobs whose modules are bound together: gate, up and down of one MLP; all others alone.
fn sets(jobs: &[&Job<'_>]) -> Vec<Vec<usize>> {
    let key = |job: usize| {
        let linear = &jobs[job].member.linear;
        let mlp = matches!(linear.role, Role::Gate | Role::Up | Role::Down);
        (linear.layer, linear.expert, if mlp { None } else { Some(linear.role) })
    };
    let all: Vec<usize> = (0..jobs.len()).collect();
    all.chunk_by(|&a, &b| key(a) == key(b)).map(<[usize]>::to_vec).collect()
}

/// The lower convex hull of the sums of one option from each list, with the options that make it.
fn hull_of_sums(lists: &[Vec<(Choice, usize)>]) -> Vec<(Choice, Vec<usize>)> {
    let mut picks: Vec<usize> = Vec::new();
    let mut steps: Vec<(f64, usize, Choice, usize)> = Vec::new();
    let mut sum = Choice { cost: 0, error: 0.0 };
    for (which, list) in lists.iter().enumerate() {
        let choices: Vec<Choice> = list.iter().map(|(choice, _)| *choice).collect();
        let hull = super::solve::lower_hull(&choices);
        let Some(&first) = hull.first() else { return Vec::new() };
        sum = add(sum, choices[first]);
        picks.push(list[first].1);
        for pair in hull.windows(2) {
            let (from, to) = (choices[pair[0]], choices[pair[1]]);
            let slope = (from.error - to.error) / (to.cost - from.cost) as f64;
            let step = Choice { cost: to.cost - from.cost, error: to.error - from.error };
            steps.push((slope, which, step, list[pair[1]].1));
        }
    }
    steps.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let mut options = vec![(sum, picks.clone())];
    for (_, which, step, option) in steps {
        sum = add(sum, step);
        picks[which] = option;
        options.push((sum, picks.clone()));
    }
    options
}
