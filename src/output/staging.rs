//! The directory `NAME.partial`, which gets its final name when it is complete.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::publish::{beside, publish, remove, replaced};
use super::{Action, Error, Identity, Journal};

/// Where the state of a job stands in a partial directory.
const STATE: &str = ".job";
/// What the job is.
const JOB: &str = "job.json";
/// What of it is done.
const DONE: &str = "done.jsonl";

/// An output being written: `NAME.partial` until [`commit`](Staging::commit) renames it to `NAME`.
///
/// The partial directory is locked as long as this value lives, so that two runs never write the same output.
/// Dropped without a commit it removes the partial directory, unless [`keep_partial`](Staging::keep_partial)
/// says otherwise; after a kill that leaves no time for that, the directory stays. What a job wrote about
/// itself ([`write_job`](Staging::write_job)) then lets it go on.
#[derive(Debug)]
pub struct Staging {
    out: PathBuf,
    partial: PathBuf,
    keep: bool,
    replace: bool,
    /// Holds the lock; `None` once there is nothing left to clean up.
    lock: Option<File>,
}

/// What an earlier run left in a partial directory.
#[derive(Debug)]
pub enum Leftover {
    /// Nothing that counts.
    Nothing,
    /// A job that can go on: what it wrote about itself.
    Unfinished(Vec<u8>),
    /// A complete output that lacks its name only.
    Complete(Identity),
    /// Files that aren't ours.
    Foreign,
}

impl Staging {
    /// Creates `NAME.partial` and the directories above it.
    ///
    /// # Errors
    /// [`Error::Exists`] if `out` exists, be it a file, an empty directory or a dangling link;
    /// [`Error::Unfinished`] or [`Error::PartialExists`] if `NAME.partial` exists with something in it;
    /// [`Error::InUse`] if another run writes it; [`Error::NoName`]; [`Error::Io`].
    pub fn create(out: &Path) -> Result<Self, Error> {
        check_name(out)?;
        refuse_existing(out)?;
        let staging = Self::lock(out)?;
        // Only now, under the lock, is it known that no other run has just finished or begun.
        refuse_existing(out)?;
        match staging.leftover()? {
            Leftover::Nothing => staging.clear(|_| false)?,
            Leftover::Unfinished(_) | Leftover::Complete(_) => {
                return Err(Error::Unfinished { path: staging.partial.clone() });
            }
            Leftover::Foreign => return Err(Error::PartialExists { path: staging.partial.clone() }),
        }
        Ok(staging)
    }

    /// Locks `NAME.partial` as it is, or creates it and the directories above it. Where something is in it, it
    /// is kept until told otherwise.
    ///
    /// # Errors
    /// [`Error::PartialExists`] if it is no directory; [`Error::InUse`], [`Error::NoName`], [`Error::Io`].
    pub fn lock(out: &Path) -> Result<Self, Error> {
        check_name(out)?;
        let partial = partial_of(out);
        create_parent(out)?;
        match fs::create_dir(&partial) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            result => result.map_err(Action::Create.failed(&partial))?,
        }
        if !partial.symlink_metadata().is_ok_and(|metadata| metadata.is_dir()) {
            return Err(Error::PartialExists { path: partial });
        }
        let lock = File::open(&partial).map_err(Action::Create.failed(&partial))?;
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => return Err(Error::InUse { path: partial }),
            // Some network file systems can't lock a directory: then two runs at once are the user's care.
            Err(TryLockError::Error(_)) | Ok(()) => {}
        }
        // Another run may have published or removed the directory between our opening and locking it.
        if !same_directory(&lock, &partial) {
            return Err(Error::InUse { path: partial });
        }
        let mut staging =
            Staging { out: out.to_owned(), partial, keep: true, replace: false, lock: Some(lock) };
        staging.keep = !matches!(staging.leftover()?, Leftover::Nothing);
        Ok(staging)
    }

    /// What an earlier run left.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn leftover(&self) -> Result<Leftover, Error> {
        match fs::read(self.partial.join(STATE).join(JOB)) {
            Ok(job) => return Ok(Leftover::Unfinished(job)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(Action::Read.failed(&self.partial.join(STATE).join(JOB))(e)),
        }
        // A commit removes the state before it gives the name.
        if let Some(identity) = Identity::of_output(&self.partial) {
            return Ok(Leftover::Complete(identity));
        }
        let blank =
            entries(&self.partial)?.iter().all(|path| path.file_name().is_some_and(|name| name == STATE));
        Ok(if blank { Leftover::Nothing } else { Leftover::Foreign })
    }

    /// The partial directory, where everything is to be written.
    pub fn path(&self) -> &Path {
        &self.partial
    }

    /// Whether the partial directory stays when this is dropped without a commit.
    pub fn keep_partial(&mut self, keep: bool) {
        self.keep = keep;
    }

    /// Lets [`commit`](Self::commit) replace an output of ours that stands under the final name.
    pub fn replace_existing(&mut self) {
        self.replace = true;
    }

    /// Removes what is in the partial directory, but for the entries that `keep` wants by name.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn clear(&self, keep: impl Fn(&str) -> bool) -> Result<(), Error> {
        let mut all = entries(&self.partial)?;
        // The state goes last: without it, what is left would be nobody's.
        all.sort_by_key(|path| path.file_name().is_some_and(|name| name == STATE));
        for path in all {
            let kept = path.file_name().and_then(|name| name.to_str()).is_some_and(&keep);
            if !kept {
                remove(&path)?;
            }
        }
        Ok(())
    }

    /// [`clear`](Self::clear), the job's state kept.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn clear_but_state(&self, keep: impl Fn(&str) -> bool) -> Result<(), Error> {
        self.clear(|name| name == STATE || keep(name))
    }

    /// Writes what the job is, whole or not at all, and on the disk when this returns.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write_job(&self, bytes: &[u8]) -> Result<(), Error> {
        let dir = self.partial.join(STATE);
        fs::create_dir_all(&dir).map_err(Action::Create.failed(&dir))?;
        let (path, new) = (dir.join(JOB), dir.join("job.json.new"));
        fs::write(&new, bytes).map_err(Action::Write.failed(&new))?;
        sync(&new)?;
        fs::rename(&new, &path).map_err(Action::Rename.failed(&new))?;
        sync(&dir)?;
        sync(&self.partial)
    }

    /// Opens the list of what is done, and gives its lines.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn journal(&self) -> Result<(Journal, Vec<Vec<u8>>), Error> {
        Journal::open(&self.partial.join(STATE).join(DONE))
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

    /// Writes a small file in the place of one that was written before.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn rewrite(&self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        let (path, new) = (self.partial.join(name), self.partial.join(format!("{name}.new")));
        fs::write(&new, bytes).map_err(Action::Write.failed(&new))?;
        fs::rename(&new, &path).map_err(Action::Rename.failed(&new))
    }

    /// Brings all files to the disk and gives the directory its final name, which is returned.
    ///
    /// # Errors
    /// [`Error::Io`] if a file can't be synced. [`Error::NotRenamed`] if only the name couldn't be given,
    /// because something took it meanwhile: then the complete partial directory stays.
    pub fn commit(self) -> Result<PathBuf, Error> {
        let (out, replace) = (self.out.clone(), self.replace);
        self.publish_as(out, replace)
    }

    /// The same under `NAME.rejected`, where an older output of ours gives way. What stands under the final name
    /// stays.
    ///
    /// # Errors
    /// Those of [`commit`](Self::commit).
    pub fn reject(self) -> Result<PathBuf, Error> {
        let out = rejected_of(&self.out);
        self.publish_as(out, true)
    }

    fn publish_as(mut self, out: PathBuf, replace: bool) -> Result<PathBuf, Error> {
        sync_tree(&self.partial)?;
        let state = self.partial.join(STATE);
        if state.exists() {
            remove(&state)?;
            sync(&self.partial)?;
        }
        // From here on it is complete, whatever happens.
        self.keep = true;
        publish(&self.partial, &out, replace)?;
        self.lock = None;
        Ok(out)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.lock.is_some() && !self.keep {
            // Nobody is left to be told, and the next run says what it finds.
            let _ = self.clear(|_| false);
            let _ = fs::remove_dir(&self.partial);
        }
    }
}

/// The partial directory of an output.
pub fn partial_of(out: &Path) -> PathBuf {
    beside(out, ".partial")
}

/// Where an output goes that its checks reject.
pub fn rejected_of(out: &Path) -> PathBuf {
    beside(out, ".rejected")
}

/// Whether `NAME.partial` holds a job that can go on.
pub fn is_resumable(out: &Path) -> bool {
    partial_of(out).join(STATE).join(JOB).is_file()
}

/// Checks that nothing that writing `out` may remove holds the directory `source`.
///
/// # Errors
/// [`Error::HoldsSource`].
pub fn check_apart(out: &Path, source: &Path) -> Result<(), Error> {
    let Ok(source) = source.canonicalize() else { return Ok(()) };
    for dir in [out.to_owned(), partial_of(out), replaced(out), rejected_of(out), replaced(&rejected_of(out))]
    {
        if dir.canonicalize().is_ok_and(|dir| source.starts_with(dir)) {
            return Err(Error::HoldsSource { path: dir });
        }
    }
    Ok(())
}

fn check_name(out: &Path) -> Result<(), Error> {
    match out.file_name() {
        Some(_) => Ok(()),
        None => Err(Error::NoName { path: out.to_owned() }),
    }
}

fn refuse_existing(out: &Path) -> Result<(), Error> {
    match fs::symlink_metadata(out) {
        Ok(_) => Err(Error::Exists { path: out.to_owned() }),
        Err(_) => Ok(()),
    }
}

fn same_directory(open: &File, path: &Path) -> bool {
    let place = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    match (open.metadata(), fs::symlink_metadata(path)) {
        (Ok(open), Ok(named)) => place(open) == place(named),
        _ => false,
    }
}

fn entries(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(dir).map_err(Action::List.failed(dir))? {
        paths.push(entry.map_err(Action::List.failed(dir))?.path());
    }
    Ok(paths)
}

/// The directory that holds `path`; that of a bare name is the current one.
pub(super) fn parent(path: &Path) -> &Path {
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
    for path in entries(dir)? {
        if path.is_dir() { sync_tree(&path)? } else { sync(&path)? }
    }
    sync(dir)
}

pub(super) fn sync(path: &Path) -> Result<(), Error> {
    File::open(path).and_then(|file| file.sync_all()).map_err(Action::Sync.failed(path))
}
