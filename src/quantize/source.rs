//! A module's weights, with its rows in the order in which they are grouped.

use half::slice::HalfFloatSliceExt;
use requant_formats::exl2::ROW_UNIT;
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

impl Source {
    /// A GPTQ module.
    pub fn gptq(matrix: gptq::Matrix, order: RowOrder) -> Self {
        let (k, n) = (matrix.shape().in_features, matrix.shape().out_features);
        let rows = match order {
            RowOrder::Grouped => matrix.g_idx().sorted_rows(),
            RowOrder::Natural => Permutation::identity(k),
        };
        Self { k, n, rows, weights: Weights::Gptq(matrix) }
    }

    /// Dense weights `[k, n]`.
    pub fn dense(weights: Vec<f32>, k: usize, n: usize) -> Self {
        assert_eq!(weights.len(), k * n, "weights are [k, n]");
        Self { k, n, rows: Permutation::identity(k), weights: Weights::Dense(weights) }
    }

    /// k.
    pub fn in_features(&self) -> usize {
        self.k
    }

    /// n.
    pub fn out_features(&self) -> usize {
        self.n
    }

    /// The weights `[k, n]` in the model's row order, as fp16 where the source is GPTQ.
    pub fn decoded(&self) -> Vec<f32> {
        match &self.weights {
            Weights::Gptq(matrix) => {
                let halves = matrix.dequantize();
                let mut floats = vec![0.0; halves.len()];
                halves.convert_to_f32_slice(&mut floats);
                floats
            }
            Weights::Dense(weights) => weights.clone(),
        }
    }

    /// Bits of the grid that a column's values lie on; `None` for dense weights.
    pub(super) fn grid(&self) -> Option<u32> {
        match &self.weights {
            Weights::Gptq(matrix) => Some(matrix.shape().bits.get()),
            Weights::Dense(_) => None,
        }
    }

    /// Runs of places whose rows are of one source group.
    pub(super) fn borders(&self, places: Range<usize>) -> Vec<Range<usize>> {
        let Weights::Gptq(matrix) = &self.weights else { return vec![places] };
        let groups = matrix.g_idx().groups();
        let group_at = |place: usize| groups[self.rows.map()[place] as usize];
        let mut runs = Vec::new();
        let mut start = places.start;
        for place in places.start + 1..=places.end {
            if place == places.end || group_at(place) != group_at(start) {
                runs.push(start..place);
                start = place;
            }
        }
        runs
    }

    /// Cuts the rows into groups of `group_size` rows, a multiple of 32; the last may be shorter.
    pub fn cut(&self, group_size: usize) -> Cut {
        debug_assert!(group_size % ROW_UNIT == 0);
        let groups: Vec<_> =
            (0..self.k).step_by(group_size).map(|start| start..self.k.min(start + group_size)).collect();
        let borders = self.borders(0..self.k);
        let straddling = groups
            .iter()
            .filter(|group| {
                let touching = borders.iter().filter(|b| b.start < group.end && group.start < b.end);
                let (mut count, mut whole) = (0, true);
                for border in touching {
                    count += 1;
                    whole &= group.start <= border.start && border.end <= group.end;
                }
                count > 1 && !whole
            })
            .count();
        Cut { groups, straddling }
    }
}
