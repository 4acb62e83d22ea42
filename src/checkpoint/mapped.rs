//! Files mapped into memory: the one place of `checkpoint` with `unsafe`.
#![allow(unsafe_code)]

use std::fs::{File, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// A file mapped read-only, and what it looked like when it was mapped.
#[derive(Debug)]
pub(super) struct Mapped {
    path: PathBuf,
    map: memmap2::Mmap,
    stamp: Stamp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    len: u64,
    modified: Option<SystemTime>,
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        Self { len: metadata.len(), modified: metadata.modified().ok() }
    }
}

impl Mapped {
    /// Maps a file.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let stamp = Stamp::of(&file.metadata()?);
        // SAFETY: the map is read-only and private to this process. Another process that writes to the file
        // while we read makes us read other bytes, which every use tolerates, as all bytes are untrusted;
        // one that truncates it ends this process by a signal. `unchanged` detects the former, and no
        // program can exclude the latter.
        let map = unsafe { memmap2::Mmap::map(&file)? };
        Ok(Self { path: path.to_owned(), map, stamp })
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// All its bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Whether size and time of modification are what they were.
    pub(super) fn unchanged(&self) -> io::Result<bool> {
        Ok(Stamp::of(&std::fs::metadata(&self.path)?) == self.stamp)
    }
}
