//! `g_idx`: which group each row belongs to (SPEC §3).

use super::{Error, check_groups};
use crate::Permutation;
use serde::Serialize;

/// The kinds of `g_idx` that files hold (SPEC G3.1 to G3.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GIdxKind {
    /// No tensor, or one without elements: rows are in order.
    Absent,
    /// All zero although there are several groups: a leftover of old writers, rows are in order.
    ZeroLeftover,
    /// All zero, and there is one group.
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
    /// Normalises the stored tensor (SPEC §3). `stated` is the configuration's group size; it is used only
    /// where the tensor says nothing (SPEC G3.6).
    ///
    /// # Errors
    /// [`Error::Size`], [`Error::GroupCount`], [`Error::GIdxLength`], [`Error::GroupIndex`];
    /// [`Error::GroupSize`] when rows are in order and no size explains the groups.
    pub fn new(
        tensor: Option<&[i64]>,
        in_features: usize,
        groups: usize,
        stated: Option<usize>,
    ) -> Result<Self, Error> {
        check_groups(in_features, groups)?;
        let index = tensor.filter(|index| !index.is_empty());
        if let Some(index) = index {
            if index.len() != in_features {
                return Err(Error::GIdxLength { found: index.len(), expected: in_features });
            }
            if let Some(position) = index.iter().position(|&g| g < 0 || g >= groups as i64) {
                return Err(Error::GroupIndex { position, found: index[position], groups });
            }
        }
        let in_order = |kind| -> Result<Self, Error> {
            let size = group_size(in_features, groups, stated).ok_or(Error::GroupSize {
                in_features,
                groups,
                stated,
            })?;
            let rows = (0..in_features).map(|row| (row / size) as u32).collect();
            Ok(Self { groups: rows, kind, group_size: size, equal: true })
        };
        match index {
            None => in_order(GIdxKind::Absent),
            Some(index) if index.iter().any(|&g| g != 0) => Ok(Self::from_index(index, groups)),
            Some(_) if groups == 1 => in_order(GIdxKind::OneGroup),
            Some(_) => in_order(GIdxKind::ZeroLeftover),
        }
    }

    /// An index that names more than one group; its entries are in range.
    fn from_index(index: &[i64], groups: usize) -> Self {
        let rows: Vec<u32> = index.iter().map(|&g| g as u32).collect();
        let mut counts = vec![0; groups];
        for &group in &rows {
            counts[group as usize] += 1;
        }
        let size = counts.iter().copied().max().unwrap_or(0);
        let sequential = rows.iter().enumerate().all(|(row, &group)| group as usize == row / size);
        let kind = if sequential { GIdxKind::Sequential } else { GIdxKind::ActOrder };
        let (last, full) = counts.split_last().map_or((0, &[][..]), |(last, full)| (*last, full));
        let equal = full.iter().all(|&count| count == size) && last > 0;
        Self { groups: rows, kind, group_size: size, equal }
    }

    /// The group of each row.
    pub fn groups(&self) -> &[u32] {
        &self.groups
    }

    /// What kind of index the file held.
    pub fn kind(&self) -> GIdxKind {
        self.kind
    }

    /// Rows of a group; of the largest one where they differ.
    pub fn group_size(&self) -> usize {
        self.group_size
    }

    /// Whether every group has `group_size` rows, the last one at most that and at least one. Readers that
    /// find a row's group by its position (exllamav2, vLLM's gptq) misread any other file.
    pub fn equal_groups(&self) -> bool {
        self.equal
    }

    /// Whether rows belong to other groups than their position says.
    pub fn is_act_order(&self) -> bool {
        self.kind == GIdxKind::ActOrder
    }

    /// The stable sort of rows by group (SPEC G3.7): entry `j` is the row at place `j`.
    pub fn sorted_rows(&self) -> Permutation {
        Permutation::stable_sort_by_key(self.groups.len(), |row| self.groups[row as usize])
    }
}

/// The group size of rows in order (SPEC G3.6): the stated one if it gives this many groups, else the even
/// division if there is one.
fn group_size(in_features: usize, groups: usize, stated: Option<usize>) -> Option<usize> {
    if groups == 1 {
        return Some(in_features);
    }
    stated
        .filter(|&size| size > 0 && in_features.div_ceil(size) == groups)
        .or_else(|| in_features.is_multiple_of(groups).then(|| in_features / groups))
}
