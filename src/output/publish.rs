//! Gives a complete directory its final name, where an older output may stand.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::identity::REPORT_FILE;
use super::staging::{parent, sync};
use super::{Action, Error, Identity};

/// Renames `partial` to `out`. With `replace`, an older output of ours gives way: both change names in one
/// step where the file system can, and the old one is removed only when the new one stands.
///
/// A kill at any moment leaves both or the new one: the old one is `NAME`, then `NAME.partial` or
/// `NAME.replaced`, until it is removed, its report last.
pub(super) fn publish(partial: &Path, out: &Path, replace: bool) -> Result<(), Error> {
    let failed = |source| Error::NotRenamed { partial: partial.to_owned(), out: out.to_owned(), source };
    if fs::symlink_metadata(out).is_err() {
        fs::rename(partial, out).map_err(failed)?;
        sync(parent(out))?;
        return if replace { discard(&replaced(out)) } else { Ok(()) };
    }
    // A rename would replace an empty directory without a word.
    if !replace || Identity::of_output(out).is_none() {
        return Err(failed(io::ErrorKind::AlreadyExists.into()));
    }
    let old = replaced(out);
    discard(&old)?;
    if renameat_with(CWD, partial, CWD, out, RenameFlags::EXCHANGE).is_ok() {
        sync(parent(out))?;
        fs::rename(partial, &old).map_err(Action::Rename.failed(partial))?;
    } else {
        fs::rename(out, &old).map_err(failed)?;
        if let Err(source) = fs::rename(partial, out) {
            // The old one is better than none; if that fails too, both are still there.
            let _ = fs::rename(&old, out);
            return Err(failed(source));
        }
        sync(parent(out))?;
    }
    discard(&old)
}

/// Where an output waits for its removal.
pub(super) fn replaced(out: &Path) -> PathBuf {
    beside(out, ".replaced")
}

/// `NAME` with something appended.
pub(super) fn beside(out: &Path, suffix: &str) -> PathBuf {
    let mut name: OsString = out.file_name().unwrap_or_default().to_owned();
    name.push(suffix);
    out.with_file_name(name)
}

/// Removes an output of ours, its report last, so that a rest of it is known for what it is. Anything else
/// of this name is an error.
fn discard(dir: &Path) -> Result<(), Error> {
    match fs::symlink_metadata(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        _ if Identity::of_output(dir).is_none() => return Err(Error::NotOurs { path: dir.to_owned() }),
        _ => {}
    }
    for entry in fs::read_dir(dir).map_err(Action::List.failed(dir))? {
        let entry = entry.map_err(Action::List.failed(dir))?;
        if entry.file_name() != REPORT_FILE {
            remove(&entry.path())?;
        }
    }
    fs::remove_dir_all(dir).map_err(Action::Remove.failed(dir))
}

/// Removes a file, or a directory with all that is in it.
pub(super) fn remove(path: &Path) -> Result<(), Error> {
    let metadata = fs::symlink_metadata(path).map_err(Action::Remove.failed(path))?;
    match metadata.is_dir() {
        true => fs::remove_dir_all(path),
        false => fs::remove_file(path),
    }
    .map_err(Action::Remove.failed(path))
}
