//! Checkpoints that lie: each is refused with the file and tensor at fault, or read as the warning says.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use proptest::prelude::*;
use requant::checkpoint::{Checkpoint, Error, Fault, OpenOptions};
use requant::formats::{exl2, gptq};
use requant::{Diagnose, Kind, WarningCode};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;
use support::writer::{
    DOWN, HIDDEN, INTERMEDIATE, LINEARS, Model, Q, Quantized, Tensor, Tensors, safetensors, write_index,
    write_json,
};
use support::{folder, skip};

fn open(dir: &Path) -> Result<Checkpoint, Error> {
    Checkpoint::open(dir, &OpenOptions::default())
}

/// The error of a directory; its file by name.
fn refused(dir: &Path) -> (String, Option<String>, Fault) {
    let error = open(dir).expect_err("was accepted");
    assert!(!error.to_string().is_empty());
    let file = error.file.file_name().unwrap().to_str().unwrap().to_owned();
    (file, error.tensor, *error.fault)
}

/// Checks that a model is refused in `model.safetensors`, and gives the fault.
fn refused_tensor(model: &Model, tensor: &str) -> Fault {
    let dir = model.write();
    let (file, found, fault) = refused(dir.path());
    assert_eq!((file.as_str(), found.as_deref()), ("model.safetensors", Some(tensor)), "{fault}");
    fault
}

// The cases that numpy writes.

#[test]
fn every_case_of_make_bad_is_refused_by_file_and_tensor_or_read_as_said() {
    let Some(assets) = folder("REQUANT_ASSETS") else { return };
    let python = std::env::var("REQUANT_PYTHON").unwrap_or_else(|_| "python3".into());
    let out = tempfile::tempdir().unwrap();
    let made = Command::new(&python).arg(assets.join("bad/make_bad.py")).arg(out.path()).output();
    match made {
        Ok(made) if made.status.success() => {}
        Ok(made) => return skip(&format!("{python}: {}", String::from_utf8_lossy(&made.stderr))),
        Err(e) => return skip(&format!("{python}: {e}")),
    }
    let cases = std::fs::read(out.path().join("cases.json")).unwrap();
    let cases: Value = serde_json::from_slice(&cases).unwrap();
    let mut refused_cases = 0;
    for (name, case) in cases.as_object().unwrap() {
        let opened = open(&out.path().join(name));
        // What the file of cases calls an error, and requant reads with a warning: tensors and index win.
        let read_with = match name.as_str() {
            // The index says which of two copies counts.
            "tensor-in-two-shards" => Some(WarningCode::CopyElsewhere),
            // Bits and group sizes are what the tensors say.
            "config-tensor-conflict" | "group-size-conflict" => Some(WarningCode::ConfigTensorConflict),
            // Two files that contradict each other; the tensors settle it.
            "configs-disagree" => Some(WarningCode::ConfigsDisagree),
            // Called an fp16 model, but its tensors are GPTQ: read as such.
            "no-quantization" => Some(WarningCode::NoQuantizationConfig),
            _ => None,
        };
        let file = case["file"].as_str().unwrap();
        let tensor = case["tensor"].as_str();
        if let Some(code) = read_with {
            let checkpoint = opened.unwrap_or_else(|e| panic!("{name}: {e:#}"));
            checkpoint.require_decodable().unwrap();
            let warning = checkpoint.warnings().iter().find(|warning| warning.code == code);
            let warning = warning.unwrap_or_else(|| panic!("{name}: {:?}", checkpoint.warnings()));
            // The subject is the module where the case names one of its tensors, and the text says the rest.
            let named = format!("{} {}", warning.subject, warning.message);
            match tensor.and_then(|tensor| tensor.rsplit_once('.')) {
                Some((module, suffix)) => {
                    assert!(named.contains(module) && named.contains(suffix), "{name}: {named}")
                }
                None => assert!(named.contains(file), "{name}: {named}"),
            }
            if name == "tensor-in-two-shards" {
                assert!(named.contains(file), "{named}");
            }
        } else if case["expect"] == "ok" {
            let checkpoint = opened.unwrap_or_else(|e| panic!("{name}: {e:#}"));
            assert_eq!(checkpoint.warnings(), [], "{name}");
        } else {
            let error = opened.expect_err(name);
            assert_eq!(error.file.file_name().unwrap().to_str(), Some(file), "{name}: {error:#}");
            assert_eq!(error.tensor.as_deref(), tensor, "{name}: {error:#}");
            assert_eq!(error.kind(), Kind::Input, "{name}: {error:#}");
            refused_cases += 1;
        }
    }
    assert_eq!((cases.as_object().unwrap().len(), refused_cases), (46, 39));
}

// Files and headers.

/// A valid file with its header edited.
fn refused_header(edit: impl FnOnce(&mut serde_json::Map<String, Value>)) -> (Option<String>, Fault) {
    let dir = Model::new(&Quantized::default()).write_edited(edit);
    let (file, tensor, fault) = refused(dir.path());
    assert_eq!(file, "model.safetensors");
    (tensor, fault)
}

/// A directory whose only weights are these bytes.
fn refused_bytes(bytes: &[u8]) -> (Option<String>, Fault) {
    let dir = tempfile::tempdir().unwrap();
    Model::new(&Quantized::default()).write_config(dir.path());
    std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    let (file, tensor, fault) = refused(dir.path());
    assert_eq!(file, "model.safetensors");
    (tensor, fault)
}

#[test]
fn a_file_short_of_one_byte_says_how_much_is_missing_and_what_to_do() {
    let model = Model::new(&Quantized::default());
    let dir = model.write();
    let path = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    let error = open(dir.path()).unwrap_err();
    let Fault::Truncated { found, expected } = *error.fault else { panic!("{error:#}") };
    assert_eq!((found, expected), (bytes.len() as u64 - 1, bytes.len() as u64));
    assert_eq!(error.tensor.as_ref(), model.tensors.keys().next_back());
    assert!(error.to_string().ends_with("1 are missing"), "{error}");
    assert!(error.hint().unwrap().contains("download the file again"));
    assert_eq!(error.code(), "checkpoint.truncated");
}

#[test]
fn bytes_after_the_last_tensor() {
    let mut bytes = safetensors(&Model::new(&Quantized::default()).tensors, |_| {});
    bytes.push(0);
    assert!(matches!(refused_bytes(&bytes), (None, Fault::TrailingBytes { .. })));
}

#[test]
fn a_gap_between_tensors() {
    let (tensor, fault) = refused_header(|header| {
        header.remove(&format!("{Q}.qzeros"));
    });
    assert!(matches!(fault, Fault::Gap { unused: 64 }), "{fault}");
    assert_eq!(tensor, Some(format!("{Q}.scales")));
}

#[test]
fn overlapping_tensors_name_each_other() {
    let (tensor, fault) = refused_header(|header| {
        let first = header[&format!("{Q}.qzeros")].clone();
        header.insert("model.zzz".into(), first);
    });
    let Fault::Overlap { with, shared: 64 } = fault else { panic!("{fault}") };
    assert_eq!((tensor.as_deref(), with), (Some("model.zzz"), format!("{Q}.qzeros")));
}

#[test]
fn malformed_entries_name_their_tensor() {
    for (key, value) in [
        ("shape", json!([-1, 64])),
        ("shape", json!("64")),
        ("shape", json!([1.5])),
        ("data_offsets", json!([0])),
        ("data_offsets", json!([0, 1, 2])),
        ("data_offsets", json!(null)),
        ("dtype", json!(4)),
    ] {
        let (tensor, fault) = refused_header(|header| header[&format!("{Q}.scales")][key] = value.clone());
        assert!(matches!(fault, Fault::TensorEntry { .. }), "{key} {value}: {fault}");
        assert_eq!(tensor, Some(format!("{Q}.scales")), "{key} {value}");
    }
}

#[test]
fn a_header_that_is_no_object_of_tensors() {
    for header in ["[]", "7", "", "{", r#"{"a""#, "\u{0}", r#"{"__metadata__": 3}"#, "{}{}"] {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        let (tensor, fault) = refused_bytes(&bytes);
        assert!(matches!(fault, Fault::HeaderNotJson { .. }), "{header}: {fault}");
        assert_eq!(tensor, None);
    }
    let deep = "[".repeat(100_000);
    let mut bytes = (deep.len() as u64).to_le_bytes().to_vec();
    bytes.extend(deep.as_bytes());
    assert!(matches!(refused_bytes(&bytes).1, Fault::HeaderNotJson { .. }));
}

#[test]
fn pickles_and_git_lfs_pointers_are_told_by_their_first_bytes() {
    assert!(matches!(refused_bytes(b"\x80\x02}q\x00X\x01\x00\x00\x00aq\x01K\x01s.").1, Fault::Pickle));
    assert!(matches!(refused_bytes(b"PK\x03\x04 and a zip archive").1, Fault::Pickle));
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n";
    assert!(matches!(refused_bytes(pointer).1, Fault::LfsPointer));
}

#[test]
fn shapes_of_nothing_with_huge_other_sides() {
    // No bytes, so any size is consistent: nothing may be computed or reserved from it.
    for suffix in ["qweight", "qzeros", "scales"] {
        for shape in [[0, 1 << 61], [1 << 61, 0]] {
            let mut model = Model::new(&Quantized::default());
            let tensor = model.tensor(Q, suffix);
            (tensor.shape, tensor.bytes) = (shape.to_vec(), Vec::new());
            refused(model.write().path());
            model.config["architectures"] = json!(["SomethingNew"]);
            refused(model.write().path());
        }
    }
}

#[test]
fn a_configuration_of_a_giant_is_refused_without_reserving_for_it() {
    let mut model = Model::new(&Quantized::default());
    model.config["num_hidden_layers"] = json!(1 << 28);
    let missing = refused_tensor(&model, "model.layers.1.self_attn.q_proj.qweight");
    assert!(matches!(missing, Fault::ModuleMissing { layers: 0x1000_0000, .. }), "{missing}");
    model.config["architectures"] = json!(["MixtralForCausalLM"]);
    model.config["num_local_experts"] = json!(1 << 28);
    let missing = refused_tensor(&model, "model.layers.0.block_sparse_moe.experts.0.w1.qweight");
    assert!(matches!(missing, Fault::ModuleMissing { .. }), "{missing}");
}

// Index and shards.

#[test]
fn a_tensor_in_two_files_without_an_index() {
    let model = Model::new(&Quantized::default());
    let dir = model.write();
    let mut copy = Tensors::new();
    copy.insert(format!("{Q}.scales"), model.tensors[&format!("{Q}.scales")].clone());
    std::fs::write(dir.path().join("other.safetensors"), safetensors(&copy, |_| {})).unwrap();
    let (file, tensor, fault) = refused(dir.path());
    assert_eq!((file.as_str(), tensor), ("other.safetensors", Some(format!("{Q}.scales"))));
    assert!(matches!(fault, Fault::InTwoFiles { other } if other == "model.safetensors"));
}

#[test]
fn an_index_that_names_files_elsewhere() {
    let model = Model::new(&Quantized::default());
    for outside in ["../a.safetensors", "/etc/hostname", "sub/a.safetensors", "..", "", "C:\\a", "a\\b"] {
        let dir = model.write_shards(|_| "a.safetensors", true);
        write_index(dir.path(), &json!({"x": "a.safetensors", "y": outside}));
        let (file, _, fault) = refused(dir.path());
        assert_eq!(file, "model.safetensors.index.json");
        assert!(matches!(fault, Fault::ShardOutside { shard } if shard == outside));
    }
}

#[test]
fn an_index_that_is_none() {
    let model = Model::new(&Quantized::default());
    for index in [json!([]), json!({}), json!({"weight_map": {}}), json!({"weight_map": {"x": 3}})] {
        let dir = model.write_shards(|_| "a.safetensors", false);
        write_json(&dir.path().join("model.safetensors.index.json"), &index);
        let (file, _, fault) = refused(dir.path());
        assert_eq!(file, "model.safetensors.index.json");
        assert!(matches!(fault, Fault::IndexMalformed { .. }), "{index}: {fault}");
    }
    let dir = model.write_shards(|_| "a.safetensors", false);
    let twice = r#"{"weight_map": {"x": "a.safetensors", "x": "b.safetensors"}}"#;
    std::fs::write(dir.path().join("model.safetensors.index.json"), twice).unwrap();
    let (_, tensor, fault) = refused(dir.path());
    assert_eq!(tensor.as_deref(), Some("x"));
    assert!(matches!(fault, Fault::IndexRepeated { .. }));
}

#[test]
fn directories_that_are_none() {
    let dir = tempfile::tempdir().unwrap();
    let absent = open(&dir.path().join("absent")).unwrap_err();
    assert_eq!((absent.kind(), absent.code()), (Kind::Environment, "checkpoint.io"));
    std::fs::write(dir.path().join("file"), b"").unwrap();
    assert_eq!(open(&dir.path().join("file")).unwrap_err().kind(), Kind::Environment);
    Model::new(&Quantized::default()).write_config(dir.path());
    assert!(matches!(refused(dir.path()).2, Fault::NoWeights));
}

// Configuration.

#[test]
fn layouts_that_only_look_like_gptq_are_refused_by_name() {
    for (key, value, method) in [
        ("quant_method", json!("awq"), "awq"),
        ("quant_method", json!("compressed-tensors"), "compressed-tensors"),
        ("quant_method", json!("hqq"), "hqq"),
        ("quant_method", json!("exl3"), "exl3"),
        ("quant_method", json!("marlin"), "marlin"),
        ("checkpoint_format", json!("marlin"), "marlin"),
        ("checkpoint_format", json!("bitblas"), "bitblas"),
        ("checkpoint_format", json!("gptq_p"), "gptq_p (planar packing)"),
        ("is_marlin_format", json!(true), "marlin"),
        ("rotation", json!("hadamard"), "rotated weights (hadamard)"),
        ("packing_format", json!("auto_round:auto_awq"), "awq"),
    ] {
        let mut model = Model::new(&Quantized::default());
        let (_, _, fault) = refused(model.set(key, value).write().path());
        let Fault::Foreign { method: found, key: says } = fault else { panic!("{key}: {fault}") };
        assert_eq!((found.as_str(), says.as_str()), (method, key));
    }
}

#[test]
fn configuration_values_that_make_no_sense() {
    for (key, value) in [
        ("bits", json!(5)),
        ("bits", json!(0)),
        ("bits", json!("4")),
        ("bits", json!(4.5)),
        ("bits", json!(1u64 << 40)),
        ("group_size", json!(0)),
        ("group_size", json!(-2)),
        ("group_size", json!(1u64 << 40)),
        ("desc_act", json!("yes")),
        ("sym", json!(1)),
        ("pack_dtype", json!("int16")),
        ("dynamic", json!([])),
        ("dynamic", json!({".*": {"bits": 7}})),
    ] {
        let mut model = Model::new(&Quantized::default());
        let (_, tensor, fault) = refused(model.set(key, value.clone()).write().path());
        assert!(matches!(fault, Fault::ConfigValue { .. }), "{key} {value}: {fault}");
        assert_eq!(tensor, None);
    }
}

#[test]
fn a_dynamic_rule_that_is_no_regex() {
    let mut model = Model::new(&Quantized::default());
    let (_, _, fault) = refused(model.set("dynamic", json!({"+:(": {}})).write().path());
    assert!(matches!(fault, Fault::DynamicRule { rule, .. } if rule == "+:("));
}

#[test]
fn a_size_of_config_json_that_makes_no_sense_is_named() {
    let mut model = Model::new(&Quantized::default());
    model.config["hidden_size"] = json!(0);
    let (file, _, fault) = refused(model.write().path());
    assert_eq!(file, "config.json");
    assert!(matches!(fault, Fault::Sizes(e) if e.key == "hidden_size"));
}

// Modules.

#[test]
fn words_of_another_type_are_refused_and_never_reinterpreted() {
    let mut model = Model::new(&Quantized::default());
    let tensor = model.tensor(Q, "qweight");
    (tensor.dtype, tensor.shape[0]) = ("I16", tensor.shape[0] * 2);
    let fault = refused_tensor(&model, &format!("{Q}.qweight"));
    assert!(matches!(fault, Fault::TensorDtype { found: safetensors::Dtype::I16, .. }), "{fault}");
}

#[test]
fn two_layouts_of_one_module() {
    for (suffix, shape) in [("weight", [HIDDEN, HIDDEN]), ("q_weight", [8, HIDDEN])] {
        let mut model = Model::new(&Quantized::default());
        let elements = shape[0] * shape[1];
        model.put(Q, suffix, Tensor::f16s(&shape, &vec![0.0; elements]));
        let dir = model.write();
        assert!(matches!(refused(dir.path()).2, Fault::TwoLayouts { .. }), "{suffix}");
    }
}

#[test]
fn awq_words_are_recognised_by_their_shape() {
    let mut model = Model::new(&Quantized::default());
    model.put(Q, "qweight", Tensor::u32s(&[HIDDEN, HIDDEN / 8], &[0; HIDDEN * HIDDEN / 8]));
    let fault = refused_tensor(&model, &format!("{Q}.qweight"));
    assert!(matches!(fault, Fault::Foreign { method, .. } if method == "awq"));
}

#[test]
fn other_layouts_are_recognised_by_their_tensors() {
    for (suffix, method) in [("weight_packed", "compressed-tensors"), ("trellis", "exl3"), ("B", "marlin")] {
        let mut model = Model::new(&Quantized::default());
        model.tensors.retain(|name, _| !name.starts_with(Q));
        model.put(Q, suffix, Tensor::u32s(&[4], &[0; 4]));
        let fault = refused_tensor(&model, &format!("{Q}.{suffix}"));
        assert!(matches!(fault, Fault::Foreign { method: found, .. } if found == method));
    }
}

#[test]
fn tensors_beside_the_linears_are_expected_too() {
    for name in ["model.embed_tokens.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight"] {
        let mut model = Model::new(&Quantized::default());
        model.tensors.remove(name);
        assert!(matches!(refused_tensor(&model, name), Fault::DenseMissing { .. }));
    }
    let mut model = Model::new(&Quantized::default());
    model.tensors.remove("lm_head.weight");
    assert!(matches!(refused_tensor(&model, "lm_head.weight"), Fault::HeadMissing));
}

#[test]
fn a_quantized_module_without_a_place() {
    let mut model = Model::new(&Quantized::default());
    let name = "model.layers.1.self_attn.q_proj";
    support::writer::gptq_module(&mut model.tensors, name, HIDDEN, HIDDEN, &Quantized::default());
    assert!(matches!(refused(model.write().path()).2, Fault::ModuleUnexpected { layers: 1, .. }));
}

#[test]
fn a_dense_weight_of_another_shape_or_type() {
    let mut model = Model::new(&Quantized::default());
    model.tensors.retain(|name, _| !name.starts_with(DOWN));
    model.put(DOWN, "weight", Tensor::f16s(&[INTERMEDIATE, HIDDEN], &[0.0; INTERMEDIATE * HIDDEN]));
    assert!(matches!(refused_tensor(&model, &format!("{DOWN}.weight")), Fault::TensorShape { .. }));
    model.tensor(DOWN, "weight").dtype = "I16";
    assert!(matches!(refused_tensor(&model, &format!("{DOWN}.weight")), Fault::TensorDtype { .. }));
}

#[test]
fn a_bias_of_another_length() {
    let mut model = Model::new(&Quantized::default());
    model.put(Q, "bias", Tensor::f16s(&[HIDDEN - 1], &[0.0; HIDDEN - 1]));
    assert!(matches!(refused_tensor(&model, &format!("{Q}.bias")), Fault::TensorShape { .. }));
}

// g_idx and scales.

#[test]
fn g_idx_entries_outside_the_groups() {
    for (row, value) in [(7, -1), (9, 2), (63, i32::MAX), (0, i32::MIN)] {
        let mut model = Model::new(&Quantized::default());
        let mut rows: Vec<i32> = (0..HIDDEN as i32).map(|row| row / 32).collect();
        rows[row] = value;
        model.put(Q, "g_idx", Tensor::i32s(&[HIDDEN], &rows));
        let fault = refused_tensor(&model, &format!("{Q}.g_idx"));
        let Fault::Gptq(gptq::Error::GroupIndex { position, found, groups: 2 }) = fault else {
            panic!("{fault}")
        };
        assert_eq!((position, found), (row, i64::from(value)));
    }
    // Beyond 32 bits: must not come back as group 0.
    let mut model = Model::new(&Quantized::default());
    let mut rows = vec![0i64; HIDDEN];
    rows[3] = 1 << 32;
    model.put(Q, "g_idx", Tensor::i64s(&[HIDDEN], &rows));
    assert!(matches!(
        refused_tensor(&model, &format!("{Q}.g_idx")),
        Fault::Gptq(gptq::Error::GroupIndex { .. })
    ));
}

#[test]
fn g_idx_of_a_wrong_length_or_rank() {
    for shape in [vec![HIDDEN - 1], vec![2 * HIDDEN], vec![1, HIDDEN]] {
        let mut model = Model::new(&Quantized::default());
        let rows = vec![0; shape.iter().product()];
        model.put(Q, "g_idx", Tensor::i32s(&shape, &rows));
        let fault = refused_tensor(&model, &format!("{Q}.g_idx"));
        let fits = matches!(&fault, Fault::Gptq(gptq::Error::GIdxLength { .. }) | Fault::TensorRank { .. });
        assert!(fits, "{fault}");
    }
}

#[test]
fn a_group_size_that_nothing_tells() {
    // Without g_idx, down_proj's 96 rows in 5 groups are explained by 20 rows, but not by the stated 32.
    let mut model = Model::new(&Quantized { group_size: 20, ..Quantized::default() });
    model.set("group_size", json!(32)).remove_all("g_idx");
    let fault = refused_tensor(&model, &format!("{DOWN}.scales"));
    let size = gptq::Error::GroupSize { in_features: INTERMEDIATE, groups: 5, stated: Some(32) };
    assert!(matches!(&fault, Fault::Gptq(e) if *e == size), "{fault}");
    open(model.set("group_size", json!(20)).write().path()).unwrap();
}

#[test]
fn scales_that_are_no_numbers_are_named_by_position() {
    let makers: [fn(&[usize], &[f32]) -> Tensor; 3] = [Tensor::f16s, Tensor::bf16s, Tensor::f32s];
    for make in makers {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut model = Model::new(&Quantized::default());
            let mut scales = vec![0.5; 2 * HIDDEN];
            scales[HIDDEN + 5] = value;
            model.put(Q, "scales", make(&[2, HIDDEN], &scales));
            let fault = refused_tensor(&model, &format!("{Q}.scales"));
            assert!(matches!(fault, Fault::Gptq(gptq::Error::Scale { group: 1, column: 5, .. })), "{fault}");
        }
    }
}

// EXL2.

/// The fixture as tensors, to be broken.
fn exl2_model() -> Model {
    let dir = Path::new("fixtures/tiny-llama-exl2-4.0bpw");
    let checkpoint = open(dir).unwrap();
    let names = |module: &requant::checkpoint::Module| module.tensor_names().collect::<Vec<_>>();
    let of_modules = checkpoint.modules().iter().flat_map(names);
    let others = checkpoint.other_tensors().map(|tensor| tensor.name().to_owned());
    let mut tensors = Tensors::new();
    for name in of_modules.chain(others) {
        let Some(tensor) = checkpoint.tensor(&name) else { continue };
        let dtype = match tensor.dtype() {
            safetensors::Dtype::I32 => "I32",
            safetensors::Dtype::I16 => "I16",
            _ => "F16",
        };
        tensors.insert(name, Tensor::of(dtype, tensor.shape(), tensor.bytes()));
    }
    Model { config: Value::Object(checkpoint.config().clone()), quant: None, tensors }
}

#[test]
fn exl2_tensors_that_do_not_fit() {
    let valid = exl2_model();
    open(valid.write().path()).unwrap();
    type Break = fn(&mut Tensor);
    let cases: [(&str, Break, fn(&Fault) -> bool); 9] = [
        ("q_groups", |t| t.bytes[0] = 7, |f| matches!(f, Fault::Exl2(exl2::Error::Bits { .. }))),
        ("q_groups", |t| t.bytes[2] = 1, |f| matches!(f, Fault::Exl2(exl2::Error::Offset { .. }))),
        ("q_groups", |t| t.bytes[0] = 2, |f| matches!(f, Fault::Exl2(_))),
        ("q_groups", |t| t.dtype = "U16", |f| matches!(f, Fault::TensorDtype { .. })),
        ("q_scale_max", |t| t.bytes[1] = 0xfc, |f| matches!(f, Fault::Exl2(exl2::Error::Ceiling { .. }))),
        ("q_scale_max", |t| t.bytes[1] = 0x7e, |f| matches!(f, Fault::Exl2(exl2::Error::Ceiling { .. }))),
        (
            "q_invperm",
            |t| t.bytes.copy_within(0..4, 4),
            |f| matches!(f, Fault::Exl2(exl2::Error::Permutation(_))),
        ),
        ("q_scale_max", |t| t.dtype = "BF16", |f| matches!(f, Fault::TensorDtype { .. })),
        ("q_scale", |t| t.shape.reverse(), |f| matches!(f, Fault::TensorShape { .. })),
    ];
    for (suffix, change, is) in cases {
        let mut model = valid.clone();
        change(model.tensor(Q, suffix));
        let fault = refused_tensor(&model, &format!("{Q}.{suffix}"));
        assert!(is(&fault), "{suffix}: {fault}");
    }
    for suffix in ["q_invperm", "q_scale", "q_scale_max", "q_groups"] {
        let mut model = valid.clone();
        model.tensors.remove(&format!("{Q}.{suffix}"));
        assert!(matches!(refused_tensor(&model, &format!("{Q}.{suffix}")), Fault::TensorMissing { .. }));
    }
}

#[test]
fn an_exl2_group_that_vanishes_is_refused_when_read() {
    let mut model = exl2_model();
    model.tensor(Q, "q_scale_max").bytes[..2].fill(0);
    let dir = model.write();
    let checkpoint = open(dir.path()).unwrap();
    let error = checkpoint.dequantize(checkpoint.module(Q).unwrap()).unwrap_err();
    assert!(matches!(*error.fault, Fault::Exl2(exl2::Error::VanishingGroup { group: 0, .. })), "{error:#}");
    assert_eq!(error.tensor, Some(format!("{Q}.q_scale_max")));
}

// Anything.

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// 2000 cases: up to 8 bytes of the header replaced. Opening and decoding never panic.
    #[test]
    fn a_damaged_header_never_panics(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8)) {
        damaged(&changes);
    }

    /// 2000 cases: digits of the header replaced by digits, so that it stays JSON and lies about numbers.
    #[test]
    fn false_numbers_in_a_header_never_panic(changes in prop::collection::vec((any::<prop::sample::Index>(), b'0'..=b'9'), 1..4)) {
        damaged(&changes);
    }
}

/// Opens a file with bytes of its length field and header replaced; digits only by digits.
fn damaged(changes: &[(prop::sample::Index, u8)]) {
    thread_local! {
        static VALID: (tempfile::TempDir, Vec<u8>) = {
            let dir = Model::new(&Quantized::default()).write();
            let bytes = std::fs::read(dir.path().join("model.safetensors")).unwrap();
            (dir, bytes)
        };
    }
    VALID.with(|(dir, valid)| {
        let mut bytes = valid.clone();
        let end = 8 + u64::from_le_bytes(valid[..8].try_into().unwrap()) as usize;
        let digits: Vec<usize> = (8..end).filter(|&i| valid[i].is_ascii_digit()).collect();
        for (place, byte) in changes {
            let place =
                if byte.is_ascii_digit() { digits[place.index(digits.len())] } else { place.index(end) };
            bytes[place] = *byte;
        }
        std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
        if let Ok(checkpoint) = open(dir.path()) {
            for module in checkpoint.modules() {
                let _ = checkpoint.dequantize(module);
            }
        }
    });
}

#[test]
fn the_model_that_these_tests_break_is_valid() {
    let dir = Model::new(&Quantized::default()).write();
    assert_eq!(open(dir.path()).unwrap().modules().len(), LINEARS.len() + 1);
}
