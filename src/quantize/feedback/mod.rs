//! Quantizes with calibration: errors are weighed by the Hessian of a linear's inputs, and the error of each row is
//! made up for by the rows after it.
//!
//! Rows are settled in stored order, a group at a time. Then each group is settled again, once or more, with all
//! others as they are, where that weighs less. Columns share nothing but a group's ceiling.

mod hessian;
pub(in crate::quantize) mod kernel;
#[cfg(test)]
mod tests;

pub use hessian::{Hessian, NotTriangular};

use super::fit::{Quantized, quantize};
use super::panel::{LANES, Lanes, Panel, Steps, Window};
use super::search::{
    Runner, SMALLEST, Search, ceiling, code_range, even_ceilings, finer_ceilings, steps, wanted_scales,
};
use super::simd::SimdPath;
use super::source::Source;
use half::f16;
use hessian::{Conditional, Factor};
use kernel::Rows;
use rayon::prelude::*;
use requant_formats::Permutation;
use requant_formats::exl2::{Bits, Error, Group, GroupTable, Matrix, ceiling_for};
use std::ops::Range;

/// How to calibrate.
#[derive(Clone, Debug, PartialEq)]
pub struct Feedback {
    /// What is added to the Hessian's diagonal, as shares of its mean: the first that makes it positive definite.
    pub damping: Vec<f64>,
    /// Orders of rows that are tried; the one whose errors weigh least is taken. Where no reader may have to
    /// permute, [`FeedbackOrder::Grouped`] of a source in natural order alone.
    pub orders: Vec<FeedbackOrder>,
    /// How often each group is settled again after the first pass.
    pub passes: usize,
    /// Ceilings of a group that are compared with feedback, of those that are best without.
    pub ceilings: usize,
    /// Tokens that a Hessian must be of at least.
    pub fewest_tokens: usize,
}

impl Default for Feedback {
    fn default() -> Self {
        Self {
            damping: vec![0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0],
            orders: vec![FeedbackOrder::Grouped, FeedbackOrder::ByHessian],
            passes: 1,
            ceilings: 6,
            fewest_tokens: 128,
        }
    }
}

/// An order of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FeedbackOrder {
    /// The source's: its groups ascending, stable.
    Grouped,
    /// The source's groups by falling mean of the Hessian's diagonal, and rows within by falling diagonal.
    GroupedByHessian,
    /// By falling diagonal.
    ByHessian,
}

/// Why a matrix was quantized without its Hessian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Uncalibrated {
    /// It is of too few tokens.
    FewTokens(usize),
    /// No input was ever other than 0.
    Zero,
    /// No damping makes it positive definite.
    NotPositive,
    /// Feedback made errors that weigh more.
    NoGain,
}

/// An EXL2 matrix, and what its errors weigh.
#[derive(Debug)]
pub struct Calibrated {
    /// The matrix.
    pub quantized: Quantized,
    /// tr(ΔᵀHΔ) over tr(WᵀHW), H not damped: the relative squared error of the linear's outputs.
    pub output_error: f64,
    /// The order of rows and the damping, as a share of the mean diagonal; or why there was no calibration.
    pub how: Result<(FeedbackOrder, f64), Uncalibrated>,
}

/// Quantizes a module with groups of these widths and rows, in stored order: the widest first.
///
/// # Errors
/// Those of [`quantize`]; [`Error::Length`] if the Hessian or the groups have other rows than the source.
pub fn quantize_calibrated(
    source: &Source,
    groups: &[Group],
    hessian: &Hessian,
    how: &Feedback,
) -> Result<Calibrated, Error> {
    quantize_on(source, groups, hessian, how, SimdPath::or_fastest())
}

fn quantize_on(
    source: &Source,
    groups: &[Group],
    hessian: &Hessian,
    how: &Feedback,
    path: SimdPath,
) -> Result<Calibrated, Error> {
    let k = source.in_features();
    for found in [hessian.in_features(), groups.iter().map(|group| group.rows).sum()] {
        if found != k {
            return Err(Error::Length { tensor: "q_groups", found, expected: k });
        }
    }
    let weights = source.decoded();
    let norm = weigh(hessian, &weights, source.n, path);
    let share = |loss: f64| if norm > 0.0 { loss / norm } else { 0.0 };
    let plain = || -> Result<(Quantized, f64), Error> {
        let mut end = 0;
        let cut = groups.iter().map(|group| {
            end += group.rows;
            end - group.rows..end
        });
        let cut = super::Cut { groups: cut.collect(), straddling: 0 };
        let bits: Vec<Bits> = groups.iter().map(|group| group.bits).collect();
        let quantized = quantize(source, &cut, &bits)?;
        let loss = share(weigh_errors(hessian, &weights, &quantized.matrix, source.prescale, path));
        Ok((quantized, loss))
    };
    let fall_back = |why| {
        let (quantized, output_error) = plain()?;
        Ok(Calibrated { quantized, output_error, how: Err(why) })
    };
    if hessian.tokens() < how.fewest_tokens {
        return fall_back(Uncalibrated::FewTokens(hessian.tokens()));
    }
    let mean = hessian.mean();
    if mean == 0.0 {
        return fall_back(Uncalibrated::Zero);
    }
    let mut best: Option<(State, FeedbackOrder, f64, f64)> = None;
    for &order in &how.orders {
        let rows = rows(source, hessian, order);
        let factors = how.damping.iter().map(|&d| (d, Factor::new(hessian, &rows, d * mean)));
        let Some((damping, factor)) = factors.into_iter().find_map(|(d, f)| Some((d, f?))) else {
            continue;
        };
        let mut state = State::new(source, rows, groups, how.ceilings, path);
        let mut loss = state.settle(&factor);
        drop(factor);
        for _ in 0..how.passes {
            loss += state.settle_again(hessian, damping * mean);
        }
        if best.as_ref().is_none_or(|best| loss < best.3) {
            best = Some((state, order, damping, loss));
        }
    }
    let Some((state, order, damping, _)) = best else { return fall_back(Uncalibrated::NotPositive) };
    let quantized = state.finish(source, groups)?;
    let output_error = share(weigh_errors(hessian, &weights, &quantized.matrix, source.prescale, path));
    let (plain, without) = plain()?;
    if without < output_error {
        let how = Err(Uncalibrated::NoGain);
        return Ok(Calibrated { quantized: plain, output_error: without, how });
    }
    Ok(Calibrated { quantized, output_error, how: Ok((order, damping)) })
}

/// Rows of the model in stored order.
fn rows(source: &Source, hessian: &Hessian, order: FeedbackOrder) -> Vec<u32> {
    let mut rows = source.rows.map().to_vec();
    let diagonal = |row: u32| hessian.at(row as usize, row as usize);
    match (order, source.groups_of_rows()) {
        (FeedbackOrder::Grouped, _) => {}
        (FeedbackOrder::ByHessian, _) | (FeedbackOrder::GroupedByHessian, None) => {
            rows.sort_by(|&a, &b| diagonal(b).total_cmp(&diagonal(a)));
        }
        (FeedbackOrder::GroupedByHessian, Some(of)) => {
            let mut sums = vec![(0.0, 0.0); of.iter().max().map_or(0, |&last| last as usize + 1)];
            for &row in &rows {
                let (sum, count) = &mut sums[of[row as usize] as usize];
                *sum += diagonal(row);
                *count += 1.0;
            }
            let mean = |row: u32| sums[of[row as usize] as usize].0 / sums[of[row as usize] as usize].1;
            rows.sort_by(|&a, &b| {
                let groups = mean(b).total_cmp(&mean(a)).then(of[a as usize].cmp(&of[b as usize]));
                groups.then(diagonal(b).total_cmp(&diagonal(a)))
            });
        }
    }
    rows
}

/// tr(EᵀHE) for the errors of a matrix.
fn weigh_errors(hessian: &Hessian, weights: &[f32], matrix: &Matrix, prescale: f64, path: SimdPath) -> f64 {
    let decoded = matrix.dequantize_prescaled(prescale);
    let errors: Vec<f32> = weights.iter().zip(&decoded).map(|(w, d)| w - d.to_f32()).collect();
    weigh(hessian, &errors, matrix.out_features(), path)
}

/// tr(EᵀHE) of `[k, n]`, rows in the model's order.
fn weigh(hessian: &Hessian, errors: &[f32], n: usize, path: SimdPath) -> f64 {
    let k = hessian.in_features();
    let full: Vec<f32> = (0..k * k).map(|i| hessian.at(i / k, i % k) as f32).collect();
    let panel = |panel: usize| -> f64 {
        let lanes = |row: &[f32]| std::array::from_fn(|lane| row[panel * LANES + lane]);
        let errors: Vec<Lanes> = errors.chunks_exact(n).map(lanes).collect();
        let mut products = vec![[0.0; LANES]; k];
        path.pull(&full, k, &errors, &mut products);
        let pairs = errors.as_flattened().iter().zip(products.as_flattened());
        pairs.map(|(&e, &p)| f64::from(e) * f64::from(p)).sum()
    };
    let sums: Vec<f64> = (0..n / LANES).into_par_iter().map(panel).collect();
    sums.iter().sum()
}

/// A panel of columns under way; all rows in stored order.
struct Columns {
    weights: Vec<Lanes>,
    /// Weights minus what they decode to; 0 for what isn't settled.
    errors: Vec<Lanes>,
    codes: Vec<[u8; LANES]>,
    /// A scale a group.
    index: Vec<[u8; LANES]>,
    /// Of the group that is being settled.
    targets: Vec<Lanes>,
}

/// A module under way.
struct State {
    rows: Vec<u32>,
    groups: Vec<(Range<usize>, Bits)>,
    ceilings: Vec<f16>,
    columns: Vec<Columns>,
    grid: Option<u32>,
    prescale: f64,
    path: SimdPath,
    ceilings_compared: usize,
}

/// A ceiling chosen for a group: each panel's indices and weight of residuals.
struct Choice {
    ceiling: f16,
    panels: Vec<([u8; LANES], Lanes)>,
    sum: f64,
}

impl State {
    fn new(
        source: &Source,
        rows: Vec<u32>,
        groups: &[Group],
        ceilings_compared: usize,
        path: SimdPath,
    ) -> Self {
        let (k, panels) = (source.k, source.n / LANES);
        let empty = || Columns {
            weights: Vec::with_capacity(k),
            errors: vec![[0.0; LANES]; k],
            codes: vec![[0; LANES]; k],
            index: vec![[0; LANES]; groups.len()],
            targets: Vec::new(),
        };
        let mut columns: Vec<Columns> = (0..panels).map(|_| empty()).collect();
        let mut row = vec![0.0; source.n];
        for &from in &rows {
            source.row(from as usize, &mut row);
            for (columns, values) in columns.iter_mut().zip(row.as_chunks::<LANES>().0) {
                columns.weights.push(*values);
            }
        }
        let mut end = 0;
        let groups: Vec<_> = (groups.iter())
            .map(|group| {
                end += group.rows;
                (end - group.rows..end, group.bits)
            })
            .collect();
        let ceilings = vec![SMALLEST; groups.len()];
        let (grid, prescale) = (source.grid(), source.prescale);
        Self { rows, groups, ceilings, columns, grid, prescale, path, ceilings_compared }
    }

    /// Settles all groups from the first to the last. Gives what the residuals weigh.
    fn settle(&mut self, factor: &Factor) -> f64 {
        let (k, path) = (self.rows.len(), self.path);
        let mut loss = 0.0;
        for (g, (range, bits)) in self.groups.clone().into_iter().enumerate() {
            let coefficients = &factor.coefficients[range.start * k..range.end * k];
            self.columns.par_iter_mut().for_each(|columns| {
                columns.targets = columns.weights[range.clone()].to_vec();
                path.pull(coefficients, k, &columns.errors[..range.start], &mut columns.targets);
            });
            let own: Vec<f32> =
                coefficients.chunks_exact(k).flat_map(|row| &row[range.clone()]).copied().collect();
            let weights = &factor.weights[range.clone()];
            let choice = self.choose(&range, bits, weights, &own, false);
            loss += self.encode(g, &range, bits, weights, &own, &choice, false);
        }
        loss
    }

    /// Settles each group again with all others as they are, where that weighs less. Gives how much less, below 0.
    fn settle_again(&mut self, hessian: &Hessian, damping: f64) -> f64 {
        let (k, path) = (self.rows.len(), self.path);
        let mut change = 0.0;
        for (g, (range, bits)) in self.groups.clone().into_iter().enumerate() {
            let Some(given) = Conditional::new(hessian, &self.rows, range.clone(), damping) else { continue };
            let now: Vec<f64> = (self.columns.par_iter_mut())
                .map(|columns| {
                    columns.targets = columns.weights[range.clone()].to_vec();
                    path.pull(&given.pull, k, &columns.errors, &mut columns.targets);
                    residuals(columns, &range, &given)
                })
                .collect();
            let now: f64 = now.iter().sum();
            let choice = self.choose(&range, bits, &given.weights, &given.coefficients, true);
            if choice.sum < now {
                let new = self.encode(g, &range, bits, &given.weights, &given.coefficients, &choice, true);
                change += new - now;
            }
        }
        change
    }

    /// The ceiling and scales of a group whose targets are known. Where `alone`, errors are counted from targets.
    fn choose(&self, range: &Range<usize>, bits: Bits, weights: &[f32], own: &[f32], alone: bool) -> Choice {
        let (path, codes) = (self.path, code_range(bits));
        let how = Search::for_bits(bits, self.grid);
        let lanes: Vec<Lanes> = weights.iter().map(|&weight| [weight; LANES]).collect();
        let wanted: Vec<Lanes> = self.columns.iter().map(|c| wanted_scales(&c.targets, codes)).collect();
        let largest = wanted.iter().flatten().fold(0.0f32, |a, &b| a.max(b));
        let panel = |p: usize| Panel { values: &self.columns[p].targets, weights: &lanes };
        // Without feedback, on some panels: which ceilings are worth a closer look.
        let some: Vec<usize> =
            (0..self.columns.len()).step_by(self.columns.len().div_ceil(32).max(1)).collect();
        let race = |ceilings: &[f16]| -> Vec<Runner> {
            let offered: Vec<Steps> = ceilings.iter().map(|&ceiling| steps(ceiling, bits)).collect();
            let sums: Vec<Vec<f64>> = (some.par_iter())
                .map(|&p| {
                    let mut sums = vec![0.0; ceilings.len()];
                    let window = Window { wanted: &wanted[p], reach: how.window };
                    path.add_best_errors(panel(p), window, &offered, codes, &mut sums);
                    sums
                })
                .collect();
            let runner =
                |(i, &ceiling): (usize, &f16)| Runner { ceiling, sum: sums.iter().map(|s| s[i]).sum() };
            let mut runners: Vec<Runner> = ceilings.iter().enumerate().map(runner).collect();
            runners.sort_by(|a, b| a.sum.total_cmp(&b.sum));
            runners
        };
        let tried = even_ceilings(largest, &how, self.prescale);
        let mut runners = race(&tried);
        let finer = finer_ceilings(&tried, &runners, largest, &how, self.prescale);
        runners.extend(race(&finer));
        runners.sort_by(|a, b| a.sum.total_cmp(&b.sum));
        let mut few: Vec<f16> = runners.iter().map(|r| r.ceiling).take(self.ceilings_compared).collect();
        if few.is_empty() {
            few.push(ceiling(0.0, self.prescale).unwrap_or(SMALLEST));
        }
        let look = |ceiling: f16| -> Choice {
            let offered = steps(ceiling, bits);
            let panels: Vec<([u8; LANES], Lanes)> = (0..self.columns.len())
                .into_par_iter()
                .map(|p| {
                    let columns = &self.columns[p];
                    let centre = path.best_index(panel(p), &offered, codes);
                    let base = if alone { &columns.targets } else { &columns.weights[range.clone()] };
                    let rows = Rows { targets: &columns.targets, base, weights, coefficients: own };
                    path.best_with_feedback(rows, &centre, &offered, codes)
                })
                .collect();
            let sum = panels.iter().flat_map(|(_, sums)| sums).map(|&sum| f64::from(sum)).sum();
            Choice { ceiling, panels, sum }
        };
        let mut best = look(few[0]);
        for &ceiling in &few[1..] {
            let other = look(ceiling);
            if other.sum < best.sum {
                best = other;
            }
        }
        best
    }

    /// Gives a group its codes. Gives what the residuals weigh.
    #[allow(clippy::too_many_arguments, reason = "a group, and what was chosen for it")]
    fn encode(
        &mut self,
        g: usize,
        range: &Range<usize>,
        bits: Bits,
        weights: &[f32],
        own: &[f32],
        choice: &Choice,
        alone: bool,
    ) -> f64 {
        let (path, codes) = (self.path, code_range(bits));
        let offered = steps(choice.ceiling, bits);
        self.ceilings[g] = choice.ceiling;
        let sums: Vec<[f64; LANES]> = (self.columns.par_iter_mut().zip(&choice.panels))
            .map(|(columns, (index, _))| {
                let Columns { weights: of, errors, codes: to, targets, .. } = columns;
                let scale = index.map(|index| offered.scale[usize::from(index)]);
                let base = if alone { &*targets } else { &of[range.clone()] };
                let rows = Rows { targets, base, weights, coefficients: own };
                let errors = &mut errors[range.clone()];
                let sums = path.encode_with_feedback(rows, &scale, codes, &mut to[range.clone()], errors);
                if alone {
                    // Errors were counted from targets.
                    for ((error, target), weight) in errors.iter_mut().zip(targets).zip(&of[range.clone()]) {
                        for lane in 0..LANES {
                            error[lane] = weight[lane] - (target[lane] - error[lane]);
                        }
                    }
                }
                columns.index[g] = *index;
                sums
            })
            .collect();
        sums.iter().flatten().sum()
    }

    fn finish(self, source: &Source, groups: &[Group]) -> Result<Quantized, Error> {
        let n = source.n;
        let (mut codes, mut index) = (Vec::with_capacity(source.k * n), Vec::new());
        for j in 0..source.k {
            codes.extend(self.columns.iter().flat_map(|columns| columns.codes[j]));
        }
        for g in 0..groups.len() {
            index.extend(self.columns.iter().flat_map(|columns| columns.index[g]));
        }
        // The search tries no other ceilings; Matrix::new refuses an infinite one.
        let scale_max = self.ceilings.iter().map(|&c| ceiling_for(c, source.prescale).unwrap_or(f16::INFINITY)).collect();
        let invperm = Permutation::new(self.rows)?.inverse();
        let matrix = Matrix::new(GroupTable::new(groups.to_vec())?, n, codes, index, scale_max, invperm)?;
        let decoded = matrix.dequantize_prescaled(source.prescale);
        let (mut squared_error, mut squared_norm) = (0.0, 0.0);
        let mut row = vec![0.0; n];
        for (i, decoded) in decoded.chunks_exact(n).enumerate() {
            source.row(i, &mut row);
            for (decoded, &weight) in decoded.iter().zip(&row) {
                squared_error += (f64::from(decoded.to_f32()) - f64::from(weight)).powi(2);
                squared_norm += f64::from(weight).powi(2);
            }
        }
        Ok(Quantized { matrix, squared_error, squared_norm })
    }
}

/// What the residuals of a group as it is weigh, given targets that leave it out.
fn residuals(columns: &Columns, range: &Range<usize>, given: &Conditional) -> f64 {
    let m = range.len();
    let mut errors: Vec<Lanes> = Vec::with_capacity(m);
    let mut sum = 0.0;
    for (j, place) in range.clone().enumerate() {
        let error: Lanes = std::array::from_fn(|lane| {
            let decoded = columns.weights[place][lane] - columns.errors[place][lane];
            columns.targets[j][lane] - decoded
        });
        let coefficients = &given.coefficients[j * m..][..j];
        let mut residual = error;
        for (&coefficient, before) in coefficients.iter().zip(&errors) {
            for lane in 0..LANES {
                residual[lane] += coefficient * before[lane];
            }
        }
        let squares: f64 = residual.iter().map(|&r| f64::from(r) * f64::from(r)).sum();
        sum += f64::from(given.weights[j]) * squares;
        errors.push(error);
    }
    sum
}
