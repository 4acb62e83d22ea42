//! Writes the shards of a plan and their index.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use xxhash_rust::xxh3::Xxh3;

use super::shard_hash::{FileHash, HASH_CHUNK};
use super::shard_plan::{Place, PlannedShard};
use super::{Action, Error, ShardPlan};
use crate::progress::{Event, Observer};

/// The name of the index, written also where there is one shard only.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// Bytes written at a time: a part of a processor's cache.
const WRITE_CHUNK: usize = 1 << 18;

/// A shard that is complete.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardFile {
    /// Its file name.
    pub file: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// The sha256 of the whole file, in lower-case hexadecimal.
    pub sha256: String,
}

/// Takes the tensors of a [`ShardPlan`] in any order and from any thread, each once.
///
/// All files have their header and final length from the start, so a tensor's bytes go straight to their
/// place and memory holds no more than the tensors being made. A job that was stopped can go on the same way:
/// what is on disk doesn't depend on the order.
#[derive(Debug)]
pub struct ShardWriter {
    dir: PathBuf,
    plan: ShardPlan,
    files: Vec<File>,
    hashes: Vec<Mutex<FileHash>>,
    slots: BTreeMap<String, Slot>,
}

/// A tensor's place and how far it is.
#[derive(Debug)]
struct Slot {
    place: Place,
    state: Mutex<State>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waiting,
    BeingWritten,
    /// With the checksum of its bytes.
    Written(u128),
}

impl Slot {
    fn state(&self) -> MutexGuard<'_, State> {
        // The value is replaced whole, so that a panic elsewhere can't leave it half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ShardWriter {
    /// Creates all files of `plan` in `dir`, with their headers and lengths.
    ///
    /// # Errors
    /// [`Error::Io`], also when one of the files exists.
    pub fn create(dir: &Path, plan: ShardPlan) -> Result<Self, Error> {
        Self::open(dir, plan, File::options().read(true).write(true).create_new(true))
    }

    /// Goes on with files that [`create`](Self::create) of the same plan made, or was about to make: headers
    /// and lengths are set again, and no tensor counts as written until [`adopt`](Self::adopt) has seen it.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn resume(dir: &Path, plan: ShardPlan) -> Result<Self, Error> {
        Self::open(dir, plan, File::options().read(true).write(true).create(true).truncate(false))
    }

    fn open(dir: &Path, plan: ShardPlan, options: &OpenOptions) -> Result<Self, Error> {
        let mut files = Vec::with_capacity(plan.files().len());
        for shard in plan.files() {
            let path = dir.join(shard.file());
            let file = options.open(&path).map_err(Action::Create.failed(&path))?;
            file.set_len(shard.bytes()).map_err(Action::Create.failed(&path))?;
            file.write_all_at(shard.head(), 0).map_err(Action::Write.failed(&path))?;
            files.push(file);
        }
        let slot = |place: &Place| Slot { place: *place, state: Mutex::new(State::Waiting) };
        let slots = plan.places().iter().map(|(name, place)| (name.clone(), slot(place))).collect();
        let hashes = files.iter().map(|_| Mutex::default()).collect();
        Ok(ShardWriter { dir: dir.to_owned(), plan, files, hashes, slots })
    }

    /// What is being written.
    pub fn plan(&self) -> &ShardPlan {
        &self.plan
    }

    /// Writes a tensor: its elements in row-major order, little-endian.
    ///
    /// # Errors
    /// [`Error::Unplanned`], [`Error::Length`], [`Error::WrittenTwice`], [`Error::Io`]; after the last the
    /// tensor may be written again.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        let slot = self.slots.get(name).ok_or_else(|| Error::Unplanned { tensor: name.to_owned() })?;
        let place = slot.place;
        if bytes.len() as u64 != place.bytes {
            let tensor = name.to_owned();
            return Err(Error::Length { tensor, found: bytes.len() as u64, expected: place.bytes });
        }
        {
            let mut state = slot.state();
            if *state != State::Waiting {
                return Err(Error::WrittenTwice { tensor: name.to_owned() });
            }
            *state = State::BeingWritten;
        }
        let result = write_and_hash(&self.files[place.shard], bytes, place.offset);
        *slot.state() = result.as_ref().map_or(State::Waiting, |checksum| State::Written(*checksum));
        result.map(drop).map_err(Action::Write.failed(&self.path(place.shard)))
    }

    /// The XXH3-128 of a tensor that is written, in lower-case hexadecimal: it tells torn from whole, at the
    /// speed of memory; the files' sha256 come at the end.
    pub fn checksum(&self, name: &str) -> Option<String> {
        match *self.slots.get(name)?.state() {
            State::Written(checksum) => Some(format!("{checksum:032x}")),
            State::Waiting | State::BeingWritten => None,
        }
    }

    /// The size in bytes of a tensor of the plan.
    pub fn bytes_of(&self, name: &str) -> Option<u64> {
        self.slots.get(name).map(|slot| slot.place.bytes)
    }

    /// Reads tensors that an earlier run wrote, and counts them as written if all have the checksum given, and
    /// none otherwise. Gives whether they have.
    ///
    /// # Errors
    /// [`Error::Io`] if a file can't be read.
    pub fn adopt<'a>(&self, tensors: impl Iterator<Item = (&'a str, &'a str)>) -> Result<bool, Error> {
        let mut adopted: Vec<(&Slot, u128)> = Vec::new();
        for (name, expected) in tensors {
            let Some(slot) = self.slots.get(name) else { return Ok(false) };
            let checksum = self.checksum_of(&slot.place)?;
            if format!("{checksum:032x}") != expected || *slot.state() != State::Waiting {
                return Ok(false);
            }
            adopted.push((slot, checksum));
        }
        for (slot, checksum) in adopted {
            *slot.state() = State::Written(checksum);
        }
        Ok(true)
    }

    /// Brings what is written to the disk.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn sync(&self) -> Result<(), Error> {
        for (i, file) in self.files.iter().enumerate() {
            file.sync_data().map_err(Action::Sync.failed(&self.path(i)))?;
        }
        Ok(())
    }

    fn checksum_of(&self, place: &Place) -> Result<u128, Error> {
        let mut hasher = Xxh3::new();
        let mut chunk = vec![0; HASH_CHUNK.min(place.bytes as usize)];
        let (mut offset, end) = (place.offset, place.offset + place.bytes);
        while offset < end {
            let chunk = &mut chunk[..HASH_CHUNK.min((end - offset) as usize)];
            self.files[place.shard]
                .read_exact_at(chunk, offset)
                .map_err(Action::Read.failed(&self.path(place.shard)))?;
            hasher.update(chunk);
            offset += chunk.len() as u64;
        }
        Ok(hasher.digest128())
    }

    /// Hashes what is written of each file, as far as it has no gaps: the less is left for
    /// [`finish`](Self::finish), the more tensors were written in the order of the files. Ends early when `stop` says
    /// so.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::ShardChanged`].
    pub fn hash_written(&self, stop: &dyn Fn() -> bool) -> Result<(), Error> {
        (0..self.files.len()).try_for_each(|shard| self.hash_shard(shard, stop))
    }

    /// The same for one file.
    fn hash_shard(&self, shard: usize, stop: &dyn Fn() -> bool) -> Result<(), Error> {
        let mut hash = self.hash_of(shard);
        let planned = &self.plan.files()[shard];
        for name in planned.tensors().skip(hash.tensors) {
            let slot = &self.slots[name];
            if !matches!(*slot.state(), State::Written(_)) {
                return Ok(());
            }
            let end = slot.place.offset + slot.place.bytes;
            let advanced = hash.advance(&self.files[shard], end, stop);
            if !advanced.map_err(|error| self.unreadable(shard, error))? {
                return Ok(());
            }
            hash.tensors += 1;
        }
        Ok(())
    }

    fn hash_of(&self, shard: usize) -> MutexGuard<'_, FileHash> {
        // A panic in the midst of it ends the job.
        self.hashes[shard].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unreadable(&self, shard: usize, error: io::Error) -> Error {
        match self.check_length(shard) {
            Err(changed) if error.kind() == io::ErrorKind::UnexpectedEof => changed,
            _ => Action::Read.failed(&self.path(shard))(error),
        }
    }

    fn check_length(&self, shard: usize) -> Result<(), Error> {
        let path = self.path(shard);
        let found = std::fs::metadata(&path).map_err(Action::Read.failed(&path))?.len();
        let expected = self.plan.files()[shard].bytes();
        if found == expected { Ok(()) } else { Err(Error::ShardChanged { path, found, expected }) }
    }

    /// Checks that every tensor was written, brings the files to the disk, hashes what isn't hashed yet and writes
    /// the index. The shards come back in order.
    ///
    /// Tells `observer` of a stage `write` with a module a file; its weights are not counted.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Io`], [`Error::ShardChanged`], [`Error::Cancelled`].
    pub fn finish(self, observer: &dyn Observer) -> Result<Vec<ShardFile>, Error> {
        self.check_complete()?;
        observer.event(&Event::Stage { name: "write", modules: self.files.len(), weights: 0 });
        let cancelled = || observer.cancelled();
        // The disk is waited for while hashing, which reads what is still in memory.
        let finished = |(i, shard): (usize, &PlannedShard)| {
            let sync = || self.files[i].sync_all().map_err(Action::Sync.failed(&self.path(i)));
            let (synced, hashed) = rayon::join(sync, || self.hash_shard(i, &cancelled));
            synced.and(hashed)?;
            if cancelled() {
                return Err(Error::Cancelled);
            }
            // All is written, so that nothing else has stopped it.
            let sha256 = self.hash_of(i).hexadecimal();
            self.check_length(i)?;
            observer.event(&Event::Module { name: shard.file(), weights: 0 });
            Ok(ShardFile { file: shard.file().to_owned(), bytes: shard.bytes(), sha256 })
        };
        let done = self.plan.files().par_iter().enumerate().map(finished).collect::<Result<_, Error>>()?;
        self.write_index()?;
        Ok(done)
    }

    fn check_complete(&self) -> Result<(), Error> {
        let mut missing = self
            .slots
            .iter()
            .filter(|(_, slot)| !matches!(*slot.state(), State::Written(_)))
            .map(|(name, _)| name);
        match missing.next() {
            None => Ok(()),
            Some(first) => Err(Error::Missing { tensor: first.clone(), count: 1 + missing.count() }),
        }
    }

    fn write_index(&self) -> Result<(), Error> {
        let files = self.plan.files();
        let weight_map: Map<String, Value> = self
            .slots
            .iter()
            .map(|(name, slot)| (name.clone(), files[slot.place.shard].file().into()))
            .collect();
        let index = json!({
            "metadata": { "total_size": self.plan.total_size() },
            "weight_map": weight_map,
        });
        let path = self.dir.join(INDEX_FILE);
        let mut file = File::create_new(&path).map_err(Action::Create.failed(&path))?;
        file.write_all(format!("{index:#}\n").as_bytes()).map_err(Action::Write.failed(&path))
    }

    fn path(&self, shard: usize) -> PathBuf {
        self.dir.join(self.plan.files()[shard].file())
    }
}

/// Writes `bytes` and gives their XXH3-128, a part at a time, so that memory is read once for both.
fn write_and_hash(file: &File, bytes: &[u8], offset: u64) -> io::Result<u128> {
    let mut hasher = Xxh3::new();
    let mut at = offset;
    for part in bytes.chunks(WRITE_CHUNK) {
        hasher.update(part);
        file.write_all_at(part, at)?;
        at += part.len() as u64;
    }
    Ok(hasher.digest128())
}
