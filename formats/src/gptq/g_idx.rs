//! `g_idx`: which group each row belongs to (SPEC §3).

use super::Error;
use crate::Permutation;
use serde::Serialize;

/// The kinds of `g_idx` that files hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GIdxKind {
    /// No tensor, or one without elements: rows are in order.
    Absent,
    /// All zero although there are several groups: a leftover of old writers, rows are in order.
    ZeroLeftover,
    /// One group only.
    OneGroup,
    /// `i / group_size`.
    Sequential,
    /// Any other assignment.
    ActOrder,
}

/// A normalised group index: one group below `groups` for each row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GIdx {
    groups: Vec<u32>,
    kind: GIdxKind,
    group_size: usize,
    equal: bool,
}

impl GIdx {
    /// Normalises the stored tensor (SPEC §3.1). `stated` is the configuration's group size, used only
    /// where `in_features` isn't a multiple of `groups`.
    ///
    /// # Errors
    /// [`Error::GIdxLength`], [`Error::GroupIndex`], [`Error::GroupSize`].
    pub fn new(
        tensor: Option<&[i64]>,
        in_features: usize,
        groups: usize,
        stated: Option<usize>,
    ) -> Result<Self, Error> {
        let index = tensor.filter(|index| !index.is_empty());
        if let Some(index) = index {
            if index.len() != in_features {
                return Err(Error::GIdxLength { found: index.len(), expected: in_features });
            }
            if let Some(position) = index.iter().position(|&g| g < 0 || g >= groups as i64) {
                return Err(Error::GroupIndex { position, found: index[position], groups });
            }
        }
        let size = group_size(in_features, groups, stated);
        let sequential = || -> Result<(Vec<u32>, usize), Error> {
            let size = size.ok_or(Error::GroupSize { in_features, groups, stated })?;
            Ok(((0..in_features).map(|row| (row / size) as u32).collect(), size))
        };
        let (kind, (rows, group_size)) = match index {
            None => (GIdxKind::Absent, sequential()?),
            Some(_) if groups == 1 => (GIdxKind::OneGroup, (vec![0; in_features], in_features)),
            Some(index) if index.iter().all(|&g| g == 0) => (GIdxKind::ZeroLeftover, sequential()?),
            Some(index) => {
                let rows: Vec<u32> = index.iter().map(|&g| g as u32).collect();
                let largest = histogram(&rows, groups).into_iter().max().unwrap_or(0);
                match size {
                    Some(size) if rows.iter().enumerate().all(|(i, &g)| g as usize == i / size) => {
                        (GIdxKind::Sequential, (rows, size))
                    }
                    _ => (GIdxKind::ActOrder, (rows, size.unwrap_or(largest))),
                }
            }
        };
        let counts = histogram(&rows, groups);
        let full = counts.len().saturating_sub(1);
        let equal = counts[..full].iter().all(|&c| c == group_size) && counts[full] <= group_size;
        Ok(Self { groups: rows, kind, group_size, equal })
    }

    /// The group of each row.
    pub fn groups(&self) -> &[u32] {
        &self.groups
    }

    /// What kind of index the file held.
    pub fn kind(&self) -> GIdxKind {
        self.kind
    }

    /// Rows of a group; of the largest one where they differ and no configuration says otherwise.
    pub fn group_size(&self) -> usize {
        self.group_size
    }

    /// Whether every group has `group_size` rows, the last one at most that. Position-based readers
    /// (exllamav2, vLLM's gptq) misread any other file.
    pub fn equal_groups(&self) -> bool {
        self.equal
    }

    /// Whether the rows' order differs from the order of their groups' sizes: real act-order.
    pub fn is_act_order(&self) -> bool {
        self.kind == GIdxKind::ActOrder
    }

    /// The stable sort of rows by group (SPEC §3.3): entry `j` is the row at place `j`.
    pub fn sorted_rows(&self) -> Permutation {
        Permutation::stable_sort_by_key(self.groups.len(), |row| self.groups[row as usize])
    }
}

/// The size that gives `groups` groups, if one does (SPEC §3.2).
fn group_size(in_features: usize, groups: usize, stated: Option<usize>) -> Option<usize> {
    if groups == 1 {
        Some(in_features)
    } else if in_features % groups == 0 {
        Some(in_features / groups)
    } else {
        stated.filter(|&size| size > 0 && in_features.div_ceil(size) == groups)
    }
}

fn histogram(rows: &[u32], groups: usize) -> Vec<usize> {
    let mut counts = vec![0; groups];
    for &group in rows {
        counts[group as usize] += 1;
    }
    counts
}
