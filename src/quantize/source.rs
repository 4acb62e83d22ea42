//! A module's weights, with its rows in the order in which they are grouped.

use half::{f16, slice::HalfFloatSliceExt};
use requant_formats::exl2::{Bits, ROW_UNIT};
use requant_formats::{Permutation, gptq};
use std::ops::Range;

/// How rows are laid out before they are cut into groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowOrder {
    /// Rows of one source group together, groups ascending, stable within a group.
    Grouped,
    /// The model's own order, where a reader can't apply a permutation.
    Natural,
}

/// The weights that are to be quantized. `k` and `n` are multiples of 32.
#[derive(Debug)]
pub struct Source {
    pub(super) k: usize,
    pub(super) n: usize,
    /// Entry `j` is the model's row at place `j`.
    pub(super) rows: Permutation,
    pub(super) weights: Weights,
    /// What exllamav2 multiplies the scales by at load.
    pub(super) prescale: f64,
}

#[derive(Debug)]
pub(super) enum Weights {
    Gptq(gptq::Matrix),
    /// `[k, n]`, rows in the model's order.
    Dense(Vec<f32>),
}

/// Consecutive places, each range a group to be. Lengths are multiples of 32.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The groups.
    pub groups: Vec<Range<usize>>,
    /// How many of them hold rows of more than one source group without holding these whole.
    pub straddling: usize,
}

impl Cut {
    /// Cuts `in_features` rows into groups of `group_size`, a multiple of 32; the last may be shorter.
    /// `source_groups` has the source group of the row at each place; it is `None` for dense weights.
    pub fn new(in_features: usize, group_size: usize, source_groups: Option<&[u32]>) -> Self {
        debug_assert!(group_size > 0 && group_size.is_multiple_of(ROW_UNIT));
        let starts = (0..in_features).step_by(group_size);
        let groups: Vec<_> =
            starts.map(|start| start..in_features.min(start.saturating_add(group_size))).collect();
        let straddling = source_groups.map_or(0, |of| straddling(&groups, of));
        Self { groups, straddling }
    }
}

/// The places of a cut in the order in which they are stored, given the width of each group: groups of the widest
/// first, as the format wants, otherwise as cut.
pub fn stored_places(groups: &[Range<usize>], bits: &[Bits]) -> Vec<usize> {
    let order = stored_groups(bits);
    order.map().iter().flat_map(|&g| groups[g as usize].clone()).collect()
}

/// The groups in the order in which they are stored.
pub(super) fn stored_groups(bits: &[Bits]) -> Permutation {
    Permutation::stable_sort_by_key(bits.len(), |g| std::cmp::Reverse(bits[g as usize]))
}

/// Counts the groups that hold rows of several source groups, of which one has rows elsewhere too.
fn straddling(groups: &[Range<usize>], source_groups: &[u32]) -> usize {
    let mut rows = vec![0usize; source_groups.iter().max().map_or(0, |&last| last as usize + 1)];
    for &group in source_groups {
        rows[group as usize] += 1;
    }
    let straddles = |places: &&Range<usize>| {
        let mut here = source_groups[(*places).clone()].to_vec();
        // In natural order a source group's rows needn't stand together.
        here.sort_unstable();
        let (mut count, mut whole) = (0, true);
        for same in here.chunk_by(|a, b| a == b) {
            count += 1;
            whole &= same.len() == rows[same[0] as usize];
        }
        count > 1 && !whole
    };
    groups.iter().filter(straddles).count()
}

impl Source {
    /// A GPTQ module.
    pub fn gptq(matrix: gptq::Matrix, order: RowOrder) -> Self {
        let (k, n) = (matrix.shape().in_features, matrix.shape().out_features);
        let rows = match order {
            RowOrder::Grouped => matrix.g_idx().sorted_rows(),
            RowOrder::Natural => Permutation::identity(k),
        };
        Self { k, n, rows, weights: Weights::Gptq(matrix), prescale: 1.0 }
    }

    /// Dense weights `[k, n]`.
    ///
    /// # Panics
    /// If there aren't `k · n` of them.
    pub fn dense(weights: Vec<f32>, k: usize, n: usize) -> Self {
        assert_eq!(weights.len(), k * n, "weights are [k, n]");
        Self { k, n, rows: Permutation::identity(k), weights: Weights::Dense(weights), prescale: 1.0 }
    }

    /// The same weights for a linear that exllamav2 multiplies by a positive prescale when it loads it: what is fitted,
    /// and what errors are of, are the products as it decodes them.
    #[must_use]
    pub fn prescaled(self, prescale: f64) -> Self {
        Self { prescale, ..self }
    }

    /// k.
    pub fn in_features(&self) -> usize {
        self.k
    }

    /// n.
    pub fn out_features(&self) -> usize {
        self.n
    }

    /// The weights `[k, n]` in the model's row order, as fp16 where the source is GPTQ; then times the prescale, rounded
    /// to fp32.
    pub fn decoded(&self) -> Vec<f32> {
        let mut weights = match &self.weights {
            Weights::Gptq(matrix) => {
                let halves = matrix.dequantize();
                let mut floats = vec![0.0; halves.len()];
                halves.convert_to_f32_slice(&mut floats);
                floats
            }
            Weights::Dense(weights) => weights.clone(),
        };
        self.multiply(&mut weights);
        weights
    }

    fn multiply(&self, weights: &mut [f32]) {
        if self.prescale != 1.0 {
            weights.iter_mut().for_each(|w| *w = (f64::from(*w) * self.prescale) as f32);
        }
    }

    /// Cuts the rows into groups of `group_size` rows, a multiple of 32; the last may be shorter.
    pub fn cut(&self, group_size: usize) -> Cut {
        let source_groups: Option<Vec<u32>> =
            self.groups_of_rows().map(|of| self.rows.map().iter().map(|&row| of[row as usize]).collect());
        Cut::new(self.k, group_size, source_groups.as_deref())
    }

    /// Bits of the grid that a column's values lie on; `None` for dense weights.
    pub(super) fn grid(&self) -> Option<u32> {
        match &self.weights {
            Weights::Gptq(matrix) => Some(matrix.shape().bits.get()),
            Weights::Dense(_) => None,
        }
    }

    /// Splits places into runs whose rows are of one source group.
    pub(super) fn runs(&self, places: Range<usize>) -> Vec<Range<usize>> {
        let Some(of) = self.groups_of_rows() else { return vec![places] };
        let mut start = places.start;
        let rows = &self.rows.map()[places];
        let same = rows.chunk_by(|&a, &b| of[a as usize] == of[b as usize]);
        same.map(|run| {
            let end = start + run.len();
            std::mem::replace(&mut start, end)..end
        })
        .collect()
    }

    /// The codes of a row of the model; empty for dense weights.
    pub(super) fn codes(&self, row: usize) -> &[u8] {
        match &self.weights {
            Weights::Gptq(matrix) => &matrix.codes()[row * self.n..][..self.n],
            Weights::Dense(_) => &[],
        }
    }

    /// A row of the model, as [`Source::decoded`] has it.
    pub(crate) fn row(&self, row: usize, values: &mut [f32]) {
        match &self.weights {
            Weights::Gptq(matrix) => {
                let group = matrix.g_idx().groups()[row];
                decode(matrix, group, self.codes(row).iter().copied(), values);
            }
            Weights::Dense(weights) => values.copy_from_slice(&weights[row * self.n..][..self.n]),
        }
        self.multiply(values);
    }

    /// What a code means in each column of the source group of a row; nothing for dense weights.
    pub(super) fn level(&self, row: usize, code: u8, values: &mut [f32]) {
        if let Weights::Gptq(matrix) = &self.weights {
            decode(matrix, matrix.g_idx().groups()[row], std::iter::repeat(code), values);
        }
        self.multiply(values);
    }

    pub(super) fn groups_of_rows(&self) -> Option<&[u32]> {
        match &self.weights {
            Weights::Gptq(matrix) => Some(matrix.g_idx().groups()),
            Weights::Dense(_) => None,
        }
    }
}

/// One code a column of a GPTQ group → weights, as [`gptq::Matrix::dequantize`] has them.
fn decode(matrix: &gptq::Matrix, group: u32, codes: impl Iterator<Item = u8>, values: &mut [f32]) {
    let from = group as usize * values.len();
    let columns = matrix.zeros()[from..].iter().zip(&matrix.scales()[from..]);
    for ((value, code), (&zero, &scale)) in values.iter_mut().zip(codes).zip(columns) {
        *value = scale * (i32::from(code) - i32::from(zero)) as f32;
    }
    let mut halves = [f16::ZERO; 64];
    for values in values.chunks_mut(halves.len()) {
        let halves = &mut halves[..values.len()];
        halves.convert_from_f32_slice(values);
        halves.convert_to_f32_slice(values);
    }
}
