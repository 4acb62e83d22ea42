//! What can be wrong with an EXL2 module's numbers (SPEC §7).

use super::{Bits, MAX_GROUP_ROWS, MAX_ROWS};
use crate::NotAPermutation;
use std::fmt;

/// Why a module's tensors are no EXL2 matrix. Tensors are named by their suffix.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A width that the format doesn't have.
    #[error("{}{found} bits: EXL2 has 2, 3, 4, 5, 6 and 8", match group {
        Some(group) => format!("q_groups: group {group} has "),
        None => String::new(),
    })]
    Bits {
        /// The group, where it was read from one.
        group: Option<usize>,
        /// The width found.
        found: i32,
    },
    /// A tensor's size doesn't fit the others.
    #[error("{tensor} has {found} elements, {expected} expected")]
    Length {
        /// Suffix of the tensor.
        tensor: &'static str,
        /// Elements found.
        found: usize,
        /// Elements expected.
        expected: usize,
    },
    /// `q_groups` is empty or of odd length.
    #[error("q_groups has {found} elements: pairs of width and offset expected, at least one")]
    OddGroups {
        /// Elements found.
        found: usize,
    },
    /// Widths must not rise from group to group: kernels walk them in descending order.
    #[error("q_groups: group {group} has {found} bits after a group of {before}: widths must not rise", found = found.get(), before = before.get())]
    RisingWidth {
        /// The group.
        group: usize,
        /// Its width.
        found: Bits,
        /// The width of the group before.
        before: Bits,
    },
    /// Offsets start at 0, rise strictly and stay below the rows of `q_weight`.
    #[error("q_groups: group {group} starts at word row {found}, which should be {expected}")]
    Offset {
        /// The group.
        group: usize,
        /// The offset found.
        found: i32,
        /// What it should be.
        expected: ExpectedOffset,
    },
    /// A group has too many rows for the 16-bit counters of the kernels.
    #[error("group {group} has {found} rows: at most {MAX_GROUP_ROWS} expected")]
    LongGroup {
        /// The group.
        group: usize,
        /// Its rows.
        found: usize,
    },
    /// A group's words don't hold a multiple of 32 rows.
    #[error(
        "q_groups: group {group} of {bits} bits has {words} words a column, which is no multiple of 32 rows",
        bits = bits.get()
    )]
    GroupRows {
        /// The group.
        group: usize,
        /// Its width.
        bits: Bits,
        /// Its words a column.
        words: usize,
    },
    /// The groups' rows don't sum up to the matrix's.
    #[error("the groups of q_groups hold {found} rows, the matrix has {expected}")]
    TotalRows {
        /// Sum over groups.
        found: usize,
        /// k.
        expected: usize,
    },
    /// More rows than a 16-bit permutation can name.
    #[error("in_features is {found}: at most {MAX_ROWS} expected")]
    Rows {
        /// k.
        found: usize,
    },
    /// Columns are not stored as a multiple of 32.
    #[error("out_features is {found}: a multiple of 32 expected, padded where the model has fewer columns")]
    Columns {
        /// n.
        found: usize,
    },
    /// `q_invperm` is not a permutation.
    #[error("q_invperm is no permutation: {0}")]
    Permutation(#[from] NotAPermutation),
    /// A ceiling is negative, NaN or infinite.
    #[error("q_scale_max[{group}] is {found}")]
    Ceiling {
        /// The group.
        group: usize,
        /// Its value.
        found: f32,
    },
    /// A ceiling decodes to 0 in a group with non-zero codes: the group would vanish.
    #[error("q_scale_max[{group}] is {found}, which decodes to 0, but the group has codes that aren't zero")]
    VanishingGroup {
        /// The group.
        group: usize,
        /// Its value.
        found: f32,
    },
    /// The largest weight of a column overflows fp16.
    #[error("group {group}, column {column}: the largest weight overflows fp16")]
    Overflow {
        /// The group.
        group: usize,
        /// The column.
        column: usize,
    },
    /// A code does not fit its width.
    #[error("code {found} at packed row {row}, column {column} doesn't fit {bits} bits", bits = bits.get())]
    Code {
        /// Packed row.
        row: usize,
        /// Column.
        column: usize,
        /// The code.
        found: u8,
        /// The width.
        bits: Bits,
    },
    /// A scale index is above 15.
    #[error("scale index {found} of group {group}, column {column} is above 15")]
    ScaleIndex {
        /// The group.
        group: usize,
        /// The column.
        column: usize,
        /// The index.
        found: u8,
    },
    /// A padding column decodes to something else than 0.
    #[error("column {column} is padding and must decode to 0, but has code {found} at packed row {row}")]
    Padding {
        /// Packed row.
        row: usize,
        /// Column, at or above the model's out_features.
        column: usize,
        /// The code.
        found: u8,
    },
}

/// What the offset of a group should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpectedOffset {
    /// The first group starts at 0.
    Zero,
    /// Above that of the group before.
    Above(i16),
    /// Below the rows of `q_weight`.
    Below(usize),
    /// At most the largest signed 16-bit integer.
    SixteenBits,
}

impl fmt::Display for ExpectedOffset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zero => write!(f, "0"),
            Self::Above(before) => write!(f, "above {before}"),
            Self::Below(rows) => write!(f, "below q_weight's {rows} rows"),
            Self::SixteenBits => write!(f, "at most {}", i16::MAX),
        }
    }
}
