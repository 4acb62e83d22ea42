//! down_proj's act-order folded through a fused gate_up: both halves of its columns follow.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

#[path = "support/outputs.rs"]
mod outputs;
mod support;

use half::f16;
use outputs::{gptq, sorted, source};
use requant::WarningCode;
use requant::checkpoint::{Layout, OpenOptions};
use requant::formats::gptq::GIdxKind;
use requant::progress::Silent;
use requant::verify::{CheckKind, verify};
use serde_json::json;
use support::writer::{DOWN, HIDDEN, INTERMEDIATE, Model, Quantized, Tensor, gptq_module};

const GATE_UP: &str = "model.layers.0.mlp.gate_up_proj";

/// A block of Phi-3: fused q/k/v and gate/up, these with a bias, and down_proj in act-order.
fn phi3() -> Model {
    let how = Quantized::default();
    let mut model = Model::new(&how);
    model.config["architectures"] = json!(["Phi3ForCausalLM"]);
    model.config["model_type"] = json!("phi3");
    let fused = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"];
    model.tensors.retain(|name, _| !fused.iter().any(|part| name.contains(part)));
    gptq_module(&mut model.tensors, "model.layers.0.self_attn.qkv_proj", HIDDEN, 3 * HIDDEN, &how);
    gptq_module(&mut model.tensors, GATE_UP, HIDDEN, 2 * INTERMEDIATE, &how);
    let bias: Vec<f32> = (0..2 * INTERMEDIATE).map(|column| column as f32 / 64.0 - 1.0).collect();
    model.put(GATE_UP, "bias", Tensor::f16s(&[2 * INTERMEDIATE], &bias));
    let groups: Vec<i32> = (0..INTERMEDIATE).map(|row| (row * 5 % 3) as i32).collect();
    model.put(DOWN, "g_idx", Tensor::i32s(&[INTERMEDIATE], &groups));
    model.set("desc_act", json!(true));
    model
}

#[test]
fn both_halves_follow_and_undoing_the_order_gives_the_source() {
    let dir = phi3().write();
    let from = source(dir.path());
    assert_eq!(from.module(GATE_UP).unwrap().linears().len(), 2);
    let out = gptq(&from, &sorted()).unwrap();
    let (to, report) = (source(&out.dir), out.report());
    assert!(!report["warnings"].to_string().contains("not_folded"), "{}", report["warnings"]);
    let entry = |name: &str| {
        let modules = report["modules"].as_array().unwrap();
        modules.iter().find(|module| module["name"] == name).unwrap().clone()
    };
    let order: Vec<usize> = serde_json::from_value(entry(DOWN)["row_order"].clone()).unwrap();
    // What the order must be: rows stably sorted by group.
    let mut by_group: Vec<usize> = (0..INTERMEDIATE).collect();
    by_group.sort_by_key(|row| row * 5 % 3);
    assert_eq!(order, by_group);
    assert_eq!(entry(GATE_UP)["decision"]["columns_follow"], DOWN);
    assert_eq!(entry(GATE_UP)["exactness"], "exact");

    let weights = |checkpoint: &requant::checkpoint::Checkpoint, name: &str| -> Vec<f16> {
        checkpoint.dequantize(checkpoint.module(name).unwrap()).unwrap()
    };
    let n = 2 * INTERMEDIATE;
    let place = |column: usize| column / INTERMEDIATE * INTERMEDIATE + order[column % INTERMEDIATE];
    let (before, after) = (weights(&from, GATE_UP), weights(&to, GATE_UP));
    assert_ne!(before, after);
    assert!((0..before.len()).all(|at| after[at] == before[at / n * n + place(at % n)]));
    let bias = |checkpoint: &requant::checkpoint::Checkpoint| {
        checkpoint.tensor(&format!("{GATE_UP}.bias")).unwrap().floats().unwrap()
    };
    assert!((0..n).all(|column| bias(&to)[column] == bias(&from)[place(column)]));
    let (before, after) = (weights(&from, DOWN), weights(&to, DOWN));
    assert!(
        (0..INTERMEDIATE)
            .all(|row| after[row * HIDDEN..][..HIDDEN] == before[order[row] * HIDDEN..][..HIDDEN])
    );
    let Layout::Gptq(down) = to.module(DOWN).unwrap().layout() else { panic!() };
    assert_eq!(down.g_idx, GIdxKind::Sequential);
}

#[test]
fn verify_follows_both_halves() {
    let dir = phi3().write();
    let from = source(dir.path());
    let out = gptq(&from, &sorted()).unwrap();
    let found = verify(&out.dir, &OpenOptions::default(), Some(&from), &Silent).unwrap();
    assert!(found.good, "{found:#?}");
    // Another bias in the second half: found.
    out.edit_tensor(&format!("{GATE_UP}.bias"), |bytes| bytes.swap(2 * INTERMEDIATE, 2 * INTERMEDIATE + 2));
    out.restate();
    let found = verify(&out.dir, &OpenOptions::default(), Some(&from), &Silent).unwrap();
    let faults: Vec<_> = found.faults().map(|(kind, fault)| (kind, fault.tensor.clone())).collect();
    assert_eq!(faults, [(CheckKind::Exactness, Some(format!("{GATE_UP}.bias")))]);
}

#[test]
fn a_dense_half_keeps_the_order() {
    let mut model = phi3();
    model.make_dense(GATE_UP, HIDDEN, 2 * INTERMEDIATE);
    let dir = model.write();
    let from = source(dir.path());
    let out = gptq(&from, &sorted()).unwrap();
    let warned = out.report()["warnings"].to_string();
    assert!(warned.contains("not_folded"), "{warned}");
    assert!(from.warnings().iter().all(|warning| warning.code != WarningCode::NotFolded));
    let Layout::Gptq(down) = source(&out.dir).module(DOWN).unwrap().layout().clone() else { panic!() };
    assert_eq!(down.g_idx, GIdxKind::ActOrder);
}
