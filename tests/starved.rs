//! A conversion that lacks room on its disk, or that something else disturbs, loses no model and leaves none half written.

#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

#[path = "support/jobs.rs"]
mod jobs;
mod support;

use jobs::{At, FIXTURE, RESUME, begin, copy_of_fixture, names, plan, refuse, run, run_job, tree};
use requant::convert::{ConvertOptions, Existing};
use requant::progress::Silent;
use requant::{Diagnose, Kind};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::Ordering;
use support::{open, skip};
use tempfile::TempDir;

// Starved.

/// A file system of its own with so many bytes; `None` where this process may not mount one.
fn small_disk(bytes: u64) -> Option<SmallDisk> {
    let dir = tempfile::tempdir().unwrap();
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"]).arg(dir.path());
    match mount.output() {
        Ok(mounted) if mounted.status.success() => Some(SmallDisk(dir)),
        failed => {
            skip(&format!("no small disk: {failed:?}"));
            None
        }
    }
}

struct SmallDisk(TempDir);

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
fn a_disk_that_is_too_small_is_told_before_anything_is_measured() {
    let Some(disk) = small_disk(1 << 20) else { return };
    let out = disk.0.path().join("out");
    for how in [["--bpw", "4"], ["--bits", "4"], ["--bpw", "3,4"]] {
        let flags = [&["--to", "exl2"], &how[..]].concat();
        let ran = run(Path::new(FIXTURE), &out, &[&flags[..], &["--json"]].concat());
        assert_eq!(ran.status.code(), Some(4), "{how:?}");
        // The error is the only line: no stage was reached.
        let error: Value = serde_json::from_slice(&ran.stderr).unwrap();
        assert_eq!((&error["code"], &error["kind"]), (&json!("output.no_space"), &json!("environment")));
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(" needs ") && message.contains(" bytes left"), "{message}");
    }
    assert!(tree(disk.0.path()).is_empty());
}

#[test]
fn a_disk_that_fills_up_meanwhile_costs_no_work() {
    let Some(disk) = small_disk(3 << 20) else { return };
    let checkpoint = open(Path::new(FIXTURE));
    let out = disk.0.path().join("out");
    let filler = disk.0.path().join("filler");
    let fill = At::new("convert", 3, |_| {
        // As much as goes on the disk.
        let _ = fs::write(&filler, vec![1; 3 << 20]);
    });
    let error = run_job(&checkpoint, &out, Existing::default(), &fill).unwrap_err();
    assert_eq!((error.code(), error.kind()), ("output.disk_full", Kind::Environment), "{error}");
    assert_eq!(names(disk.0.path()), ["filler", "out.partial"]);
    // Still full: nothing is lost by trying.
    assert_eq!(run_job(&checkpoint, &out, RESUME, &Silent).unwrap_err().kind(), Kind::Environment);
    fs::remove_file(&filler).unwrap();
    run_job(&checkpoint, &out, RESUME, &Silent).unwrap();
    let dir = tempfile::tempdir().unwrap();
    run_job(&checkpoint, &dir.path().join("whole"), Existing::default(), &Silent).unwrap();
    assert!(tree(&out) == tree(&dir.path().join("whole")));
}

/// All shards but the last are written when the disk is full.
#[test]
fn a_disk_that_fills_up_in_the_last_shard_leaves_nothing_under_the_name() {
    let Some(disk) = small_disk(3 << 20) else { return };
    let checkpoint = open(Path::new(FIXTURE));
    let options = ConvertOptions { shard_size: 200_000 };
    let out = disk.0.path().join("out");
    let filler = disk.0.path().join("filler");
    let last = plan(&checkpoint).modules.len() - 1;
    let fill = At::new("convert", last, |_| {
        let _ = fs::write(&filler, vec![1; 3 << 20]);
    });
    let mut job = begin(&checkpoint, &out, Existing::default()).unwrap().unwrap();
    job.set_plan(&checkpoint, plan(&checkpoint)).unwrap();
    let error = job.run(&checkpoint, &options, &fill).unwrap_err();
    assert_eq!((error.code(), error.kind()), ("output.disk_full", Kind::Environment), "{error}");
    assert_eq!(names(disk.0.path()), ["filler", "out.partial"]);
    let mut shards = names(&out.with_extension("partial"));
    shards.retain(|name| name.ends_with(".safetensors"));
    let named = error.file().and_then(Path::file_name).unwrap().to_str().unwrap();
    assert!(shards.len() > 3 && shards.last().map(String::as_str) == Some(named), "{named}: {shards:?}");
    fs::remove_file(&filler).unwrap();
    // At one go, what can't be finished is removed.
    let fill = At::new("convert", last, |_| {
        let _ = fs::write(&filler, vec![1; 3 << 20]);
    });
    let at_once = disk.0.path().join("at-once");
    fs::remove_dir_all(out.with_extension("partial")).unwrap();
    let error = requant::convert(&checkpoint, &plan(&checkpoint), &at_once, &options, &fill).unwrap_err();
    assert_eq!(error.code(), "output.disk_full", "{error}");
    assert_eq!(names(disk.0.path()), ["filler"]);
}

#[test]
fn a_read_only_target_is_the_environments_fault() {
    // Closed to root, too.
    let error = refuse(Path::new(FIXTURE), Path::new("/proc/out"), &["--to", "same"], 4);
    assert_eq!(error["kind"], "environment", "{error}");
    let Some(disk) = small_disk(8 << 20) else { return };
    let remount = Command::new("mount").args(["-o", "remount,ro"]).arg(disk.0.path()).status();
    assert!(remount.unwrap().success());
    let error = refuse(Path::new(FIXTURE), &disk.0.path().join("out"), &["--to", "same"], 4);
    assert_eq!(error["code"], "output.read_only", "{error}");
}

// Disturbed.

#[test]
fn a_source_that_changes_while_it_is_read_is_not_published() {
    let source = copy_of_fixture();
    let weights = source.path().join("model.safetensors");
    let checkpoint = open(source.path());
    let dir = tempfile::tempdir().unwrap();
    let touch = At::new("convert", 5, |_| {
        use std::os::unix::fs::FileExt;
        let file = fs::File::options().write(true).open(&weights).unwrap();
        let end = file.metadata().unwrap().len() - 1;
        file.write_all_at(&[0x55], end).unwrap();
    });
    let error = run_job(&checkpoint, &dir.path().join("out"), Existing::default(), &touch).unwrap_err();
    assert_eq!((error.code(), error.kind()), ("checkpoint.changed", Kind::Environment));
    // What came from it is of no use.
    assert_eq!(names(dir.path()), [""; 0]);
}

#[test]
fn two_runs_never_write_one_output() {
    let checkpoint = open(Path::new(FIXTURE));
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let in_use = |more: &[&str]| {
        let flags = [&["--to", "exl2", "--bits", "4"], more].concat();
        let error = refuse(Path::new(FIXTURE), &out, &flags, 2);
        assert_eq!(error["code"], "output.in_use", "{more:?}: {error}");
        assert!(error["message"].as_str().unwrap().contains("another run"), "{error}");
    };
    let all =
        || [&[][..], &["--resume"], &["--force"], &["--resume", "--force"]].into_iter().for_each(in_use);
    // From the first moment, while it converts, goes on, and hashes.
    let mut job = begin(&checkpoint, &out, Existing::default()).unwrap().unwrap();
    all();
    job.set_plan(&checkpoint, plan(&checkpoint)).unwrap();
    drop(job);
    let stopped = At::new("convert", 3, |cancel| {
        all();
        cancel.cancel();
    });
    assert_eq!(run_job(&checkpoint, &out, RESUME, &stopped).unwrap_err().kind(), Kind::Interrupted);
    let checking = At::new("check", 1, |cancel| {
        all();
        cancel.cancel();
    });
    assert_eq!(run_job(&checkpoint, &out, RESUME, &checking).unwrap_err().kind(), Kind::Interrupted);
    assert!(checking.done.load(Ordering::SeqCst) > 0);
    let hashing = At::new("write", 1, |_| all());
    run_job(&checkpoint, &out, RESUME, &hashing).unwrap();
    assert_eq!(hashing.done.load(Ordering::SeqCst), 1);
    // And not while a replacement is under way.
    let force = At::new("convert", 2, |_| {
        assert_eq!(refuse(Path::new(FIXTURE), &out, &["--to", "same"], 2)["code"], "output.exists");
        in_use(&["--force"]);
    });
    run_job(&checkpoint, &out, Existing { resume: false, force: true }, &force).unwrap();
    assert_eq!(names(dir.path()), ["out"]);
}
