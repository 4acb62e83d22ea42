//! Who loads a checkpoint, and at which numbers of GPUs: verdicts on files that somebody else made.
//!
//! What is expected is what the programs' own code does, as the formats' specifications collect it.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use requant::formats::gptq::ZeroConvention;
use requant::plan::readers::READERS;
use serde_json::{Value, json};
use std::path::Path;
use support::binary::{FIXTURE, requant};
use support::folder;
use support::writer::{DOWN, Model, Q, Quantized, Sizes, Tensor, gptq_module};

const EXL2: &str = "fixtures/tiny-llama-exl2-4.0bpw";

/// What `inspect --json` answers; the question is answered, so that the exit code is 0.
fn inspect(dir: &Path, flags: &[&str]) -> Value {
    let ran = requant().arg("inspect").arg(dir).arg("--json").args(flags).output().unwrap();
    assert_eq!((ran.status.code(), ran.stderr.as_slice()), (Some(0), b"".as_slice()), "{flags:?}");
    serde_json::from_slice(&ran.stdout).unwrap()
}

/// The programs that load it, in the table's order.
fn loaders(dir: &Path) -> Vec<String> {
    let answer = inspect(dir, &["--for", "all"]);
    let verdicts = answer["for"].as_array().unwrap();
    assert_eq!(verdicts.len(), READERS.len());
    for verdict in verdicts {
        // Who doesn't load it is told why.
        assert_eq!(verdict["loads"] == false, verdict["reasons"][0].is_object(), "{verdict}");
    }
    let loads = verdicts.iter().filter(|verdict| verdict["loads"] == true);
    loads.map(|verdict| verdict["reader"].as_str().unwrap().to_owned()).collect()
}

/// Why a program doesn't load a model: subjects and messages.
fn reasons(model: &Model, reader: &str) -> Vec<(Vec<String>, String)> {
    let answer = inspect(model.write().path(), &["--for", reader]);
    let reasons = answer["for"][0]["reasons"].as_array().unwrap().iter();
    reasons
        .map(|reason| {
            let subjects = reason["subjects"].as_array().unwrap().iter();
            let subjects = subjects.map(|subject| subject.as_str().unwrap().to_owned());
            (subjects.collect(), reason["message"].as_str().unwrap().to_owned())
        })
        .collect()
}

/// A model that every program loads: 4 bits, groups of 64 in order, sizes that are multiples of 128.
fn plain() -> Model {
    let sizes = Sizes { hidden: 128, intermediate: 256, heads: 4, head_dim: 32, layers: 1, vocab: 128 };
    Model::sized(&Quantized { group_size: 64, ..Quantized::default() }, &sizes)
}

#[test]
fn a_plain_model_is_loaded_by_all() {
    assert_eq!(loaders(plain().write().path()).len(), READERS.len());
}

#[test]
fn the_fixtures() {
    // Act-order, which vLLM no longer reads.
    let but_vllm = ["vllm-0.10", "sglang", "exllamav2", "gptqmodel", "transformers", "tgi", "aphrodite"];
    assert_eq!(loaders(Path::new(FIXTURE)), but_vllm);
    assert_eq!(loaders(Path::new(EXL2)), ["exllamav2", "tgi"]);
    let answer = inspect(Path::new(EXL2), &["--for", "aphrodite,vllm,aphrodite"]);
    let verdicts = answer["for"].as_array().unwrap();
    // Each once, as asked for.
    assert_eq!(verdicts.len(), 2);
    assert_eq!(verdicts[0]["reasons"][0]["subjects"], json!(["lm_head"]));
    assert_eq!(verdicts[1]["reasons"][0]["message"], "it does not load EXL2");
}

#[test]
fn the_tiny_checkpoints() {
    let Some(assets) = folder("REQUANT_ASSETS") else { return };
    let all = ["vllm", "vllm-0.10", "sglang", "exllamav2", "gptqmodel", "transformers", "tgi", "aphrodite"];
    let without = |gone: &[&str]| -> Vec<String> {
        all.iter().filter(|name| !gone.contains(name)).map(ToString::to_string).collect()
    };
    let own = ["vllm", "vllm-0.10", "sglang", "exllamav2", "tgi", "aphrodite"];
    for (name, refuse) in [
        // One zero point of 0, whose borrow only GPTQModel undoes.
        ("tiny-llama-2bit", &own[..]),
        ("tiny-llama-3bit", &["vllm", "sglang", "exllamav2", "tgi"]),
        ("tiny-llama-8bit", &["vllm", "exllamav2"]),
        ("tiny-llama-asym", &["vllm", "sglang"]),
        ("tiny-llama-autogptq", &[]),
        ("tiny-llama-g128", &[]),
        ("tiny-llama-perchannel", &[]),
        // k_proj dense beside quantized ones, down_proj of 8 bits.
        ("tiny-llama-dynamic", &own),
        // exllamav2 obeys the label of config.json; SGLang ignores zero points.
        ("tiny-llama-v2", &["vllm", "vllm-0.10", "tgi", "aphrodite"]),
        ("tiny-llama", &["vllm"]),
        // rope_theta of 1e6 where exllamav2 0.3.2 doesn't look.
        ("tiny-qwen3", &["vllm", "exllamav2"]),
    ] {
        assert_eq!(loaders(&assets.join("tiny").join(name)), without(refuse), "{name}");
    }
}

#[test]
fn what_the_configuration_says_counts_for_those_who_go_by_it() {
    let mut denied = plain();
    let order: Vec<i32> = (0..128).map(|row| row % 2).collect();
    denied.put(Q, "g_idx", Tensor::i32s(&[128], &order));
    for reader in ["vllm-0.10", "sglang", "tgi", "aphrodite"] {
        let reasons = reasons(&denied, reader);
        assert!(
            reasons
                .iter()
                .any(|(subjects, message)| *subjects == [Q] && message.contains("denies act-order")),
            "{reader}: {reasons:?}"
        );
    }
    for reader in ["exllamav2", "gptqmodel"] {
        assert_eq!(reasons(&denied, reader), [], "{reader}");
    }
    let mut silent = plain();
    silent.quant.as_mut().unwrap().as_object_mut().unwrap().remove("desc_act");
    assert_eq!(reasons(&silent, "vllm")[0].1, "its configuration must say desc_act");
    assert_eq!(reasons(&silent, "gptqmodel"), []);
    let mut none = plain();
    none.quant = None;
    assert!(reasons(&none, "vllm")[0].1.starts_with("nothing configures the quantization"));
    assert_eq!(reasons(&none, "exllamav2"), []);
}

#[test]
fn zero_points_that_the_label_lies_about() {
    let how = Quantized { group_size: 64, convention: ZeroConvention::V2, ..Quantized::default() };
    let sizes = Sizes { hidden: 128, intermediate: 256, heads: 4, head_dim: 32, layers: 1, vocab: 128 };
    let mut model = Model::sized(&how, &sizes);
    model.set("checkpoint_format", json!("gptq"));
    let answer = inspect(model.write().path(), &["--for", "all"]);
    let zeros = json!([{"convention": "v2", "evidence": "values", "modules": 7}]);
    assert_eq!(answer["summary"]["zeros"], zeros);
    // Those that ignore them compute what was meant; all others are a step off in every weight.
    let dir = model.write();
    assert_eq!(loaders(dir.path()), ["vllm", "sglang"]);
    let text = requant().arg("inspect").arg(dir.path()).args(["--for", "transformers"]).output().unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("zero points: v2 in 7 modules, which their values show"), "{text}");
    assert!(
        text.contains("and 6 more: its zero points are v2, and it reads v1: every weight is a step off"),
        "{text}"
    );
}

#[test]
fn parts_that_a_server_joins_and_rules_that_it_does_not_read() {
    let mut model = plain();
    let small = Quantized { group_size: 32, ..Quantized::default() };
    gptq_module(&mut model.tensors, Q, 128, 128, &small);
    model.set("dynamic", json!({"+:.*q_proj$": {"group_size": 32}}));
    const K: &str = "model.layers.0.self_attn.k_proj";
    for (reader, subject, said) in [
        ("vllm", K, "joins the module with its siblings"),
        ("sglang", K, "joins the module with its siblings"),
        // Without `dynamic`: the module isn't as the one configuration says.
        ("tgi", Q, "which gives other bits or groups than the tensors"),
    ] {
        let reasons = reasons(&model, reader);
        let found = reasons
            .iter()
            .any(|(subjects, message)| subjects.contains(&subject.into()) && message.contains(said));
        assert!(found, "{reader}: {reasons:?}");
    }
    for reader in ["gptqmodel", "transformers", "exllamav2"] {
        assert_eq!(reasons(&model, reader), [], "{reader}");
    }
}

#[test]
fn a_bias_that_has_no_place_and_an_index_that_is_missing() {
    let mut biased = plain();
    biased.put(Q, "bias", Tensor::f16s(&[128], &[0.5; 128]));
    assert!(reasons(&biased, "vllm")[0].1.contains("leaves it out"));
    assert!(reasons(&biased, "exllamav2")[0].1.contains("expects no bias"));
    biased.put(Q, "bias", Tensor::f16s(&[128], &[0.0; 128]));
    assert_eq!((reasons(&biased, "vllm"), reasons(&biased, "exllamav2")), (vec![], vec![]));
    let mut old = plain();
    old.remove_all("g_idx");
    assert_eq!(reasons(&old, "tgi")[0].1, "it stops where there is no g_idx");
    assert_eq!(reasons(&old, "sglang"), []);
}

#[test]
fn what_is_not_whole_is_an_error() {
    let dir = plain().write();
    let path = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    let ran = requant().arg("inspect").arg(dir.path()).args(["--for", "all", "--json"]).output().unwrap();
    let error: Value = serde_json::from_slice(&ran.stderr).unwrap();
    assert_eq!((ran.status.code(), &error["code"]), (Some(3), &json!("checkpoint.truncated")));
    let ran = requant().args(["inspect", FIXTURE, "--for", "ollama"]).output().unwrap();
    assert_eq!(ran.status.code(), Some(2));
}

// Tensor parallelism.

fn tp(dir: &Path, size: &str) -> Value {
    inspect(dir, &["--tp", size])["tp"].clone()
}

#[test]
fn a_group_that_straddles_the_border_of_two_gpus() {
    // 192 rows of groups of 64: a half ends in the middle of the second.
    let sizes = Sizes { hidden: 128, intermediate: 192, heads: 4, head_dim: 32, layers: 1, vocab: 128 };
    let model = |group_size| Model::sized(&Quantized { group_size, ..Quantized::default() }, &sizes).write();
    let found = tp(model(64).path(), "2");
    assert_eq!((&found["works"], &found["sizes"]), (&json!(false), &json!([1])));
    let expected = json!([{"subjects": [DOWN], "message": "a share of 96 rows ends inside a group of 64"}]);
    assert_eq!(found["reasons"], expected);
    // Split in two it is safe: 96 = 3 · 32. Four GPUs get 48 rows each.
    let found = tp(model(32).path(), "2");
    assert_eq!((&found["works"], &found["sizes"]), (&json!(true), &json!([1, 2])));
    // Whose rules these are is said.
    assert_eq!(found["programs"], json!(["vllm", "vllm-0.10", "sglang", "tgi"]));
    let text = requant().arg("inspect").arg(model(32).path()).args(["--tp", "2"]).output().unwrap().stdout;
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains("for 2 GPUs in vllm, vllm-0.10, sglang, tgi: can be cut"), "{text}");
    let exl2 = tp(Path::new("fixtures/tiny-llama-exl2-4.0bpw"), "2");
    assert_eq!(exl2["programs"], json!(["exllamav2"]));
}

#[test]
fn act_order_in_what_is_cut_by_rows() {
    let mut model = plain();
    let order: Vec<i32> = (0..256).map(|row| row % 4).collect();
    model.put(DOWN, "g_idx", Tensor::i32s(&[256], &order));
    let found = tp(model.write().path(), "2");
    assert_eq!(found["reasons"][0]["subjects"], json!([DOWN]));
    // In what is cut by columns it does no harm.
    let mut model = plain();
    let order: Vec<i32> = (0..128).map(|row| row % 2).collect();
    model.put(Q, "g_idx", Tensor::i32s(&[128], &order));
    assert_eq!(tp(model.write().path(), "2")["works"], true);
}

#[test]
fn parts_of_a_fused_linear_are_cut_by_themselves() {
    let of = |intermediate: usize| {
        let config = json!({
            "architectures": ["Phi3ForCausalLM"], "hidden_size": 128, "intermediate_size": intermediate,
            "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
            "rope_theta": 10000.0
        });
        Model::of(config, &Quantized::default()).write()
    };
    // Two heads of keys and values are given to four GPUs twice.
    assert_eq!(tp(of(256).path(), "4")["works"], true);
    // 2 · 96 columns of gate_up make four shares of 48, but gate and up are cut each: 24.
    let found = tp(of(96).path(), "4");
    assert_eq!(found["reasons"][0]["subjects"], json!(["model.layers.0.mlp.gate_up_proj"]));
    let message = found["reasons"][0]["message"].as_str().unwrap();
    assert!(message.starts_with("96 columns make no 4 shares"), "{found}");
}

#[test]
fn heads_and_exl2() {
    let found = tp(plain().write().path(), "3");
    assert!(found["reasons"][0]["message"].as_str().unwrap().starts_with("4 attention heads"), "{found}");
    assert_eq!(found["sizes"], json!([1, 2]));
    assert_eq!(tp(Path::new(EXL2), "2")["works"], true);
    let mut unknown = plain();
    unknown.config["architectures"] = json!(["SomethingNew"]);
    let dir = unknown.write();
    let ran = requant().arg("inspect").arg(dir.path()).args(["--tp", "2"]).output().unwrap();
    assert_eq!(ran.status.code(), Some(2));
}
