//! The directory `NAME.partial`, which gets its final name when it is complete.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::{Action, Error};

/// An output being written: `NAME.partial` until [`commit`](Staging::commit) renames it to `NAME`.
///
/// The partial directory is locked as long as this value lives, so that two runs never write the same output.
/// Dropped without a commit it removes the partial directory, unless [`keep_partial`](Staging::keep_partial)
/// says otherwise; after a kill that leaves no time for that, the directory stays and the next run refuses it.
#[derive(Debug)]
pub struct Staging {
    out: PathBuf,
    partial: PathBuf,
    keep: bool,
    /// Holds the lock; `None` once there is nothing left to clean up.
    lock: Option<File>,
}

impl Staging {
    /// Creates `NAME.partial` and the directories above it.
    ///
    /// # Errors
    /// [`Error::Exists`] if `out` exists, be it a file, an empty directory or a dangling link;
    /// [`Error::PartialExists`] if `NAME.partial` exists, unless it is an empty directory; [`Error::InUse`] if
    /// another run writes it; [`Error::NoName`]; [`Error::Io`].
    pub fn create(out: &Path) -> Result<Self, Error> {
        let name = out.file_name().ok_or_else(|| Error::NoName { path: out.to_owned() })?;
        let mut partial_name = name.to_owned();
        partial_name.push(".partial");
        let partial = out.with_file_name(partial_name);

        refuse_existing(out)?;
        create_parent(out)?;
        match fs::create_dir(&partial) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            result => result.map_err(Action::Create.failed(&partial))?,
        }
        if !partial.is_dir() {
            return Err(Error::PartialExists { path: partial });
        }
        let lock = File::open(&partial).map_err(Action::Create.failed(&partial))?;
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => return Err(Error::InUse { path: partial }),
            // Some network file systems can't lock a directory: then two runs at once are the user's care.
            Err(TryLockError::Error(_)) | Ok(()) => {}
        }
        // Only now, under the lock, is it known that no other run has just finished or begun.
        refuse_existing(out)?;
        let mut entries = fs::read_dir(&partial).map_err(Action::List.failed(&partial))?;
        if entries.next().is_some() {
            return Err(Error::PartialExists { path: partial });
        }
        Ok(Staging { out: out.to_owned(), partial, keep: false, lock: Some(lock) })
    }

    /// The partial directory, where everything is to be written.
    pub fn path(&self) -> &Path {
        &self.partial
    }

    /// Whether the partial directory stays when this is dropped without a commit.
    pub fn keep_partial(&mut self, keep: bool) {
        self.keep = keep;
    }

    /// Writes a small file, such as `config.json`, whole.
    ///
    /// # Errors
    /// [`Error::Io`], also when a file of this name was written before.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        let path = self.partial.join(name);
        let mut file = File::create_new(&path).map_err(Action::Create.failed(&path))?;
        file.write_all(bytes).map_err(Action::Write.failed(&path))
    }

    /// Brings all files to the disk and gives the directory its final name, which is returned.
    ///
    /// # Errors
    /// [`Error::Io`] if a file can't be synced. [`Error::NotRenamed`] if only the name couldn't be given,
    /// because something took it meanwhile: then the complete partial directory stays.
    pub fn commit(mut self) -> Result<PathBuf, Error> {
        sync_tree(&self.partial)?;
        // A rename would replace an empty directory without a word.
        let renamed = match fs::symlink_metadata(&self.out) {
            Ok(_) => Err(io::Error::from(io::ErrorKind::AlreadyExists)),
            Err(_) => fs::rename(&self.partial, &self.out),
        };
        if let Err(source) = renamed {
            self.keep = true;
            return Err(Error::NotRenamed { partial: self.partial.clone(), out: self.out.clone(), source });
        }
        self.lock = None;
        sync(parent(&self.out))?;
        Ok(self.out.clone())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.lock.is_some() && !self.keep {
            // Nobody is left to be told, and the next run says what it finds.
            let _ = fs::remove_dir_all(&self.partial);
        }
    }
}

fn refuse_existing(out: &Path) -> Result<(), Error> {
    match fs::symlink_metadata(out) {
        Ok(_) => Err(Error::Exists { path: out.to_owned() }),
        Err(_) => Ok(()),
    }
}

/// The directory that holds `path`; that of a bare name is the current one.
fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn create_parent(out: &Path) -> Result<(), Error> {
    let parent = parent(out);
    fs::create_dir_all(parent).map_err(|source| {
        // The system doesn't say which of the directories is in fact a file, and may say that it exists.
        match parent.ancestors().find(|a| a.exists() && !a.is_dir()) {
            Some(file) => Action::Create.failed(file)(io::ErrorKind::NotADirectory.into()),
            None => Action::Create.failed(parent)(source),
        }
    })
}

fn sync_tree(dir: &Path) -> Result<(), Error> {
    for entry in fs::read_dir(dir).map_err(Action::List.failed(dir))? {
        let path = entry.map_err(Action::List.failed(dir))?.path();
        if path.is_dir() { sync_tree(&path)? } else { sync(&path)? }
    }
    sync(dir)
}

fn sync(path: &Path) -> Result<(), Error> {
    File::open(path).and_then(|file| file.sync_all()).map_err(Action::Sync.failed(path))
}
