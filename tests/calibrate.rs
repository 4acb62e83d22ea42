//! `convert --calibrate`: less divergence at the same bits, the same bytes, and what is said.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

use requant::checkpoint::{Checkpoint, OpenOptions};
use requant::kernels::Cpu;
use requant::progress::Silent;
use requant::validate::{Options, Text, validate};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

const SOURCE: &str = "fixtures/tiny-llama-gptq";

fn requant(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_requant")).args(arguments).output().unwrap()
}

/// Converts the fixture with these flags besides.
fn convert(out: &Path, flags: &[&str]) {
    let out = out.to_str().unwrap();
    let arguments = [&["convert", SOURCE, "--to", "exl2", "--out", out][..], flags].concat();
    let output = requant(&arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

const CALIBRATE: [&str; 3] = ["--calibrate", "--calibration-tokens", "8192"];

/// Of the fixture, on the built-in text for validation, which no model is calibrated on.
fn divergence(out: &Path) -> f64 {
    let open = |dir: &Path| Checkpoint::open(dir, &OpenOptions::default()).unwrap();
    let options = Options { text: Text::Sample, tokens: 2048, ..Options::default() };
    let (source, converted) = (open(SOURCE.as_ref()), open(out));
    let found = validate(&source, &converted, &options, &Cpu::new(0), &Silent).unwrap();
    assert!(found.is_good());
    found.model.unwrap().kl.mean
}

fn report(out: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(out.join("report.json")).unwrap()).unwrap()
}

#[test]
fn calibrated_models_diverge_less_at_the_same_bits() {
    let place = TempDir::new().unwrap();
    for (name, flags) in [("uniform", ["--bits", "3"]), ("mixed", ["--bpw", "3.5"])] {
        let (plain, calibrated) = (place.path().join(name), place.path().join(format!("{name}-calibrated")));
        convert(&plain, &flags);
        convert(&calibrated, &[&flags[..], &CALIBRATE].concat());
        let (without, with) = (divergence(&plain), divergence(&calibrated));
        assert!(with < 0.8 * without, "{name}: {with} {without}");
        let (plain, calibrated) = (report(&plain), report(&calibrated));
        assert!(
            calibrated["totals"]["bpw"].as_f64().unwrap() <= plain["totals"]["bpw"].as_f64().unwrap() + 0.01
        );
        for module in calibrated["modules"].as_array().unwrap() {
            if module["name"] == "lm_head" {
                assert!(module.get("calibration").is_none());
                continue;
            }
            let calibration = &module["calibration"];
            assert!(calibration["tokens"].as_u64().unwrap() >= 8000, "{module}");
            let error = |key: &str| calibration[key].as_f64().unwrap();
            assert!(error("output_error") <= error("output_error_by_weights"), "{module}");
            assert!(calibration["damping"].is_f64() != calibration["uncalibrated"].is_string(), "{module}");
        }
        assert_eq!(calibrated["objective"]["calibrated"].as_bool(), (name == "mixed").then_some(true));
        assert!(plain["modules"][0].get("calibration").is_none());
    }
}

#[test]
fn same_bytes_for_any_number_of_threads_and_after_a_stop() {
    let place = TempDir::new().unwrap();
    let run = |name: &str, threads: &str| {
        let out = place.path().join(name);
        let flags = [&["--bpw", "4", "--threads", threads][..], &CALIBRATE].concat();
        convert(&out, &flags);
        let tensors = std::fs::read(out.join("model.safetensors")).unwrap();
        (tensors, std::fs::read(out.join("report.json")).unwrap())
    };
    let one = run("one", "1");
    assert!(one == run("three", "3"));
    // Half of the modules are done when the second run begins.
    let out = place.path().join("stopped");
    let out_text = out.to_str().unwrap();
    let flags =
        [&["convert", SOURCE, "--to", "exl2", "--out", out_text, "--bpw", "4", "--resume"][..], &CALIBRATE];
    let flags = flags.concat();
    let partial = place.path().join("stopped.partial");
    let mut child = Command::new(env!("CARGO_BIN_EXE_requant")).args(&flags).spawn().unwrap();
    while child.try_wait().unwrap().is_none() {
        let done = std::fs::read_to_string(partial.join(".job/done.jsonl")).unwrap_or_default();
        if done.lines().count() > 12 {
            child.kill().unwrap();
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    child.wait().unwrap();
    let output = requant(&flags);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let tensors = std::fs::read(out.join("model.safetensors")).unwrap();
    assert!(tensors == one.0);
    // With another text it is another job.
    let other = [&flags[..flags.len() - 1], &["4096"]].concat();
    let output = requant(&other);
    assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stderr).contains("calibrate"));
}

#[test]
fn a_text_of_one_token_is_damped_or_said() {
    let place = TempDir::new().unwrap();
    let text = place.path().join("same.txt");
    std::fs::write(&text, "a".repeat(4000)).unwrap();
    let out = place.path().join("out");
    let flags = ["--bits", "4", "--calibrate", "--calibration-text", text.to_str().unwrap()];
    convert(&out, &flags);
    let modules = report(&out)["modules"].as_array().unwrap().clone();
    assert!(modules.iter().filter(|module| module["name"] != "lm_head").all(|module| {
        let calibration = &module["calibration"];
        calibration["damping"].is_f64()
            || calibration["uncalibrated"].is_string()
            || calibration["uncalibrated"].is_object()
    }));
    assert!(divergence(&out).is_finite());
}

#[test]
fn flags_of_calibration_go_together() {
    let place = TempDir::new().unwrap();
    let out = place.path().join("out");
    let out = out.to_str().unwrap();
    for flags in [
        &["--to", "gptq", "--zeros", "v2", "--calibrate"][..],
        &["--to", "exl2", "--bpw", "4", "--calibration-tokens", "9"],
        &["--to", "exl2", "--bpw", "4", "--calibrate", "--calibration-text", "absent.txt"],
    ] {
        let output = requant(&[&["convert", SOURCE, "--out", out][..], flags].concat());
        assert!(matches!(output.status.code(), Some(2..=4)), "{flags:?}");
        assert!(!Path::new(out).exists());
    }
}
