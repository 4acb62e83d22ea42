//! Measures every option and lets the solver choose under the budget.

use super::keep::solve_with_kept;
use super::options::{Candidate, Job, Outcome};
use super::solve::{Choice, Solution, solve_until};
use super::{Error, Losses, Objective};
use crate::checkpoint::Checkpoint;
use crate::progress::{Event, Observer};

/// What was measured, for all budgets alike.
pub(super) struct Measurements<'a> {
    budgets: Vec<f64>,
    /// `None`: errors of weights count.
    losses: Option<&'a mut dyn Losses>,
    calibrated: bool,
    /// The options of each job; `None` before the first budget is solved.
    measured: Option<Vec<Vec<Candidate>>>,
}

impl<'a> Measurements<'a> {
    /// For budgets in bpw.
    pub(super) fn of(budgets: Vec<f64>, losses: Option<&'a mut dyn Losses>) -> Self {
        Self { budgets, calibrated: losses.is_some(), losses, measured: None }
    }

    /// The options of each job, measured if they aren't yet, and once every budget is known to be feasible.
    fn get(
        &mut self,
        checkpoint: &Checkpoint,
        jobs: &[&Job<'_>],
        weights: u64,
        observer: &dyn Observer,
    ) -> Result<&[Vec<Candidate>], crate::Error> {
        let measured = match self.measured.take() {
            Some(measured) => measured,
            None => {
                for &bpw in &self.budgets {
                    budget(jobs, bpw, weights)?;
                }
                measure(checkpoint, jobs, weights, self.losses.take(), observer)?
            }
        };
        Ok(self.measured.insert(measured))
    }
}

fn measure(
    checkpoint: &Checkpoint,
    jobs: &[&Job<'_>],
    weights: u64,
    mut losses: Option<&mut dyn Losses>,
    observer: &dyn Observer,
) -> Result<Vec<Vec<Candidate>>, crate::Error> {
    observer.event(&Event::Stage { name: "measure", modules: jobs.len(), weights });
    let mut measured: Vec<Vec<Candidate>> = Vec::with_capacity(jobs.len());
    for job in jobs {
        if observer.cancelled() {
            return Err(crate::Error::Cancelled);
        }
        measured.push(job.measure(checkpoint, &mut losses)?);
        let module = job.member.module;
        observer.event(&Event::Module { name: module.name(), weights: module.weights() });
    }
    Ok(measured)
}

pub(super) fn by_error(
    checkpoint: &Checkpoint,
    jobs: &[&Job<'_>],
    bpw: f64,
    measurements: &mut Measurements<'_>,
    observer: &dyn Observer,
) -> Result<(Vec<Outcome>, Objective), crate::Error> {
    let weights: u64 = jobs.iter().map(|job| job.member.module.weights()).sum();
    let budget = budget(jobs, bpw, weights)?;
    let calibrated = measurements.calibrated;
    let measured = measurements.get(checkpoint, jobs, weights, observer)?;
    let solved = |open: &dyn Fn(&Candidate) -> bool| -> Result<(Solution, Vec<Vec<usize>>), Error> {
        let open: Vec<Vec<usize>> =
            measured.iter().map(|c| (0..c.len()).filter(|&i| open(&c[i])).collect()).collect();
        let classes: Vec<Vec<Choice>> = (measured.iter().zip(&open))
            .map(|(candidates, open)| open.iter().map(|&i| candidates[i].choice()).collect())
            .collect();
        let may_keep = |(c, open): (&Vec<Candidate>, &Vec<usize>)| open.iter().any(|&i| c[i].kept.is_some());
        let solution = match measured.iter().zip(&open).any(may_keep) {
            true => solve_with_kept(jobs, measured, &open, budget, &|| observer.cancelled()),
            false => solve_until(&classes, budget, &|| observer.cancelled()),
        };
        Ok((solution.ok_or_else(|| infeasible(jobs, bpw, weights))?, open))
    };
    let (mut best, mut open) = solved(&|_| true)?;
    let (one_width, one_width_open) = solved(&|candidate| candidate.uniform)?;
    // Better only where the search was cut short, or where kept modules were looked for along hulls; the gap
    // that was left shrinks by as much.
    let mut others = vec![(one_width.clone(), one_width_open.clone())];
    if measured.iter().flatten().any(|candidate| candidate.kept.is_some()) {
        others.push(solved(&|candidate| candidate.kept.is_none())?);
    }
    // What a cancelled search gives is no plan.
    if observer.cancelled() {
        return Err(crate::Error::Cancelled);
    }
    for (other, other_open) in others {
        if other.error < best.error {
            let gap = (best.gap - (best.error - other.error)).max(0.0);
            (best, open) = (Solution { gap, ..other }, other_open);
        }
    }
    let mean = |solution: &Solution, open: &[Vec<usize>]| {
        let errors =
            measured.iter().zip(open).zip(&solution.picks).map(|((c, o), &p)| c[o[p]].squared_error.sqrt());
        errors.sum::<f64>() / jobs.len() as f64
    };
    let objective = Objective {
        value: best.error,
        calibrated,
        one_width_a_module: one_width.error,
        gap: best.gap,
        mean_relative_error: mean(&best, &open),
        mean_relative_error_one_width: mean(&one_width, &one_width_open),
    };
    let outcomes = (jobs.iter().zip(measured).zip(open.iter().zip(&best.picks)))
        .map(|((job, candidates), (open, &pick))| job.outcome(candidates, open[pick]))
        .collect();
    Ok((outcomes, objective))
}

fn budget(jobs: &[&Job<'_>], bpw: f64, weights: u64) -> Result<u64, Error> {
    let (lowest, highest) = range(jobs, weights);
    // More than the dearest options is no error of size, but not what was asked for either.
    if !(lowest..=highest).contains(&bpw) {
        return Err(infeasible(jobs, bpw, weights));
    }
    Ok((bpw * weights as f64) as u64)
}

/// bpw of the cheapest and of the dearest options. Both are rounded up to the four digits that an error
/// prints, so that what it prints is feasible.
fn range(jobs: &[&Job<'_>], weights: u64) -> (f64, f64) {
    bpw_range(jobs.iter().map(|job| job.range()), weights)
}

fn bpw_range(ranges: impl Iterator<Item = (u64, u64)>, weights: u64) -> (f64, f64) {
    let (lowest, highest) = ranges.fold((0, 0), |sum, range| (sum.0 + range.0, sum.1 + range.1));
    let bpw = |bits: u64| (bits as f64 / weights as f64 * 1e4).ceil() / 1e4;
    (bpw(lowest), bpw(highest))
}

fn infeasible(jobs: &[&Job<'_>], asked: f64, weights: u64) -> Error {
    let (lowest, highest) = range(jobs, weights);
    let unruled = bpw_range(jobs.iter().map(|job| job.unruled_range()), weights);
    let unruled = (unruled != (lowest, highest)).then_some(unruled);
    Error::Infeasible { asked, lowest, highest, unruled }
}
