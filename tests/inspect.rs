//! What `inspect` says of EXL2 directories that exllamav2 would fail on or misread.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use requant::WarningCode;
use requant::fit::{Fit, OVERHEAD_BYTES};
use requant::inspect::Inspection;
use serde_json::{Value, json};
use std::path::Path;
use support::binary::{FIXTURE, requant};
use support::open;

const EXL2: &str = "fixtures/tiny-llama-exl2-4.0bpw";

/// What is said of exllamav2's own directory with another configuration.
fn with_config(edit: impl FnOnce(&mut Value)) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(Path::new(EXL2).join("output.safetensors"), dir.path().join("output.safetensors")).unwrap();
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(Path::new(EXL2).join("config.json")).unwrap()).unwrap();
    edit(&mut config);
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let warnings = Inspection::new(&open(dir.path())).warnings;
    let odd = warnings.into_iter().filter(|w| w.code == WarningCode::Exllamav2Misreads);
    odd.map(|w| format!("{}: {}", w.subject, w.message)).collect()
}

#[test]
fn exllamav2s_own_directory_is_not_odd() {
    assert_eq!(with_config(|_| ()), [""; 0]);
}

#[test]
fn two_kinds_of_rope_scaling_are_told() {
    let said = with_config(|config| {
        config["rope_scaling"] = json!({"type": "linear", "rope_type": "linear", "factor": 2.0});
    });
    assert!(
        said.len() == 1 && said[0].starts_with("config.json: ") && said[0].contains("rope_type"),
        "{said:?}"
    );
}

#[test]
fn missing_biases_are_told() {
    // Then exllamav2 expects a bias on q, k, v and o of all three layers.
    let said = with_config(|config| config["attention_bias"] = json!(true));
    assert_eq!(said.iter().filter(|s| s.contains("bias")).count(), 12, "{said:?}");
}

#[test]
fn several_architectures_are_told() {
    let said =
        with_config(|config| config["architectures"] = json!(["LlamaForCausalLM", "MistralForCausalLM"]));
    assert!(said.iter().any(|s| s.contains("architectures")), "{said:?}");
}

/// Bytes that a token takes in the cache of the fixture: keys and values of 3 layers, each 4 heads of 32, fp16.
const OF_TOKEN: u64 = 2 * 3 * 4 * 32 * 2;

/// Bytes of its tensors: its one file without the header.
fn tensor_bytes() -> u64 {
    let bytes = std::fs::read(Path::new(FIXTURE).join("model.safetensors")).unwrap();
    bytes.len() as u64 - 8 - u64::from_le_bytes(bytes[..8].try_into().unwrap())
}

fn fit(vram: u64, context: u64) -> Fit {
    let checkpoint = open(FIXTURE.as_ref());
    Fit::new(&checkpoint, &Inspection::new(&checkpoint), vram, context).unwrap()
}

#[test]
fn a_model_fits_to_the_byte() {
    let needed = tensor_bytes() + 8192 * OF_TOKEN + OVERHEAD_BYTES;
    let exactly = fit(needed, 8192);
    assert_eq!((exactly.weight_bytes, exactly.cache_bytes), (tensor_bytes(), 8192 * OF_TOKEN));
    assert_eq!((exactly.total_bytes, exactly.fits), (needed, true));
    assert_eq!((exactly.largest_context, exactly.positions), (Some(8192), Some(1024)));
    let short = fit(needed - 1, 8192);
    assert_eq!((short.fits, short.largest_context), (false, Some(8191)));
    assert_eq!(fit(tensor_bytes() + OVERHEAD_BYTES, 1).largest_context, Some(0));
    assert_eq!(fit(tensor_bytes() + OVERHEAD_BYTES - 1, 1).largest_context, None);
}

#[test]
fn whether_it_fits_is_told_in_words_and_in_json() {
    let ask = |arguments: &[&str]| {
        let ran = requant().args(["inspect", FIXTURE]).args(arguments).output().unwrap();
        (ran.status.code(), String::from_utf8(ran.stdout).unwrap())
    };
    let (code, text) = ask(&["--vram", "24G", "--context", "8192"]);
    assert_eq!(code, Some(0));
    for part in ["\nfits: ", "12.0 MiB of cache for 8192 tokens", "24.0 GiB", "positions for 1024"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let (_, text) = ask(&["--vram", "64MiB"]);
    assert!(text.contains("\ndoes not fit: ") && text.contains("largest context that fits: none"), "{text}");
    let (_, json) = ask(&["--vram", "24GB", "--context", "100", "--json"]);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["fit"]["vram_bytes"], 24_000_000_000u64);
    assert_eq!(json["fit"]["cache_bytes"], 100 * OF_TOKEN);
    assert_eq!(json["fit"]["fits"], true);
    assert!(json["modules"].is_array());
    // Without a memory the question makes no sense, nor does a context of nothing.
    assert_eq!(ask(&["--context", "8192"]).0, Some(2));
    assert_eq!(ask(&["--vram", "24G", "--context", "0"]).0, Some(2));
    assert_eq!(ask(&["--vram", "24Q"]).0, Some(2));
}
