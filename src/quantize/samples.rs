//! The different values in each column of a group, and how often each occurs.

use super::panel::{LANES, Lanes, Panel};
use super::source::{Source, Weights};
use half::{f16, slice::HalfFloatSliceExt};
use std::ops::Range;

/// Values and weights of a group, panel by panel: `[panels][values][16]`.
#[derive(Debug)]
pub struct Samples {
    /// Different values a column (the largest number over columns; unused ones have weight 0).
    depth: usize,
    values: Vec<Lanes>,
    weights: Vec<Lanes>,
    /// For each place of the group, where its values stand.
    slots: Vec<Slot>,
    grid: Option<u32>,
}

/// Where a row's values stand among a group's samples.
#[derive(Clone, Copy, Debug)]
enum Slot {
    /// A row of its own.
    Row(usize),
    /// The row's code says which, from this value on.
    Codes { model_row: usize, first: usize },
}

impl Samples {
    /// Collects the samples of some places of `source`.
    pub fn new(source: &Source, places: Range<usize>) -> Self {
        let n = source.n;
        let mut depth = 0;
        let mut slots = Vec::with_capacity(places.len());
        let runs = source.borders(places);
        for run in &runs {
            let levels = match &source.weights {
                Weights::Gptq(matrix) => 1 << matrix.shape().bits.get(),
                Weights::Dense(_) => usize::MAX,
            };
            if levels < run.len() {
                slots.extend(
                    run.clone().map(|place| Slot::Codes {
                        model_row: source.rows.map()[place] as usize,
                        first: depth,
                    }),
                );
                depth += levels;
            } else {
                slots.extend((0..run.len()).map(|i| Slot::Row(depth + i)));
                depth += run.len();
            }
        }
        let panels = n / LANES;
        let mut samples = Self {
            depth,
            values: vec![[0.0; LANES]; panels * depth],
            weights: vec![[0.0; LANES]; panels * depth],
            slots,
            grid: source.grid(),
        };
        samples.fill(source, &runs);
        samples
    }

    fn fill(&mut self, source: &Source, runs: &[Range<usize>]) {
        let n = source.n;
        let mut row = vec![0.0f32; n];
        let mut rounded = vec![f16::ZERO; n];
        let mut done = 0;
        for run in runs {
            for place in run.clone() {
                let model_row = source.rows.map()[place] as usize;
                match self.slots[done] {
                    Slot::Row(slot) => {
                        match &source.weights {
                            Weights::Dense(weights) => row.copy_from_slice(&weights[model_row * n..][..n]),
                            Weights::Gptq(matrix) => {
                                let group = matrix.g_idx().groups()[model_row] as usize;
                                let codes = &matrix.codes()[model_row * n..][..n];
                                let (zeros, scales) =
                                    (&matrix.zeros()[group * n..], &matrix.scales()[group * n..]);
                                for (column, value) in row.iter_mut().enumerate() {
                                    let q = i32::from(codes[column]) - i32::from(zeros[column]);
                                    *value = scales[column] * q as f32;
                                }
                                rounded.convert_from_f32_slice(&row);
                                rounded.convert_to_f32_slice(&mut row);
                            }
                        }
                        self.set_values(slot, &row);
                        self.weights
                            .iter_mut()
                            .skip(slot)
                            .step_by(self.depth)
                            .for_each(|w| *w = [1.0; LANES]);
                    }
                    Slot::Codes { first, .. } => {
                        let Weights::Gptq(matrix) = &source.weights else {
                            unreachable!("dense rows have no codes")
                        };
                        if place == run.start {
                            let group = matrix.g_idx().groups()[model_row] as usize;
                            let (zeros, scales) =
                                (&matrix.zeros()[group * n..], &matrix.scales()[group * n..]);
                            for level in 0..1usize << matrix.shape().bits.get() {
                                for (column, value) in row.iter_mut().enumerate() {
                                    *value =
                                        scales[column] * (level as i32 - i32::from(zeros[column])) as f32;
                                }
                                rounded.convert_from_f32_slice(&row);
                                rounded.convert_to_f32_slice(&mut row);
                                self.set_values(first + level, &row);
                            }
                        }
                        let codes = &matrix.codes()[model_row * n..][..n];
                        for (panel, codes) in codes.chunks_exact(LANES).enumerate() {
                            let weights = &mut self.weights[panel * self.depth + first..];
                            for (lane, &code) in codes.iter().enumerate() {
                                weights[usize::from(code)][lane] += 1.0;
                            }
                        }
                    }
                }
                done += 1;
            }
        }
        // A value that no row has would still set the range of scales.
        for (value, weight) in self.values.iter_mut().zip(&self.weights) {
            for lane in 0..LANES {
                if weight[lane] == 0.0 {
                    value[lane] = 0.0;
                }
            }
        }
    }

    fn set_values(&mut self, slot: usize, row: &[f32]) {
        for (panel, values) in row.chunks_exact(LANES).enumerate() {
            self.values[panel * self.depth + slot].copy_from_slice(values);
        }
    }

    /// Panels of sixteen columns.
    pub(super) fn panels(&self) -> usize {
        self.values.len() / self.depth
    }

    pub(super) fn panel(&self, panel: usize) -> Panel<'_> {
        let range = panel * self.depth..(panel + 1) * self.depth;
        Panel { values: &self.values[range.clone()], weights: &self.weights[range] }
    }

    /// Sum of squares of all weights of the group.
    pub fn squared_norm(&self) -> f64 {
        let pairs = self.values.iter().flatten().zip(self.weights.iter().flatten());
        pairs.map(|(&v, &w)| f64::from(w) * f64::from(v) * f64::from(v)).sum()
    }

    /// Bits of the source's grid.
    pub(super) fn grid(&self) -> Option<u32> {
        self.grid
    }

    /// Rows of the group.
    pub(super) fn rows(&self) -> usize {
        self.slots.len()
    }

    /// Writes the codes of one row, given a code for each sample, `[panels][values][16]`.
    pub(super) fn codes_of_row(&self, source: &Source, row: usize, table: &[[u8; LANES]], codes: &mut [u8]) {
        match (self.slots[row], &source.weights) {
            (Slot::Codes { model_row, first }, Weights::Gptq(matrix)) => {
                let from = &matrix.codes()[model_row * source.n..][..source.n];
                let panels = codes.chunks_exact_mut(LANES).zip(from.chunks_exact(LANES));
                for (panel, (codes, from)) in panels.enumerate() {
                    let table = &table[panel * self.depth + first..];
                    for lane in 0..LANES {
                        codes[lane] = table[usize::from(from[lane])][lane];
                    }
                }
            }
            (Slot::Row(slot) | Slot::Codes { first: slot, .. }, _) => {
                for (panel, codes) in codes.chunks_exact_mut(LANES).enumerate() {
                    codes.copy_from_slice(&table[panel * self.depth + slot]);
                }
            }
        }
    }
}
