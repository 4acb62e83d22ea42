//! Writes an output directory (being written).

/// Being written.
#[derive(Debug, thiserror::Error)]
#[error("output")]
pub struct Error;

impl crate::Diagnose for Error {
    fn code(&self) -> &'static str {
        "output"
    }
    fn kind(&self) -> crate::Kind {
        crate::Kind::Environment
    }
}
