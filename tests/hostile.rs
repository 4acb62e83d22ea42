//! Checkpoints that lie: each is refused with the file and tensor at fault, or read as the warning says.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use proptest::prelude::*;
use requant::checkpoint::Fault;
use requant::{Diagnose, Kind, WarningCode};
use serde_json::{Value, json};
use std::process::Command;
use support::writer::{LINEARS, Model, Q, Quantized, Tensors, safetensors, write_index, write_json};
use support::{folder, refused, refused_tensor, skip, try_open};

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
        let opened = try_open(&out.path().join(name));
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
    let error = try_open(dir.path()).unwrap_err();
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
    let absent = try_open(&dir.path().join("absent")).unwrap_err();
    assert_eq!((absent.kind(), absent.code()), (Kind::Environment, "checkpoint.io"));
    std::fs::write(dir.path().join("file"), b"").unwrap();
    let file = try_open(&dir.path().join("file")).unwrap_err();
    assert_eq!((file.kind(), file.code()), (Kind::Usage, "checkpoint.not_a_folder"));
    assert!(file.hint().unwrap().contains("the folder that it is in"), "{file}");
    Model::new(&Quantized::default()).write_config(dir.path());
    assert!(matches!(refused(dir.path()).2, Fault::NoWeights));
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
        if let Ok(checkpoint) = try_open(dir.path()) {
            for module in checkpoint.modules() {
                let _ = checkpoint.dequantize(module);
            }
        }
    });
}

#[test]
fn the_model_that_these_tests_break_is_valid() {
    let dir = Model::new(&Quantized::default()).write();
    assert_eq!(try_open(dir.path()).unwrap().modules().len(), LINEARS.len() + 1);
}
