//! What becomes of sources that are odd but valid: dense parts, biases, other types, heads, experts, groups.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use half::f16;
use requant::checkpoint::{Checkpoint, Layout};
use serde_json::json;
use std::path::Path;
use support::binary::{Converted, convert, convert_model, quantized, refuse, refuse_model};
use support::writer::{HIDDEN, LINEARS, Model, Q, Quantized, Sizes, Tensor, VOCAB};
use support::{folder, open};

const O: &str = "model.layers.0.self_attn.o_proj";
const EMBEDDING: &str = "model.embed_tokens.weight";

fn model() -> Model {
    Model::new(&Quantized::default())
}

/// Stored bytes of a tensor.
fn bytes<'a>(checkpoint: &'a Checkpoint, name: &str) -> &'a [u8] {
    checkpoint.tensor(name).unwrap_or_else(|| panic!("no {name}")).bytes()
}

fn is_exl2(converted: &Converted, module: &str) -> bool {
    matches!(converted.checkpoint.module(module).unwrap().layout(), Layout::Exl2(_))
}

// Sets that are loaded together.

#[test]
fn a_dense_member_gets_the_widest_option() {
    let Some(assets) = folder("REQUANT_ASSETS") else { return };
    let dir = assets.join("tiny/tiny-llama-dynamic");
    let dense = "model.layers.0.self_attn.k_proj";
    for flags in [["--bpw", "4.25"], ["--bits", "4"]] {
        let converted = convert(&dir, &flags);
        converted.assert_errors(&open(&dir));
        let expected = if flags[0] == "--bpw" { (8, json!(32)) } else { (4, json!(64)) };
        let entry = converted.module(dense);
        assert_eq!((converted.widths(dense), &entry["group_size"]), (vec![expected.0], &expected.1));
        assert_eq!(entry["layout_before"], "dense fp16");
        let warnings = converted.warnings("dense_member_quantized");
        let [(subject, message)] = &warnings[..] else { panic!("{warnings:?}") };
        assert_eq!(subject, "model.layers.0.self_attn");
        // 256 · 128 weights.
        assert!(message.contains("k_proj") && message.contains("524288 bits"), "{message}");
    }
}

#[test]
fn a_dense_member_can_make_its_set_dense_or_stop_the_job() {
    let Some(assets) = folder("REQUANT_ASSETS") else { return };
    let dir = assets.join("tiny/tiny-llama-dynamic");
    let converted = convert(&dir, &["--bpw", "4.25", "--dense-members", "dequantize-set"]);
    let source = open(&dir);
    assert_eq!(converted.assert_errors(&source), 21 - 4);
    for part in ["q", "k", "v", "o"] {
        let name = format!("model.layers.0.self_attn.{part}_proj");
        assert!(!is_exl2(&converted, &name) && is_exl2(&converted, &name.replace(".0.", ".1.")));
        assert_eq!(converted.module(&name)["relative_error"], 0.0);
        let exactness = if part == "k" { "identical" } else { "exact" };
        assert_eq!(converted.module(&name)["exactness"], exactness, "{name}");
    }
    assert_eq!(converted.warning_codes(), ["set_dequantized"]);
    let refused = refuse(&dir, &["--bpw", "4.25", "--dense-members", "error"]);
    assert_eq!((refused.exit, refused.text("code")), (3, "plan.dense_member"));
    assert_eq!(refused.text("tensor"), "model.layers.0.self_attn.k_proj");
}

#[test]
fn a_set_that_is_wholly_dense_stays_so() {
    let mut model = model();
    for (name, k, n) in &LINEARS[..4] {
        model.make_dense(name, *k, *n);
    }
    let converted = convert_model(&model, &["--bpw", "5"]);
    assert_eq!(quantized(&converted, &model), 3);
    for (name, ..) in &LINEARS[..4] {
        let weight = format!("{name}.weight");
        assert_eq!(bytes(&converted.checkpoint, &weight), model.tensors[&weight].bytes, "{name}");
    }
    let warnings = converted.warnings("dense_set_kept");
    let [(subject, message)] = &warnings[..] else { panic!("{warnings:?}") };
    // 4 · 64 · 64 weights of 16 bits.
    assert!(subject == "model.layers.0.self_attn" && message.contains("262144 bits"), "{subject}: {message}");
}

#[test]
fn a_set_of_sizes_that_exl2_cannot_hold_becomes_dense() {
    let how = Quantized { group_size: 8, ..Quantized::default() };
    let model = Model::sized(&how, &Sizes { intermediate: 72, ..Sizes::default() });
    let converted = convert_model(&model, &["--bits", "4"]);
    assert_eq!(quantized(&converted, &model), 4);
    let warnings = converted.warnings("odd_size");
    let [(subject, message)] = &warnings[..] else { panic!("{warnings:?}") };
    assert!(subject == "model.layers.0.mlp" && message.contains("is 72"), "{subject}: {message}");
    for (name, ..) in &LINEARS[4..] {
        assert!(!is_exl2(&converted, name), "{name}");
    }

    let nothing_left = Sizes { hidden: 72, intermediate: 104, head_dim: 40, ..Sizes::default() };
    let refused = refuse_model(&Model::sized(&how, &nothing_left), &["--bits", "4"]);
    assert_eq!((refused.exit, refused.text("code")), (3, "plan.nothing_to_quantize"));
}

#[test]
fn a_wholly_dense_source_is_quantized() {
    let mut dense = model();
    for (name, k, n) in LINEARS {
        dense.make_dense(name, k, n);
    }
    dense.quant = None;
    let dir = dense.write();
    let converted = convert(dir.path(), &["--bpw", "6.5"]);
    assert_eq!(converted.assert_errors(&open(dir.path())), LINEARS.len());
}

#[test]
fn an_exl2_source_is_refused() {
    let refused = refuse(Path::new("fixtures/tiny-llama-exl2-4.0bpw"), &["--bpw", "4.25"]);
    assert_eq!((refused.exit, refused.text("code")), (3, "plan.already_exl2"));
    assert_eq!(refused.text("tensor"), "model.layers.0.self_attn.q_proj");
}

// Experts.

#[test]
fn routers_stay_dense() {
    let Some(assets) = folder("REQUANT_ASSETS") else { return };
    for (name, module, experts) in [("tiny-mixtral", "block_sparse_moe", 4), ("tiny-qwen3moe", "mlp", 4)] {
        let dir = assets.join("tiny").join(name);
        let (source, converted) = (open(&dir), convert(&dir, &["--bits", "4"]));
        let layers = source.dims().unwrap().layers;
        assert_eq!(converted.assert_errors(&source), layers * (4 + 3 * experts));
        for layer in 0..layers {
            let router = format!("model.layers.{layer}.{module}.gate.weight");
            assert_eq!(bytes(&converted.checkpoint, &router), bytes(&source, &router));
        }
    }
}

#[test]
fn gptqmodels_names_of_mixtrals_experts_become_those_of_exllamav2() {
    let Some(assets) = folder("REQUANT_ASSETS") else { return };
    let dir = assets.join("tiny/tiny-mixtral");
    let mut renamed = Model::read(&dir);
    renamed.rename(|name| {
        let name = name.replace(".block_sparse_moe.", ".mlp.").replace(".w1.", ".gate_proj.");
        name.replace(".w3.", ".up_proj.").replace(".w2.", ".down_proj.")
    });
    assert!(renamed.tensors.contains_key("model.layers.0.mlp.experts.0.gate_proj.qweight"));
    let flags = ["--bits", "4"];
    let (theirs, ours) = (convert(&dir, &flags), convert_model(&renamed, &flags));
    assert_eq!(quantized(&ours, &renamed), theirs.assert_errors(&open(&dir)));
    let weights = |converted: &Converted| std::fs::read(converted.out.join("model.safetensors")).unwrap();
    assert!(weights(&theirs) == weights(&ours));
    let entry = ours.module("model.layers.0.block_sparse_moe.experts.1.w2");
    assert_eq!(entry["source"], "model.layers.0.mlp.experts.1.down_proj");
}

// Biases.

fn zeros(n: usize) -> Tensor {
    Tensor::f16s(&[n], &vec![0.0; n])
}

fn with_zero_biases(linears: &[(&str, usize, usize)]) -> Model {
    let mut model = model();
    for (name, _, n) in linears {
        model.put(name, "bias", zeros(*n));
    }
    model
}

fn half_in_one_place() -> Tensor {
    let mut bias = vec![0.0; HIDDEN];
    bias[17] = 0.5;
    Tensor::f16s(&[HIDDEN], &bias)
}

#[test]
fn zero_biases_that_nothing_expects_are_dropped() {
    let converted = convert_model(&with_zero_biases(&LINEARS), &["--bits", "4"]);
    let dropped = converted.warnings("zero_bias_dropped");
    assert_eq!(dropped.len(), 7);
    for (name, ..) in LINEARS {
        assert!(converted.checkpoint.tensor(&format!("{name}.bias")).is_none());
        assert_eq!(converted.module(name)["bias"], "dropped_zeros");
    }
    let Some(assets) = folder("REQUANT_ASSETS") else { return };
    let converted = convert(&assets.join("tiny/tiny-llama-autogptq"), &["--bits", "4"]);
    assert_eq!(converted.warnings("zero_bias_dropped").len(), 21);
    assert!(converted.checkpoint.modules().iter().all(|module| module.bias().is_none()));
}

#[test]
fn a_bias_that_is_not_zero_is_never_dropped() {
    // Only o has one: exllamav2 has no place for it.
    let mut alone = model();
    alone.put(O, "bias", half_in_one_place());
    let refused = refuse_model(&alone, &["--bits", "4"]);
    assert_eq!((refused.exit, refused.text("code")), (3, "plan.unexpected_bias"));
    assert_eq!(refused.text("tensor"), format!("{O}.bias"));
    assert!(!refused.text("hint").contains("attention_bias"), "{}", refused.error);

    // All four have one: config.json can say so.
    let mut all = with_zero_biases(&LINEARS[..4]);
    all.put(O, "bias", half_in_one_place());
    let refused = refuse_model(&all, &["--bits", "4"]);
    assert_eq!((refused.exit, refused.text("tensor")), (3, format!("{O}.bias").as_str()));
    assert!(refused.text("hint").contains("\"attention_bias\": true"), "{}", refused.error);
    all.config["attention_bias"] = json!(true);
    let converted = convert_model(&all, &["--bits", "4"]);
    assert_eq!(quantized(&converted, &all), 7);
    for (name, ..) in &LINEARS[..4] {
        let bias = format!("{name}.bias");
        assert_eq!(bytes(&converted.checkpoint, &bias), all.tensors[&bias].bytes, "{name}");
        assert_eq!(converted.module(name)["bias"], "kept");
    }
    let totals = &converted.report["totals"];
    let bias_bits = totals["bpw"].as_f64().unwrap() - totals["exllamav2_bpw"].as_f64().unwrap();
    let weights = totals["quantized_weights"].as_f64().unwrap();
    assert!((bias_bits * weights - 4.0 * 16.0 * HIDDEN as f64).abs() < 1e-6);
    assert_eq!(converted.config["attention_bias"], true);
}

#[test]
fn qwen2_gets_the_biases_it_expects_even_of_zeros() {
    let mut model = with_zero_biases(&LINEARS[..4]);
    model.config["architectures"] = json!(["Qwen2ForCausalLM"]);
    let converted = convert_model(&model, &["--bits", "4"]);
    for (name, ..) in &LINEARS[..3] {
        assert_eq!(bytes(&converted.checkpoint, &format!("{name}.bias")), [0; 2 * HIDDEN]);
    }
    assert!(converted.checkpoint.tensor(&format!("{O}.bias")).is_none());
    assert_eq!(converted.warnings("zero_bias_dropped").len(), 1);
    // Without one of them exllamav2 stops, so it is refused.
    model.tensors.remove(&format!("{Q}.bias"));
    let refused = refuse_model(&model, &["--bits", "4"]);
    assert_eq!(refused.exit, 3);
    assert!(refused.text("tensor").starts_with(Q), "{}", refused.error);
    // A true bias of o has no place, whatever config.json says.
    let mut odd = with_zero_biases(&LINEARS[..4]);
    odd.config["architectures"] = json!(["Qwen2ForCausalLM"]);
    odd.put(O, "bias", half_in_one_place());
    assert_eq!(refuse_model(&odd, &["--bits", "4"]).text("tensor"), format!("{O}.bias"));
}

// Embeddings and norms of other types.

fn ramp(scale: f32) -> Vec<f32> {
    (0..VOCAB * HIDDEN).map(|i| (i as f32 - 1000.0) * scale).collect()
}

#[test]
fn embeddings_and_norms_of_other_types_become_fp16() {
    let values = ramp(1.0 / 1024.0);
    let mut model = model();
    model.tensors.insert(EMBEDDING.into(), Tensor::f32s(&[VOCAB, HIDDEN], &values));
    model.tensors.insert("model.norm.weight".into(), Tensor::bf16s(&[HIDDEN], &[1.5; HIDDEN]));
    let converted = convert_model(&model, &["--bits", "4"]);
    let expected: Vec<f16> = values.iter().map(|&value| f16::from_f32(value)).collect();
    assert_eq!(converted.checkpoint.tensor(EMBEDDING).unwrap().f16s().unwrap(), expected);
    let norm = converted.checkpoint.tensor("model.norm.weight").unwrap();
    assert_eq!(norm.f16s().unwrap(), vec![f16::from_f32(1.5); HIDDEN]);
    let origins = converted.report["tensors"].as_array().unwrap();
    let exactness = |name: &str| &origins.iter().find(|t| t["name"] == name).unwrap()["exactness"];
    // 11 bits suffice for |i - 1000| up to 2048, and the ramp goes to 2071.
    assert_eq!((exactness(EMBEDDING), exactness("model.norm.weight")), (&json!("rounded"), &json!("exact")));
    assert_eq!(exactness("lm_head.weight"), "identical");
    let warnings = converted.warnings("rounded_to_half");
    let [(subject, message)] = &warnings[..] else { panic!("{warnings:?}") };
    let rounded = values.iter().filter(|&&v| f16::from_f32(v).to_f32() != v).count();
    assert!(rounded > 0 && subject == EMBEDDING);
    assert!(message.starts_with(&format!("{rounded} of {} values", VOCAB * HIDDEN)), "{message}");
}

#[test]
fn values_below_the_smallest_normal_half_are_counted() {
    let mut values = vec![0.25; VOCAB * HIDDEN];
    (values[5], values[6], values[7]) = (1e-9, -3.0e-5, 2f32.powi(-20)); // The last one fits.
    let mut model = model();
    model.tensors.insert(EMBEDDING.into(), Tensor::f32s(&[VOCAB, HIDDEN], &values));
    let converted = convert_model(&model, &["--bits", "4"]);
    let warnings = converted.warnings("rounded_to_half");
    let [(_, message)] = &warnings[..] else { panic!("{warnings:?}") };
    let largest = (f16::from_f32(-3.0e-5).to_f32() - -3.0e-5).abs();
    assert!(
        message.starts_with("2 of 3072 values") && message.contains("2 of them below 2^-14"),
        "{message}"
    );
    assert!(message.contains(&format!("{largest:e}")), "{message}: {largest:e}");
}

#[test]
fn values_that_fp16_cannot_hold_are_refused_with_their_place() {
    let cases: [(&str, &[usize], usize, f32, &str); 4] = [
        (EMBEDDING, &[VOCAB, HIDDEN], 2 * HIDDEN + 3, 7e4, "[2, 3]"),
        (EMBEDDING, &[VOCAB, HIDDEN], HIDDEN, f32::NAN, "[1, 0]"),
        ("model.layers.0.input_layernorm.weight", &[HIDDEN], 9, f32::NEG_INFINITY, "[9]"),
        ("lm_head.weight", &[VOCAB, HIDDEN], 63, -7e4, "[0, 63]"),
    ];
    for (name, shape, at, value, position) in cases {
        for make in [Tensor::f32s, Tensor::bf16s] {
            let mut values = vec![0.5; shape.iter().product()];
            values[at] = value;
            let mut model = model();
            model.tensors.insert(name.into(), make(shape, &values));
            let refused = refuse_model(&model, &["--bits", "4"]);
            assert_eq!(
                (refused.exit, refused.text("code"), refused.text("tensor")),
                (3, "plan.overflow", name)
            );
            assert!(refused.text("message").contains(position), "{}", refused.error);
            assert!(refused.text("file").ends_with("model.safetensors"), "{}", refused.error);
        }
    }
    // In fp16 itself, too.
    let mut values = vec![0.5; HIDDEN];
    values[1] = f32::NAN;
    let mut model = model();
    model.tensors.insert("model.norm.weight".into(), Tensor::f16s(&[HIDDEN], &values));
    let refused = refuse_model(&model, &["--bits", "4"]);
    assert_eq!((refused.exit, refused.text("tensor")), (3, "model.norm.weight"));
}

#[test]
fn scales_that_give_weights_outside_fp16_are_refused_or_said() {
    let scales = |at: usize, value: f32| {
        let mut scales = vec![0.01; 2 * HIDDEN];
        scales[at] = value;
        scales
    };
    // Column 7 of the second group.
    let mut large = model();
    large.put(Q, "scales", Tensor::bf16s(&[2, HIDDEN], &scales(HIDDEN + 7, 7e4)));
    let refused = refuse_model(&large, &["--bits", "4"]);
    assert_eq!((refused.exit, refused.text("code")), (3, "convert.weight_overflow"));
    assert_eq!(refused.text("tensor"), format!("{Q}.scales"));
    assert!(refused.text("message").contains("column 7"), "{}", refused.error);

    let mut small = model();
    small.put(Q, "scales", Tensor::bf16s(&[2, HIDDEN], &scales(3, 1e-9)));
    let converted = convert_model(&small, &["--bits", "4"]);
    let warnings = converted.warnings("rounded_to_half");
    let [(subject, message)] = &warnings[..] else { panic!("{warnings:?}") };
    assert!(subject == &format!("{Q}.scales") && message.contains("1 of 128"), "{subject}: {message}");
}

// Heads.

#[test]
fn a_tied_head_stays_tied_unless_it_is_quantized() {
    let mut model = model();
    model.tensors.remove("lm_head.weight");
    model.config["tie_word_embeddings"] = json!(true);
    let converted = convert_model(&model, &["--bits", "4"]);
    assert_eq!(quantized(&converted, &model), 7);
    assert!(converted.checkpoint.tensor("lm_head.weight").is_none());
    assert!(converted.checkpoint.module("lm_head").is_none());
    assert_eq!(converted.config["tie_word_embeddings"], true);
    assert_eq!(converted.config["quantization_config"]["head_bits"], 16);

    let converted = convert_model(&model, &["--bits", "4", "--head-bits", "6"]);
    assert_eq!(quantized(&converted, &model), 8);
    assert!(is_exl2(&converted, "lm_head") && converted.widths("lm_head") == [6]);
    assert_eq!(converted.config["tie_word_embeddings"], false);
    assert_eq!(converted.config["quantization_config"]["head_bits"], 6);
    assert_eq!(converted.module("lm_head")["source"], "model.embed_tokens");
    // It is outside the bpw.
    assert_eq!(converted.report["totals"]["quantized_weights"], 4 * 64 * 64 + 3 * 64 * 96);
    // The vocabulary of 48 is padded to 64 columns, and the padding decodes to zeros.
    let head = converted.checkpoint.module("lm_head").unwrap();
    let matrix = converted.checkpoint.exl2(head).unwrap();
    assert_eq!((head.out_features(), matrix.out_features()), (VOCAB, 64));
    matrix.check_padding(VOCAB).unwrap();
    let padding =
        matrix.dequantize().chunks_exact(64).flat_map(|row| row[VOCAB..].to_vec()).collect::<Vec<_>>();
    assert!(padding.iter().all(|weight| *weight == f16::ZERO));
    assert_eq!(converted.module("lm_head")["stored_out_features"], 64);
    assert_eq!(converted.config["vocab_size"], VOCAB);
}

#[test]
fn a_tied_head_of_a_real_model() {
    let Some(assets) = folder("REQUANT_ASSETS") else { return };
    let dir = assets.join("tiny/tiny-llama3rope");
    let source = open(&dir);
    let tied = convert(&dir, &["--bits", "4"]);
    assert!(tied.checkpoint.tensor("lm_head.weight").is_none());
    assert_eq!(tied.config["tie_word_embeddings"], true);
    let untied = convert(&dir, &["--bpw", "4.25", "--head-bits", "6"]);
    assert_eq!(untied.assert_errors(&source), 1 + tied.assert_errors(&source));
    assert_eq!(untied.config["tie_word_embeddings"], false);
}

#[test]
fn a_stored_head_of_a_tied_model_is_dropped_if_equal_and_kept_if_not() {
    let mut equal = model();
    equal.config["tie_word_embeddings"] = json!(true);
    let converted = convert_model(&equal, &["--bits", "4"]);
    assert!(converted.checkpoint.tensor("lm_head.weight").is_none());
    assert_eq!(converted.config["tie_word_embeddings"], true);
    let converted = convert_model(&equal, &["--bits", "4", "--head-bits", "5"]);
    assert_eq!(quantized(&converted, &equal), 8);
    assert_eq!(converted.config["tie_word_embeddings"], false);

    let mut differing = equal;
    let head = Tensor::f16s(&[VOCAB, HIDDEN], &ramp(1e-4));
    differing.tensors.insert("lm_head.weight".into(), head.clone());
    let converted = convert_model(&differing, &["--bits", "4"]);
    assert_eq!(bytes(&converted.checkpoint, "lm_head.weight"), head.bytes);
    assert_eq!(converted.config["tie_word_embeddings"], false);
    assert_eq!(converted.warning_codes(), ["tied_head_differs"]);
}

#[test]
fn a_quantized_head_becomes_dense_unless_a_width_is_asked_for() {
    let vocab = 64;
    let mut model = Model::sized(&Quantized::default(), &Sizes { vocab, ..Sizes::default() });
    model.tensors.remove("lm_head.weight");
    support::writer::gptq_module(&mut model.tensors, "lm_head", HIDDEN, vocab, &Quantized::default());
    model.set("lm_head", json!(true));
    let converted = convert_model(&model, &["--bits", "4"]);
    assert_eq!(quantized(&converted, &model), 7);
    assert_eq!(converted.warning_codes(), ["head_dequantized"]);
    assert_eq!(converted.module("lm_head")["exactness"], "exact");
    let converted = convert_model(&model, &["--bits", "4", "--head-bits", "8"]);
    assert_eq!(quantized(&converted, &model), 8);
    assert_eq!(converted.warning_codes(), [""; 0]);
}
