//! Validation: what a conversion promised is found again in its files, and what can't be measured is said.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use requant::checkpoint::{Checkpoint, OpenOptions};
use requant::kernels::Cpu;
use requant::progress::Silent;
use requant::validate::report::Verdict;
use requant::validate::{Layers, Options, SwapIn, Validation, page, summary, validate};
use serde_json::json;
use std::path::Path;
use support::binary::{Converted, FIXTURE, convert, names_in, requant};
use support::open;
use support::writer::Model;

fn options() -> Options {
    Options { tokens: 512, window: Some(128), ..Options::default() }
}

fn validated(source: &Path, converted: &Path) -> Validation {
    validate(&open(source), &open(converted), &options(), &Cpu::new(2), &Silent).unwrap()
}

/// A 4-bit conversion of the fixture.
fn converted() -> Converted {
    convert(FIXTURE.as_ref(), &["--bits", "4"])
}

#[test]
fn errors_are_those_of_the_conversion() {
    let converted = converted();
    let validation = validated(FIXTURE.as_ref(), &converted.out);
    assert_eq!(validation.verdict, Verdict::Passed);
    for layer in &validation.layers {
        let stated = converted.module(&layer.converted)["relative_error"].as_f64().unwrap();
        assert!((layer.weight_error - stated).abs() <= 1e-6 * stated, "{}", layer.source);
        assert_eq!(layer.promised_error, Some(stated));
    }
    let quantized = validation.layers.iter().filter(|layer| layer.weight_error > 0.0).count();
    assert_eq!(quantized, 21, "all linears of three blocks");
    let totals = converted.report["totals"]["bpw"].as_f64().unwrap();
    assert!((validation.converted.bpw - totals).abs() < 1e-9);
}

#[test]
fn a_report_of_another_source_is_refused() {
    let converted = converted();
    let dir = tempfile::tempdir().unwrap();
    for name in names_in(FIXTURE.as_ref()) {
        std::fs::copy(Path::new(FIXTURE).join(&name), dir.path().join(&name)).unwrap();
    }
    let config = dir.path().join("config.json");
    let changed = std::fs::read_to_string(&config).unwrap().replacen('{', "{\"x\": 1,", 1);
    std::fs::write(&config, changed).unwrap();
    let source = Checkpoint::open(dir.path(), &OpenOptions::default()).unwrap();
    let error = validate(&source, &open(&converted.out), &options(), &Cpu::new(1), &Silent).unwrap_err();
    assert!(error.to_string().contains("another source"), "{error}");
}

/// The forward pass of a Granite isn't written, and its layers are compared all the same.
#[test]
fn of_an_unsupported_architecture_the_layers_are_checked_and_the_rest_says_why_not() {
    let mut model = Model::read(FIXTURE.as_ref());
    model.config["architectures"] = json!(["GraniteForCausalLM"]);
    model.config["residual_multiplier"] = json!(0.22);
    let source = model.write();
    let converted = convert(source.path(), &["--bits", "4"]);
    let swap_in = Some(SwapIn { layers: Layers::All, tokens: 512 });
    let options = Options { swap_in, ..options() };
    let (from, to) = (open(source.path()), open(&converted.out));
    let validation = validate(&from, &to, &options, &Cpu::new(2), &Silent).unwrap();
    assert_eq!(validation.verdict, Verdict::Passed);
    let lossy: Vec<_> = validation.layers.iter().filter(|layer| layer.role != "head").collect();
    assert_eq!(lossy.len(), 21);
    for layer in lossy {
        let stated = converted.module(&layer.converted)["relative_error"].as_f64().unwrap();
        assert!(stated > 0.0 && (layer.weight_error - stated).abs() <= 1e-6 * stated, "{}", layer.source);
        assert!(layer.output.is_none() && layer.swap_in.is_none() && layer.fault.is_none());
    }
    assert!(validation.model.is_none() && validation.cumulative.is_empty());
    let why =
        "Perplexity, KL and the outputs of layers: the forward pass of GraniteForCausalLM is not supported.";
    assert_eq!(validation.not_run, [why]);
    let worst = summary::worst(&validation).unwrap();
    assert!(validation.layers.iter().all(|layer| layer.weight_error <= worst.weight_error));
    let html = page::html(&validation);
    for told in [why, "layer check only", &worst.source] {
        assert!(html.contains(told), "{told}");
    }
    let run = |flags: &[&str]| {
        let mut command = requant();
        let command = command.arg("validate").arg(source.path()).arg(&converted.out).args(flags);
        let ran = command.output().unwrap();
        (ran.status.code(), String::from_utf8(ran.stdout).unwrap())
    };
    let (code, text) = run(&["--progress", "none"]);
    assert!(code == Some(0) && text.contains(&format!("not run: {why}")), "{text}");
    // What couldn't be measured meets no limit.
    let (code, text) = run(&["--progress", "none", "--max-kl", "1"]);
    assert!(code == Some(1) && text.contains("KL was not measured, at most 1 was asked"), "{text}");
}
