//! What a person or a script sees: texts, streams, exit codes, progress.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use serde_json::{Value, json};
use std::io::Read;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use support::binary::{FIXTURE, convert, names_in, requant};
use support::writer::{Model, Q, Quantized};

/// Compares with a file of `snapshots/`, temporary folders replaced.
macro_rules! snapshot {
    ($name:literal, $text:expr) => {{
        let mut settings = insta::Settings::clone_current();
        settings.set_prepend_module_to_snapshot(false);
        settings.set_omit_expression(true);
        settings.add_filter(r"/[^\s:]*/\.tmp\w+", "[DIR]");
        settings.bind(|| insta::assert_snapshot!($name, $text));
    }};
}

fn run(arguments: &[&str]) -> Output {
    requant().args(arguments).output().unwrap()
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap()
}

/// Stdout of a command that succeeds and says nothing else.
fn stdout(arguments: &[&str]) -> String {
    let ran = run(arguments);
    assert_eq!((ran.status.code(), text(ran.stderr).as_str()), (Some(0), ""), "{arguments:?}");
    text(ran.stdout)
}

#[test]
fn help() {
    snapshot!("help", stdout(&["--help"]));
    snapshot!("help-convert", stdout(&["convert", "--help"]));
    snapshot!("help-validate", stdout(&["validate", "--help"]));
    snapshot!("help-inspect", stdout(&["inspect", "--help"]));
    assert_eq!(stdout(&["--version"]), concat!("requant ", env!("CARGO_PKG_VERSION"), "\n"));
}

#[test]
fn help_fits_any_terminal() {
    for columns in [60, 100, 300] {
        let help =
            requant().args(["convert", "--help"]).env("COLUMNS", columns.to_string()).output().unwrap();
        let help = text(help.stdout);
        // clap doesn't wrap the usage.
        let lines = help.lines().filter(|line| !line.starts_with("Usage:"));
        let longest = lines.map(|line| line.trim_end().len()).max().unwrap();
        assert!(longest <= columns.min(100), "{longest} of {columns}");
    }
}

#[test]
fn inspection() {
    snapshot!("inspect", stdout(&["inspect", FIXTURE]));
    snapshot!("inspect-exl2", stdout(&["inspect", "fixtures/tiny-llama-exl2-4.0bpw"]));
    let json: Value = serde_json::from_str(&stdout(&["inspect", FIXTURE, "--json"])).unwrap();
    assert_eq!(json["architecture"], "LlamaForCausalLM");
    let size = std::fs::metadata(Path::new(FIXTURE).join("model.safetensors")).unwrap().len();
    assert_eq!(json["files"], json!([["model.safetensors", size]]));
    assert_eq!((json["modules"].as_array().unwrap().len(), &json["warnings"]), (22, &json!([])));
    let first = &json["modules"][0];
    let zeros = json!({
        "convention": "v1", "evidence": "values", "encoding": "v1_word_wise", "symmetric": true, "all_ones": 0,
        "smears": 0,
    });
    let expected = json!({
        "name": Q, "in_features": 256, "out_features": 256, "layout": "gptq", "bits": 4, "group_size": 32,
        "groups": 8, "g_idx": "act_order", "equal_groups": true, "zeros": zeros, "scales": "F16", "bias": null,
        "bpw": 4.75,
    });
    assert_eq!(*first, expected);
}

#[test]
fn a_plan() {
    let plan = ["convert", FIXTURE, "--to", "exl2", "--bpw", "4.25", "--dry-run", "--progress", "none"];
    snapshot!("dry-run", stdout(&plan));
    assert_eq!(stdout(&[&plan[..], &["--threads", "7"]].concat()), stdout(&plan));
    let uniform = ["convert", FIXTURE, "--to", "exl2", "--bits", "4", "--dry-run", "--progress", "none"];
    snapshot!("dry-run-uniform", stdout(&uniform));
}

#[test]
fn warnings_are_told_once_and_on_stderr() {
    let mut model = Model::new(&Quantized::default());
    for (name, _, n) in support::writer::LINEARS {
        model.put(name, "bias", support::writer::Tensor::f16s(&[n], &vec![0.0; n]));
    }
    model.set("desc_act", json!(false));
    let order: Vec<i32> = (0..64).map(|row| row % 2).collect();
    model.put(Q, "g_idx", support::writer::Tensor::i32s(&[64], &order));
    let source = model.write();
    let source = source.path().to_str().unwrap();
    let converted = convert(Path::new(source), &["--bits", "4", "--progress", "none"]);
    snapshot!("warnings", converted.stderr);
    assert_eq!(converted.stdout.lines().count(), 1, "{}", converted.stdout);
    // To whom asks for the plan they are part of the answer.
    let shown =
        stdout(&["convert", source, "--to", "exl2", "--bits", "4", "--dry-run", "--progress", "none"]);
    assert!(shown.ends_with(&converted.stderr), "{shown}");
    let inspected = stdout(&["inspect", source]);
    assert_eq!(inspected.lines().filter(|line| line.starts_with("warning: ")).count(), 1, "{inspected}");
}

#[test]
fn typical_failures() {
    let whole = Model::new(&Quantized::default());
    let truncated = whole.write();
    let shard = truncated.path().join("model.safetensors");
    let bytes = std::fs::read(&shard).unwrap();
    std::fs::write(&shard, &bytes[..bytes.len() - 1]).unwrap();
    let mut missing = whole.clone();
    missing.tensors.remove(&format!("{Q}.scales"));
    let missing = missing.write();
    let mut foreign = whole.clone();
    foreign.set("quant_method", json!("awq"));
    let foreign = foreign.write();
    let path = |dir: &tempfile::TempDir| dir.path().to_str().unwrap().to_owned();
    let (fixture, four) = (FIXTURE.to_owned(), "--bits=4");
    let cases = [
        ("truncated", path(&truncated), four, 3),
        ("missing tensor", path(&missing), four, 3),
        ("usage", fixture.clone(), "--bits=7", 2),
        ("infeasible", fixture, "--bpw=1.5", 2),
        ("unsupported method", path(&foreign), four, 3),
    ];
    let mut all = String::new();
    for (name, source, target, exit) in cases {
        for form in ["--progress=none", "--json"] {
            let out = tempfile::tempdir().unwrap();
            let out = out.path().join("out");
            let out = out.to_str().unwrap();
            let ran = run(&["convert", &source, "--to", "exl2", target, "--out", out, form]);
            assert_eq!((ran.status.code(), ran.stdout.as_slice()), (Some(exit), b"".as_slice()), "{name}");
            all += &format!("# {name}\n{}\n", text(ran.stderr));
        }
    }
    snapshot!("failures", all);
}

#[test]
fn progress_in_three_forms() {
    let dir = tempfile::tempdir().unwrap();
    let convert = |style: &str, target: &str| {
        let out = dir.path().join(format!("out-{style}"));
        let mut command = requant();
        command.args(["convert", FIXTURE, "--to", "exl2", target, "--out"]).arg(&out);
        let ran = command.args(["--progress", style]).output().unwrap();
        let stdout = text(ran.stdout);
        assert!(
            stdout.starts_with(&format!("{}: ", out.display())) && stdout.lines().count() == 1,
            "{stdout}"
        );
        assert!(
            stdout.contains(" in 1 file of weights, ") && stdout.contains(" bpw, mean relative error 0.")
        );
        text(ran.stderr)
    };
    // On a pipe, auto is plain.
    for (style, target) in [("auto", "--bpw=3"), ("plain", "--bits=4")] {
        let lines = convert(style, target);
        // Told only where a stage takes more than seconds.
        let mut lines = lines.lines().filter(|line| !line.contains(" left"));
        let stages = [("measure", "21 modules, 1.77 M weights"), ("convert", "22 modules, 2.03 M weights")];
        for (stage, to_come) in &stages[usize::from(style == "plain")..] {
            if *stage == "convert" {
                let memory = lines.next().unwrap();
                assert!(memory.starts_with("takes up to ") && memory.ends_with(" of memory"), "{memory}");
            }
            assert_eq!(lines.next(), Some(format!("{stage}: {to_come}").as_str()));
            let (done, count) = (lines.next().unwrap(), &to_come[..2]);
            assert!(done.starts_with(&format!("{stage}: {count}/{count} modules, ")), "{done}");
            assert!(done.ends_with(" weights/s"), "{done}");
        }
        let rest: Vec<&str> = lines.collect();
        assert_eq!(rest, ["write: 1 file", "write: 1/1 files"]);
    }
    assert_eq!(convert("none", "--bits=4"), "");
    let lines = convert("json", "--bpw=3");
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 22 + 1 + 23 + 2);
    let first = json!({
        "stage": "measure", "modules": 21, "weights": 1769472, "modules_done": 0, "weights_done": 0
    });
    assert_eq!(lines[0], first);
    assert!(lines[22]["peak_memory"].as_u64().unwrap() > 1 << 20);
    assert_eq!(lines[23]["stage"], "convert");
    for last in [&lines[21], &lines[45]] {
        assert_eq!((&last["modules_done"], &last["weights_done"]), (&last["modules"], &last["weights"]));
    }
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    for arguments in [&["inspect", FIXTURE, "--json"][..], &["completions", "bash"], &["inspect", FIXTURE]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_requant"));
        let mut child =
            command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let mut stderr = String::new();
        child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        assert_eq!((child.wait().unwrap().code(), stderr.as_str()), (Some(0), ""), "{arguments:?}");
    }
}

#[test]
fn an_unwritable_stdout_is_an_error() {
    let Ok(full) = std::fs::File::options().write(true).open("/dev/full") else {
        return support::skip("there is no /dev/full");
    };
    let mut command = Command::new(env!("CARGO_BIN_EXE_requant"));
    let ran = command.args(["inspect", FIXTURE]).stdout(full).output().unwrap();
    assert_eq!(ran.status.code(), Some(4));
    assert!(text(ran.stderr).starts_with("error: stdout: "));
}

/// Commands with flags of their own.
const COMMANDS: [&str; 4] = ["inspect", "convert", "verify", "validate"];

/// The long flags that the help of a command lists.
fn flags_of(command: &str) -> Vec<String> {
    let help = stdout(&[command, "--help"]);
    let words =
        help.lines().filter(|line| line.trim_start().starts_with('-')).flat_map(str::split_whitespace);
    let flags =
        words.filter(|word| word.starts_with("--")).map(|word| word.trim_end_matches([',', '.']).into());
    flags.collect()
}

fn every_flag() -> Vec<String> {
    COMMANDS.iter().flat_map(|command| flags_of(command)).collect()
}

#[test]
fn completions_and_man_pages() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = stdout(&["completions", shell]);
        assert!(script.contains("requant") && script.contains("dense-members"), "{shell}");
        for flag in every_flag() {
            assert!(script.contains(flag.trim_start_matches('-')), "{shell} lacks {flag}");
        }
    }
    // The shell accepts its own.
    let mut bash = Command::new("bash");
    let checked = bash.args(["-n", "-c", &stdout(&["completions", "bash"])]).output().unwrap();
    assert!(checked.status.success(), "{}", text(checked.stderr));

    let dir = tempfile::tempdir().unwrap();
    assert_eq!(stdout(&["man", dir.path().to_str().unwrap()]), "");
    let mut pages = vec![
        "requant-completions.1",
        "requant-convert.1",
        "requant-doctor.1",
        "requant-inspect.1",
        "requant-validate.1",
        "requant-verify.1",
        "requant.1",
    ];
    if !cfg!(feature = "cuda") {
        pages.retain(|page| *page != "requant-doctor.1");
    }
    assert_eq!(names_in(dir.path()), pages);
    for command in COMMANDS {
        let page = std::fs::read_to_string(dir.path().join(format!("requant-{command}.1"))).unwrap();
        let plain = page.replace("\\-", "-");
        for flag in flags_of(command) {
            assert!(plain.contains(&flag), "the page of {command} lacks {flag}");
        }
    }
    let page = std::fs::read_to_string(dir.path().join("requant-convert.1")).unwrap();
    assert!(page.contains(".TH requant-convert 1") && page.contains("bits a weight"), "{page}");
    assert_eq!(run(&["man", "/dev/null/no"]).status.code(), Some(4));
}

#[test]
fn commands_that_do_not_exist() {
    for arguments in [
        &[][..],
        &["unknown"],
        &["inspect"],
        &["inspect", FIXTURE, "--threads", "0"],
        &["completions", "tcsh"],
    ] {
        let ran = run(arguments);
        assert_eq!((ran.status.code(), ran.stdout.as_slice()), (Some(2), b"".as_slice()), "{arguments:?}");
    }
}
