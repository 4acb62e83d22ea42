//! Writes the shards of a plan and their index.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::shard_plan::Place;
use super::{Action, Error, ShardPlan};
use crate::progress::{Event, Observer};

/// The name of the index, written also where there is one shard only.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// Bytes hashed between two looks at whether to go on.
const HASH_CHUNK: usize = 1 << 20;

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
    slots: BTreeMap<String, Slot>,
}

/// A tensor's place and how far it is.
#[derive(Debug)]
struct Slot {
    place: Place,
    state: AtomicU8,
}

const WAITING: u8 = 0;
const BEING_WRITTEN: u8 = 1;
const WRITTEN: u8 = 2;

impl ShardWriter {
    /// Creates all files of `plan` in `dir`, with their headers and lengths.
    ///
    /// # Errors
    /// [`Error::Io`], also when one of the files exists.
    pub fn create(dir: &Path, plan: ShardPlan) -> Result<Self, Error> {
        let mut files = Vec::with_capacity(plan.files().len());
        for shard in plan.files() {
            let path = dir.join(shard.file());
            let file = File::create_new(&path).map_err(Action::Create.failed(&path))?;
            file.set_len(shard.bytes()).map_err(Action::Create.failed(&path))?;
            file.write_all_at(shard.head(), 0).map_err(Action::Write.failed(&path))?;
            files.push(file);
        }
        let slot = |place: &Place| Slot { place: *place, state: AtomicU8::new(WAITING) };
        let slots = plan.places().iter().map(|(name, place)| (name.clone(), slot(place))).collect();
        Ok(ShardWriter { dir: dir.to_owned(), plan, files, slots })
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
        let Slot { place, state } =
            self.slots.get(name).ok_or_else(|| Error::Unplanned { tensor: name.to_owned() })?;
        if bytes.len() as u64 != place.bytes {
            let tensor = name.to_owned();
            return Err(Error::Length { tensor, found: bytes.len() as u64, expected: place.bytes });
        }
        state
            .compare_exchange(WAITING, BEING_WRITTEN, Ordering::AcqRel, Ordering::Acquire)
            .map_err(|_| Error::WrittenTwice { tensor: name.to_owned() })?;
        let result = self.files[place.shard].write_all_at(bytes, place.offset);
        state.store(if result.is_ok() { WRITTEN } else { WAITING }, Ordering::Release);
        result.map_err(Action::Write.failed(&self.path(place.shard)))
    }

    /// Checks that every tensor was written, brings the files to the disk, hashes them and writes the index.
    /// The shards come back in order.
    ///
    /// Tells `observer` of a stage `write` with a module a file; its weights are not counted.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Io`], [`Error::ShardChanged`], [`Error::Cancelled`].
    pub fn finish(self, observer: &dyn Observer) -> Result<Vec<ShardFile>, Error> {
        self.check_complete()?;
        observer.event(&Event::Stage { name: "write", modules: self.files.len(), weights: 0 });
        let mut done = Vec::with_capacity(self.files.len());
        for (i, shard) in self.plan.files().iter().enumerate() {
            let path = self.path(i);
            self.files[i].sync_all().map_err(Action::Sync.failed(&path))?;
            let sha256 = hash(&path, shard.bytes(), observer)?;
            observer.event(&Event::Module { name: shard.file(), weights: 0 });
            done.push(ShardFile { file: shard.file().to_owned(), bytes: shard.bytes(), sha256 });
        }
        self.write_index()?;
        Ok(done)
    }

    fn check_complete(&self) -> Result<(), Error> {
        let mut missing = self
            .slots
            .iter()
            .filter(|(_, slot)| slot.state.load(Ordering::Acquire) != WRITTEN)
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

/// The sha256 of a file of `expected` bytes.
///
/// A pass of its own, after the last tensor: tensors arrive in any order at any position, and a sha256 takes
/// bytes only in the order of the file. The pages are mostly still in memory then.
fn hash(path: &Path, expected: u64, observer: &dyn Observer) -> Result<String, Error> {
    let mut file = File::open(path).map_err(Action::Read.failed(path))?;
    let mut hasher = Sha256::new();
    let mut chunk = vec![0; HASH_CHUNK];
    let mut found = 0;
    loop {
        if observer.cancelled() {
            return Err(Error::Cancelled);
        }
        let n = match file.read(&mut chunk) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            result => result.map_err(Action::Read.failed(path))?,
        };
        if n == 0 {
            break;
        }
        found += n as u64;
        hasher.update(&chunk[..n]);
    }
    if found != expected {
        return Err(Error::ShardChanged { path: path.to_owned(), found, expected });
    }
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}
