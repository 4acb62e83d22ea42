//! Validation of mixtures of experts: a projection of all experts is one unit.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use half::f16;
use requant::kernels::Cpu;
use requant::progress::Silent;
use requant::validate::report::LayerScores;
use requant::validate::{Layers, Options, SwapIn, Text, Validation, summary, validate};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use support::binary::{Converted, convert, requant};
use support::writer::{Model, Quantized, Tensor};
use support::{folder, open};
use tempfile::TempDir;

const TOKENS: usize = 256;

/// Single layers, and blocks, on as many tokens as the models.
fn validated(source: &Path, converted: &Path, layers: Layers) -> Validation {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ids.json");
    let ids: Vec<u32> = (0..TOKENS as u32).map(|i| (i * i * 7 + i * 3) % 48).collect();
    std::fs::write(&path, json!(ids).to_string()).unwrap();
    let swap_in = Some(SwapIn { layers, tokens: TOKENS });
    let options = Options { text: Text::TokenIds(path), window: Some(64), swap_in, ..Options::default() };
    validate(&open(source), &open(converted), &options, &Cpu::new(2), &Silent).unwrap()
}

/// A small mixture of four experts, its weights pseudo-random.
fn experts(architecture: &str) -> Model {
    let config = json!({
        "architectures": [architecture], "model_type": "qwen3_moe", "hidden_size": 64,
        "intermediate_size": 96, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 96,
        "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 48, "tie_word_embeddings": false,
        "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "norm_topk_prob": false, "max_position_embeddings": 256
    });
    let mut model = Model::of(config, &Quantized::default());
    let mut state = 1u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    for (name, tensor) in &mut model.tensors {
        let size = tensor.shape.iter().product();
        if name.ends_with("qweight") {
            tensor.bytes.iter_mut().for_each(|byte| *byte = (random() * 256.0) as u8);
        } else if ["embed_tokens", "gate", "lm_head"]
            .iter()
            .any(|end| name.ends_with(&format!("{end}.weight")))
        {
            // Small embeddings, so that what blocks add counts.
            let scale = if name.contains("embed") { 0.02 } else { 1.0 };
            let values: Vec<f32> = (0..size).map(|_| scale * (2.0 * random() - 1.0)).collect();
            *tensor = Tensor::f16s(&tensor.shape, &values);
        }
    }
    model
}

/// The sources: name and folder.
fn sources(written: &TempDir) -> Vec<(&'static str, PathBuf)> {
    let mut sources = vec![("written here", written.path().to_path_buf())];
    if let Some(assets) = folder("REQUANT_ASSETS") {
        sources.extend(["tiny-mixtral", "tiny-qwen3moe"].map(|name| (name, assets.join("tiny").join(name))));
    }
    sources
}

/// A converted weight in the source's order of rows and columns, `[n, k]`: read from the files and the report.
fn replacement(converted: &Converted, entry: &Value) -> Tensor {
    let module = converted.checkpoint.module(entry["name"].as_str().unwrap()).unwrap();
    let (k, n) = (module.in_features(), module.out_features());
    let weights = converted.checkpoint.dequantize(module).unwrap();
    let entries = converted.report["modules"].as_array().unwrap();
    let order = |source: &Value, len: usize| -> Vec<usize> {
        let of = entries.iter().find(|other| &other["source"] == source);
        let order = of.and_then(|entry| serde_json::from_value(entry["row_order"].clone()).ok());
        order.unwrap_or_else(|| (0..len).collect())
    };
    let (rows, columns) = (order(&entry["source"], k), order(&entry["decision"]["columns_follow"], n));
    let mut turned = vec![f16::ZERO; k * n];
    for (i, &weight) in weights.iter().enumerate() {
        turned[columns[i % n] * k + rows[i / n]] = weight;
    }
    Tensor::of("F16", &[n, k], bytemuck::cast_slice(&turned))
}

fn of_unit<'a>(validation: &'a Validation, layer: usize, role: &str) -> Vec<&'a LayerScores> {
    validation.layers.iter().filter(|l| l.layer == Some(layer) && l.role == role).collect()
}

/// The whole-model figures of a directory in which just these linears are the converted ones.
#[test]
fn a_projection_alone_is_the_model_in_which_just_its_experts_are_converted() {
    let written = experts("Qwen3MoeForCausalLM").write();
    for (name, source) in sources(&written) {
        let converted = convert(&source, &["--bits", "3", "--group-size", "32"]);
        let validation = validated(&source, &converted.out, Layers::All);
        let dense = tempfile::tempdir().unwrap();
        let dense = dense.path().join("fp16");
        requant().arg("convert").arg(&source).args(["--to", "fp16", "--out"]).arg(&dense).assert().success();
        for (layer, role) in [(0, "gate"), (1, "up"), (1, "down"), (1, "o")] {
            let unit = of_unit(&validation, layer, role);
            let experts = if role == "o" { 1 } else { 4 };
            assert_eq!(unit.len(), experts, "{name} {role}");
            let swap = unit[0].swap_in.unwrap();
            let mut mixed = Model::read(&dense);
            for member in &unit {
                let other = member.swap_in.unwrap();
                assert_eq!(
                    (other.kl, other.perplexity),
                    (swap.kl, swap.perplexity),
                    "{name} {}",
                    member.source
                );
                let mut entries = converted.report["modules"].as_array().unwrap().iter();
                let entry = entries.find(|entry| entry["source"] == member.source.as_str()).unwrap();
                mixed.put(&member.source, "weight", replacement(&converted, entry));
            }
            let dir = mixed.write();
            let alone = validated(&source, dir.path(), Layers::Worst(0));
            let whole = alone.model.unwrap();
            let what = format!("{name} {layer} {role}");
            assert!(swap.kl > 1e-5, "{what}: {}", swap.kl);
            assert_eq!((swap.kl, swap.perplexity), (whole.kl.mean, whole.converted_perplexity), "{what}");
            let changed = alone.layers.iter().filter(|layer| layer.weight_error > 0.0).count();
            assert_eq!(changed, experts, "{what}");
        }
        let (last, whole) = (validation.cumulative.last().unwrap(), validation.model.unwrap());
        assert!((last.kl / whole.kl.mean - 1.0).abs() < 1e-9, "{name}: {} {}", last.kl, whole.kl.mean);
        assert!((last.perplexity / whole.converted_perplexity - 1.0).abs() < 1e-9, "{name}");
    }
}

#[test]
fn a_shared_expert_is_converted_with_the_others() {
    let mut model = experts("Qwen2MoeForCausalLM");
    let source = model.write();
    let unit = |name: &str| name.starts_with("model.layers.1.") && name.ends_with("down_proj.scales");
    for (_, scales) in model.tensors.iter_mut().filter(|(name, _)| unit(name)) {
        let shrunk: Vec<f16> = (scales.bytes.as_chunks::<2>().0.iter())
            .map(|&scale| f16::from_f32(f16::from_le_bytes(scale).to_f32() * 0.8))
            .collect();
        *scales = Tensor::of("F16", &scales.shape, bytemuck::cast_slice(&shrunk));
    }
    let validation = validated(source.path(), model.write().path(), Layers::All);
    let unit = of_unit(&validation, 1, "down");
    assert_eq!((unit.len(), unit.iter().filter(|layer| layer.expert.is_none()).count()), (5, 1));
    let whole = validation.model.as_ref().unwrap();
    for member in &unit {
        let swap = member.swap_in.unwrap();
        assert_eq!((swap.kl, swap.perplexity), (whole.kl.mean, whole.converted_perplexity));
    }
    assert!(whole.kl.mean > 1e-6, "{}", whole.kl.mean);
    let shared = unit.into_iter().find(|layer| layer.expert.is_none()).unwrap();
    let cost = summary::cost(&validation, shared);
    assert!(cost.contains("this projection of all experts alone"), "{cost}");
}

/// The rule that the advice names is taken, and widens the projection of all experts, and nothing else.
#[test]
fn the_advice_widens_all_experts_of_the_worst_projection() {
    let written = experts("Qwen3MoeForCausalLM").write();
    for (name, source) in sources(&written) {
        let converted = convert(&source, &["--bits", "2", "--group-size", "32"]);
        let mut validation = validated(&source, &converted.out, Layers::Worst(0));
        // Whatever is worst: here it is to be an expert's.
        validation.layers.retain(|layer| layer.role == "down");
        let worst = summary::worst(&validation).unwrap();
        let advice = summary::advice(&validation);
        let rule = advice.split_once("--set '").unwrap().1.split_once('\'').unwrap().0;
        assert!(advice.contains("projection of all experts"), "{advice}");
        let again = convert(&source, &["--bits", "2", "--group-size", "32", "--set", rule]);
        let widened = |layer: &Value| {
            let name = layer["name"].as_str().unwrap();
            again.widths(name) != converted.widths(name)
        };
        let widened: Vec<&str> = (again.report["modules"].as_array().unwrap().iter())
            .filter(|module| module["layout_after"] == "exl2" && widened(module))
            .map(|module| module["source"].as_str().unwrap())
            .collect();
        let unit: Vec<&str> = of_unit(&validation, worst.layer.unwrap(), "down")
            .iter()
            .map(|layer| layer.source.as_str())
            .collect();
        assert_eq!(widened, unit, "{name}: {rule}");
    }
}
