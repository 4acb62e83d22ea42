//! What calibration needs of a device besides the forward pass.

use super::error::Error;
use super::operations::Operations;

/// Sums of the products of a linear's inputs, Σ xxᵀ over tokens x: what says how much an error in each weight
/// matters to the linear's output.
pub trait Calibration: Operations {
    /// A sum under way, in the device's memory: one triangle of `columns` × `columns`.
    type Sums: Send;

    /// A sum over no token.
    fn new_sums(&self, columns: usize) -> Result<Self::Sums, Error>;

    /// Adds the rows of `x` `[tokens, columns]`. Products are added in fp32 over one call at most, and in fp64
    /// over calls. The same calls give the same bits, for any number of threads.
    fn add_products(&self, sums: &mut Self::Sums, x: &Self::Tensor) -> Result<(), Error>;

    /// The lower triangle with the diagonal, row by row: entry (i, j ≤ i) stands at `i · (i + 1) / 2 + j`.
    fn download_sums(&self, sums: Self::Sums) -> Result<Vec<f64>, Error>;
}
