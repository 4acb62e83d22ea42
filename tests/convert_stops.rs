//! A conversion that can't be done or is stopped leaves nothing behind, and says why by its exit code.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use requant::checkpoint::{Checkpoint, OpenOptions};
use requant::formats::exl2::Bits;
use requant::progress::{CancelFlag, Event, Observer};
use requant::{ConvertOptions, Diagnose, Error, Kind, Plan, PlanOptions, Target};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use support::binary::{FIXTURE, convert_model, files_in, json_of, names_in, refuse, refuse_model, requant};
use support::writer::{Model, Quantized};
use support::{folder, open, skip};

#[test]
fn flags_that_do_not_go_together_are_usage_errors() {
    let cases: [(&[&str], &str); 12] = [
        (&["--bits", "4", "--bpw", "4"], "cli.usage"),
        (&[], "cli.usage"),
        (&["--bits", "7"], "cli.usage"),
        (&["--bpw", "four"], "cli.usage"),
        (&["--bpw", "4", "--group-size", "64"], "cli.usage"),
        (&["--bits", "4", "--head-bits", "16"], "cli.usage"),
        (&["--bits", "4", "--shard-size", "0"], "cli.usage"),
        (&["--bits", "4", "--set", "q_proj"], "cli.usage"),
        (&["--bits", "4", "--set", "(=4"], "plan.pattern"),
        (&["--bits", "4", "--set", "q_prj=4"], "plan.unused_rule"),
        (&["--bits", "4", "--min", "lm_head=6"], "plan.unused_rule"),
        (&["--bits", "4", "--set", "q_proj=3", "--min", "q_proj=4"], "plan.rules_disagree"),
    ];
    for (flags, code) in cases {
        let refused = refuse(Path::new(FIXTURE), flags);
        assert_eq!(
            (refused.exit, refused.text("code"), refused.text("kind")),
            (2, code, "usage"),
            "{flags:?}"
        );
    }
    for size in ["0", "48", "16"] {
        for more in [[].as_slice(), &["--head-bits", "6"]] {
            let flags = [&["--bits", "4", "--group-size", size], more].concat();
            let refused = refuse(Path::new(FIXTURE), &flags);
            assert_eq!((refused.exit, refused.text("code")), (2, "plan.group_size"), "{flags:?}");
            assert!(refused.text("message").contains(size), "{}", refused.error);
        }
    }
}

#[test]
fn an_unknown_architecture_is_refused_but_can_be_inspected() {
    let mut model = Model::new(&Quantized::default());
    model.config["architectures"] = json!(["SomethingNewForCausalLM"]);
    let refused = refuse_model(&model, &["--bits", "4"]);
    assert_eq!((refused.exit, refused.text("code")), (3, "plan.architecture"));
    assert!(refused.text("message").contains("SomethingNewForCausalLM"));
    for known in ["Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral"] {
        assert!(refused.text("hint").contains(&format!("{known}ForCausalLM")), "{}", refused.error);
    }
    let inspected = requant().arg("inspect").arg(model.write().path()).output().unwrap();
    let text = String::from_utf8(inspected.stdout).unwrap();
    assert!(inspected.status.success() && text.starts_with("SomethingNewForCausalLM"), "{text}");
}

#[test]
fn every_case_of_make_bad_ends_as_it_should_and_leaves_nothing() {
    let Some(assets) = folder("REQUANT_ASSETS") else { return };
    let python = std::env::var("REQUANT_PYTHON").unwrap_or_else(|_| "python3".into());
    let dir = tempfile::tempdir().unwrap();
    match Command::new(&python).arg(assets.join("bad/make_bad.py")).arg(dir.path()).output() {
        Ok(made) if made.status.success() => {}
        Ok(made) => return skip(&format!("{python}: {}", String::from_utf8_lossy(&made.stderr))),
        Err(e) => return skip(&format!("{python}: {e}")),
    }
    // Tensors and index settle these, with a warning: see the reader's tests.
    let read_with_a_warning = [
        "config-tensor-conflict",
        "configs-disagree",
        "group-size-conflict",
        "no-quantization",
        "tensor-in-two-shards",
    ];
    let flags = ["--bits", "4"];
    let mut refused_cases = 0;
    for (name, case) in json_of(&dir.path().join("cases.json")).as_object().unwrap() {
        let source = dir.path().join(name);
        if case["expect"] == "ok" || read_with_a_warning.contains(&name.as_str()) {
            let converted = support::binary::convert(&source, &flags);
            assert_eq!(case["expect"] == "ok", converted.warning_codes().is_empty(), "{name}");
            converted.assert_errors(&open(&source));
        } else {
            let refused = refuse(&source, &flags);
            assert_eq!((refused.exit, refused.text("kind")), (3, "input"), "{name}: {}", refused.error);
            refused_cases += 1;
        }
    }
    assert_eq!(refused_cases, 39);
}

#[test]
fn sources_that_are_no_directory() {
    let dir = tempfile::tempdir().unwrap();
    let absent = refuse(&dir.path().join("absent"), &["--bits", "4"]);
    assert_eq!((absent.exit, absent.text("code")), (4, "checkpoint.io"));
    let file = refuse(Path::new("Cargo.toml"), &["--bits", "4"]);
    assert_eq!((file.exit, file.text("message")), (2, "is a file, not a folder"));
    let empty = refuse(dir.path(), &["--bits", "4"]);
    assert_eq!((empty.exit, empty.text("code")), (3, "checkpoint.missing"));
}

#[test]
fn an_output_that_cannot_be_created_is_the_environments_fault() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("file"), "data").unwrap();
    for out in [dir.path().join("file/out"), dir.path().join("file/deep/out"), PathBuf::from("/dev/null/out")]
    {
        let mut command = requant();
        command.args(["convert", FIXTURE, "--to", "exl2", "--bits", "4", "--progress", "none", "--out"]);
        let ran = command.arg(&out).output().unwrap();
        let stderr = String::from_utf8(ran.stderr).unwrap();
        assert_eq!(ran.status.code(), Some(4), "{stderr}");
        let file = out.ancestors().find(|path| path.exists()).unwrap().display();
        assert_eq!(stderr, format!("error: cannot create {file}: not a directory\n"));
    }
    assert_eq!(std::fs::read(dir.path().join("file")).unwrap(), b"data");
}

#[test]
fn an_existing_output_is_not_touched() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    std::fs::create_dir(&out).unwrap();
    std::fs::write(out.join("precious"), "data").unwrap();
    std::fs::write(dir.path().join("file"), "data").unwrap();
    for existing in ["out", "file"] {
        let mut command = requant();
        command
            .args(["convert", FIXTURE, "--to", "exl2", "--bits", "4", "--out"])
            .arg(dir.path().join(existing));
        let ran = command.output().unwrap();
        let stderr = String::from_utf8(ran.stderr).unwrap();
        assert_eq!(ran.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains(existing) && stderr.contains("exists"), "{stderr}");
    }
    assert_eq!(names_in(dir.path()), ["file", "out"]);
    assert_eq!(files_in(&out), BTreeMap::from([("precious".to_owned(), b"data".to_vec())]));
    // Nor the leftover of a run that was killed.
    std::fs::create_dir(dir.path().join("new.partial")).unwrap();
    std::fs::write(dir.path().join("new.partial/shard"), "data").unwrap();
    let mut command = requant();
    command.args(["convert", FIXTURE, "--to", "exl2", "--bits", "4", "--out"]).arg(dir.path().join("new"));
    assert_eq!(command.output().unwrap().status.code(), Some(2));
    assert_eq!(names_in(&dir.path().join("new.partial")), ["shard"]);
}

#[test]
fn a_file_system_that_is_full_is_the_environments_fault() {
    let dir = tempfile::tempdir().unwrap();
    // Files of at most 500 blocks of 1024 bytes, and an error instead of a signal for more.
    let script = "trap '' XFSZ; ulimit -f 500; exec \"$@\"";
    let mut command = Command::new("bash");
    command.args(["-c", script, "bash", env!("CARGO_BIN_EXE_requant"), "convert", FIXTURE, "--to", "exl2"]);
    let ran = command.args(["--bits", "4", "--json", "--out"]).arg(dir.path().join("out")).output().unwrap();
    let stderr = String::from_utf8(ran.stderr).unwrap();
    assert_eq!(ran.status.code(), Some(4), "{stderr}");
    let error: Value = serde_json::from_str(stderr.lines().last().unwrap()).unwrap();
    assert_eq!(error["kind"], "environment");
    assert!(error["file"].as_str().unwrap().ends_with("model.safetensors"), "{stderr}");
    // What is done is kept for --resume.
    assert!(error["hint"].as_str().unwrap().contains("--resume"), "{stderr}");
    assert_eq!(names_in(dir.path()), ["out.partial"]);
}

// Stopping.

/// The fixture with its three blocks repeated, so that converting it takes a while.
fn long_model(times: usize) -> Model {
    let mut model = Model::read(Path::new(FIXTURE));
    let layers = 3;
    let blocks: Vec<_> = model.tensors.iter().map(|(name, tensor)| (name.clone(), tensor.clone())).collect();
    for (name, tensor) in blocks {
        let Some((number, rest)) = name.strip_prefix("model.layers.").and_then(|n| n.split_once('.')) else {
            continue;
        };
        let layer: usize = number.parse().unwrap();
        for copy in 1..times {
            model.tensors.insert(format!("model.layers.{}.{rest}", layer + copy * layers), tensor.clone());
        }
    }
    model.config["num_hidden_layers"] = json!(layers * times);
    model
}

/// Starts a conversion, sends a signal when a module of `stage` is done, and gives the exit code and the
/// last line of stderr.
fn interrupt(source: &Path, out: &Path, flags: &[&str], stage: &str, signal: &str) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_requant"));
    command.arg("convert").arg(source).args([
        "--to",
        "exl2",
        "--progress",
        "json",
        "--threads",
        "1",
        "--out",
    ]);
    let mut child =
        command.arg(out).args(flags).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    loop {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0, "ended before {stage}");
        let progress: Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{line}: {e}"));
        if progress["stage"] == stage && progress["modules_done"] != 0 {
            break;
        }
    }
    if stage == "convert" {
        let parent = out.parent().unwrap();
        assert_eq!(names_in(parent), ["out.partial"], "nothing was being written");
    }
    let killed = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    let mut rest = String::new();
    lines.read_to_string(&mut rest).unwrap();
    (child.wait().unwrap().code(), rest.lines().last().unwrap_or_default().to_owned())
}

#[test]
fn a_signal_stops_cleanly() {
    let source = long_model(12).write();
    let cases = [
        ("measure", "-INT", "--bpw", "4.25"),
        ("convert", "-INT", "--bits", "4"),
        ("convert", "-TERM", "--bits", "4"),
    ];
    for (stage, signal, flag, value) in cases {
        let dir = tempfile::tempdir().unwrap();
        let (code, last) = interrupt(source.path(), &dir.path().join("out"), &[flag, value], stage, signal);
        assert_eq!(code, Some(130), "{stage} {signal}");
        // Once there is a plan, what is done is kept for --resume; nothing stands under the final name.
        let (left, line): (&[&str], _) = match stage {
            "measure" => (&[], "error: interrupted"),
            _ => (&["out.partial"], "  hint: what is done is kept: the same command with --resume goes on"),
        };
        assert_eq!(
            (names_in(dir.path()), last.as_str()),
            (left.iter().map(|s| s.to_string()).collect(), line)
        );
    }
}

// Through the library.

/// Counts events by stage, and cancels after some modules of one.
struct Counter {
    stages: Mutex<Vec<(&'static str, usize, usize)>>,
    weights: Mutex<BTreeMap<&'static str, (u64, u64)>>,
    cancel_after: Option<(&'static str, usize)>,
    flag: CancelFlag,
    questions: AtomicUsize,
}

impl Counter {
    fn new(cancel_after: Option<(&'static str, usize)>) -> Self {
        let (stages, weights) = (Mutex::default(), Mutex::default());
        Self { stages, weights, cancel_after, flag: CancelFlag::default(), questions: AtomicUsize::new(0) }
    }
}

impl Observer for Counter {
    fn event(&self, event: &Event<'_>) {
        let mut stages = self.stages.lock().unwrap();
        match *event {
            Event::Stage { name, modules, weights } => {
                stages.push((name, modules, 0));
                self.weights.lock().unwrap().insert(name, (weights, 0));
            }
            Event::Module { weights, .. } => {
                let (name, _, done) = stages.last_mut().unwrap();
                *done += 1;
                self.weights.lock().unwrap().get_mut(name).unwrap().1 += weights;
                if self.cancel_after == Some((*name, *done)) {
                    self.flag.cancel();
                }
            }
            _ => {}
        }
    }

    fn cancelled(&self) -> bool {
        self.questions.fetch_add(1, Ordering::Relaxed);
        self.flag.is_set()
    }
}

fn planned(checkpoint: &Checkpoint, target: Target, observer: &Counter) -> Result<Plan, Error> {
    Plan::new(checkpoint, &PlanOptions::new(target), observer)
}

#[test]
fn the_library_tells_each_stage_and_does_what_the_binary_does() {
    let checkpoint = Checkpoint::open(Path::new(FIXTURE), &OpenOptions::default()).unwrap();
    let observer = Counter::new(None);
    let plan = planned(&checkpoint, Target::Bpw(3.5), &observer).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let report = requant::convert(&checkpoint, &plan, &out, &ConvertOptions::default(), &observer).unwrap();
    assert_eq!(*observer.stages.lock().unwrap(), [("measure", 21, 21), ("convert", 22, 22), ("write", 1, 1)]);
    for (stage, (announced, done)) in &*observer.weights.lock().unwrap() {
        assert_eq!(announced, done, "{stage}");
    }
    assert!(report.totals.bpw <= 3.5 && report.totals.bpw > 3.49);
    let by_binary = support::binary::convert(Path::new(FIXTURE), &["--bpw", "3.5"]);
    // The report of the binary holds its flags, too.
    let without_flags = |dir: &Path| {
        let mut files = files_in(dir);
        let text = files.remove("report.json").unwrap();
        let mut report: Value = serde_json::from_slice(&text).unwrap();
        report.as_object_mut().unwrap().shift_remove("flags");
        (files, report)
    };
    assert!(without_flags(&out) == without_flags(&by_binary.out));
}

#[test]
fn the_library_stops_at_the_next_module() {
    let checkpoint = Checkpoint::open(Path::new(FIXTURE), &OpenOptions::default()).unwrap();
    let bits = Bits::try_from(4).unwrap();
    let uniform = Target::Uniform { bits, group_size: 64 };
    let measuring = Counter::new(Some(("measure", 1)));
    let error = planned(&checkpoint, Target::Bpw(4.0), &measuring).unwrap_err();
    assert!(matches!(error, Error::Cancelled));
    assert_eq!(*measuring.stages.lock().unwrap(), [("measure", 21, 1)]);

    let plan = planned(&checkpoint, uniform, &Counter::new(None)).unwrap();
    for (stage, done) in [("convert", 1), ("convert", 22), ("write", 1)] {
        let observer = Counter::new(Some((stage, done)));
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        let error =
            requant::convert(&checkpoint, &plan, &out, &ConvertOptions::default(), &observer).unwrap_err();
        assert_eq!((error.kind(), error.code()), (Kind::Interrupted, "interrupted"), "{stage} {done}");
        assert_eq!(names_in(dir.path()), [""; 0], "{stage} {done}");
        assert_eq!(
            observer.stages.lock().unwrap().last().unwrap().2,
            if stage == "write" { 1 } else { done % 22 }
        );
    }
}

#[test]
fn a_source_that_changes_meanwhile_is_not_published() {
    struct Touch(PathBuf);
    impl Observer for Touch {
        fn event(&self, event: &Event<'_>) {
            if matches!(event, Event::Stage { name: "write", .. }) {
                let file = std::fs::File::options().append(true).open(&self.0).unwrap();
                file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
            }
        }
    }
    let source = Model::new(&Quantized::default()).write();
    let checkpoint = open(source.path());
    let target = Target::Uniform { bits: Bits::try_from(4).unwrap(), group_size: 32 };
    let plan = planned(&checkpoint, target, &Counter::new(None)).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let touch = Touch(source.path().join("model.safetensors"));
    let error =
        requant::convert(&checkpoint, &plan, &dir.path().join("out"), &ConvertOptions::default(), &touch);
    assert_eq!(error.unwrap_err().code(), "checkpoint.changed");
    assert_eq!(names_in(dir.path()), [""; 0]);
}

#[test]
fn the_long_model_is_a_valid_one() {
    let converted = convert_model(&long_model(2), &["--bits", "2"]);
    assert_eq!(converted.report["modules"].as_array().unwrap().len(), 43);
}
