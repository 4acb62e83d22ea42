//! What an operation can refuse.

/// Why an operation was not done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The activations are not `[m, k]` for the weight's k.
    #[error("{found} activations for {m} rows of a weight with {in_features} in_features")]
    Activations {
        /// Elements found.
        found: usize,
        /// Rows asked for.
        m: usize,
        /// k.
        in_features: usize,
    },
}

/// Checks that `activations` elements are `[m, k]`.
///
/// # Errors
/// [`Error::Activations`].
pub(crate) fn expect_activations(found: usize, m: usize, in_features: usize) -> Result<(), Error> {
    // A saturated product matches no length.
    if found == m.saturating_mul(in_features) {
        Ok(())
    } else {
        Err(Error::Activations { found, m, in_features })
    }
}
