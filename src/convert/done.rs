//! What a job has done: a line of its journal for each unit whose bytes are written.
//!
//! A line says what the bytes hash to, so that it needs no faith: a job that goes on reads them back, and
//! does again what isn't there, be it for a kill or a power cut.

use super::report::{Exactness, TensorOrigin};
use crate::output::{self, Journal, ShardWriter, Staging};
use crate::progress::{Event, Observer};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread::{Scope, ScopedJoinHandle};

/// Bytes of output between two syncs: a power cut costs no more than the work on these, and the last sync
/// doesn't have to bring a whole model to the disk at once. A kill costs the module in work.
const SYNC_EVERY: u64 = 256 << 20;

/// A unit (a module, or a tensor outside modules) that is written.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Done {
    /// The module's or tensor's name in the output.
    unit: String,
    /// Its tensors and the checksums of their bytes.
    tensors: Vec<(String, String)>,
    /// Its part of the report.
    pub(super) origins: Vec<TensorOrigin>,
    /// What was measured on the way, of a module.
    pub(super) outcome: Option<Outcome>,
}

/// What converting a module told that its plan didn't.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Outcome {
    /// Frobenius norm of the difference over that of the weight.
    pub(super) relative_error: f64,
    /// What happened to the weight.
    pub(super) exactness: Exactness,
    /// The order of its rows, where they were sorted.
    pub(super) row_order: Option<Vec<u32>>,
    /// How it was calibrated, if it was to be.
    pub(super) calibration: Option<super::Calibration>,
}

/// Units that are done, and where to say so; a job that can't go on has no journal.
pub(super) struct Progress {
    done: BTreeMap<String, Done>,
    journal: Option<Journal>,
    unsynced: u64,
}

impl Progress {
    /// Of a job that leaves nothing when it stops.
    pub(super) fn unrecorded() -> Self {
        Self { done: BTreeMap::new(), journal: None, unsynced: 0 }
    }

    /// Of a job that may have been begun before: the bytes of all units in its journal are read back.
    pub(super) fn resume(
        staging: &Staging,
        writer: &ShardWriter,
        observer: &dyn Observer,
    ) -> Result<Self, crate::Error> {
        let (journal, lines) = staging.journal()?;
        // A unit that was done again has a later line.
        let recorded: BTreeMap<String, Done> = (lines.iter())
            .filter_map(|line| serde_json::from_slice::<Done>(line).ok())
            .map(|done| (done.unit.clone(), done))
            .collect();
        let mut progress = Self { journal: Some(journal), ..Self::unrecorded() };
        if recorded.is_empty() {
            return Ok(progress);
        }
        observer.event(&Event::Stage { name: "check", modules: recorded.len(), weights: 0 });
        let intact = |done: &Done| {
            if observer.cancelled() {
                return Err(crate::Error::Cancelled);
            }
            let intact =
                writer.adopt(done.tensors.iter().map(|(name, hash)| (name.as_str(), hash.as_str())))?;
            observer.event(&Event::Module { name: &done.unit, weights: 0 });
            Ok(intact)
        };
        let recorded: Vec<Done> = recorded.into_values().collect();
        let kept: Vec<bool> = recorded.par_iter().map(intact).collect::<Result<_, _>>()?;
        let done = recorded.into_iter().zip(kept).filter(|(_, intact)| *intact);
        progress.done = done.map(|(done, _)| (done.unit.clone(), done)).collect();
        Ok(progress)
    }

    /// The record of a unit, if it is done.
    pub(super) fn of(&self, unit: &str) -> Option<&Done> {
        self.done.get(unit)
    }

    /// Says that a unit is written.
    pub(super) fn record(
        &mut self,
        unit: &str,
        origins: &[TensorOrigin],
        outcome: Option<Outcome>,
        writer: &ShardWriter,
        followers: &mut Followers<'_, '_>,
    ) -> Result<(), crate::Error> {
        followers.unit_written();
        let Some(journal) = &mut self.journal else { return Ok(()) };
        let hash = |origin: &TensorOrigin| Some((origin.name.clone(), writer.checksum(&origin.name)?));
        let tensors = origins.iter().filter_map(hash).collect();
        let done = Done { unit: unit.into(), tensors, origins: origins.to_vec(), outcome };
        // Names, numbers that are finite, lists of these: nothing here can fail to serialise.
        journal.append(&serde_json::to_vec(&done).unwrap_or_default())?;
        self.unsynced += origins.iter().filter_map(|origin| writer.bytes_of(&origin.name)).sum::<u64>();
        if self.unsynced >= SYNC_EVERY {
            if followers.begin_sync()? {
                journal.sync()?;
            }
            self.unsynced = 0;
        }
        Ok(())
    }
}

/// What follows behind the writing while the work goes on: the hashes of the files, and one sync after the other.
pub(super) struct Followers<'scope, 'env> {
    scope: &'scope Scope<'scope, 'env>,
    writer: &'env ShardWriter,
    written: Sender<()>,
    ended: Arc<AtomicBool>,
    sync: Option<ScopedJoinHandle<'scope, Result<(), output::Error>>>,
}

impl<'scope, 'env> Followers<'scope, 'env> {
    pub(super) fn new(scope: &'scope Scope<'scope, 'env>, writer: &'env ShardWriter) -> Self {
        let (written, units) = mpsc::channel();
        let ended = Arc::new(AtomicBool::new(false));
        let stop = ended.clone();
        scope.spawn(move || {
            while units.recv().is_ok() {
                // Each look finds what all units before it wrote.
                units.try_iter().for_each(drop);
                // What failed is tried again at the end, and told then.
                if writer.hash_written(&|| stop.load(Ordering::Relaxed)).is_err() {
                    return;
                }
            }
        });
        Self { scope, writer, written, ended, sync: None }
    }

    /// Says that a unit is written.
    fn unit_written(&self) {
        // Nobody listens after an error.
        let _ = self.written.send(());
    }

    /// Begins another sync, unless the one before still runs. Gives whether one has ended since.
    fn begin_sync(&mut self) -> Result<bool, output::Error> {
        if self.sync.as_ref().is_some_and(|running| !running.is_finished()) {
            return Ok(false);
        }
        let ended = self.sync.is_some();
        self.wait()?;
        let writer = self.writer;
        self.sync = Some(self.scope.spawn(move || writer.sync()));
        Ok(ended)
    }

    /// Waits for the sync that runs.
    pub(super) fn wait(&mut self) -> Result<(), output::Error> {
        match self.sync.take().map(ScopedJoinHandle::join) {
            None => Ok(()),
            Some(Ok(result)) => result,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
        }
    }
}

impl Drop for Followers<'_, '_> {
    /// What isn't hashed by then, the end hashes on all threads; after an error nobody needs it.
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
    }
}
