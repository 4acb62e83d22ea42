//! What an operation can refuse.

/// Why an operation was not done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The sizes of the arguments don't fit together.
    #[error("{operation}: {found}, expected {expected}")]
    Shape {
        /// Name of the operation, as the trait has it.
        operation: &'static str,
        /// What was given, in words: `activations [3, 64]`.
        found: String,
        /// What fits, in words: `[m, 128]`.
        expected: String,
    },
    /// The device failed.
    #[error("{device}: {operation} failed: {message}")]
    Device {
        /// The device's name.
        device: String,
        /// Name of the operation.
        operation: &'static str,
        /// What the driver says.
        message: String,
    },
    /// The device has not enough memory.
    #[error("{device}: {operation} needs {needed} bytes more than are free")]
    OutOfMemory {
        /// The device's name.
        device: String,
        /// Name of the operation.
        operation: &'static str,
        /// Bytes asked for.
        needed: u64,
    },
    /// The GPU can't be used.
    #[cfg(feature = "cuda")]
    #[error("{0}; {hint}", hint = .0.hint())]
    Unavailable(#[from] crate::cuda::Unavailable),
    /// A GPU was asked for, and the program was built without.
    #[error("this program was built without GPUs")]
    NotBuilt,
}

/// [`Error::Shape`] unless `fits`; `words` gives what was found and what was expected.
pub(crate) fn expect(
    operation: &'static str,
    fits: bool,
    words: impl FnOnce() -> (String, String),
) -> Result<(), Error> {
    if fits {
        return Ok(());
    }
    let (found, expected) = words();
    Err(Error::Shape { operation, found, expected })
}
