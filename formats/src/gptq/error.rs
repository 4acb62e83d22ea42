//! What can be wrong with a GPTQ module's numbers.

use super::Bits;

/// Why a module's tensors are no GPTQ matrix. Tensors are named by their suffix.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The width is none of 2, 3, 4, 8.
    #[error("{found} bits: GPTQ has 2, 3, 4 and 8")]
    Bits {
        /// The width asked for.
        found: u32,
    },
    /// A matrix without rows or columns, or with more than tensors of int32 can index.
    #[error("{axis} is {found}: 1 to 2147483647 expected")]
    Size {
        /// `in_features` or `out_features`.
        axis: &'static str,
        /// The size.
        found: usize,
    },
    /// No groups, or more groups than rows.
    #[error("scales has {groups} groups for {in_features} rows: 1 to {in_features} expected")]
    GroupCount {
        /// k.
        in_features: usize,
        /// Rows of `scales`.
        groups: usize,
    },
    /// A tensor's rows or columns don't fit the other tensors.
    #[error("{tensor} is {found:?}, but its dimension {axis} should be {expected}")]
    Dimensions {
        /// Suffix of the tensor.
        tensor: &'static str,
        /// Its shape.
        found: [usize; 2],
        /// Which dimension is wrong.
        axis: usize,
        /// What the other tensors make it.
        expected: usize,
    },
    /// No width of the format explains the word counts.
    #[error(
        "no width of 2, 3, 4 or 8 bits fits a {in_features}x{out_features} weight with qweight {qweight:?} \
         and qzeros {qzeros:?}"
    )]
    NoWidthFits {
        /// k.
        in_features: usize,
        /// n.
        out_features: usize,
        /// Shape of `qweight`.
        qweight: [usize; 2],
        /// Shape of `qzeros`.
        qzeros: [usize; 2],
    },
    /// More than one width explains the word counts: only possible below 32 rows and columns.
    #[error("a {in_features}x{out_features} weight is too small to tell its width: {first} and {second} bits fit",
        first = first.get(), second = second.get())]
    SeveralWidthsFit {
        /// k.
        in_features: usize,
        /// n.
        out_features: usize,
        /// One width.
        first: Bits,
        /// Another one.
        second: Bits,
    },
    /// A slice is shorter or longer than the shape asks for.
    #[error("{tensor} has {found} elements, {expected} expected")]
    Length {
        /// Suffix of the tensor.
        tensor: &'static str,
        /// Elements found.
        found: usize,
        /// Elements expected.
        expected: usize,
    },
    /// A code does not fit its width.
    #[error("code {found} at element {position} doesn't fit {bits} bits", bits = bits.get())]
    Code {
        /// Index of the code.
        position: usize,
        /// Its value.
        found: u8,
        /// The width.
        bits: Bits,
    },
    /// A group index is negative or not below the number of groups.
    #[error("g_idx[{position}] is {found}, outside 0..{groups}")]
    GroupIndex {
        /// Row of the weight.
        position: usize,
        /// The index found.
        found: i64,
        /// Number of groups.
        groups: usize,
    },
    /// `g_idx` has a wrong length.
    #[error("g_idx has {found} entries for {expected} rows")]
    GIdxLength {
        /// Entries found.
        found: usize,
        /// k.
        expected: usize,
    },
    /// Without a usable `g_idx` the group size is unknown.
    #[error("{in_features} rows in {groups} groups: no group size gives that{}", match stated {
        Some(size) => format!(" (the configuration says {size})"),
        None => String::new(),
    })]
    GroupSize {
        /// k.
        in_features: usize,
        /// Rows of `scales`.
        groups: usize,
        /// What the configuration says, if anything.
        stated: Option<usize>,
    },
    /// A scale is NaN or infinite.
    #[error("scales[{group}, {column}] is {found}")]
    Scale {
        /// Group of the scale.
        group: usize,
        /// Column of the scale.
        column: usize,
        /// Its value.
        found: f32,
    },
    /// A zero point above `2^bits`, which no encoding gives.
    #[error("zero point {found} of group {group}, column {column} is above {max}", max = bits.max_code() + 1)]
    Zero {
        /// Group of the zero point.
        group: usize,
        /// Its column.
        column: usize,
        /// The zero point.
        found: u16,
        /// Width of a code.
        bits: Bits,
    },
    /// The 3-bit encoding was asked for at another width.
    #[error("zero points of {bits} bits can't have the exchanged constants of 3 bits", bits = bits.get())]
    EncodingWidth {
        /// The width.
        bits: Bits,
    },
    /// A zero point can't be stored in the convention asked for.
    #[error("zero point {found} of group {group}, column {column} can't be stored as {convention}")]
    ZeroNotRepresentable {
        /// Group of the zero point.
        group: usize,
        /// Its column.
        column: usize,
        /// The zero point.
        found: u16,
        /// The convention.
        convention: super::ZeroConvention,
    },
    /// A difference that doesn't fit a symmetric module of this width.
    #[error("q − z is {difference} at row {row}, column {column}, which {b} bits can't hold around their centre", b = bits.get())]
    Recentre {
        /// Row of the weight.
        row: usize,
        /// Its column.
        column: usize,
        /// Code minus zero point.
        difference: i32,
        /// The width.
        bits: Bits,
    },
    /// Codes don't fit fewer bits in general.
    #[error("{f} bits can't be stored in {t} without quantizing anew", f = from.get(), t = to.get())]
    Narrower {
        /// The width now.
        from: Bits,
        /// The width asked for.
        to: Bits,
    },
    /// A group can't be cut into equal parts.
    #[error("group {group} has {rows} rows, which groups of {size} don't divide")]
    Split {
        /// The group.
        group: usize,
        /// Its rows.
        rows: usize,
        /// Rows of a part.
        size: usize,
    },
}
