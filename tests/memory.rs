//! A conversion takes no more memory than its plan says.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};
use support::writer::{Model, Quantized, Sizes, Tensor};

/// A large vocabulary over a tiny model: the head and the embedding are all there is.
const SIZES: Sizes =
    Sizes { hidden: 128, intermediate: 128, heads: 2, head_dim: 32, layers: 1, vocab: 1 << 16 };

/// requant on two threads with so many bytes of data (RLIMIT_DATA).
fn limited(bytes: u64, source: &Path, out: &Path, flags: &[&str]) -> Output {
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("ulimit -d {} && exec \"$@\"", bytes / 1024)).arg("sh");
    command.arg(env!("CARGO_BIN_EXE_requant")).arg("convert").arg(source).args(flags).arg("--out").arg(out);
    command.args(["--json"]).env("RAYON_NUM_THREADS", "2").output().unwrap()
}

fn converts_in_what_it_says(model: &Model, flags: &[&str]) -> u64 {
    let (source, dir) = (model.write(), tempfile::tempdir().unwrap());
    let out = dir.path().join("out");
    let planned = limited(1 << 40, source.path(), &out, &[flags, &["--dry-run"]].concat());
    let plan: Value = serde_json::from_slice(&planned.stdout).unwrap();
    let peak = plan["peak_memory"].as_u64().unwrap();
    let ran = limited(peak, source.path(), &out, flags);
    let stderr = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{flags:?} in {peak} bytes: {stderr}");
    assert!(stderr.contains("takes up to ") && stderr.contains("of memory"), "{stderr}");
    peak
}

#[test]
fn a_head_of_64k_columns_is_quantized_in_what_the_plan_says() {
    let model = Model::sized(&Quantized::default(), &SIZES);
    let flags = ["--to", "exl2", "--bits", "4", "--head-bits", "6"];
    let peak = converts_in_what_it_says(&model, &flags);
    // The head decides: four bytes a weight are its fp32 alone.
    assert!(peak > (4 * 128) << 16, "{peak}");
    // And what is said isn't far too much.
    let (source, dir) = (model.write(), tempfile::tempdir().unwrap());
    assert!(!limited(peak / 2, source.path(), &dir.path().join("out"), &flags).status.success(), "{peak}");
}

#[test]
fn an_embedding_of_64k_rows_is_rounded_in_what_the_plan_says() {
    let mut model = Model::sized(&Quantized::default(), &SIZES);
    let values: Vec<f32> = (0..128 << 16).map(|i| (i % 31) as f32 * 0.01 - 0.15).collect();
    for name in ["model.embed_tokens", "lm_head"] {
        model.put(name, "weight", Tensor::bf16s(&[1 << 16, 128], &values));
    }
    converts_in_what_it_says(&model, &["--to", "fp16"]);
}

#[test]
fn a_layout_of_gptq_is_changed_in_what_the_plan_says() {
    let sizes = Sizes { hidden: 1024, intermediate: 4096, heads: 16, head_dim: 64, layers: 1, vocab: 64 };
    let model = Model::sized(&Quantized::default(), &sizes);
    for flags in [
        &["--to", "gptq", "--zeros", "v2"][..],
        &["--to", "gptq", "--bits", "8"],
        &["--to", "gptq", "--bits", "3"],
        &["--to", "fp16"],
        &["--to", "same"],
        &["--to", "exl2", "--bits", "8"],
    ] {
        converts_in_what_it_says(&model, flags);
    }
}
