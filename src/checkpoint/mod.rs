//! Opens a checkpoint directory (being written).

/// Being written.
#[derive(Debug)]
pub struct Checkpoint;

/// Being written.
#[derive(Debug, thiserror::Error)]
#[error("checkpoint")]
pub struct Error;

impl crate::Diagnose for Error {
    fn code(&self) -> &'static str {
        "checkpoint"
    }
    fn kind(&self) -> crate::Kind {
        crate::Kind::Input
    }
}
