//! Sixteen columns at a time: what the search looks at.

/// Columns of a panel.
pub(super) const LANES: usize = 16;

/// One number a column.
pub(super) type Lanes = [f32; LANES];

/// What a group offers the columns of a panel: sixteen scales of one ceiling.
#[derive(Clone, Debug)]
pub(super) struct Steps {
    /// Scales as decoded, ascending. One whose lowest code overflows fp16 is NaN; the first never is.
    pub(super) scale: [f32; 16],
    /// Their reciprocals.
    pub(super) inverse: [f32; 16],
}

/// A panel's values and how often each occurs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Panel<'a> {
    pub(super) values: &'a [Lanes],
    pub(super) weights: &'a [Lanes],
}

/// Smallest and largest code, as signed integers around zero.
#[derive(Clone, Copy, Debug)]
pub(super) struct Range {
    pub(super) low: f32,
    pub(super) high: f32,
}

/// Which indices of a ceiling are compared.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window<'a> {
    /// Each column's smallest scale that clips nothing.
    pub(super) wanted: &'a Lanes,
    /// Indices below and above the first whose scale is at least the wanted one.
    pub(super) reach: (i32, i32),
}
