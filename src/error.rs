//! What every error of the library can say about itself.
//!
//! Each layer has its own error type; [`Error`] joins them. The command line alone turns them into text,
//! JSON and exit codes, through [`Diagnose`].

use crate::checkpoint::{CONFIG, Checkpoint};
use std::path::{Path, PathBuf};

/// Who has to act, which is also what decides the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Kind {
    /// A gate that the user set was missed.
    Gate,
    /// The flags, or a resume that doesn't match.
    Usage,
    /// The checkpoint is invalid or unsupported.
    Input,
    /// Disk, network, permission, device.
    Environment,
    /// The user stopped the work.
    Interrupted,
    /// requant itself is wrong: please report it.
    Bug,
}

/// The parts of a message: what was found and expected is in the error's `Display`.
pub trait Diagnose: std::error::Error {
    /// A stable name, such as `checkpoint.truncated`.
    fn code(&self) -> &'static str;
    /// Who has to act.
    fn kind(&self) -> Kind;
    /// The file concerned.
    fn file(&self) -> Option<&Path> {
        None
    }
    /// The tensor concerned, by its full name.
    fn tensor(&self) -> Option<&str> {
        None
    }
    /// What to do.
    fn hint(&self) -> Option<String> {
        None
    }
}

/// Any error of the library.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Opening or reading a checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] crate::checkpoint::Error),
    /// Making a plan.
    #[error(transparent)]
    Plan(#[from] crate::plan::Error),
    /// Converting a module.
    #[error(transparent)]
    Convert(#[from] crate::convert::Error),
    /// Writing the output.
    #[error(transparent)]
    Output(#[from] crate::output::Error),
    /// Validating.
    #[error(transparent)]
    Validate(#[from] crate::validate::Error),
    /// The work was cancelled.
    #[error("interrupted")]
    Cancelled,
}

impl From<requant_kernels::Error> for Error {
    fn from(error: requant_kernels::Error) -> Self {
        Self::Validate(error.into())
    }
}

impl Error {
    /// The file at fault, that of the module or tensor in `checkpoint` where the error itself names none.
    pub fn file_in(&self, checkpoint: &Checkpoint) -> Option<PathBuf> {
        if let Some(file) = self.file() {
            return Some(file.to_owned());
        }
        match self {
            Error::Plan(error) if error.is_of_config() => Some(checkpoint.dir().join(CONFIG)),
            _ => checkpoint.file_of(self.tensor()?).map(Path::to_owned),
        }
    }

    fn inner(&self) -> Option<&dyn Diagnose> {
        match self {
            Error::Checkpoint(e) => Some(e),
            Error::Plan(e) => Some(e),
            Error::Convert(e) => Some(e),
            Error::Output(e) => Some(e),
            Error::Validate(e) => Some(e),
            Error::Cancelled => None,
        }
    }
}

impl Diagnose for Error {
    fn code(&self) -> &'static str {
        self.inner().map_or("interrupted", |e| e.code())
    }
    fn kind(&self) -> Kind {
        self.inner().map_or(Kind::Interrupted, |e| e.kind())
    }
    fn file(&self) -> Option<&Path> {
        self.inner().and_then(|e| e.file())
    }
    fn tensor(&self) -> Option<&str> {
        self.inner().and_then(|e| e.tensor())
    }
    fn hint(&self) -> Option<String> {
        self.inner().and_then(|e| e.hint())
    }
}
