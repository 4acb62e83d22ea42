//! Faults that were found by trying to break the work, each kept from coming back.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use requant::WarningCode;
use serde_json::json;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use support::binary::{FIXTURE, convert, refuse_model};
use support::open;
use support::writer::{HIDDEN, Model, Q, Quantized, Tensor};

/// The number of layers was bounded by tensors over experts, although these layers have none.
#[test]
fn a_mixture_of_plain_blocks_keeps_all_of_them() {
    let mut model = Model::read(Path::new(FIXTURE));
    model.config["architectures"] = json!(["Qwen3MoeForCausalLM"]);
    model.config["num_experts"] = json!(128);
    model.config["moe_intermediate_size"] = json!(64);
    model.config["mlp_only_layers"] = json!([0, 1, 2]);
    for layer in 0..3 {
        for norm in ["q_norm", "k_norm"] {
            let name = format!("model.layers.{layer}.self_attn.{norm}.weight");
            model.tensors.insert(name, Tensor::f16s(&[32], &[1.0; 32]));
        }
    }
    let dir = model.write();
    let source = open(dir.path());
    let converted = convert(dir.path(), &["--bits", "4"]);
    assert_eq!(converted.assert_errors(&source), 21);
}

#[test]
fn tensors_that_the_architecture_has_no_use_for_are_told() {
    let mut model = Model::new(&Quantized::default());
    for name in ["model.layers.0.self_attn.sinks", "model.norm.bias"] {
        model.tensors.insert(name.into(), Tensor::f16s(&[2], &[1.0; 2]));
    }
    model.tensors.insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), Tensor::f32s(&[1], &[1.0]));
    let dir = model.write();
    let checkpoint = open(dir.path());
    let [warning] = checkpoint.warnings() else { panic!("{:?}", checkpoint.warnings()) };
    assert_eq!(warning.code, WarningCode::TensorsUnused);
    assert!(warning.message.contains("and 1 more"), "{}", warning.message);
}

#[test]
fn a_dense_layer_beyond_the_configurations_is_refused() {
    let mut model = Model::new(&Quantized::default());
    let name = "model.layers.1.self_attn.q_proj.weight";
    model.tensors.insert(name.into(), Tensor::f16s(&[HIDDEN, HIDDEN], &vec![1.0; HIDDEN * HIDDEN]));
    let refused = refuse_model(&model, &["--bits", "4"]);
    assert_eq!((refused.exit, refused.text("tensor")), (3, name));
}

#[test]
fn a_bias_is_trimmed_with_the_padding_of_its_module() {
    let mut model = Model::new(&Quantized::default());
    let mut bias = vec![0.25; HIDDEN];
    bias.resize(HIDDEN + 32, 0.0);
    model.pad_columns(Q, HIDDEN).put(Q, "bias", Tensor::f16s(&[HIDDEN + 32], &bias));
    for part in ["k", "v", "o"] {
        let name = Q.replace("q_proj", &format!("{part}_proj"));
        model.put(&name, "bias", Tensor::f16s(&[HIDDEN], &vec![0.5; HIDDEN]));
    }
    model.config["attention_bias"] = json!(true);
    let dir = model.write();
    let converted = convert(dir.path(), &["--bits", "4"]);
    let written = converted.checkpoint.tensor(&format!("{Q}.bias")).unwrap();
    assert_eq!(written.floats().unwrap(), vec![0.25; HIDDEN]);

    bias[HIDDEN + 3] = 1.0;
    model.put(Q, "bias", Tensor::f16s(&[HIDDEN + 32], &bias));
    let refused = refuse_model(&model, &["--bits", "4"]);
    assert_eq!((refused.exit, refused.text("tensor")), (3, format!("{Q}.bias").as_str()));
}

#[test]
fn a_pipe_in_place_of_a_configuration_does_not_hang() {
    let dir = Model::new(&Quantized::default()).write();
    for file in ["config.json", "quantize_config.json"] {
        let path = dir.path().join(file);
        let text = std::fs::read(&path).ok();
        let _ = std::fs::remove_file(&path);
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let mut child = Command::new(env!("CARGO_BIN_EXE_requant"))
            .arg("inspect")
            .arg(dir.path())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let started = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if started.elapsed() > Duration::from_secs(20) {
                child.kill().unwrap();
                panic!("{file}: still waiting for a pipe");
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        assert!(matches!(status.code(), Some(3 | 4)), "{file}: {status}");
        std::fs::remove_file(&path).unwrap();
        if let Some(text) = text {
            std::fs::write(&path, text).unwrap();
        }
    }
}

/// A link that leads nowhere failed the job after all its work.
#[test]
fn side_files_that_lead_nowhere_are_left_out() {
    let dir = Model::new(&Quantized::default()).write();
    std::os::unix::fs::symlink("loop", dir.path().join("loop")).unwrap();
    std::os::unix::fs::symlink("config.json/x", dir.path().join("no-directory")).unwrap();
    let converted = convert(dir.path(), &["--bits", "4"]);
    let skipped = converted.report["side_files"]["skipped"].as_array().unwrap();
    for name in ["loop", "no-directory"] {
        assert!(skipped.iter().any(|s| s["name"] == name && s["reason"] == "broken_link"), "{skipped:?}");
    }
}
