//! Modules that stay GPTQ in an EXL2 directory.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use requant::checkpoint::{Checkpoint, Layout, OpenOptions};
use requant::formats::gptq::ZeroConvention;
use requant::progress::Silent;
use requant::verify::verify;
use std::path::Path;
use support::binary::{Converted, FIXTURE, convert, refuse, relative_error};
use support::{folder, open};

fn is_gptq(checkpoint: &Checkpoint, name: &str) -> bool {
    matches!(checkpoint.module(name).unwrap().layout(), Layout::Gptq(_))
}

/// Every module that stays GPTQ decodes as the source's, and gate and up stay so only with all of their MLP.
fn assert_kept(converted: &Converted, source: &Checkpoint) -> usize {
    let output = &converted.checkpoint;
    let mut kept = 0;
    for module in output.modules().iter().filter(|m| matches!(m.layout(), Layout::Gptq(_))) {
        let from = source.module(module.name()).unwrap();
        assert!(output.dequantize(module).unwrap() == source.dequantize(from).unwrap(), "{}", module.name());
        let Layout::Gptq(gptq) = module.layout() else { unreachable!() };
        assert_eq!(gptq.zeros.convention, ZeroConvention::V1);
        if let Some(mlp) = module.name().strip_suffix("gate_proj").or(module.name().strip_suffix("up_proj")) {
            for part in ["gate_proj", "up_proj", "down_proj"] {
                assert!(is_gptq(output, &format!("{mlp}{part}")), "{mlp}{part}");
            }
        }
        kept += 1;
    }
    assert!(converted.checkpoint.warnings().is_empty());
    kept
}

#[test]
fn above_the_sources_own_size_everything_stays_exactly() {
    let source = open(Path::new(FIXTURE));
    let converted = convert(Path::new(FIXTURE), &["--bpw", "6", "--keep-gptq"]);
    assert_eq!(assert_kept(&converted, &source), 21);
    assert!(converted.stdout.contains("every module stays GPTQ, exactly"), "{}", converted.stdout);
    assert_eq!(converted.report["mean_relative_error"], 0.0);
    assert_eq!(converted.config["quantization_config"]["quant_method"], "exl2");
}

#[test]
fn some_stay_where_the_size_allows_it_and_the_plan_is_no_worse() {
    let source = open(Path::new(FIXTURE));
    let value = |flags: &[&str]| {
        let converted = convert(Path::new(FIXTURE), flags);
        let bpw = converted.report["totals"]["bpw"].as_f64().unwrap();
        assert!(bpw <= 4.6 && bpw > 4.58, "{bpw}");
        (converted.report["objective"]["value"].as_f64().unwrap(), assert_kept(&converted, &source))
    };
    let (without, none) = value(&["--bpw", "4.6"]);
    let (with, some) = value(&["--bpw", "4.6", "--keep-gptq"]);
    assert!(none == 0 && some > 0 && some < 21, "{none} {some}");
    assert!(with <= without, "{with} {without}");
}

#[test]
fn v2_zero_points_are_written_as_v1() {
    let Some(assets) = folder("REQUANT_ASSETS") else { return };
    let dir = assets.join("tiny/tiny-llama-v2");
    let converted = convert(&dir, &["--bpw", "6", "--keep-gptq"]);
    assert_eq!(assert_kept(&converted, &open(&dir)), 21);
}

#[test]
fn what_exllamav2_does_not_read_is_never_kept() {
    let Some(assets) = folder("REQUANT_ASSETS") else { return };
    // Other widths, and 2 bits with a zero point of 0.
    for name in ["tiny-llama-2bit", "tiny-llama-3bit", "tiny-llama-8bit"] {
        let dir = assets.join("tiny").join(name);
        let converted = convert(&dir, &["--bpw", "6", "--keep-gptq"]);
        assert_eq!(assert_kept(&converted, &open(&dir)), 0, "{name}");
    }
    let dir = assets.join("tiny/tiny-mixtral");
    let converted = convert(&dir, &["--bpw", "4.35", "--keep-gptq"]);
    assert!(assert_kept(&converted, &open(&dir)) > 0);
}

#[test]
fn keeping_needs_a_budget() {
    let refused = refuse(Path::new(FIXTURE), &["--bits", "4", "--keep-gptq"]);
    assert_eq!(refused.exit, 2);
}

/// The head is outside the budget: beside modules that are all kept it is quantized at its own width, and without
/// a width it stays as it is.
#[test]
fn a_head_of_its_own_width_beside_kept_modules() {
    let source = open(Path::new(FIXTURE));
    let wanted = source.dequantize(source.module("lm_head").unwrap()).unwrap();
    let converted = convert(Path::new(FIXTURE), &["--bpw", "6", "--keep-gptq", "--head-bits", "6"]);
    assert_eq!(assert_kept(&converted, &source), 21);
    let head = converted.checkpoint.module("lm_head").unwrap();
    assert!(matches!(head.layout(), Layout::Exl2(_)));
    assert_eq!(converted.widths("lm_head"), [6]);
    let found = converted.checkpoint.dequantize(head).unwrap();
    let error = relative_error(&wanted, &found);
    let stated = converted.module("lm_head")["relative_error"].as_f64().unwrap();
    assert!(error > 0.0 && (error - stated).abs() <= 1e-6 * stated, "{error} {stated}");
    // Not every module is exact then, and the summary doesn't say so.
    assert!(!converted.stdout.contains("every module stays GPTQ, exactly"), "{}", converted.stdout);
    assert!(verify(&converted.out, &OpenOptions::default(), Some(&source), &Silent).unwrap().good);

    let without = convert(Path::new(FIXTURE), &["--bpw", "6", "--keep-gptq"]);
    let head = without.checkpoint.module("lm_head").unwrap();
    assert!(matches!(head.layout(), Layout::Dense { .. }));
    assert!(without.checkpoint.dequantize(head).unwrap() == wanted);
}
