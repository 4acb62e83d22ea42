//! What can go wrong while an output is written.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use super::Difference;
use crate::{Diagnose, Kind};

/// Why an output could not be planned, written or put in place.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The path ends in no name (`/`, `..`), so that nothing can be written beside it.
    #[error("{} names no directory to write", path.display())]
    NoName {
        /// The path given.
        path: PathBuf,
    },
    /// Something stands where the output is to go.
    #[error("{} exists already", path.display())]
    Exists {
        /// The output.
        path: PathBuf,
    },
    /// An earlier run of ours stopped before its output was complete.
    #[error("{} holds an unfinished conversion", path.display())]
    Unfinished {
        /// The partial directory.
        path: PathBuf,
    },
    /// What is to be continued was begun from another source, with other flags or by another version.
    #[error("{} was made otherwise: {}", path.display(), list(differences))]
    OtherJob {
        /// The output, or its partial directory.
        path: PathBuf,
        /// What differs.
        differences: Vec<Difference>,
    },
    /// What an unfinished job wrote about itself can't be read.
    #[error("{} holds an unfinished conversion whose state can't be read: {source}", path.display())]
    State {
        /// The partial directory.
        path: PathBuf,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// What is to be replaced isn't a complete output of ours.
    #[error("{} is not an output of requant", path.display())]
    NotOurs {
        /// What stands there.
        path: PathBuf,
    },
    /// Writing the output could remove the source.
    #[error("{} is, or holds, the source", path.display())]
    HoldsSource {
        /// The output, or a directory that is needed beside it.
        path: PathBuf,
    },
    /// The disk hasn't room for the output.
    #[error("{} needs {needed} bytes more, its disk has {available} bytes left", path.display())]
    NoSpace {
        /// Where the output is to be written.
        path: PathBuf,
        /// Bytes still to be written.
        needed: u64,
        /// Bytes that may be written.
        available: u64,
    },
    /// Files where a partial directory should be, and no sign that they are ours.
    #[error("{} exists already and is not empty", path.display())]
    PartialExists {
        /// The partial directory.
        path: PathBuf,
    },
    /// Another run holds the partial directory's lock.
    #[error("{} is being written by another run", path.display())]
    InUse {
        /// The partial directory.
        path: PathBuf,
    },
    /// The file system refused: full, read-only, not permitted, a file where a directory should be.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: Action,
        /// On which file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// All files are complete, but their directory could not get its final name.
    #[error("cannot rename {} to {}: {source}", partial.display(), out.display())]
    NotRenamed {
        /// Where the complete output stands now.
        partial: PathBuf,
        /// The name it should have got.
        out: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A shard is not as long as it was written: something else changed it.
    #[error("{} has {found} bytes, {expected} were written", path.display())]
    ShardChanged {
        /// The shard.
        path: PathBuf,
        /// Bytes found.
        found: u64,
        /// Bytes written.
        expected: u64,
    },
    /// The work was cancelled while files were being hashed.
    #[error("interrupted")]
    Cancelled,
    /// A plan without a single tensor.
    #[error("the output holds no tensor")]
    NoTensors,
    /// A name that a shard's header keeps for itself.
    #[error("no tensor can be named {tensor}")]
    ReservedName {
        /// The name.
        tensor: String,
    },
    /// A name that was planned twice.
    #[error("tensor {tensor} was planned twice")]
    PlannedTwice {
        /// The name.
        tensor: String,
    },
    /// A shape whose size overflows, or a dtype below a byte whose elements fill no whole bytes.
    #[error("tensor {tensor} of shape {shape:?} has no size in whole bytes")]
    Size {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A shard's header that the safetensors crate refuses.
    #[error("the header of {file} is invalid: {source}")]
    Header {
        /// The shard's file name.
        file: String,
        /// What is wrong with it.
        source: safetensors::SafeTensorError,
    },
    /// A tensor that was never planned.
    #[error("tensor {tensor} was not planned")]
    Unplanned {
        /// Its name.
        tensor: String,
    },
    /// More or fewer bytes than the planned dtype and shape take.
    #[error("tensor {tensor} was given {found} bytes, its dtype and shape take {expected}")]
    Length {
        /// The tensor.
        tensor: String,
        /// Bytes given.
        found: u64,
        /// Bytes expected.
        expected: u64,
    },
    /// A tensor that was written already.
    #[error("tensor {tensor} was written twice")]
    WrittenTwice {
        /// Its name.
        tensor: String,
    },
    /// Tensors that were planned and never written.
    #[error("{count} tensors were not written, {tensor} first")]
    Missing {
        /// The first of them by name.
        tensor: String,
        /// How many there are.
        count: usize,
    },
}

/// What was tried on a file when the system refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Action {
    /// Making a file or directory, or giving it its length.
    Create,
    /// Listing a directory.
    List,
    /// Reading.
    Read,
    /// Writing.
    Write,
    /// Bringing it to the disk.
    Sync,
    /// Giving it another name.
    Rename,
    /// Removing.
    Remove,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Action::Create => "create",
            Action::List => "list",
            Action::Read => "read",
            Action::Write => "write",
            Action::Sync => "sync",
            Action::Rename => "rename",
            Action::Remove => "remove",
        })
    }
}

impl Action {
    /// The error of this action on `path`.
    pub(super) fn failed(self, path: &Path) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::Io { action: self, path: path.to_owned(), source }
    }
}

fn list(differences: &[Difference]) -> String {
    differences.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

impl Diagnose for Error {
    fn code(&self) -> &'static str {
        match self {
            Error::NoName { .. } => "output.no_name",
            Error::Exists { .. } => "output.exists",
            Error::PartialExists { .. } => "output.partial_exists",
            Error::Unfinished { .. } => "output.unfinished",
            Error::OtherJob { .. } => "output.other_job",
            Error::State { .. } => "output.state",
            Error::NotOurs { .. } => "output.not_ours",
            Error::HoldsSource { .. } => "output.holds_source",
            Error::NoSpace { .. } => "output.no_space",
            Error::InUse { .. } => "output.in_use",
            Error::Io { action, source, .. } => match source.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "output.disk_full",
                io::ErrorKind::NotADirectory => "output.not_a_directory",
                _ if matches!(action, Action::Read | Action::List) => "output.unreadable",
                io::ErrorKind::PermissionDenied => "output.permission",
                io::ErrorKind::ReadOnlyFilesystem => "output.read_only",
                _ => "output.io",
            },
            Error::NotRenamed { .. } => "output.not_renamed",
            Error::ShardChanged { .. } => "output.shard_changed",
            Error::Cancelled => "interrupted",
            Error::NoTensors => "output.no_tensors",
            Error::ReservedName { .. } => "output.reserved_name",
            Error::PlannedTwice { .. } => "output.planned_twice",
            Error::Size { .. } => "output.size",
            Error::Header { .. } => "output.header",
            Error::Unplanned { .. } => "output.unplanned",
            Error::Length { .. } => "output.length",
            Error::WrittenTwice { .. } => "output.written_twice",
            Error::Missing { .. } => "output.missing",
        }
    }

    fn kind(&self) -> Kind {
        match self {
            Error::NoName { .. }
            | Error::Exists { .. }
            | Error::PartialExists { .. }
            | Error::Unfinished { .. }
            | Error::OtherJob { .. }
            | Error::State { .. }
            | Error::NotOurs { .. }
            | Error::HoldsSource { .. }
            | Error::InUse { .. } => Kind::Usage,
            Error::Io { .. }
            | Error::NotRenamed { .. }
            | Error::NoSpace { .. }
            | Error::ShardChanged { .. } => Kind::Environment,
            Error::Cancelled => Kind::Interrupted,
            Error::NoTensors
            | Error::ReservedName { .. }
            | Error::PlannedTwice { .. }
            | Error::Size { .. }
            | Error::Header { .. }
            | Error::Unplanned { .. }
            | Error::Length { .. }
            | Error::WrittenTwice { .. }
            | Error::Missing { .. } => Kind::Bug,
        }
    }

    fn file(&self) -> Option<&Path> {
        match self {
            Error::NoName { path }
            | Error::Exists { path }
            | Error::PartialExists { path }
            | Error::Unfinished { path }
            | Error::OtherJob { path, .. }
            | Error::State { path, .. }
            | Error::NotOurs { path }
            | Error::HoldsSource { path }
            | Error::NoSpace { path, .. }
            | Error::InUse { path }
            | Error::Io { path, .. }
            | Error::ShardChanged { path, .. } => Some(path),
            Error::NotRenamed { out, .. } => Some(out),
            Error::Header { file, .. } => Some(Path::new(file)),
            _ => None,
        }
    }

    fn tensor(&self) -> Option<&str> {
        match self {
            Error::ReservedName { tensor }
            | Error::PlannedTwice { tensor }
            | Error::Size { tensor, .. }
            | Error::Unplanned { tensor }
            | Error::Length { tensor, .. }
            | Error::WrittenTwice { tensor }
            | Error::Missing { tensor, .. } => Some(tensor),
            _ => None,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Error::NoName { .. } => Some("give the output directory a name of its own".to_owned()),
            Error::Exists { .. } => {
                Some("choose another name, or --force to replace it when the new one is complete".to_owned())
            }
            Error::PartialExists { .. } => {
                Some("it is needed for writing: choose another name, or remove it first".to_owned())
            }
            Error::Unfinished { .. } => Some("--resume goes on with it, --force starts anew".to_owned()),
            Error::OtherJob { .. } => Some(
                "give the same source and flags, or start anew with --force instead of --resume".to_owned(),
            ),
            Error::State { .. } => Some("start anew with --force instead of --resume".to_owned()),
            Error::NotOurs { .. } => Some(
                "--force replaces complete outputs of requant only: choose another name, or remove it first"
                    .to_owned(),
            ),
            Error::HoldsSource { .. } => Some("write somewhere else".to_owned()),
            Error::NoSpace { .. } => Some("free some space, or write to another disk".to_owned()),
            Error::InUse { .. } => Some("wait for the other run, or choose another name".to_owned()),
            Error::Io { action: Action::List, .. } => Some("make the directory readable".to_owned()),
            Error::Io { action: Action::Read, .. } => Some(
                "make it readable; a file of the source that the model doesn't need can be taken out of it"
                    .to_owned(),
            ),
            Error::Io { source, .. } => match source.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                    Some("free some space, or write to another disk".to_owned())
                }
                io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                    Some("write to a directory that you may write to".to_owned())
                }
                _ => None,
            },
            Error::NotRenamed { partial, .. } => {
                Some(format!("the output is complete: rename {} by hand", partial.display()))
            }
            _ => None,
        }
    }
}
