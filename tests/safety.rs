//! A conversion can be killed, gone on with or replaced, and no model is lost or half written.

#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

#[path = "support/jobs.rs"]
mod jobs;
mod support;

use jobs::{
    At, FIXTURE, RESUME, begin, command, copy_of_fixture, flags, names, plan, refuse, run, run_job, succeed,
    text, tree,
};
use requant::convert::{Existing, Job};
use requant::formats::exl2::Bits;
use requant::progress::{CancelFlag, Silent};
use requant::{Diagnose, Kind, Plan, PlanOptions, Target};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use support::open;

// Killed.

/// A xorshift generator: moments differ, and the same ones come again.
fn random(seed: &mut u64) -> f64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    (*seed >> 11) as f64 / (1u64 << 53) as f64
}

/// Starts a job, kills it, goes on with it, kills it again, and so on; checks that whenever it gets to its end
/// that is the same. Gives how many of the kills left something to go on with.
fn kill_and_resume(flags: &[&str], kills: usize, seed: &mut u64) -> usize {
    let source = Path::new(FIXTURE);
    let dir = tempfile::tempdir().unwrap();
    // Small shards, so that there are several files to go on with.
    let flags = [flags, &["--shard-size", "600kB"]].concat();
    let resumed = [&flags[..], &["--resume"]].concat();
    let (whole, out) = (dir.path().join("whole"), dir.path().join("out"));
    let started = Instant::now();
    succeed(source, &whole, &flags);
    let length = started.elapsed();
    let expected = tree(&whole);
    let state = dir.path().join("out.partial/.job/job.json");

    let (mut killed, mut resumable) = (0, 0);
    while killed < kills {
        let mut child = command(source, &out, &resumed).spawn().unwrap();
        std::thread::sleep(length.mul_f64(random(seed)));
        match child.try_wait().unwrap() {
            Some(status) => assert!(status.success()),
            None => {
                child.kill().unwrap();
                child.wait().unwrap();
                killed += 1;
                resumable += usize::from(state.exists());
            }
        }
        if killed == kills {
            succeed(source, &out, &resumed);
        }
        // Under the final name there is nothing, or all.
        if out.exists() {
            assert!(tree(&out) == expected, "after {killed} kills");
            assert_eq!(names(dir.path()), ["out", "whole"]);
            fs::remove_dir_all(&out).unwrap();
        }
    }
    resumable
}

#[test]
fn killed_at_twenty_moments_it_goes_on_to_the_same_bytes() {
    let mut seed = 0x5eed_1e55_0ff5_e7e5;
    // Measuring takes the most time, and little can go wrong in it: most kills fall on writing.
    kill_and_resume(&["--to", "exl2", "--bpw", "3.5"], 4, &mut seed);
    let resumable = kill_and_resume(&["--to", "exl2", "--bits", "4"], 16, &mut seed);
    assert!(resumable >= 8, "only {resumable} of 16 kills left something to go on with");
}

#[test]
fn a_job_goes_on_with_what_is_intact_and_does_the_rest_again() {
    let checkpoint = open(Path::new(FIXTURE));
    let dir = tempfile::tempdir().unwrap();
    let (whole, out) = (dir.path().join("whole"), dir.path().join("out"));
    run_job(&checkpoint, &whole, Existing::default(), &Silent).unwrap();

    let stop = At::new("convert", 9, CancelFlag::cancel);
    let error = run_job(&checkpoint, &out, Existing::default(), &stop).unwrap_err();
    assert_eq!(error.kind(), Kind::Interrupted);
    let partial = dir.path().join("out.partial");
    let journal = partial.join(".job/done.jsonl");
    let lines = fs::read_to_string(&journal).unwrap();
    let modules = |lines: &str| lines.lines().filter(|line| !line.contains("\"outcome\":null")).count();
    assert_eq!(modules(&lines), 9);

    // A torn last line, bytes that never reached the disk, and files of a later stage.
    fs::write(&journal, &lines[..lines.len() - 7]).unwrap();
    let shard = partial.join("model.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[start..start + 4096].fill(0);
    fs::write(&shard, bytes).unwrap();
    fs::write(partial.join("config.json"), "{").unwrap();
    fs::write(partial.join("report.json"), "").unwrap();

    // Nothing is gone on with unasked.
    let refused = begin(&checkpoint, &out, Existing::default()).unwrap_err();
    assert_eq!((refused.code(), refused.kind()), ("output.unfinished", Kind::Usage));
    assert!(refused.hint().unwrap().contains("--resume"));

    let count = At::new("convert", 0, |_| {});
    run_job(&checkpoint, &out, RESUME, &count).unwrap();
    let total = plan(&checkpoint).modules.len();
    let again = count.done.load(Ordering::SeqCst);
    // One for the torn line, at least one for the zeros.
    assert!(again > total - 9 && again <= total - 5, "{again} of {total}");
    assert!(tree(&out) == tree(&whole));
}

#[test]
fn signals_keep_what_can_go_on_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let flags = ["--to", "exl2", "--bpw", "3.5", "--json"];
    let interrupted = |flags: &[&str], when: &dyn Fn() -> bool| {
        let child = command(Path::new(FIXTURE), &out, flags).spawn().unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while !when() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
        let id = child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
        let ran = child.wait_with_output().unwrap();
        (ran.status.code(), text(&ran.stderr))
    };
    // While it measures there is nothing to go on with. The handler is set before the directory is made.
    let (code, stderr) = interrupted(&flags, &|| dir.path().join("out.partial").exists());
    assert_eq!(code, Some(130), "{stderr}");
    assert!(!stderr.contains("--resume"), "{stderr}");
    assert_eq!(names(dir.path()), [""; 0]);

    let planned = || dir.path().join("out.partial/.job/job.json").exists();
    let (code, stderr) = interrupted(&flags, &planned);
    assert_eq!(code, Some(130), "{stderr}");
    assert!(stderr.contains("--resume"), "{stderr}");
    assert_eq!(names(dir.path()), ["out.partial"]);
    // What is kept doesn't measure again.
    let ran = run(Path::new(FIXTURE), &out, &[&flags[..], &["--resume"]].concat());
    let stderr = text(&ran.stderr);
    assert!(
        ran.status.success() && stderr.contains("convert: ") && !stderr.contains("measure: "),
        "{stderr}"
    );
    assert_eq!(names(dir.path()), ["out"]);
}

// Resumed where it doesn't fit.

#[test]
fn resume_refuses_other_flags_and_sources_and_leaves_complete_outputs_alone() {
    let source = copy_of_fixture();
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let four = ["--to", "exl2", "--bits", "4", "--resume"];
    // Nothing to go on with: it begins.
    succeed(source.path(), &out, &four);
    let before = tree(&out);
    assert!(succeed(source.path(), &out, &four).contains("complete already"));
    let other = refuse(source.path(), &out, &["--to", "exl2", "--bits", "3", "--resume"], 2);
    assert_eq!(other["code"], "output.other_job");
    let message = other["message"].as_str().unwrap();
    assert!(message.contains("--bits was 4 and is 3") && !message.contains("--to"), "{message}");

    // Complete, but made by another version.
    let report = fs::read(out.join("report.json")).unwrap();
    let mut older: Value = serde_json::from_slice(&report).unwrap();
    older["tool"] = json!("requant 0.0.1");
    fs::write(out.join("report.json"), older.to_string()).unwrap();
    let other = refuse(source.path(), &out, &four, 2);
    assert!(other["message"].as_str().unwrap().contains("the tool was requant 0.0.1"), "{other}");
    fs::write(out.join("report.json"), report).unwrap();

    let config = fs::read(source.path().join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config["rms_norm_eps"] = json!(1e-3);
    fs::write(source.path().join("config.json"), config.to_string()).unwrap();
    let other = refuse(source.path(), &out, &four, 2);
    assert!(other["message"].as_str().unwrap().contains("the source was"), "{other}");
    assert!(tree(&out) == before);
    assert_eq!(names(dir.path()), ["out"]);
}

#[test]
fn an_unfinished_job_goes_on_with_the_very_source_only() {
    let source = copy_of_fixture();
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let checkpoint = open(source.path());
    let mut job = begin(&checkpoint, &out, Existing::default()).unwrap().unwrap();
    job.set_plan(&checkpoint, plan(&checkpoint)).unwrap();
    drop(job);
    assert_eq!(names(dir.path()), ["out.partial"]);

    let other = Job::begin(&checkpoint, flags(3), &out, RESUME).unwrap_err();
    assert_eq!((other.code(), other.kind()), ("output.other_job", Kind::Usage));
    // The same names, sizes and headers, but not the same file.
    let weights = fs::File::options().append(true).open(source.path().join("model.safetensors")).unwrap();
    weights.set_modified(std::time::UNIX_EPOCH + Duration::from_secs(1)).unwrap();
    let changed = open(source.path());
    assert_eq!(changed.fingerprint(), checkpoint.fingerprint());
    let other = begin(&changed, &out, RESUME).unwrap_err();
    assert_eq!(other.code(), "output.other_job");
    assert!(other.to_string().contains("model.safetensors"), "{other}");

    // Another version may decide otherwise, and its plan may look different.
    let state = dir.path().join("out.partial/.job/job.json");
    let ours = fs::read(&state).unwrap();
    let mut older: Value = serde_json::from_slice(&ours).unwrap();
    older["identity"]["tool"] = json!("requant 0.0.1");
    older["plan"] = json!({"as": "it was then"});
    fs::write(&state, older.to_string()).unwrap();
    let by_another = begin(&checkpoint, &out, RESUME).unwrap_err();
    assert_eq!((by_another.code(), by_another.kind()), ("output.other_job", Kind::Usage));
    assert!(by_another.to_string().contains("the tool was requant 0.0.1 and is requant "), "{by_another}");
    assert_eq!(names(dir.path()), ["out.partial"]);

    fs::write(&state, "{").unwrap();
    let damaged = begin(&changed, &out, RESUME).unwrap_err();
    assert_eq!((damaged.code(), damaged.kind()), ("output.state", Kind::Usage));
    // --force starts anew.
    run_job(&changed, &out, Existing { resume: false, force: true }, &Silent).unwrap();
    assert_eq!(names(dir.path()), ["out"]);
}

#[test]
fn every_plan_survives_the_disk() {
    let checkpoint = open(Path::new(FIXTURE));
    let exl2 = PlanOptions { head_bits: Bits::try_from(6).ok(), ..PlanOptions::new(Target::Bpw(4.0)) };
    let gptq = requant::plan::GptqOptions::default();
    let plans = [
        Plan::new(&checkpoint, &exl2, &Silent).unwrap(),
        Plan::to_gptq(&checkpoint, &gptq).unwrap(),
        Plan::to_dense(&checkpoint, requant::plan::DenseType::Bf16).unwrap(),
        Plan::same(&checkpoint),
    ];
    for plan in plans {
        let json = serde_json::to_string(&plan).unwrap();
        let back: Plan = serde_json::from_str(&json).unwrap();
        // Debug shows every field, the skipped ones too.
        assert_eq!(format!("{back:?}"), format!("{plan:?}"));
    }
}

// Replaced.

#[test]
fn force_replaces_a_complete_output_when_the_new_one_is_complete() {
    let checkpoint = open(Path::new(FIXTURE));
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let force = Existing { resume: false, force: true };
    succeed(Path::new(FIXTURE), &out, &["--to", "exl2", "--bits", "2"]);
    let old = tree(&out);
    let refused = refuse(Path::new(FIXTURE), &out, &["--to", "exl2", "--bits", "4"], 2);
    assert_eq!(refused["code"], "output.exists");
    assert!(refused["hint"].as_str().unwrap().contains("--force"));

    // The old one stands until the very end, be it that the new one fails or is stopped.
    let watch = At::new("write", 1, |_| assert!(tree(&out) == old));
    run_job(&checkpoint, &out, force, &watch).unwrap();
    assert_eq!(watch.done.load(Ordering::SeqCst), 1);
    let new = tree(&out);
    assert!(new != old);
    assert_eq!(names(dir.path()), ["out"]);

    // Stopped, both are there; resumed with --force, the new one takes the place.
    succeed(Path::new(FIXTURE), &out, &["--to", "exl2", "--bits", "2", "--force"]);
    assert!(tree(&out) == old);
    let mut job = begin(&checkpoint, &out, force).unwrap().unwrap();
    job.set_plan(&checkpoint, plan(&checkpoint)).unwrap();
    drop(job);
    assert_eq!(names(dir.path()), ["out", "out.partial"]);
    assert!(tree(&out) == old);
    run_job(&checkpoint, &out, Existing { resume: true, force: true }, &Silent).unwrap();
    assert!(tree(&out) == new);
    assert_eq!(names(dir.path()), ["out"]);
}

#[test]
fn a_kill_during_the_replacement_loses_nothing() {
    let checkpoint = open(Path::new(FIXTURE));
    let dir = tempfile::tempdir().unwrap();
    let (out, spare) = (dir.path().join("out"), dir.path().join("spare"));
    run_job(&checkpoint, &out, Existing::default(), &Silent).unwrap();
    let new = tree(&out);
    succeed(Path::new(FIXTURE), &spare, &["--to", "exl2", "--bits", "2"]);
    let force = ["--to", "exl2", "--bits", "2", "--force"];
    let two = tree(&spare);

    // Killed before the final name was given: complete, without state.
    fs::rename(&out, dir.path().join("out.partial")).unwrap();
    assert_eq!(begin(&checkpoint, &out, Existing::default()).unwrap_err().code(), "output.unfinished");
    assert_eq!(Job::begin(&checkpoint, flags(3), &out, RESUME).unwrap_err().code(), "output.other_job");
    assert!(begin(&checkpoint, &out, RESUME).unwrap().is_none());
    assert!(tree(&out) == new);

    // Killed when names were exchanged, and while the old one was being removed.
    for leftover in ["out.partial", "out.replaced"] {
        let leftover = dir.path().join(leftover);
        fs::create_dir(&leftover).unwrap();
        fs::copy(spare.join("report.json"), leftover.join("report.json")).unwrap();
        succeed(Path::new(FIXTURE), &out, &force);
        assert!(tree(&out) == two);
        assert_eq!(names(dir.path()), ["out", "spare"]);
    }
}

#[test]
fn force_replaces_nothing_that_is_not_an_output() {
    let source = copy_of_fixture();
    let dir = tempfile::tempdir().unwrap();
    let force = ["--to", "exl2", "--bits", "4", "--force"];
    let precious = dir.path().join("precious");
    fs::create_dir(&precious).unwrap();
    fs::write(precious.join("thesis.tex"), "years").unwrap();
    assert_eq!(refuse(source.path(), &precious, &force, 2)["code"], "output.not_ours");
    fs::rename(&precious, dir.path().join("out.partial")).unwrap();
    assert_eq!(refuse(source.path(), &dir.path().join("out"), &force, 2)["code"], "output.partial_exists");
    assert_eq!(fs::read(dir.path().join("out.partial/thesis.tex")).unwrap(), b"years");

    // Nor the source, even where that is an output.
    let source_files = tree(source.path());
    assert_eq!(refuse(source.path(), source.path(), &force, 2)["code"], "output.holds_source");
    let above = source.path().parent().unwrap();
    assert_eq!(refuse(source.path(), above, &force, 2)["code"], "output.holds_source");
    assert!(tree(source.path()) == source_files);
}

// Several bitrates.

#[test]
fn several_bitrates_are_measured_once_and_each_is_what_it_is_alone() {
    let dir = tempfile::tempdir().unwrap();
    let (both, alone) = (dir.path().join("both"), dir.path().join("alone"));
    let several = ["--to", "exl2", "--bpw", "3,4.25"];
    let ran = run(Path::new(FIXTURE), &both, &several);
    let stderr = text(&ran.stderr);
    assert!(ran.status.success(), "{stderr}");
    assert_eq!(stderr.matches("measure: 21 modules").count(), 1, "{stderr}");
    assert_eq!(names(&both), ["3.0bpw", "4.25bpw"]);
    succeed(Path::new(FIXTURE), &alone, &["--to", "exl2", "--bpw", "4.25"]);
    assert!(tree(&both.join("4.25bpw")) == tree(&alone));

    // One of them lost: only that is made again.
    fs::remove_dir_all(both.join("3.0bpw")).unwrap();
    let told = succeed(Path::new(FIXTURE), &both, &[&several[..], &["--resume"]].concat());
    assert_eq!(told.matches("complete already").count(), 1, "{told}");
    assert_eq!(names(&both), ["3.0bpw", "4.25bpw"]);

    let infeasible =
        refuse(Path::new(FIXTURE), &dir.path().join("no"), &["--to", "exl2", "--bpw", "3,99"], 2);
    assert_eq!(infeasible["code"], "plan.infeasible");
    let twice = refuse(Path::new(FIXTURE), &dir.path().join("no"), &["--to", "exl2", "--bpw", "3,3.0"], 2);
    assert_eq!(twice["kind"], "usage");
}
