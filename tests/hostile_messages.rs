//! What is told of a fault: early, with the file and tensor at fault, once, and with what would help.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use requant::output::copy_side_files;
use requant::progress::{CancelFlag, Event, Observer};
use requant::{Diagnose, Error, Plan, PlanOptions, Target, WarningCode};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use support::binary::{FIXTURE, files_in, json_of, names_in, refuse, refuse_model, requant};
use support::open;
use support::writer::{HIDDEN, Model, Q, Quantized, Tensor, VOCAB};

fn model() -> Model {
    Model::new(&Quantized::default())
}

/// The error of a command line that must fail, with its exit code.
fn error_of(arguments: &[&str]) -> (i32, Value) {
    let ran = requant().args(arguments).arg("--json").output().unwrap();
    assert_eq!(ran.stdout, b"", "{arguments:?}");
    let error = serde_json::from_slice(&ran.stderr).unwrap_or_else(|e| panic!("{arguments:?}: {e}: {ran:?}"));
    (ran.status.code().unwrap(), error)
}

// Files.

#[test]
fn a_side_file_that_cannot_be_read_is_told_before_anything_is_measured() {
    let source = model().write();
    let secret = source.path().join("tokenizer.json");
    fs::write(&secret, "{}").unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o000)).unwrap();
    let target = tempfile::tempdir().unwrap();
    for dir in [source.path(), target.path()] {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o777)).unwrap();
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_requant"));
    if fs::File::open(&secret).is_ok() {
        // To root all modes are one.
        command.uid(65_534);
    }
    command.arg("convert").arg(source.path()).args(["--to", "exl2", "--bpw", "4.25", "--progress", "json"]);
    let ran = command.args(["--json", "--out"]).arg(target.path().join("out")).output();
    let ran = match ran {
        Ok(ran) => ran,
        Err(e) => return support::skip(&format!("the binary can't be run as another user: {e}")),
    };
    let error: Value = serde_json::from_slice(&ran.stderr).unwrap_or_else(|e| panic!("{e}: {ran:?}"));
    assert_eq!((ran.status.code(), &error["code"]), (Some(4), &json!("output.unreadable")));
    assert_eq!(error["file"], json!(secret));
    let hint = error["hint"].as_str().unwrap();
    assert!(hint.contains("readable") && !hint.contains("may write"), "{hint}");
    assert_eq!(names_in(target.path()), [""; 0]);
}

#[test]
fn the_file_of_a_checkpoint_is_no_checkpoint() {
    for command in [&["inspect"][..], &["convert", "--to", "same", "--dry-run"], &["verify"]] {
        let (exit, error) = error_of(&[command, &["fixtures/tiny-llama-gptq/config.json"]].concat());
        assert_eq!((exit, &error["code"]), (2, &json!("checkpoint.not_a_folder")), "{command:?}");
        assert!(error["hint"].as_str().unwrap().contains("folder that it is in"), "{error}");
    }
}

#[test]
fn a_configuration_is_named_once() {
    let mut model = model();
    model.config["hidden_size"] = json!("64");
    let source = model.write();
    let ran = requant().arg("inspect").arg(source.path()).output().unwrap();
    let text = String::from_utf8(ran.stderr).unwrap();
    assert_eq!(text.matches("config.json").count(), 1, "{text}");
    assert!(text.contains("hidden_size is \"64\": a positive integer"), "{text}");
}

#[test]
fn rope_settings_of_a_wrong_type_are_refused() {
    let cases = [
        ("rope_theta", json!("10000"), "rope_theta"),
        ("rope_theta", json!(0), "rope_theta"),
        ("rope_scaling", json!({"type": "linear", "factor": "2"}), "rope_scaling.factor"),
        ("rope_scaling", json!({"rope_type": 3, "factor": 2}), "rope_scaling.rope_type"),
        ("rope_scaling", json!({"type": "longrope", "long_factor": 3}), "rope_scaling.long_factor"),
        ("rope_parameters", json!({"rope_theta": true}), "rope_parameters.rope_theta"),
        (
            "rope_parameters",
            json!({"full_attention": {"rope_theta": [1]}}),
            "rope_parameters.full_attention.rope_theta",
        ),
        ("text_config", json!({"rope_theta": "1e6"}), "text_config.rope_theta"),
    ];
    for (key, value, named) in cases {
        let mut model = model();
        model.config[key] = value;
        let refused = refuse_model(&model, &["--bits", "4"]);
        assert_eq!((refused.exit, refused.text("code")), (3, "checkpoint.config_value"), "{named}");
        let message = refused.text("message");
        assert!(message.starts_with(&format!("has {named} = ")), "{message}");
    }
    let mut model = model();
    model.config["rope_scaling"] = json!({"type": "linear", "factor": 2.0, "beta_fast": null});
    open(model.write().path());
}

#[test]
fn groups_of_no_common_size_are_not_given_one() {
    let mut model = model();
    model.set("group_size", json!(64));
    // A first group that is smaller than the second is no short last one.
    for (last_of_first, said) in [(24, "2 groups of up to 40 rows by"), (1, "2 groups of up to 63 rows by")] {
        let index: Vec<i32> = (0..64).map(|row| i32::from(row >= last_of_first)).collect();
        model.put(Q, "g_idx", Tensor::i32s(&[64], &index));
        let checkpoint = open(model.write().path());
        let all = checkpoint.warnings().iter();
        let warning = all.clone().find(|w| w.code == WarningCode::ConfigTensorConflict);
        let message = &warning.unwrap_or_else(|| panic!("{:?}", checkpoint.warnings())).message;
        assert!(
            message.starts_with("Group size 64 by the configuration, ") && message.contains(said),
            "{message}"
        );
    }
    let mut three = Model::new(&Quantized { group_size: 16, ..Quantized::default() });
    three.set("group_size", json!(64));
    // Of four groups two have rows.
    let index: Vec<i32> = (0..64).map(|row| if row < 40 { 1 } else { 3 }).collect();
    three.put(Q, "g_idx", Tensor::i32s(&[64], &index));
    let checkpoint = open(three.write().path());
    let message = &checkpoint.warnings()[0].message;
    assert!(message.contains("4 groups of up to 40 rows, 2 of them empty by the tensors"), "{message}");
}

// Rules and budgets.

#[test]
fn a_rule_for_the_head_is_sent_to_head_bits() {
    let refused = refuse(Path::new(FIXTURE), &["--bpw", "4", "--set", "lm_head=6"]);
    assert_eq!((refused.exit, refused.text("code")), (2, "plan.unused_rule"));
    assert!(refused.text("hint").contains("--head-bits"), "{}", refused.error);
    let refused = refuse(Path::new(FIXTURE), &["--bpw", "4", "--min", "dwon_proj=6"]);
    assert!(refused.text("hint").contains("inspect"), "{}", refused.error);
}

#[test]
fn a_budget_that_rules_put_out_of_reach_says_so() {
    let hint = |flags: &[&str]| {
        let refused = refuse(Path::new(FIXTURE), flags);
        assert_eq!((refused.exit, refused.text("code")), (2, "plan.infeasible"));
        refused.text("hint").to_owned()
    };
    let floors = hint(&["--bpw", "3", "--min", "proj=6"]);
    assert!(
        floors.contains("--min and --set") && floors.contains("without them it goes from 2."),
        "{floors}"
    );
    let fixed = hint(&["--bpw", "7", "--set", "proj=2"]);
    assert!(fixed.contains("--min and --set"), "{fixed}");
    let bare = hint(&["--bpw", "1"]);
    assert!(bare.starts_with("choose a --bpw from 2.") && !bare.contains("--min"), "{bare}");
}

// Where.

#[test]
fn what_a_plan_refuses_is_named_with_its_file() {
    let gptq =
        |flags: &[&str]| error_of(&[&["convert", FIXTURE, "--to", "gptq", "--dry-run"], flags].concat());
    for (flags, code) in
        [(&["--group-size", "48"][..], "plan.group_split"), (&["--for", "vllm"], "plan.reader_refuses")]
    {
        let (_, error) = gptq(flags);
        assert_eq!(error["code"], code);
        assert!(error["file"].as_str().is_some_and(|file| file.ends_with("model.safetensors")), "{error}");
        assert!(error["tensor"].is_string(), "{error}");
    }
    let mut unknown = model();
    unknown.config["architectures"] = json!(["SomethingNew"]);
    let refused = refuse_model(&unknown, &["--bits", "4"]);
    assert!(refused.text("file").ends_with("config.json"), "{}", refused.error);
}

#[test]
fn a_bias_of_the_head_is_named() {
    let mut model = model();
    model.put("lm_head", "bias", Tensor::f16s(&[VOCAB], &[0.5; VOCAB]));
    let refused = refuse_model(&model, &["--bits", "4"]);
    assert_eq!((refused.text("code"), refused.text("tensor")), ("plan.head_bias", "lm_head.bias"));
    assert!(refused.text("file").ends_with("model.safetensors"), "{}", refused.error);
}

#[test]
fn an_embedding_that_fp16_cannot_hold_is_refused_before_anything_is_measured() {
    let mut model = model();
    let mut values = vec![0.5; VOCAB * HIDDEN];
    values[HIDDEN + 5] = 7e4;
    let embedding = "model.embed_tokens.weight";
    model.tensors.insert(embedding.into(), Tensor::bf16s(&[VOCAB, HIDDEN], &values));
    let source = model.write();
    let source = source.path().to_str().unwrap();
    for target in
        [&["--to", "exl2", "--bpw", "4.25"][..], &["--to", "exl2", "--bits", "4"], &["--to", "fp16"]]
    {
        let command = [&["convert", source, "--dry-run", "--progress", "json"], target].concat();
        // A stage that begins would be a line before the error.
        let (exit, error) = error_of(&command);
        assert_eq!((exit, &error["code"]), (3, &json!("plan.overflow")), "{target:?}");
        assert_eq!(error["tensor"], embedding);
        assert!(error["message"].as_str().unwrap().starts_with("element [1, 5] is "), "{error}");
    }
}

// Stopping.

/// Cancels when so many modules have been measured.
struct CancelAfter {
    modules: usize,
    seen: AtomicUsize,
    flag: CancelFlag,
}

impl Observer for CancelAfter {
    fn event(&self, event: &Event<'_>) {
        if matches!(event, Event::Module { .. })
            && self.seen.fetch_add(1, Ordering::SeqCst) + 1 == self.modules
        {
            self.flag.cancel();
        }
    }

    fn cancelled(&self) -> bool {
        self.flag.is_set()
    }
}

#[test]
fn the_solver_and_the_copying_of_side_files_can_be_stopped() {
    let checkpoint = open(Path::new(FIXTURE));
    let linears = 21;
    let observer = CancelAfter { modules: linears, seen: AtomicUsize::new(0), flag: CancelFlag::default() };
    // Everything is measured: only the solver is left.
    let stopped = Plan::new(&checkpoint, &PlanOptions::new(Target::Bpw(4.0)), &observer);
    assert!(matches!(stopped, Err(Error::Cancelled)), "{stopped:?}");
    assert_eq!(observer.seen.load(Ordering::SeqCst), linears);

    let out = tempfile::tempdir().unwrap();
    let stopped = copy_side_files(Path::new(FIXTURE), out.path(), &observer).unwrap_err();
    assert_eq!(stopped.code(), "interrupted");
}

/// Starts a conversion and sends SIGINT twice without a pause as soon as `when` says so.
fn interrupt_twice(out: &Path, when: &dyn Fn() -> bool) -> Option<i32> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_requant"));
    command.args(["convert", FIXTURE, "--to", "exl2", "--bpw", "3.5", "--threads", "1", "--out"]).arg(out);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    while !when() {
        assert_eq!(child.try_wait().unwrap(), None, "it ended by itself");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    let id = child.id().to_string();
    let kill = format!("kill -INT {id}; sleep 0.01; kill -INT {id}");
    Command::new("sh").args(["-c", &kill]).stderr(Stdio::null()).status().unwrap();
    child.wait().unwrap().code()
}

/// The second signal ends the process at once, as a kill does: what is there stays as it is, unlocked, and
/// the next run finds its way.
#[test]
fn two_signals_leave_what_the_next_run_can_use() {
    let dir = tempfile::tempdir().unwrap();
    let (out, partial) = (dir.path().join("out"), dir.path().join("out.partial"));
    let again = |flags: &[&str]| {
        let mut command = requant();
        command.args(["convert", FIXTURE, "--to", "exl2", "--bpw", "3.5", "--json", "--out"]).arg(&out);
        command.args(flags).output().unwrap()
    };
    // Before there is a plan: at most an empty folder, which is nobody's.
    assert_eq!(interrupt_twice(&out, &|| partial.exists()), Some(130));
    assert!(!out.exists());
    let ran = again(&[]);
    assert!(ran.status.success(), "{ran:?}");
    let whole = files_in(&out);
    fs::remove_dir_all(&out).unwrap();

    // With one: it is told, and goes on to the same bytes.
    assert_eq!(interrupt_twice(&out, &|| partial.join(".job/job.json").exists()), Some(130));
    assert_eq!(names_in(dir.path()), ["out.partial"]);
    let ran = again(&["--progress", "none"]);
    assert_eq!(ran.status.code(), Some(2));
    let told: Value = serde_json::from_slice(&ran.stderr).unwrap();
    assert_eq!(told["code"], "output.unfinished");
    let ran = again(&["--resume"]);
    assert!(ran.status.success(), "{ran:?}");
    assert!(files_in(&out) == whole);
    assert!(json_of(&out.join("report.json"))["modules"].is_array());
}
