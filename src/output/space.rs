//! Whether an output fits on its disk.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::{Action, Error};

/// Checks that the file system of `dir` has room for an output of `needed` bytes, of which `dir` may hold a
/// part already.
///
/// # Errors
/// [`Error::NoSpace`], [`Error::Io`].
pub fn check_space(dir: &Path, needed: u64) -> Result<(), Error> {
    let disk = rustix::fs::statvfs(dir).map_err(|e| Action::Read.failed(dir)(e.into()))?;
    // Some network file systems don't tell their size.
    if disk.f_blocks == 0 {
        return Ok(());
    }
    let available = disk.f_bavail.saturating_mul(disk.f_frsize);
    let needed = needed.saturating_sub(allocated(dir)?);
    match needed <= available {
        true => Ok(()),
        false => Err(Error::NoSpace { path: dir.to_owned(), needed, available }),
    }
}

/// Bytes that files take on the disk: shards have their full length from the start, but holes in it.
fn allocated(dir: &Path) -> Result<u64, Error> {
    let mut bytes = 0;
    for entry in fs::read_dir(dir).map_err(Action::List.failed(dir))? {
        let entry = entry.map_err(Action::List.failed(dir))?;
        let metadata = entry.metadata().map_err(Action::Read.failed(&entry.path()))?;
        if metadata.is_file() {
            bytes += (metadata.blocks() * 512).min(metadata.len());
        }
    }
    Ok(bytes)
}
