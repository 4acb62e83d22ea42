//! Conversions as commands and as jobs that something happens to.
#![allow(dead_code)] // Each test binary uses its own part.

use requant::convert::{Begun, ConvertOptions, Existing, Job};
use requant::formats::exl2::Bits;
use requant::progress::{CancelFlag, Event, Observer, Silent};
use requant::{Checkpoint, Error, Plan, PlanOptions, Target};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use tempfile::TempDir;

pub(crate) const FIXTURE: &str = "fixtures/tiny-llama-gptq";

/// `requant convert SOURCE --out OUT FLAGS`, errors as JSON.
pub(crate) fn command(source: &Path, out: &Path, flags: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_requant"));
    command.arg("convert").arg(source).arg("--out").arg(out).args(["--threads", "1"]).args(flags);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

pub(crate) fn run(source: &Path, out: &Path, flags: &[&str]) -> Output {
    command(source, out, flags).output().unwrap()
}

/// A run that must succeed; gives what it prints.
pub(crate) fn succeed(source: &Path, out: &Path, flags: &[&str]) -> String {
    let ran = run(source, out, flags);
    assert!(ran.status.success(), "{flags:?}: {}", text(&ran.stderr));
    text(&ran.stdout)
}

/// A run that must fail with this exit code; gives its error.
pub(crate) fn refuse(source: &Path, out: &Path, flags: &[&str], exit: i32) -> Value {
    let ran = run(source, out, &[flags, &["--json"]].concat());
    let stderr = text(&ran.stderr);
    assert_eq!(ran.status.code(), Some(exit), "{flags:?}: {stderr}");
    serde_json::from_str(stderr.lines().last().unwrap_or_default())
        .unwrap_or_else(|e| panic!("{e}: {stderr}"))
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Every file below a directory, by its path in it.
pub(crate) fn tree(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = PathBuf::from(path.file_name().unwrap());
        match path.is_dir() {
            true => files.extend(tree(&path).into_iter().map(|(below, bytes)| (name.join(below), bytes))),
            false => drop(files.insert(name, fs::read(&path).unwrap())),
        }
    }
    files
}

pub(crate) fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

pub(crate) fn copy_of_fixture() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in tree(Path::new(FIXTURE)) {
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    dir
}

/// An observer that does something when a module of a stage is done, such as to cancel.
pub(crate) struct At<F: Fn(&CancelFlag) + Sync> {
    stage: &'static str,
    module: usize,
    act: F,
    in_stage: AtomicUsize,
    pub(crate) done: AtomicUsize,
    cancel: CancelFlag,
}

impl<F: Fn(&CancelFlag) + Sync> At<F> {
    pub(crate) fn new(stage: &'static str, module: usize, act: F) -> Self {
        let zero = || AtomicUsize::new(0);
        At { stage, module, act, in_stage: zero(), done: zero(), cancel: CancelFlag::default() }
    }
}

impl<F: Fn(&CancelFlag) + Sync> Observer for At<F> {
    fn event(&self, event: &Event<'_>) {
        match *event {
            Event::Stage { name, .. } => {
                self.in_stage.store(usize::from(name == self.stage), Ordering::SeqCst);
            }
            Event::Module { .. }
                if self.in_stage.load(Ordering::SeqCst) == 1
                    && self.done.fetch_add(1, Ordering::SeqCst) + 1 == self.module =>
            {
                (self.act)(&self.cancel);
            }
            _ => {}
        }
    }

    fn cancelled(&self) -> bool {
        self.cancel.is_set()
    }
}

pub(crate) fn flags(bits: u32) -> Map<String, Value> {
    Map::from_iter([("bits".to_owned(), json!(bits))])
}

pub(crate) const RESUME: Existing = Existing { resume: true, force: false };

pub(crate) fn begin(checkpoint: &Checkpoint, out: &Path, existing: Existing) -> Result<Option<Job>, Error> {
    Ok(match Job::begin(checkpoint, flags(4), out, existing)? {
        Begun::Complete => None,
        Begun::Job(job) => Some(*job),
    })
}

pub(crate) fn plan(checkpoint: &Checkpoint) -> Plan {
    let target = Target::Uniform { bits: Bits::try_from(4).unwrap(), group_size: 64 };
    Plan::new(checkpoint, &PlanOptions::new(target), &Silent).unwrap()
}

/// A job with its plan, run while `observer` watches.
pub(crate) fn run_job(
    checkpoint: &Checkpoint,
    out: &Path,
    existing: Existing,
    observer: &dyn Observer,
) -> Result<(), Error> {
    let mut job = begin(checkpoint, out, existing)?.expect("complete already");
    if job.plan().is_none() {
        job.set_plan(checkpoint, plan(checkpoint))?;
    }
    job.run(checkpoint, &ConvertOptions::default(), observer).map(drop)
}
