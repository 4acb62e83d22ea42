//! What can be wrong with an EXL2 module's numbers (SPEC §6).

use crate::NotAPermutation;

/// Why a module's tensors are no EXL2 matrix. Tensors are named by their suffix.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A width that the format doesn't have.
    #[error("{}{found} bits: EXL2 has 2, 3, 4, 5, 6 and 8", group.map_or(String::new(), |g| format!("q_groups: group {g} has ")))]
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
    #[error("q_groups: group {group} has {found} bits after a group of {before}: widths must not rise")]
    RisingWidth {
        /// The group.
        group: usize,
        /// Its width.
        found: u32,
        /// The width of the group before.
        before: u32,
    },
    /// Offsets start at 0, rise strictly and stay below the rows of `q_weight`.
    #[error("q_groups: group {group} starts at word row {found}, which should be {expected}")]
    Offset {
        /// The group.
        group: usize,
        /// The offset found.
        found: i32,
        /// In words: what it should be.
        expected: String,
    },
    /// A group's words don't hold a multiple of 32 rows.
    #[error(
        "q_groups: group {group} of {bits} bits has {words} words a column, which is no multiple of 32 rows"
    )]
    GroupRows {
        /// The group.
        group: usize,
        /// Its width.
        bits: u32,
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
    /// k or n is not a multiple of 32, or k is too large.
    #[error("{axis} is {found}: {expected}")]
    Size {
        /// `in_features` or `out_features`.
        axis: &'static str,
        /// The size.
        found: usize,
        /// In words: what is allowed.
        expected: &'static str,
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
    #[error("code {found} at packed row {row}, column {column} doesn't fit {bits} bits")]
    Code {
        /// Packed row.
        row: usize,
        /// Column.
        column: usize,
        /// The code.
        found: u8,
        /// The width.
        bits: u32,
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
