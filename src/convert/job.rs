//! A conversion that can be stopped and go on.
//!
//! `NAME.partial/.job` holds what the job is (source, flags, version of the tool, and the plan, so that
//! nothing is measured twice) and what of it is done. A job that goes on ends in the bytes that it would have
//! ended in anyway; one that would not is refused.

use super::{Report, run};
use crate::checkpoint::{Checkpoint, Fault};
use crate::output::{self, Identity, Leftover, Staging};
use crate::plan::{Plan, PlanOptions, Target};
use crate::progress::Observer;
use crate::{Diagnose, Kind};
use requant_formats::exl2::Bits;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// What to do with what stands where the output is to be written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Existing {
    /// An unfinished output is gone on with, a complete one is left as it is.
    pub resume: bool,
    /// An unfinished output is thrown away, unless `resume` goes on with it; a complete one of ours is
    /// replaced when the new one is complete.
    pub force: bool,
}

/// A job, or nothing to do.
#[derive(Debug)]
pub enum Begun {
    /// The output is there, made of the same source with the same flags.
    Complete,
    /// Something to do.
    Job(Box<Job>),
}

/// A conversion under way: the output is locked until this is dropped or run to its end.
///
/// Stopped or out of luck with its disk it leaves what it needs to go on, once it has a plan; after any other
/// error, and before it has one, it leaves nothing.
#[derive(Debug)]
pub struct Job {
    staging: Staging,
    identity: Identity,
    source_files: Vec<SourceFile>,
    plan: Option<Plan>,
}

/// A file of the source as it was when the job was begun. The fingerprint doesn't read weights, so this is
/// what tells that a part of the output would come from other weights than the rest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SourceFile {
    name: String,
    bytes: u64,
    /// Since 1970, if the file system tells.
    modified_nanoseconds: Option<u64>,
}

/// What a job writes about itself.
#[derive(Serialize)]
struct State<'a> {
    identity: &'a Identity,
    source_files: &'a [SourceFile],
    plan: &'a Plan,
}

/// What a job reads about itself.
#[derive(Deserialize)]
struct Found {
    identity: Identity,
    source_files: Vec<SourceFile>,
    /// Of another version it may look different, which is then no reason to call the state damaged.
    plan: Value,
}

impl Job {
    /// Begins to convert `checkpoint` into the new directory `out`, or goes on with it. `flags` is everything
    /// besides the source that decides the bytes of the output, by name.
    ///
    /// # Errors
    /// Those of [`output::Error`] that are the user's: what stands there exists, is unfinished, is written by
    /// another run, was made otherwise, isn't ours, or holds the source; [`output::Error::Io`].
    pub fn begin(
        checkpoint: &Checkpoint,
        flags: Map<String, Value>,
        out: &Path,
        existing: Existing,
    ) -> Result<Begun, crate::Error> {
        let identity = Identity::new(checkpoint.fingerprint(), flags);
        output::check_apart(out, checkpoint.dir())?;
        output::check_side_files(checkpoint.dir())?;
        if is_complete(out, &identity, existing)? {
            return Ok(Begun::Complete);
        }
        let mut staging = Staging::lock(out)?;
        // Only now, under the lock, is it known that no other run has just finished.
        if is_complete(out, &identity, existing)? {
            return Ok(Begun::Complete);
        }
        if existing.force {
            staging.replace_existing();
        }
        let source_files = source_files(checkpoint);
        let path = || staging.path().to_owned();
        let mut plan = None;
        match (staging.leftover()?, existing) {
            (Leftover::Nothing, _) => staging.clear(|_| false)?,
            (Leftover::Foreign, _) => return Err(output::Error::PartialExists { path: path() }.into()),
            (Leftover::Complete(found), Existing { resume: true, .. }) => {
                refuse_other(path(), &found, &identity)?;
                staging.commit()?;
                return Ok(Begun::Complete);
            }
            (Leftover::Unfinished(state), Existing { resume: true, .. }) => {
                let damaged = |source| output::Error::State { path: path(), source };
                let found: Found = serde_json::from_slice(&state).map_err(damaged)?;
                refuse_other(path(), &found.identity, &identity)?;
                refuse_changed(path(), &found.source_files, &source_files)?;
                plan = Some(Plan::deserialize(found.plan).map_err(damaged)?);
            }
            (_, Existing { force: true, .. }) => {
                staging.clear(|_| false)?;
                staging.keep_partial(false);
            }
            _ => return Err(output::Error::Unfinished { path: path() }.into()),
        }
        Ok(Begun::Job(Box::new(Job { staging, identity, source_files, plan })))
    }

    /// The plan, if the job has gone that far.
    pub fn plan(&self) -> Option<&Plan> {
        self.plan.as_ref()
    }

    /// Checks that the disk has room for so many bytes, of which the job may have written a part already.
    ///
    /// # Errors
    /// [`output::Error::NoSpace`].
    pub fn check_space(&self, needed: u64) -> Result<(), crate::Error> {
        Ok(output::check_space(self.staging.path(), needed)?)
    }

    /// A name beside the unfinished output for what is to be on its disk for a while.
    pub fn beside(&self, what: &str) -> PathBuf {
        self.staging.path().with_extension(what)
    }

    /// Removes the job, so that it can't go on.
    pub fn discard(mut self) {
        self.staging.keep_partial(false);
    }

    /// Gives the job its plan, which it keeps on the disk: from here on it can go on after a stop.
    ///
    /// # Errors
    /// [`output::Error::NoSpace`], [`output::Error::Io`].
    pub fn set_plan(&mut self, checkpoint: &Checkpoint, plan: Plan) -> Result<(), crate::Error> {
        self.check_space(planned_bytes(checkpoint, &plan))?;
        let (identity, source_files) = (&self.identity, self.source_files.as_slice());
        let state = State { identity, source_files, plan: &plan };
        // Maps have string keys and floats are finite: nothing here can fail to serialise.
        self.staging.write_job(&serde_json::to_vec(&state).unwrap_or_default())?;
        self.staging.keep_partial(true);
        self.plan = Some(plan);
        Ok(())
    }

    /// Converts what isn't converted yet and publishes the output.
    ///
    /// # Errors
    /// As [`convert`](super::convert).
    ///
    /// # Panics
    /// If the job has no plan.
    pub fn run(
        self,
        checkpoint: &Checkpoint,
        options: &super::ConvertOptions,
        observer: &dyn Observer,
    ) -> Result<Report, crate::Error> {
        Ok(self
            .run_and_check(checkpoint, options, &super::ByWeights, observer, |_| Ok(Check::default()))?
            .report)
    }

    /// Converts what isn't converted yet, has `check` look at the complete directory, and publishes it: under
    /// its name, or under `NAME.rejected` if `check` says so.
    ///
    /// # Errors
    /// As [`convert`](super::convert), and those of `check`, after which the conversion can go on from where it
    /// is.
    ///
    /// # Panics
    /// If the job has no plan.
    pub fn run_and_check(
        mut self,
        checkpoint: &Checkpoint,
        options: &super::ConvertOptions,
        quantizer: &dyn super::Quantizer,
        observer: &dyn Observer,
        check: impl FnOnce(&Path) -> Result<Check, crate::Error>,
    ) -> Result<Published, crate::Error> {
        #[allow(clippy::expect_used, reason = "the order of calls is the caller's, and documented")]
        let plan = self.plan.take().expect("set_plan comes before run");
        let flags = std::mem::take(&mut self.identity.flags);
        let result = self.check_space(planned_bytes(checkpoint, &plan)).and_then(|()| {
            run::run(checkpoint, &plan, flags, &self.staging, true, options, (quantizer, observer))
        });
        let mut report = result.inspect_err(|error| {
            // Bad input stays bad, and what came from a source that changed is of no use.
            let changed = matches!(error, crate::Error::Checkpoint(e) if matches!(*e.fault, Fault::Changed));
            let goes_on = matches!(error.kind(), Kind::Interrupted | Kind::Environment);
            self.staging.keep_partial(goes_on && !changed);
        })?;
        let checked = check(self.staging.path())?;
        for (name, bytes) in &checked.files {
            self.staging.write(name, bytes)?;
        }
        if checked.summary.is_some() {
            report.validation = checked.summary;
            self.staging.rewrite(output::REPORT_FILE, report.to_json().as_bytes())?;
        }
        let path = if checked.rejected { self.staging.reject()? } else { self.staging.commit()? };
        Ok(Published { report, path })
    }
}

/// What a look at a complete output found.
#[derive(Clone, Debug, Default)]
pub struct Check {
    /// Whether it must not get its name.
    pub rejected: bool,
    /// Files to put beside the others: names and bytes.
    pub files: Vec<(String, Vec<u8>)>,
    /// What report.json is to say of it.
    pub summary: Option<Value>,
}

/// A complete output.
#[derive(Clone, Debug)]
pub struct Published {
    /// Its report.
    pub report: Report,
    /// Where it is.
    pub path: PathBuf,
}

/// Whether `out` is there and is what would be made. An error where it is something else that may not be
/// replaced.
fn is_complete(out: &Path, identity: &Identity, existing: Existing) -> Result<bool, crate::Error> {
    if out.symlink_metadata().is_err() {
        return Ok(false);
    }
    let path = out.to_owned();
    // A replacement that was interrupted is gone on with first.
    let unfinished = existing.force && output::is_resumable(out);
    match (Identity::of_output(out), existing) {
        (Some(found), Existing { resume: true, force }) if !unfinished => {
            match found.differences(identity).is_empty() {
                true => Ok(true),
                false if force => Ok(false),
                false => refuse_other(path, &found, identity).map(|()| true),
            }
        }
        (Some(_), Existing { force: true, .. }) => Ok(false),
        (None, Existing { force: true, .. }) => Err(output::Error::NotOurs { path }.into()),
        _ => Err(output::Error::Exists { path }.into()),
    }
}

fn refuse_other(path: PathBuf, found: &Identity, now: &Identity) -> Result<(), crate::Error> {
    let differences = found.differences(now);
    match differences.is_empty() {
        true => Ok(()),
        false => Err(output::Error::OtherJob { path, differences }.into()),
    }
}

fn source_files(checkpoint: &Checkpoint) -> Vec<SourceFile> {
    let file = |file: &crate::checkpoint::Shard| {
        let modified = file.path().metadata().and_then(|metadata| metadata.modified()).ok();
        let since = modified.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        SourceFile {
            name: file.name().into(),
            bytes: file.size(),
            modified_nanoseconds: since.and_then(|since| since.as_nanos().try_into().ok()),
        }
    };
    checkpoint.files().iter().map(file).collect()
}

fn refuse_changed(path: PathBuf, found: &[SourceFile], now: &[SourceFile]) -> Result<(), crate::Error> {
    let at = |file: &SourceFile| format!("{:?} ns after 1970", file.modified_nanoseconds.unwrap_or_default());
    // Names and sizes are in the fingerprint, which is the same.
    let changed = found.iter().zip(now).filter(|(found, now)| found != now);
    let differences: Vec<output::Difference> = changed
        .map(|(found, now)| output::Difference {
            what: format!("the time of modification of {}", now.name),
            before: at(found),
            now: at(now),
        })
        .collect();
    match differences.is_empty() {
        true => Ok(()),
        false => Err(output::Error::OtherJob { path, differences }.into()),
    }
}

/// Bytes of what a plan makes of `checkpoint`.
fn planned_bytes(checkpoint: &Checkpoint, plan: &Plan) -> u64 {
    plan.totals.tensor_bytes + output::side_file_bytes(checkpoint.dir())
}

/// Bytes of what `options` will make of `checkpoint` at most, without measuring anything. What a budget in
/// bpw leaves open is only where they are spent, so the same plan at one width tells the rest.
///
/// # Errors
/// Those of [`Plan::new`], but for a budget that can't be met.
pub fn needed_bytes(checkpoint: &Checkpoint, options: &PlanOptions) -> Result<u64, crate::Error> {
    let mut uniform = options.clone();
    if let Target::Bpw(_) = options.target {
        uniform.target = Target::Uniform { bits: Bits::ALL[0], group_size: 32 };
    }
    let plan = Plan::new(checkpoint, &uniform, &crate::progress::Silent)?;
    let bytes = planned_bytes(checkpoint, &plan);
    Ok(match options.target {
        Target::Bpw(bpw) => {
            // More than fp16 takes can't be met, which planning says better.
            let quantized = (bpw.min(16.0) * plan.totals.quantized_weights as f64 / 8.0) as u64;
            bytes - plan.totals.stored_bits / 8 + quantized
        }
        _ => bytes,
    })
}
