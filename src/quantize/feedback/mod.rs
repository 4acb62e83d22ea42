//! Quantizes with calibration: errors are weighed by the Hessian of a linear's inputs, and the error of each row is
//! made up for by the rows settled after it.
//!
//! Groups are settled one after the other, those whose inputs are largest first, whatever the order they are stored
//! in. A group's scales are searched for the weights that the errors so far ask for, weighed by the Hessian's
//! diagonal. Weighing them by what later rows can't make up for looks better group by group and is far worse in the
//! end: a weight that is clipped because others may make up for it makes the others too large for their own scales.
//! Settling groups again when all are settled lowers what errors weigh on the calibration text by 4 %, and does
//! nothing for other texts.

mod hessian;
pub(in crate::quantize) mod kernel;
#[cfg(test)]
mod tests;

pub use hessian::{Hessian, NotTriangular};

use super::fit::{Quantized, quantize};
use super::panel::{LANES, Lanes, Panel};
use super::relative_error::squares;
use super::search::{Search, best_ceiling, code_range, no_ceiling, steps};
use super::simd::SimdPath;
use super::source::{Cut, Source, stored_groups};
use half::f16;
use hessian::Factor;
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
    /// Tokens that a Hessian must be of at least.
    pub fewest_tokens: usize,
}

impl Default for Feedback {
    fn default() -> Self {
        Self { damping: vec![0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0], fewest_tokens: 128 }
    }
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
    /// The same of [`quantize`]'s matrix.
    pub output_error_by_weights: f64,
    /// The damping, as a share of the mean diagonal; or why there was no calibration.
    pub damping: Result<f64, Uncalibrated>,
}

/// Quantizes a module as [`quantize`] does, with the same order of rows, for the least tr(ΔᵀHΔ).
///
/// # Errors
/// Those of [`quantize`]; [`Error::Length`] if the Hessian has other rows than the source.
pub fn quantize_calibrated(
    source: &Source,
    cut: &Cut,
    bits: &[Bits],
    hessian: &Hessian,
    how: &Feedback,
) -> Result<Calibrated, Error> {
    let path = SimdPath::or_fastest();
    check_rows(source, hessian)?;
    let by_weights = quantize(source, cut, bits)?;
    let weights = source.decoded();
    let norm = weigh(hessian, &weights, source.n, path);
    let share = |matrix: &Matrix| {
        let loss = weigh_errors(hessian, &weights, matrix, source.prescale, path);
        if norm > 0.0 { loss / norm } else { 0.0 }
    };
    let without = share(&by_weights.matrix);
    let fall_back = |quantized, why| Calibrated {
        quantized,
        output_error: without,
        output_error_by_weights: without,
        damping: Err(why),
    };
    let order = Order::new(source, cut, hessian);
    let (damping, factor) = match damped(hessian, &order.rows, how) {
        Ok(found) => found,
        Err(why) => return Ok(fall_back(by_weights, why)),
    };
    let mut state = State::new(source, order, cut, bits, path);
    state.settle(&factor);
    drop(factor);
    let quantized = state.finish(source, cut, bits)?;
    let output_error = share(&quantized.matrix);
    if without < output_error {
        return Ok(fall_back(by_weights, Uncalibrated::NoGain));
    }
    Ok(Calibrated { quantized, output_error, output_error_by_weights: without, damping: Ok(damping) })
}

fn check_rows(source: &Source, hessian: &Hessian) -> Result<(), Error> {
    let (found, expected) = (hessian.in_features(), source.in_features());
    match found == expected {
        true => Ok(()),
        false => Err(Error::Length { tensor: "Hessian", found, expected }),
    }
}

/// The factor of a Hessian with the least damping that it needs.
fn damped(hessian: &Hessian, rows: &[u32], how: &Feedback) -> Result<(f64, Factor), Uncalibrated> {
    if hessian.tokens() < how.fewest_tokens {
        return Err(Uncalibrated::FewTokens(hessian.tokens()));
    }
    let mean = hessian.mean();
    if mean == 0.0 {
        return Err(Uncalibrated::Zero);
    }
    let factors = how.damping.iter().map(|&d| (d, Factor::new(hessian, rows, d * mean)));
    factors.into_iter().find_map(|(d, factor)| Some((d, factor?))).ok_or(Uncalibrated::NotPositive)
}

/// What the groups of a cut would weigh at each width after feedback, about: each group's errors as it would be by
/// itself, weighed by what later rows can't make up for.
#[derive(Clone, Debug)]
pub struct GroupLosses {
    /// Of each group in the order of the cut, of each width; summed over tokens.
    pub losses: Vec<Vec<f64>>,
    /// tr(WᵀHW).
    pub norm: f64,
}

/// Measures [`GroupLosses`]; `None` where the Hessian is of no use.
///
/// # Errors
/// [`Error::Length`] if the Hessian has other rows than the source.
pub fn group_losses(
    source: &Source,
    cut: &Cut,
    widths: &[Bits],
    hessian: &Hessian,
    how: &Feedback,
) -> Result<Option<GroupLosses>, Error> {
    check_rows(source, hessian)?;
    let path = SimdPath::or_fastest();
    let order = Order::new(source, cut, hessian);
    let Ok((_, factor)) = damped(hessian, &order.rows, how) else { return Ok(None) };
    let norm = weigh(hessian, &source.decoded(), source.n, path);
    let mut losses = vec![Vec::new(); cut.groups.len()];
    let bits = vec![Bits::ALL[0]; cut.groups.len()];
    let state = State::new(source, order, cut, &bits, path);
    let found: Vec<(usize, Vec<f64>)> = (state.groups.par_iter())
        .map(|group| {
            let of = |bits| state.loss_by_itself(&factor, group, bits);
            (group.of_cut, widths.iter().map(|&bits| of(bits)).collect())
        })
        .collect();
    for (group, of) in found {
        losses[group] = of;
    }
    Ok(Some(GroupLosses { losses, norm }))
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

/// The order in which rows are settled.
struct Order {
    /// Rows of the model.
    rows: Vec<u32>,
    /// The groups of the cut, and the place in the cut of each row.
    groups: Vec<usize>,
    places: Vec<usize>,
}

impl Order {
    /// Groups by the falling mean of the Hessian's diagonal, and the rows of each by the falling diagonal.
    fn new(source: &Source, cut: &Cut, hessian: &Hessian) -> Self {
        let row = |place: usize| source.rows.map()[place];
        let weight = |place: usize| hessian.at(row(place) as usize, row(place) as usize);
        let mean =
            |g: usize| cut.groups[g].clone().map(weight).sum::<f64>() / cut.groups[g].len().max(1) as f64;
        let means: Vec<f64> = (0..cut.groups.len()).map(mean).collect();
        let mut groups: Vec<usize> = (0..cut.groups.len()).collect();
        groups.sort_by(|&a, &b| means[b].total_cmp(&means[a]));
        let mut places = Vec::with_capacity(source.k);
        for &group in &groups {
            let first = places.len();
            places.extend(cut.groups[group].clone());
            places[first..].sort_by(|&a, &b| weight(b).total_cmp(&weight(a)));
        }
        Self { rows: places.iter().map(|&place| row(place)).collect(), groups, places }
    }
}

/// A panel of columns under way; all rows in the order in which they are settled.
struct Columns {
    weights: Vec<Lanes>,
    /// Weights minus what they decode to; 0 for what isn't settled.
    errors: Vec<Lanes>,
    codes: Vec<[u8; LANES]>,
    /// A scale a group, in the order of the cut.
    index: Vec<[u8; LANES]>,
    /// Of the group that is being settled.
    targets: Vec<Lanes>,
}

/// A group: its rows in the order in which they are settled, its width, its place in the cut.
#[derive(Clone)]
struct Settled {
    rows: Range<usize>,
    bits: Bits,
    of_cut: usize,
}

/// A module under way.
struct State {
    rows: Vec<u32>,
    places: Vec<usize>,
    groups: Vec<Settled>,
    /// In the order of the cut.
    ceilings: Vec<f16>,
    columns: Vec<Columns>,
    grid: Option<u32>,
    prescale: f64,
    path: SimdPath,
}

/// A ceiling chosen for a group, and each panel's indices.
struct Choice {
    ceiling: f16,
    index: Vec<[u8; LANES]>,
}

/// The weights of rows, for each column of a panel.
fn lanes(weights: &[f32]) -> Vec<Lanes> {
    weights.iter().map(|&weight| [weight; LANES]).collect()
}

impl State {
    fn new(source: &Source, order: Order, cut: &Cut, bits: &[Bits], path: SimdPath) -> Self {
        let (k, panels) = (source.k, source.n / LANES);
        let empty = || Columns {
            weights: Vec::with_capacity(k),
            errors: vec![[0.0; LANES]; k],
            codes: vec![[0; LANES]; k],
            index: vec![[0; LANES]; cut.groups.len()],
            targets: Vec::new(),
        };
        let mut columns: Vec<Columns> = (0..panels).map(|_| empty()).collect();
        let mut row = vec![0.0; source.n];
        for &from in &order.rows {
            source.row(from as usize, &mut row);
            for (columns, values) in columns.iter_mut().zip(row.as_chunks::<LANES>().0) {
                columns.weights.push(*values);
            }
        }
        let mut end = 0;
        let Order { rows, groups, places } = order;
        let groups = (groups.into_iter())
            .map(|of_cut| {
                let first = end;
                end += cut.groups[of_cut].len();
                Settled { rows: first..end, bits: bits[of_cut], of_cut }
            })
            .collect();
        let ceilings = vec![no_ceiling(source.prescale); cut.groups.len()];
        let (grid, prescale) = (source.grid(), source.prescale);
        Self { rows, places, groups, ceilings, columns, grid, prescale, path }
    }

    /// Settles all groups from the first to the last.
    fn settle(&mut self, factor: &Factor) {
        let (k, path) = (self.rows.len(), self.path);
        for group in self.groups.clone() {
            let range = group.rows.clone();
            let coefficients = &factor.coefficients[range.start * k..range.end * k];
            self.columns.par_iter_mut().for_each(|columns| {
                columns.targets = columns.weights[range.clone()].to_vec();
                path.pull(coefficients, k, &columns.errors[..range.start], &mut columns.targets);
            });
            let own: Vec<f32> =
                coefficients.chunks_exact(k).flat_map(|row| &row[range.clone()]).copied().collect();
            let lanes = lanes(&factor.diagonal[range.clone()]);
            let panel = |p: usize| Panel { values: &self.columns[p].targets, weights: &lanes };
            let choice = self.choose(group.bits, panel);
            self.encode(&group, &factor.weights[range], &own, &choice);
        }
    }

    /// The ceiling and scales of a group: those of the least weighted error from what the panels hold.
    fn choose<'a>(&self, bits: Bits, panel: impl Fn(usize) -> Panel<'a> + Sync) -> Choice {
        let how = Search::for_bits(bits, self.grid);
        let found = best_ceiling(self.columns.len(), &panel, self.prescale, bits, &how, self.path);
        let Some(ceiling) = found else {
            let ceiling = no_ceiling(self.prescale);
            return Choice { ceiling, index: vec![[0; LANES]; self.columns.len()] };
        };
        let offered = steps(ceiling, bits);
        let index = (0..self.columns.len()).into_par_iter();
        let index = index.map(|p| self.path.best_index(panel(p), &offered, code_range(bits))).collect();
        Choice { ceiling, index }
    }

    /// Gives a group its codes.
    fn encode(&mut self, group: &Settled, weights: &[f32], own: &[f32], choice: &Choice) {
        let (path, codes, range) = (self.path, code_range(group.bits), group.rows.clone());
        let offered = steps(choice.ceiling, group.bits);
        self.ceilings[group.of_cut] = choice.ceiling;
        self.columns.par_iter_mut().zip(&choice.index).for_each(|(columns, index)| {
            let Columns { weights: of, errors, codes: to, targets, .. } = columns;
            let scale = index.map(|index| offered.scale[usize::from(index)]);
            let rows = Rows { targets, base: &of[range.clone()], weights, coefficients: own };
            path.encode_with_feedback(
                rows,
                &scale,
                codes,
                &mut to[range.clone()],
                &mut errors[range.clone()],
            );
            columns.index[group.of_cut] = *index;
        });
    }

    /// What a group weighs at a width when no other has an error.
    fn loss_by_itself(&self, factor: &Factor, group: &Settled, bits: Bits) -> f64 {
        let (path, range, codes) = (self.path, group.rows.clone(), code_range(bits));
        let lanes = lanes(&factor.diagonal[range.clone()]);
        let panel = |p: usize| Panel { values: &self.columns[p].weights[range.clone()], weights: &lanes };
        let choice = self.choose(bits, panel);
        let offered = steps(choice.ceiling, bits);
        let (rows, apart) = (range.len(), vec![0.0; range.len() * range.len()]);
        let (mut to, mut errors) = (vec![[0; LANES]; rows], vec![[0.0; LANES]; rows]);
        let mut loss = 0.0;
        for (columns, index) in self.columns.iter().zip(&choice.index) {
            let scale = index.map(|index| offered.scale[usize::from(index)]);
            let of = &columns.weights[range.clone()];
            let rows =
                Rows { targets: of, base: of, weights: &factor.weights[range.clone()], coefficients: &apart };
            loss += path.encode_with_feedback(rows, &scale, codes, &mut to, &mut errors).iter().sum::<f64>();
        }
        loss
    }

    fn finish(self, source: &Source, cut: &Cut, bits: &[Bits]) -> Result<Quantized, Error> {
        let n = source.n;
        let mut at = vec![0; source.k];
        for (settled, &place) in self.places.iter().enumerate() {
            at[place] = settled;
        }
        let (mut codes, mut index) = (Vec::with_capacity(source.k * n), Vec::new());
        let (mut groups, mut scale_max, mut rows) = (Vec::new(), Vec::new(), Vec::new());
        for &group in stored_groups(bits).map() {
            let group = group as usize;
            for place in cut.groups[group].clone() {
                rows.push(source.rows.map()[place]);
                codes.extend(self.columns.iter().flat_map(|columns| columns.codes[at[place]]));
            }
            index.extend(self.columns.iter().flat_map(|columns| columns.index[group]));
            // The search tries no other ceilings; Matrix::new refuses an infinite one.
            scale_max.push(ceiling_for(self.ceilings[group], source.prescale).unwrap_or(f16::INFINITY));
            groups.push(Group { bits: bits[group], rows: cut.groups[group].len() });
        }
        let invperm = Permutation::new(rows)?.inverse();
        let matrix = Matrix::new(GroupTable::new(groups)?, n, codes, index, scale_max, invperm)?;
        let (decoded, wanted) = (matrix.dequantize_prescaled(source.prescale), source.decoded());
        let pairs = decoded.iter().zip(wanted).map(|(found, wanted)| (found.to_f32(), wanted));
        let (squared_error, squared_norm) = squares(pairs);
        Ok(Quantized { matrix, squared_error, squared_norm })
    }
}
