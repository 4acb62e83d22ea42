//! The different values in each column of a group, and how often each occurs.

use super::panel::{LANES, Lanes, Panel};
use super::source::Source;
use std::ops::Range;

/// Values and weights of a group, panel by panel: `[panels][values][16]`.
#[derive(Debug)]
pub struct Samples<'a> {
    source: &'a Source,
    /// Different values a column (the largest number over columns; unused ones have weight 0).
    depth: usize,
    values: Vec<Lanes>,
    weights: Vec<Lanes>,
    /// For each place of the group, where its values stand.
    slots: Vec<Slot>,
}

/// Where a row's values stand among a group's samples.
#[derive(Clone, Copy, Debug)]
enum Slot {
    /// A row of its own.
    Row(usize),
    /// The codes of this row of the model say which, from this value on.
    Codes { row: usize, first: usize },
}

impl<'a> Samples<'a> {
    /// Collects the samples of some places of `source`.
    pub fn new(source: &'a Source, places: Range<usize>) -> Self {
        // Counting pays where a run has more rows than its grid has values.
        let levels = source.grid().map_or(usize::MAX, |bits| 1 << bits);
        let runs = source.runs(places.clone());
        let depth = runs.iter().map(|run| run.len().min(levels)).sum();
        let size = source.out_features() / LANES * depth;
        let mut samples = Self {
            source,
            depth,
            values: vec![[0.0; LANES]; size],
            weights: vec![[0.0; LANES]; size],
            slots: Vec::with_capacity(places.len()),
        };
        let mut first = 0;
        for run in &runs {
            let rows = &source.rows.map()[run.clone()];
            if levels < rows.len() {
                samples.count_codes(rows, first, levels);
            } else {
                samples.list_rows(rows, first);
            }
            first += rows.len().min(levels);
        }
        samples
    }

    /// Each row is a value of its own.
    fn list_rows(&mut self, rows: &[u32], first: usize) {
        let mut values = vec![0.0f32; self.source.n];
        for (slot, &row) in (first..).zip(rows) {
            self.source.row(row as usize, &mut values);
            self.set_values(slot, &values);
            self.weights.iter_mut().skip(slot).step_by(self.depth).for_each(|w| *w = [1.0; LANES]);
            self.slots.push(Slot::Row(slot));
        }
    }

    /// Rows of one source group: each of its levels is a value, and the rows are counted.
    fn count_codes(&mut self, rows: &[u32], first: usize, levels: usize) {
        let source = self.source;
        let mut values = vec![0.0f32; source.n];
        for level in 0..levels {
            source.level(rows[0] as usize, level as u8, &mut values);
            self.set_values(first + level, &values);
        }
        for &row in rows {
            let row = row as usize;
            for (panel, codes) in source.codes(row).chunks_exact(LANES).enumerate() {
                let weights = &mut self.weights[panel * self.depth + first..][..levels];
                for (lane, &code) in codes.iter().enumerate() {
                    weights[usize::from(code)][lane] += 1.0;
                }
            }
            self.slots.push(Slot::Codes { row, first });
        }
        // A value that no row has would still set the range of scales.
        for panel in 0..self.panels() {
            let at = panel * self.depth + first..panel * self.depth + first + levels;
            for (value, weight) in self.values[at.clone()].iter_mut().zip(&self.weights[at]) {
                for lane in 0..LANES {
                    if weight[lane] == 0.0 {
                        value[lane] = 0.0;
                    }
                }
            }
        }
    }

    fn set_values(&mut self, slot: usize, row: &[f32]) {
        for (panel, values) in row.chunks_exact(LANES).enumerate() {
            self.values[panel * self.depth + slot].copy_from_slice(values);
        }
    }

    /// Sum of squares of all weights of the group.
    pub fn squared_norm(&self) -> f64 {
        let pairs = self.values.iter().flatten().zip(self.weights.iter().flatten());
        pairs.map(|(&v, &w)| f64::from(w) * f64::from(v) * f64::from(v)).sum()
    }

    /// Panels of sixteen columns.
    pub(super) fn panels(&self) -> usize {
        self.source.n / LANES
    }

    /// Values a column.
    pub(super) fn depth(&self) -> usize {
        self.depth
    }

    pub(super) fn panel(&self, panel: usize) -> Panel<'_> {
        let range = panel * self.depth..(panel + 1) * self.depth;
        Panel { values: &self.values[range.clone()], weights: &self.weights[range] }
    }

    /// What exllamav2 multiplies the scales by at load.
    pub(super) fn prescale(&self) -> f64 {
        self.source.prescale
    }

    /// Bits of the source's grid; `None` for dense weights.
    pub fn grid(&self) -> Option<u32> {
        self.source.grid()
    }

    /// The codes `[rows, n]` of the group, given one for each sample, `[panels][values][16]`.
    pub(super) fn codes(&self, table: &[[u8; LANES]]) -> Vec<u8> {
        let n = self.source.n;
        let mut codes = vec![0; self.slots.len() * n];
        for (codes, &slot) in codes.chunks_exact_mut(n).zip(&self.slots) {
            let panels = codes.chunks_exact_mut(LANES).zip(table.chunks_exact(self.depth));
            match slot {
                Slot::Row(slot) => panels.for_each(|(codes, table)| codes.copy_from_slice(&table[slot])),
                Slot::Codes { row, first } => {
                    let from = self.source.codes(row).chunks_exact(LANES);
                    for ((codes, table), from) in panels.zip(from) {
                        for lane in 0..LANES {
                            codes[lane] = table[first + usize::from(from[lane])][lane];
                        }
                    }
                }
            }
        }
        codes
    }
}
