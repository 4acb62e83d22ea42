//! Real checkpoints decode to the hashes that other tools gave; and what odd but valid ones mean.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use half::f16;
use requant::WarningCode;
use requant::checkpoint::{Bias, Layout};
use requant::formats::gptq::GIdxKind;
use serde_json::{Value, json};
use std::path::Path;
use support::writer::{
    DOWN, HIDDEN, INTERMEDIATE, MakeFloats, Model, Q, Quantized, Tensor, VOCAB, write_json,
};
use support::{codes, folder, hashes, open, sha256};

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Compares every module with `expected.json`, both ways.
fn assert_decodes(dir: &Path) {
    let expected = json_of(&dir.join("expected.json"));
    let modules = expected["modules"].as_object().unwrap();
    let checkpoint = open(dir);
    // The file lists routers as well, which are no modules.
    for (name, expected) in modules.iter().filter(|(name, _)| checkpoint.module(name).is_none()) {
        let tensor = checkpoint.tensor(&format!("{name}.weight")).unwrap();
        let (rows, columns) = (tensor.shape()[0], tensor.shape()[1]);
        let stored = tensor.f16s().unwrap();
        let transposed: Vec<f16> =
            (0..rows * columns).map(|i| stored[i % rows * columns + i / rows]).collect();
        assert_eq!(sha256(&transposed), expected["sha256"], "{} {name}", dir.display());
    }
    for (module, hash) in checkpoint.modules().iter().zip(hashes(&checkpoint)) {
        let expected = &modules[module.name()]; // Panics for a module that the file doesn't list.
        assert_eq!(
            json!([module.in_features(), module.out_features()]),
            expected["shape"],
            "{}",
            module.name()
        );
        assert_eq!(hash, expected["sha256"], "{} {}", dir.display(), module.name());
    }
}

fn assert_decodes_exl2(dir: &Path, modules: &serde_json::Map<String, Value>) {
    let checkpoint = open(dir);
    assert_eq!(checkpoint.modules().len(), modules.len());
    for (module, hash) in checkpoint.modules().iter().zip(hashes(&checkpoint)) {
        let expected = &modules[module.name()];
        assert_eq!(
            (json!(module.in_features()), json!(module.out_features())),
            (expected["in"].clone(), expected["out"].clone())
        );
        assert_eq!(hash, expected["sha256_fp16_in_out"], "{} {}", dir.display(), module.name());
        let Layout::Exl2(stored) = module.layout() else { panic!("{}", module.layout().name()) };
        let groups = stored.groups.groups().iter().map(|group| json!([group.bits.get(), group.rows]));
        assert_eq!(Value::from_iter(groups), expected["groups"], "{}", module.name());
    }
}

#[test]
fn the_gptq_fixture_decodes_to_its_hashes() {
    let dir = Path::new("fixtures/tiny-llama-gptq");
    assert_decodes(dir);
    let checkpoint = open(dir);
    assert_eq!(checkpoint.warnings(), []);
    assert_eq!(checkpoint.other_tensors().count(), 1 + 2 * 3 + 1);
    checkpoint.require_decodable().unwrap();
    checkpoint.check_unchanged().unwrap();
}

#[test]
fn the_exl2_fixture_decodes_as_exllamav2s_kernel_does() {
    let dir = Path::new("fixtures/tiny-llama-exl2-4.0bpw");
    assert_decodes_exl2(dir, json_of(&dir.join("expected.json"))["modules"].as_object().unwrap());
    assert_eq!(open(dir).warnings(), []);
}

#[test]
fn tiny_checkpoints_decode_to_their_hashes() {
    let Some(assets) = folder("REQUANT_ASSETS") else { return };
    let mut count = 0;
    for family in ["tiny", "tiny/dense"] {
        for entry in std::fs::read_dir(assets.join(family)).unwrap() {
            let dir = entry.unwrap().path();
            if dir.join("expected.json").is_file() {
                assert_decodes(&dir);
                count += 1;
            }
        }
    }
    assert_eq!(count, 19);
}

#[test]
fn what_the_tiny_checkpoints_warn_of() {
    let Some(assets) = folder("REQUANT_ASSETS") else { return };
    for entry in std::fs::read_dir(assets.join("tiny")).unwrap() {
        let dir = entry.unwrap().path();
        if !dir.join("config.json").is_file() {
            continue;
        }
        let expected: &[WarningCode] = match dir.file_name().unwrap().to_str().unwrap() {
            // One zero point of 0, which other engines read otherwise than GPTQModel.
            "tiny-llama-2bit" => &[WarningCode::ZeroPointsWrapped],
            _ => &[],
        };
        assert_eq!(codes(&open(&dir)), expected, "{}", dir.display());
    }
}

#[test]
fn exllamav2s_own_files_decode_as_its_kernel_does() {
    let Some(assets) = folder("REQUANT_ASSETS") else { return };
    let expected = json_of(&assets.join("exl2/expected/tiny-decode.json"));
    let models = expected["models"].as_object().unwrap();
    assert_eq!(models.len(), 3);
    for (name, model) in models {
        assert_decodes_exl2(&assets.join("exl2").join(name), model["modules"].as_object().unwrap());
    }
}

#[test]
fn single_exl2_modules_of_a_model_of_unknown_architecture_decode() {
    let Some(assets) = folder("REQUANT_ASSETS") else { return };
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(assets.join("exl2/smollm2-modules.safetensors"), dir.path().join("output.safetensors"))
        .unwrap();
    write_json(&dir.path().join("config.json"), &json!({"architectures": ["SomethingNew"]}));
    let expected = json_of(&assets.join("exl2/expected/smollm2-modules.json"));
    assert_decodes_exl2(dir.path(), expected["picked"].as_object().unwrap());
    let checkpoint = open(dir.path());
    assert_eq!(codes(&checkpoint), [WarningCode::UnknownArchitecture]);
    // Natural order: block 12 after block 1.
    assert_eq!(checkpoint.modules().last().unwrap().name(), "model.layers.12.mlp.gate_proj");
}

#[test]
fn smollm2_decodes_to_its_hashes() {
    let Some(assets) = folder("REQUANT_ASSETS") else { return };
    let Some(dir) = folder("REQUANT_SMOLLM2") else { return };
    let expected = json_of(&assets.join("smollm2/expected.json"));
    let expected = expected["dequantized_sha256"].as_object().unwrap();
    let checkpoint = open(&dir);
    assert_eq!((checkpoint.modules().len(), expected.len()), (210, 210));
    assert_eq!(checkpoint.warnings(), []);
    for (module, hash) in checkpoint.modules().iter().zip(hashes(&checkpoint)) {
        assert_eq!(hash, expected[module.name()], "{}", module.name());
    }
}

#[test]
fn modules_come_in_block_order_with_their_roles() {
    let dir = Model::new(&Quantized::default()).write();
    let checkpoint = open(dir.path());
    let names: Vec<&str> = checkpoint.modules().iter().map(|module| module.name()).collect();
    let mut expected: Vec<&str> = support::writer::LINEARS.iter().map(|(name, ..)| *name).collect();
    expected.push("lm_head");
    assert_eq!(names, expected);
    assert!(checkpoint.module("lm_head").unwrap().linear().is_none());
    assert_eq!(checkpoint.module(DOWN).unwrap().linear().unwrap().in_features, INTERMEDIATE);
    assert!(checkpoint.module("model.norm").is_none());
}

// Configuration.

#[test]
fn without_a_quantization_config_all_is_derived_and_said() {
    let mut model = Model::new(&Quantized::default());
    let whole = hashes(&open(model.write().path()));
    model.quant = None;
    let checkpoint = open(model.write().path());
    assert_eq!(hashes(&checkpoint), whole);
    let [warning] = checkpoint.warnings() else { panic!("{:?}", checkpoint.warnings()) };
    assert_eq!((warning.code, warning.subject.as_str()), (WarningCode::NoQuantizationConfig, "config.json"));
    assert!(warning.message.contains("4 bits in groups of 32 rows"), "{}", warning.message);
    assert!(checkpoint.quant_config().is_none());
}

#[test]
fn group_size_minus_one_is_each_modules_k() {
    let mut model = Model::new(&Quantized { group_size: 1024, ..Quantized::default() });
    model.set("group_size", json!(-1)).set("desc_act", json!(true));
    let whole = open(model.write().path());
    assert_eq!(codes(&whole), []);
    for (name, k) in [(Q, HIDDEN), (DOWN, INTERMEDIATE)] {
        let Layout::Gptq(stored) = whole.module(name).unwrap().layout() else { panic!() };
        assert_eq!((stored.group_size, stored.shape.groups, stored.g_idx), (k, 1, GIdxKind::OneGroup));
    }
    // Old act-order files without groups have no g_idx at all.
    let absent = open(model.remove_all("g_idx").write().path());
    assert_eq!(codes(&absent), []);
    assert_eq!(hashes(&absent), hashes(&whole));
    let Layout::Gptq(stored) = absent.module(DOWN).unwrap().layout() else { panic!() };
    assert_eq!((stored.group_size, stored.g_idx), (INTERMEDIATE, GIdxKind::Absent));
}

#[test]
fn tensors_overrule_bits_and_group_size() {
    let mut model = Model::new(&Quantized::default());
    let checkpoint = open(model.set("bits", json!(8)).set("group_size", json!(128)).write().path());
    // 128 rows would be one group; the tensors have two and three.
    assert_eq!(codes(&checkpoint), [WarningCode::ConfigTensorConflict, WarningCode::ConfigTensorConflict]);
    assert!(checkpoint.warnings().iter().all(|warning| warning.subject == Q));
    checkpoint.require_decodable().unwrap();
}

#[test]
fn dynamic_rules_are_checked_against_the_tensors() {
    let mut model = Model::new(&Quantized::default());
    let eight = Quantized { bits: 8, group_size: 16, zero: |_, _| 128, ..Quantized::default() };
    support::writer::gptq_module(&mut model.tensors, DOWN, INTERMEDIATE, HIDDEN, &eight);
    model.set("dynamic", json!({r"+:.*\.down_proj$": {"bits": 8, "group_size": 16}}));
    assert_eq!(codes(&open(model.write().path())), []);
    model.set("dynamic", json!({r"+:.*\.down_proj$": {"bits": 8, "group_size": 16}, r"-:.*\.q_proj": {}}));
    let checkpoint = open(model.write().path());
    assert_eq!(
        (codes(&checkpoint), checkpoint.warnings()[0].subject.as_str()),
        (vec![WarningCode::DynamicConflict], Q)
    );
    // A negative rule beats the positive one before it, in GPTQModel; not in vLLM.
    model.set("dynamic", json!({r"+:.*": {}, r"-:.*\.q_proj": {}}));
    assert!(codes(&open(model.write().path())).contains(&WarningCode::DynamicOrder));
}

#[test]
fn a_list_without_the_attentions_projections_does_not_make_them_dense() {
    let mut model = Model::new(&Quantized::default());
    let mlp = json!([["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]);
    let checkpoint = open(model.set("modules_in_block_to_quantize", mlp).write().path());
    let [warning] = checkpoint.warnings() else { panic!("{:?}", checkpoint.warnings()) };
    assert_eq!((warning.code, warning.subject.as_str()), (WarningCode::ModuleListIncomplete, Q));
    assert!(warning.message.contains("3 more modules"), "{}", warning.message);
    assert!(checkpoint.module(Q).unwrap().layout().is_quantized());
    let attention = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
    assert_eq!(codes(&open(model.set("modules_in_block_to_quantize", json!(attention)).write().path())), []);
}

#[test]
fn a_module_left_dense_is_read_as_dense() {
    let mut model = Model::new(&Quantized::default());
    model.tensors.retain(|name, _| !name.starts_with(Q));
    let numbers: Vec<f32> = (0..HIDDEN * HIDDEN).map(|i| (i % 251) as f32 * 0.5).collect();
    model.put(Q, "weight", Tensor::bf16s(&[HIDDEN, HIDDEN], &numbers));
    let checkpoint = open(model.write().path());
    let module = checkpoint.module(Q).unwrap();
    assert!(matches!(module.layout(), Layout::Dense { .. }));
    let weights = checkpoint.dense(module).unwrap();
    assert_eq!(weights[5 * HIDDEN + 3], numbers[3 * HIDDEN + 5]);
    assert_eq!(checkpoint.dequantize(module).unwrap()[5 * HIDDEN + 3].to_f32(), numbers[3 * HIDDEN + 5]);
    assert!(checkpoint.gptq(module).is_err());
}

#[test]
fn a_config_that_claims_quantization_over_dense_tensors_is_told() {
    let mut model = Model::new(&Quantized::default());
    for (name, k, n) in support::writer::LINEARS {
        model.tensors.retain(|tensor, _| !tensor.starts_with(name));
        model.put(name, "weight", Tensor::f16s(&[n, k], &vec![0.5; n * k]));
    }
    assert_eq!(codes(&open(model.write().path())), [WarningCode::NothingQuantized]);
}

// Tensors beside the words.

#[test]
fn scales_of_every_float_type_decode_exactly() {
    let values: Vec<f32> = (0..2 * HIDDEN).map(|i| 0.25 + 0.25 * (i % 7) as f32).collect();
    let shape = [2, HIDDEN];
    let makers: [MakeFloats; 3] = [Tensor::f16s, Tensor::bf16s, Tensor::f32s];
    let decoded = makers.map(|make| {
        let mut model = Model::new(&Quantized::default());
        let dir = model.put(Q, "scales", make(&shape, &values)).write();
        hashes(&open(dir.path()))
    });
    assert_eq!(decoded[0], decoded[1]);
    assert_eq!(decoded[0], decoded[2]);
}

#[test]
fn scales_beyond_fp16_are_not_lost_on_the_way() {
    let mut model = Model::new(&Quantized::default());
    let mut values = vec![0.5; 2 * HIDDEN];
    (values[0], values[1]) = (1e-9, 7e4);
    let checkpoint = open(model.put(Q, "scales", Tensor::bf16s(&[2, HIDDEN], &values)).write().path());
    let matrix = checkpoint.gptq(checkpoint.module(Q).unwrap()).unwrap();
    let expected = |f: f32| half::bf16::from_f32(f).to_f32();
    assert_eq!(matrix.scales()[..2], [expected(1e-9), expected(7e4)]);
}

#[test]
fn columns_that_only_pad_are_left_out() {
    let mut model = Model::new(&Quantized::default());
    let whole = hashes(&open(model.write().path()));
    // Their zero points would hide the symmetric ones.
    model.pad_columns(Q, HIDDEN);
    let checkpoint = open(model.write().path());
    assert_eq!(hashes(&checkpoint), whole);
    assert_eq!(
        (codes(&checkpoint), checkpoint.warnings()[0].subject.as_str()),
        (vec![WarningCode::PaddingIgnored], Q)
    );
    model.tensor(Q, "scales").bytes[2 * HIDDEN + 1] = 0x3c;
    let fault = support::refused_tensor(&model, &format!("{Q}.scales"));
    assert!(matches!(fault, requant::checkpoint::Fault::TensorShape { .. }), "{fault}");
}

#[test]
fn an_all_zero_bias_is_told_from_another() {
    let mut model = Model::new(&Quantized::default());
    let mut bias = vec![0.0; HIDDEN];
    bias[3] = -0.0;
    let checkpoint = open(model.put(Q, "bias", Tensor::f16s(&[HIDDEN], &bias)).write().path());
    let module = checkpoint.module(Q).unwrap();
    assert_eq!(module.bias(), Some(Bias::AllZero));
    assert_eq!(checkpoint.bias(module).unwrap().unwrap(), bias);
    bias[5] = 0.5;
    let checkpoint = open(model.put(Q, "bias", Tensor::f32s(&[HIDDEN], &bias)).write().path());
    let module = checkpoint.module(Q).unwrap();
    assert_eq!(module.bias(), Some(Bias::NonZero));
    assert_eq!(checkpoint.bias(module).unwrap().unwrap(), bias);
    assert_eq!(checkpoint.module(DOWN).unwrap().bias(), None);
}

#[test]
fn tied_heads() {
    let mut model = Model::new(&Quantized::default());
    model.config["tie_word_embeddings"] = json!(true);
    let copy = open(model.write().path());
    assert!(copy.head_is_tied_copy() && copy.module("lm_head").is_some());
    assert_eq!(codes(&copy), []);
    model.tensor("lm_head", "weight").bytes[0] ^= 1;
    let differs = open(model.write().path());
    assert!(!differs.head_is_tied_copy());
    assert_eq!(codes(&differs), [WarningCode::TiedHeadDiffers]);
    model.tensors.remove("lm_head.weight");
    let absent = open(model.write().path());
    assert!(absent.module("lm_head").is_none());
    assert_eq!(codes(&absent), []);
    let how = Quantized { group_size: 64, ..Quantized::default() };
    support::writer::gptq_module(&mut model.tensors, "lm_head", HIDDEN, VOCAB, &how);
    let quantized = open(model.set("dynamic", json!({"lm_head": {"group_size": 64}})).write().path());
    assert_eq!(codes(&quantized), [WarningCode::TiedHeadQuantized]);
}

#[test]
fn an_unknown_architecture_is_read_by_its_tensors() {
    let mut model = Model::new(&Quantized::default());
    let whole = hashes(&open(model.write().path()));
    model.config["architectures"] = json!(["SomethingNew"]);
    let checkpoint = open(model.write().path());
    assert_eq!(codes(&checkpoint), [WarningCode::UnknownArchitecture]);
    assert_eq!((checkpoint.modules().len(), checkpoint.architecture().is_none()), (8, true));
    let mut found = hashes(&checkpoint);
    let mut whole = whole;
    found.sort();
    whole.sort();
    assert_eq!(found, whole);
    // Without g_idx, k comes from the words.
    let checkpoint = open(model.remove_all("g_idx").write().path());
    assert_eq!(checkpoint.module(DOWN).unwrap().in_features(), INTERMEDIATE);
}
