//! Blocks × roles, the experts of a projection in one cell.

use super::number;
use crate::validate::report::{LayerScores, SwapScores};
use std::collections::BTreeMap;

/// Roles in the order of the forward pass.
const ROLES: [&str; 8] = ["q", "k", "v", "o", "gate", "up", "down", "head"];

/// One projection of a block.
pub(super) struct Cell<'a> {
    pub(super) layer: Option<usize>,
    pub(super) role: &'a str,
    /// Linears; 1 without experts.
    pub(super) experts: usize,
    pub(super) bpw: (f64, f64),
    /// Largest relative error of the outputs.
    pub(super) output_error: Option<f64>,
    pub(super) faults: usize,
    /// With this projection converted: of all experts together.
    pub(super) swap_in: Option<SwapScores>,
    /// The first broken linear, or else that with the largest error of the outputs, or of the weights.
    pub(super) worst: &'a LayerScores,
}

pub(super) struct Grid<'a> {
    cells: Vec<Cell<'a>>,
}

impl<'a> Grid<'a> {
    pub(super) fn new(layers: &'a [LayerScores]) -> Self {
        let mut cells: BTreeMap<_, Cell<'a>> = BTreeMap::new();
        for l in layers {
            let key = (l.layer.unwrap_or(usize::MAX), order(&l.role), l.role.as_str());
            let output = l.output.map(|o| o.relative_error);
            let cell = cells.entry(key).or_insert_with(|| Cell {
                layer: l.layer,
                role: &l.role,
                experts: 0,
                bpw: (l.bpw, l.bpw),
                output_error: output,
                faults: 0,
                swap_in: None,
                worst: l,
            });
            cell.experts += 1;
            cell.bpw = (cell.bpw.0.min(l.bpw), cell.bpw.1.max(l.bpw));
            cell.faults += usize::from(l.fault.is_some());
            cell.output_error = match (cell.output_error, output) {
                (Some(a), Some(b)) => Some(a.max(b)),
                (a, b) => a.or(b),
            };
            cell.swap_in = cell.swap_in.or(l.swap_in);
            if badness(l) > badness(cell.worst) {
                cell.worst = l;
            }
        }
        Self { cells: cells.into_values().collect() }
    }

    /// By block, the head last.
    pub(super) fn cells(&self) -> &[Cell<'a>] {
        &self.cells
    }

    /// Roles that some block has.
    pub(super) fn roles(&self) -> Vec<&'a str> {
        let mut roles: Vec<&str> = self.cells.iter().map(|c| c.role).collect();
        roles.sort_by_key(|role| (order(role), *role));
        roles.dedup();
        roles
    }

    pub(super) fn of_role(&self, role: &str) -> impl Iterator<Item = &Cell<'a>> {
        self.cells.iter().filter(move |c| c.role == role)
    }
}

fn badness(l: &LayerScores) -> (bool, f64, f64) {
    (l.fault.is_some(), l.output.map_or(0.0, |o| o.relative_error), l.weight_error)
}

fn order(role: &str) -> usize {
    ROLES.iter().position(|r| *r == role).unwrap_or(ROLES.len())
}

impl Cell<'_> {
    pub(super) fn label(&self) -> String {
        match self.layer {
            Some(layer) => format!("block {layer} {}", self.role),
            None => self.role.to_string(),
        }
    }

    /// Bits a weight, as a range where experts differ.
    pub(super) fn bits(&self) -> String {
        let (low, high) = (format!("{:.2}", self.bpw.0), format!("{:.2}", self.bpw.1));
        if low == high { low } else { format!("{low}–{high}") }
    }

    pub(super) fn percent(&self) -> Option<String> {
        Some(format!("{} %", number(100.0 * self.output_error?)))
    }
}
