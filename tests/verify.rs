//! `requant verify`: good outputs of all kinds pass, and each planted fault is found and named.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

#[path = "support/outputs.rs"]
mod outputs;
mod support;

use outputs::{Output, SMALL, dense, exl2, gptq, json_of, output, sorted, source, zeros};
use requant::checkpoint::{Checkpoint, OpenOptions};
use requant::formats::gptq::{Bits, ZeroConvention};
use requant::plan::{DenseType, GptqOptions, Plan};
use requant::progress::Silent;
use requant::verify::{CheckKind, Verification, verify};
use serde_json::json;
use std::path::Path;
use support::writer::{DOWN, HIDDEN, Model, Q, Quantized, Tensor};

const FIXTURE: &str = "fixtures/tiny-llama-gptq";
const GATE: &str = "model.layers.0.mlp.gate_proj";

fn check(dir: &Path, against: Option<&Checkpoint>) -> Verification {
    verify(dir, &OpenOptions::default(), against, &Silent).unwrap()
}

/// The kinds of checks that found faults, with each fault's file and tensor.
fn faults(verification: &Verification) -> Vec<(CheckKind, Option<&str>, Option<&str>)> {
    assert_eq!(verification.good, verification.faults().next().is_none());
    let faults = verification.faults();
    faults.map(|(kind, fault)| (kind, fault.file.as_deref(), fault.tensor.as_deref())).collect()
}

fn assert_good(out: &Output, from: &Checkpoint, what: &str) {
    for against in [None, Some(from)] {
        let found = check(&out.dir, against);
        assert!(found.good, "{what}: {found:#?}");
        let exactness = found.checks.iter().find(|check| check.kind == CheckKind::Exactness).unwrap();
        assert_eq!(exactness.skipped.is_none(), against.is_some());
        assert!(against.is_none() || exactness.checked > 10);
    }
}

/// The fault that must be the only one, without the source or only with it.
fn assert_fault(out: &Output, from: &Checkpoint, kind: CheckKind, tensor: &str) {
    let with_source = matches!(kind, CheckKind::Exactness);
    let without = check(&out.dir, None);
    assert_eq!(without.good, with_source, "{without:#?}");
    let found = check(&out.dir, Some(from));
    let file = out.file_of(&first_tensor(out, tensor));
    let file = file.file_name().unwrap().to_str();
    assert_eq!(faults(&found), [(kind, file, Some(tensor))], "{found:#?}");
}

/// A tensor of that name, or the first of a module of that name.
fn first_tensor(out: &Output, name: &str) -> String {
    let index = json_of(out.dir.join("model.safetensors.index.json"));
    let map = index["weight_map"].as_object().unwrap();
    let suffixes = ["", ".qweight", ".q_weight", ".weight"];
    suffixes.iter().map(|suffix| format!("{name}{suffix}")).find(|name| map.contains_key(name)).unwrap()
}

#[test]
fn good_outputs_of_all_kinds() {
    let from = source(FIXTURE);
    let mut outputs = vec![
        ("exl2", exl2(&from, 3)),
        ("fp16", dense(&from, DenseType::Fp16)),
        ("bf16", dense(&from, DenseType::Bf16)),
        ("same", output(&from, &Plan::same(&from), SMALL)),
    ];
    let default = GptqOptions::default;
    for (name, options) in [
        ("kept", default()),
        ("v2", zeros(ZeroConvention::V2)),
        ("8 bits", GptqOptions { bits: Some(Bits::ALL[3]), ..default() }),
        ("groups of 16", GptqOptions { group_size: Some(16), ..default() }),
        ("sorted", sorted()),
        ("exllamav2", outputs::reader("exllamav2")),
    ] {
        outputs.push((name, gptq(&from, &options).unwrap()));
    }
    for (name, out) in &outputs {
        assert_good(out, &from, name);
    }
}

#[test]
fn good_outputs_of_an_exl2_directory() {
    let from = source("fixtures/tiny-llama-exl2-4.0bpw");
    assert_good(&dense(&from, DenseType::Fp16), &from, "fp16");
    assert_good(&dense(&from, DenseType::Bf16), &from, "bf16");
    assert_good(&gptq(&from, &GptqOptions::default()).unwrap(), &from, "gptq");
    assert_good(&gptq(&from, &sorted()).unwrap(), &from, "sorted");
}

#[test]
fn good_outputs_with_rounded_scales() {
    let mut model = Model::new(&Quantized::default());
    let scales: Vec<f32> = (0..2 * HIDDEN).map(|i| 1e-6 * (1.0 + i as f32 / 200.0)).collect();
    model.put(Q, "scales", Tensor::bf16s(&[2, HIDDEN], &scales));
    let dir = model.write();
    let from = source(dir.path());
    let options = GptqOptions { allow_rounding: true, ..outputs::reader("gptqmodel") };
    let out = gptq(&from, &options).unwrap();
    let module = out.report()["modules"][0].clone();
    assert_eq!((&module["name"], &module["exactness"]), (&json!(Q), &json!("rounded")));
    assert_good(&out, &from, "rounded");
    // Rounded, but not to the nearest.
    out.edit_tensor(&format!("{Q}.scales"), |bytes| bytes[0] ^= 1);
    out.restate();
    assert_fault(&out, &from, CheckKind::Exactness, Q);
}

#[test]
fn good_outputs_of_all_tiny_checkpoints() {
    let Some(assets) = support::folder("REQUANT_ASSETS") else { return };
    for entry in std::fs::read_dir(assets.join("tiny")).unwrap() {
        let dir = entry.unwrap().path();
        if !dir.join("config.json").is_file() {
            continue;
        }
        let from = source(&dir);
        let name = dir.display().to_string();
        assert_good(&exl2(&from, 4), &from, &name);
        // A zero point of 0 can't be written in v1: tiny-llama-2bit has one.
        let symmetric = name.ends_with("2bit");
        assert_good(&gptq(&from, &GptqOptions { symmetric, ..sorted() }).unwrap(), &from, &name);
        assert_good(&dense(&from, DenseType::Bf16), &from, &name);
    }
}

#[test]
fn exllamav2s_own_directories_are_good() {
    let mut dirs = vec![Path::new("fixtures/tiny-llama-exl2-4.0bpw").to_owned()];
    if let Some(assets) = support::folder("REQUANT_ASSETS") {
        dirs.extend(["2.5", "4.0", "6.0"].map(|bpw| assets.join(format!("exl2/tiny-llama-exl2-{bpw}bpw"))));
    }
    for dir in dirs {
        let found = check(&dir, None);
        assert!(found.good, "{found:#?}");
        let skipped: Vec<CheckKind> =
            found.checks.iter().filter(|check| check.skipped.is_some()).map(|check| check.kind).collect();
        let expected = [CheckKind::Files, CheckKind::Index, CheckKind::Source, CheckKind::Exactness];
        assert_eq!(skipped, expected);
    }
}

#[test]
fn a_flipped_byte() {
    let from = source(FIXTURE);
    let out = exl2(&from, 3);
    let norm = "model.norm.weight";
    out.edit_tensor(norm, |bytes| bytes[7] ^= 1);
    let file = out.file_of(norm);
    let file = file.file_name().unwrap().to_str();
    assert_eq!(faults(&check(&out.dir, None)), [(CheckKind::Files, file, None)]);
    let found = check(&out.dir, Some(&from));
    let expected = [(CheckKind::Files, file, None), (CheckKind::Exactness, file, Some(norm))];
    assert_eq!(faults(&found), expected);
}

#[test]
fn a_missing_shard() {
    let from = source(FIXTURE);
    let out = exl2(&from, 3);
    let path = out.file_of("model.norm.weight");
    let file = path.file_name().unwrap().to_str();
    std::fs::remove_file(&path).unwrap();
    let found = check(&out.dir, Some(&from));
    let found = faults(&found);
    assert!(found.contains(&(CheckKind::Files, file, None)), "{found:?}");
    assert!(found.contains(&(CheckKind::Open, file, None)), "{found:?}");
    let index = (CheckKind::Index, Some("model.safetensors.index.json"), Some("model.norm.weight"));
    assert!(found.contains(&index), "{found:?}");
}

#[test]
fn missing_other_files() {
    let from = source(FIXTURE);
    for file in ["tokenizer.json", "model.safetensors.index.json"] {
        let out = gptq(&from, &zeros(ZeroConvention::V2)).unwrap();
        std::fs::remove_file(out.dir.join(file)).unwrap();
        let found = check(&out.dir, None);
        assert!(faults(&found).contains(&(CheckKind::Files, Some(file), None)), "{found:#?}");
    }
}

#[test]
fn a_changed_scale_that_the_report_calls_exact() {
    let from = source(FIXTURE);
    let out = gptq(&from, &zeros(ZeroConvention::V2)).unwrap();
    out.edit_tensor(&format!("{DOWN}.scales"), |bytes| bytes[100] ^= 1);
    out.restate();
    assert_fault(&out, &from, CheckKind::Exactness, DOWN);
}

#[test]
fn a_changed_tensor_that_the_report_calls_identical() {
    let from = source(FIXTURE);
    let out = gptq(&from, &GptqOptions::default()).unwrap();
    let scales = format!("{DOWN}.scales");
    out.edit_tensor(&scales, |bytes| bytes[100] ^= 1);
    out.restate();
    assert_fault(&out, &from, CheckKind::Exactness, &scales);
}

#[test]
fn swapped_groups() {
    let from = source(FIXTURE);
    let out = gptq(&from, &zeros(ZeroConvention::V2)).unwrap();
    out.edit_tensor(&format!("{Q}.scales"), |bytes| bytes[..1024].rotate_left(512));
    out.restate();
    assert_fault(&out, &from, CheckKind::Exactness, Q);
    // The same in g_idx: rows 0 and 1 exchange their groups.
    let out = gptq(&from, &zeros(ZeroConvention::V2)).unwrap();
    let mut swapped = false;
    out.edit_tensor(&format!("{DOWN}.g_idx"), |bytes| {
        let groups: &mut [i32] = bytemuck::cast_slice_mut(bytes);
        let other = groups.iter().position(|group| *group != groups[0]).unwrap();
        groups.swap(0, other);
        swapped = true;
    });
    assert!(swapped);
    out.restate();
    assert_fault(&out, &from, CheckKind::Exactness, DOWN);
}

#[test]
fn inverted_permutations() {
    let from = source(FIXTURE);
    let invert = |order: &[u64]| {
        let mut inverse = vec![0; order.len()];
        for (place, &row) in order.iter().enumerate() {
            inverse[row as usize] = place as u64;
        }
        assert_ne!(inverse, order);
        inverse
    };
    // In the report: down_proj's rows, and gate's and up's columns.
    let out = gptq(&from, &sorted()).unwrap();
    out.edit_json("report.json", |report| {
        let modules = report["modules"].as_array_mut().unwrap();
        let module = modules.iter_mut().find(|module| module["name"] == DOWN).unwrap();
        let order: Vec<u64> = serde_json::from_value(module["row_order"].clone()).unwrap();
        module["row_order"] = json!(invert(&order));
    });
    let found = check(&out.dir, Some(&from));
    let tensors: Vec<&str> = faults(&found).iter().map(|(_, _, tensor)| tensor.unwrap()).collect();
    assert_eq!(tensors, [GATE, "model.layers.0.mlp.up_proj", DOWN]);
    assert!(found.faults().all(|(kind, _)| kind == CheckKind::Exactness));
    // In the file.
    let out = exl2(&from, 4);
    out.edit_tensor(&format!("{DOWN}.q_invperm"), |bytes| {
        let map: &mut [u32] = bytemuck::cast_slice_mut(bytes);
        let order: Vec<u64> = map.iter().map(|&row| u64::from(row)).collect();
        for (to, from) in map.iter_mut().zip(invert(&order)) {
            *to = from as u32;
        }
    });
    out.restate();
    assert_fault(&out, &from, CheckKind::Exactness, DOWN);
}

#[test]
fn a_scale_index_off_by_one() {
    let from = source(FIXTURE);
    let out = exl2(&from, 4);
    out.edit_tensor(&format!("{GATE}.q_scale"), |bytes| {
        bytes[9] = if bytes[9] & 15 == 15 { bytes[9] - 1 } else { bytes[9] + 1 };
    });
    out.restate();
    assert_fault(&out, &from, CheckKind::Exactness, GATE);
}

#[test]
fn a_missing_bias() {
    let mut model = Model::new(&Quantized::default());
    model.config["architectures"] = json!(["Qwen2ForCausalLM"]);
    for name in ["q_proj", "k_proj", "v_proj"] {
        let bias: Vec<f32> = (0..HIDDEN).map(|i| i as f32 / 64.0).collect();
        model.put(&format!("model.layers.0.self_attn.{name}"), "bias", Tensor::f16s(&[HIDDEN], &bias));
    }
    let dir = model.write();
    let from = source(dir.path());
    let out = exl2(&from, 4);
    assert_good(&out, &from, "with biases");
    let bias = format!("{Q}.bias");
    out.edit_tensors(&bias, |tensors| assert!(tensors.remove(&bias).is_some()));
    out.restate();
    let found = check(&out.dir, None);
    assert_eq!(faults(&found), [(CheckKind::Exllamav2, None, Some(bias.as_str()))], "{found:#?}");
    let found = check(&out.dir, Some(&from));
    let exactness = (CheckKind::Exactness, None, Some(bias.as_str()));
    assert!(faults(&found).contains(&exactness), "{found:#?}");
    // A report that doesn't mention it, either.
    out.edit_json("report.json", |report| {
        report["tensors"].as_array_mut().unwrap().retain(|tensor| tensor["name"] != bias.as_str());
    });
    assert!(faults(&check(&out.dir, Some(&from))).contains(&exactness));
}

#[test]
fn a_bias_too_many() {
    let from = source(FIXTURE);
    let out = exl2(&from, 4);
    let bias = format!("{Q}.bias");
    out.edit_tensors(&format!("{Q}.q_scale"), |tensors| {
        tensors.insert(bias.clone(), Tensor::f16s(&[256], &[0.0; 256]));
    });
    out.restate();
    let found = check(&out.dir, Some(&from));
    let kinds: Vec<CheckKind> = faults(&found).iter().map(|(kind, ..)| *kind).collect();
    assert_eq!(kinds, [CheckKind::Exllamav2, CheckKind::Exactness], "{found:#?}");
    assert!(found.faults().all(|(_, fault)| fault.tensor.as_deref() == Some(bias.as_str())));
}

#[test]
fn a_stray_file_of_weights() {
    let from = source(FIXTURE);
    for (out, kinds) in [
        (exl2(&from, 4), &[CheckKind::Files, CheckKind::Exllamav2][..]),
        (gptq(&from, &sorted()).unwrap(), &[CheckKind::Files]),
    ] {
        std::fs::copy(out.file_of("model.norm.weight"), out.dir.join("adapter_model.safetensors")).unwrap();
        let found = check(&out.dir, None);
        let on_stray = faults(&found);
        let on_stray: Vec<CheckKind> = on_stray
            .iter()
            .filter(|(kind, ..)| *kind != CheckKind::Index)
            .map(|(kind, file, _)| (*file == Some("adapter_model.safetensors")).then_some(*kind).unwrap())
            .collect();
        assert_eq!(on_stray, kinds, "{found:#?}");
    }
}

#[test]
fn a_wrong_index() {
    let from = source(FIXTURE);
    let out = gptq(&from, &sorted()).unwrap();
    let name = "model.safetensors.index.json";
    let file = Some(name);
    out.edit_json(name, |index| {
        let norm = &index["weight_map"]["model.norm.weight"];
        let other = index["weight_map"].as_object().unwrap().values().find(|shard| *shard != norm);
        let other = other.unwrap().clone();
        index["weight_map"]["model.norm.weight"] = other;
    });
    let found = check(&out.dir, None);
    let index = (CheckKind::Index, file, Some("model.norm.weight"));
    assert!(faults(&found).contains(&index), "{found:#?}");

    let out = gptq(&from, &sorted()).unwrap();
    out.edit_json(name, |index| index["metadata"]["total_size"] = json!(5));
    assert_eq!(faults(&check(&out.dir, None)), [(CheckKind::Index, file, None)]);

    let out = gptq(&from, &sorted()).unwrap();
    out.edit_json(name, |index| {
        index["weight_map"].as_object_mut().unwrap().remove("model.norm.weight").unwrap();
    });
    let found = check(&out.dir, None);
    assert!(
        faults(&found)
            .iter()
            .any(|(kind, _, t)| *kind == CheckKind::Index && *t == Some("model.norm.weight"))
    );
}

#[test]
fn another_source() {
    let from = source(FIXTURE);
    let out = gptq(&from, &sorted()).unwrap();
    let other = source("fixtures/tiny-llama-exl2-4.0bpw");
    let found = check(&out.dir, Some(&other));
    assert_eq!(faults(&found), [(CheckKind::Source, Some("report.json"), None)]);
    assert!(check(&out.dir, None).good);
}

#[test]
fn reports_that_lie_by_omission() {
    let from = source(FIXTURE);
    let out = gptq(&from, &sorted()).unwrap();
    let norm = "model.norm.weight";
    out.edit_json("report.json", |report| {
        report["tensors"].as_array_mut().unwrap().retain(|tensor| tensor["name"] != norm);
        report["modules"].as_array_mut().unwrap().retain(|module| module["name"] != Q);
    });
    let found = check(&out.dir, Some(&from));
    for name in [norm, Q] {
        let expected = |(kind, _, tensor): &(CheckKind, Option<&str>, Option<&str>)| {
            *kind == CheckKind::Exactness && *tensor == Some(name)
        };
        assert!(faults(&found).iter().any(expected), "{name}: {found:#?}");
    }
    for broken in ["", "{}", "[1]", "{\"schema\": 2}"] {
        std::fs::write(out.dir.join("report.json"), broken).unwrap();
        assert_eq!(faults(&check(&out.dir, None)), [(CheckKind::Files, Some("report.json"), None)]);
    }
}

#[test]
fn configurations_that_readers_take_otherwise() {
    let from = source(FIXTURE);
    let config = |file: &str, edit: &dyn Fn(&mut serde_json::Value), kind| {
        let out = if kind == CheckKind::Exllamav2 { exl2(&from, 4) } else { gptq(&from, &sorted()).unwrap() };
        out.edit_json(file, edit);
        let found = check(&out.dir, None);
        assert_eq!(found.faults().map(|(kind, _)| kind).collect::<Vec<_>>(), [kind], "{found:#?}");
    };
    let exllamav2 = |edit: &dyn Fn(&mut serde_json::Value)| config("config.json", edit, CheckKind::Exllamav2);
    exllamav2(&|config| config["quantization_config"]["checkpoint_format"] = json!("gptq_v2"));
    exllamav2(&|config| {
        config["rope_scaling"] = json!({"type": "linear", "rope_type": "linear", "factor": 2})
    });
    exllamav2(&|config| config["rope_parameters"] = json!({"rope_theta": 12345.0, "rope_type": "default"}));
    exllamav2(&|config| {
        let theta = config["rope_theta"].clone();
        config.as_object_mut().unwrap().remove("rope_scaling");
        config["rope_parameters"] = json!({"rope_theta": theta, "rope_type": "linear", "factor": 2});
    });
    let gptq = |file: &str, edit: &dyn Fn(&mut serde_json::Value)| config(file, edit, CheckKind::Config);
    gptq("quantize_config.json", &|config| config["true_sequential"] = json!(false));
}

#[test]
fn mixtures_that_exllamav2_refuses() {
    let from = source(FIXTURE);
    let out = exl2(&from, 4);
    // k_proj dense among quantized ones.
    let k = "model.layers.0.self_attn.k_proj";
    let module = from.module(k).unwrap();
    let weights: Vec<f32> = vec![0.5; module.in_features() * module.out_features()];
    let tensor = Tensor::f16s(&[module.out_features(), module.in_features()], &weights);
    let files: std::collections::BTreeSet<String> =
        ["q_weight", "q_invperm", "q_scale", "q_scale_max", "q_groups"]
            .iter()
            .map(|suffix| format!("{k}.{suffix}"))
            .collect();
    for name in &files {
        out.edit_tensors(name, |tensors| {
            tensors.remove(name).unwrap();
        });
    }
    out.edit_tensors("model.norm.weight", |tensors| {
        tensors.insert(format!("{k}.weight"), tensor);
    });
    out.restate();
    let found = check(&out.dir, None);
    assert_eq!(found.faults().count(), 1, "{found:#?}");
    let (kind, fault) = found.faults().next().unwrap();
    assert_eq!((kind, fault.tensor.as_deref()), (CheckKind::Exllamav2, Some(k)));
}

fn requant(arguments: &[&str]) -> (i32, String, String) {
    let mut command = assert_cmd::Command::cargo_bin("requant").unwrap();
    let output = command.arg("verify").args(arguments).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn exit_codes_and_output() {
    let from = source(FIXTURE);
    let out = exl2(&from, 3);
    let dir = out.dir.to_str().unwrap();
    let (code, stdout, _) = requant(&[dir, "--against", FIXTURE]);
    assert_eq!((code, stdout.lines().count(), stdout.lines().last()), (0, 9, Some("good")), "{stdout}");

    out.edit_tensor("model.norm.weight", |bytes| bytes[7] ^= 1);
    let (code, stdout, stderr) = requant(&[dir]);
    assert_eq!((code, stdout.lines().last()), (3, Some("bad: 1 fault")), "{stdout}");
    assert!(stdout.contains("sha256") && stderr.contains("verification found a fault"), "{stdout}{stderr}");
    let (code, stdout, stderr) = requant(&[dir, "--json"]);
    let json: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, &json["good"], &json["checks"][0]["kind"]), (3, &json!(false), &json!("files")));
    let error: serde_json::Value = serde_json::from_str(stderr.lines().last().unwrap()).unwrap();
    assert_eq!(error["code"], "verify.failed");

    let own = "fixtures/tiny-llama-exl2-4.0bpw";
    let (code, stdout, _) = requant(&[own]);
    assert_eq!(code, 0, "{stdout}");
    assert!(stdout.contains("not checked: the directory has no report.json"), "{stdout}");
    assert_eq!(requant(&[own, "--against", FIXTURE]).0, 2);
    assert_eq!(requant(&[]).0, 2);
    assert_eq!(requant(&["/nowhere"]).0, 4);
}

/// An EXL2 directory in which one module is GPTQ again, from the first directory that has its tensors.
fn with_gptq_module(exl2: &Output, from: &Checkpoint, module: &str) {
    for suffix in ["q_weight", "q_invperm", "q_scale", "q_scale_max", "q_groups"] {
        let name = format!("{module}.{suffix}");
        exl2.edit_tensors(&name, |tensors| assert!(tensors.remove(&name).is_some()));
    }
    exl2.edit_tensors("model.norm.weight", |tensors| {
        for suffix in ["qweight", "qzeros", "scales", "g_idx"] {
            let name = format!("{module}.{suffix}");
            let view = from.tensor(&name).unwrap();
            let dtype = if suffix == "scales" { "F16" } else { "I32" };
            tensors.insert(name, Tensor::of(dtype, view.shape(), view.bytes()));
        }
    });
    exl2.restate();
}

#[test]
fn gptq_modules_in_an_exl2_directory() {
    let from = source(FIXTURE);
    let default = GptqOptions::default;
    let v2 = gptq(&from, &zeros(ZeroConvention::V2)).unwrap();
    let wide = gptq(&from, &GptqOptions { bits: Some(Bits::ALL[3]), ..default() }).unwrap();
    let fine = gptq(&from, &GptqOptions { group_size: Some(16), ..default() }).unwrap();
    // From where, which, and the tensor or module at fault.
    let cases: [(&Path, &str, Option<String>); 5] = [
        (Path::new(FIXTURE), Q, None),
        (Path::new(FIXTURE), GATE, Some(GATE.into())),
        (&v2.dir, Q, Some(format!("{Q}.qzeros"))),
        (&wide.dir, Q, Some(Q.into())),
        (&fine.dir, Q, Some(Q.into())),
    ];
    for (dir, module, fault) in cases {
        let out = exl2(&from, 4);
        with_gptq_module(&out, &source(dir), module);
        let found = check(&out.dir, None);
        assert_eq!(found.good, fault.is_none(), "{found:#?}");
        let named: Vec<Option<&str>> = found
            .faults()
            .filter(|(kind, _)| *kind == CheckKind::Exllamav2)
            .map(|(_, fault)| fault.tensor.as_deref())
            .collect();
        assert_eq!(named, fault.iter().map(|fault| Some(fault.as_str())).collect::<Vec<_>>(), "{found:#?}");
    }
}
