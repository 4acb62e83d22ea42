//! What `inspect` says of EXL2 directories that exllamav2 would fail on or misread.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use requant::WarningCode;
use requant::inspect::Inspection;
use serde_json::{Value, json};
use std::path::Path;
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
