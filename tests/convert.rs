//! A GPTQ checkpoint becomes an EXL2 directory: complete, as its report says, and the same bytes every time.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use support::binary::{FIXTURE, convert, files_in, json_of, names_in, refuse, requant};
use support::consistency::names;
use support::writer::{Model, Quantized, Sizes};
use support::{folder, open};

#[test]
fn the_readmes_command_writes_a_complete_directory() {
    let converted = convert(Path::new(FIXTURE), &["--bpw", "4.25"]);
    let source = open(Path::new(FIXTURE));
    assert_eq!(
        names_in(&converted.out),
        [
            "config.json",
            "expected.json", // Lies beside the fixture, as any file may.
            "generation_config.json",
            "model.safetensors",
            "model.safetensors.index.json",
            "report.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ]
    );
    for name in ["generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        let (from, to) = (Path::new(FIXTURE).join(name), converted.out.join(name));
        assert_eq!(std::fs::read(from).unwrap(), std::fs::read(to).unwrap(), "{name}");
    }
    converted.assert_consistent(&source);
    assert_eq!(converted.assert_errors(&source), 21);

    // The configuration that exllamav2 reads, and nothing of GPTQ's.
    let config = &converted.config;
    let quantization = config["quantization_config"].as_object().unwrap();
    assert_eq!(quantization["quant_method"], "exl2");
    assert_eq!(quantization["head_bits"], 16);
    assert!(
        ["checkpoint_format", "desc_act", "group_size", "sym"].iter().all(|k| quantization.get(*k).is_none())
    );
    assert_eq!((&config["rope_theta"], &config["dtype"]), (&json!(10000.0), &json!("float16")));
    assert_eq!(config["tie_word_embeddings"], false);
    // All else is the source's.
    for (key, value) in source.config().iter().filter(|(key, _)| *key != "quantization_config") {
        assert_eq!(config[key], *value, "{key}");
    }

    let report = &converted.report;
    let keys: Vec<&str> = report.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(
        keys,
        [
            "schema",
            "tool",
            "source",
            "flags",
            "target",
            "totals",
            "objective",
            "mean_relative_error",
            "modules",
            "tensors",
            "shards",
            "side_files",
            "warnings"
        ]
    );
    assert_eq!((&report["schema"], &report["target"]), (&json!(1), &json!({"bpw": 4.25})));
    assert_eq!(report["source"]["fingerprint"], source.fingerprint());
    assert_eq!(report["warnings"], json!([]));
    let skipped = &report["side_files"]["skipped"];
    assert_eq!(names(skipped, "name"), ["config.json", "model.safetensors", "quantize_config.json"]);

    // What each width was chosen from, and what the next ones would cost.
    let linears = || report["modules"].as_array().unwrap().iter().filter(|m| m["name"] != "lm_head");
    for module in linears() {
        // Six widths at each of three group sizes.
        assert_eq!(module["options"].as_array().unwrap().len(), 18, "{module}");
        let (up, down) = (&module["step_up"], &module["step_down"]);
        assert!(up["bits"].as_i64().unwrap() > 0 && down["bits"].as_i64().unwrap() < 0, "{module}");
        let error = |option: &Value| option["option"]["relative_error"].as_f64().unwrap();
        let own = module["relative_error"].as_f64().unwrap();
        assert!(error(up) < own && own < error(down), "{module}");
        for price in [up, down] {
            let bits = |value: &Value| value.as_i64().unwrap();
            let from = bits(&price["option"]["stored_bits"]) - bits(&price["bits"]);
            assert_eq!(module["stored_bits"], from, "{module}");
        }
    }
    let mean =
        linears().map(|m| m["relative_error"].as_f64().unwrap()).sum::<f64>() / linears().count() as f64;
    assert!((report["mean_relative_error"].as_f64().unwrap() - mean).abs() < 1e-12);

    assert!(converted.stdout.contains("4.2483 bpw") && converted.stdout.lines().count() == 1);
}

#[test]
fn each_width_decodes_to_what_the_report_says() {
    let source = open(Path::new(FIXTURE));
    let mut last = f64::INFINITY;
    for bits in ["2", "3", "4", "5", "6", "8"] {
        let converted = convert(Path::new(FIXTURE), &["--bits", bits, "--group-size", "32"]);
        converted.assert_consistent(&source);
        assert_eq!(converted.assert_errors(&source), 21);
        let wanted: u64 = bits.parse().unwrap();
        for module in source.modules().iter().filter(|m| m.name() != "lm_head") {
            assert_eq!(converted.widths(module.name()), [wanted]);
            assert_eq!(converted.module(module.name())["group_size"], 32);
        }
        let mean = converted.report["mean_relative_error"].as_f64().unwrap();
        assert!(mean < last, "{bits} bits: {mean}, one width less: {last}");
        last = mean;
    }
}

#[test]
fn every_tiny_checkpoint_decodes_to_what_the_report_says() {
    let Some(assets) = folder("REQUANT_ASSETS") else { return };
    let names = [
        "tiny-llama",
        "tiny-llama-2bit",
        "tiny-llama-3bit",
        "tiny-llama-8bit",
        "tiny-llama-asym",
        "tiny-llama-autogptq",
        "tiny-llama-dynamic",
        "tiny-llama-g128",
        "tiny-llama-perchannel",
        "tiny-llama-sharded",
        "tiny-llama-v2",
        "tiny-llama3rope",
        "tiny-mistral-swa",
        "tiny-mixtral",
        "tiny-qwen2",
        "tiny-qwen3",
        "tiny-qwen3moe",
    ];
    let all = names_in(&assets.join("tiny"));
    let all: Vec<&str> = all.iter().map(String::as_str).filter(|name| name.starts_with("tiny-")).collect();
    assert_eq!(names.iter().collect::<BTreeSet<_>>(), all.iter().collect());
    for name in names {
        let dir = assets.join("tiny").join(name);
        let source = open(&dir);
        let converted = convert(&dir, &["--bpw", "4.25"]);
        converted.assert_consistent(&source);
        let linears = source.modules().iter().filter(|m| m.name() != "lm_head").count();
        assert_eq!(converted.assert_errors(&source), linears, "{name}");
        let bpw = converted.report["totals"]["bpw"].as_f64().unwrap();
        assert!((4.24..=4.25).contains(&bpw), "{name}: {bpw} bpw");
        let objective = &converted.report["objective"];
        let value = |key: &str| objective[key].as_f64().unwrap();
        assert!(value("value") <= value("one_width_a_module"), "{name}: {objective}");
        let expected: &[&str] = match name {
            "tiny-llama-2bit" => &["zero_points_wrapped"],
            "tiny-llama-autogptq" => &["zero_bias_dropped"],
            "tiny-llama-dynamic" => &["dense_member_quantized"],
            "tiny-mistral-swa" => &["config"], // exllamav2 ignores the window.
            _ => &[],
        };
        assert_eq!(converted.warning_codes(), expected, "{name}");
    }
}

#[test]
fn a_model_of_106_million_weights_decodes_to_what_the_report_says() {
    let Some(dir) = folder("REQUANT_SMOLLM2") else { return };
    let source = open(&dir);
    let converted = convert(&dir, &["--bits", "4"]);
    converted.assert_consistent(&source);
    assert_eq!(converted.assert_errors(&source), 210);
    assert_eq!(converted.report["totals"]["quantized_weights"], 106_168_320);
}

#[test]
fn a_target_is_met_from_below_and_each_end_of_the_range_can_be_had() {
    let source = Path::new(FIXTURE);
    let refused = refuse(source, &["--bpw", "1"]);
    assert_eq!((refused.exit, refused.text("code")), (2, "plan.infeasible"));
    let range: Vec<&str> = refused.text("hint").split(' ').filter(|word| word.contains('.')).collect();
    let [lowest, highest] = range[..] else { panic!("{}", refused.error) };
    for (asked, width) in [(lowest, 2), (highest, 8)] {
        let converted = convert(source, &["--bpw", asked]);
        let bpw = converted.report["totals"]["bpw"].as_f64().unwrap();
        let asked: f64 = asked.parse().unwrap();
        assert!(bpw <= asked && asked - bpw < 0.01, "{bpw} of {asked}");
        let most = source_linears().filter(|name| converted.widths(name) == [width]).count();
        assert!(most >= 20, "{most} of 21 modules have {width} bits");
    }
    // All digits of the dearest plan, which is every module at 8 bits in groups of 32.
    let dearest = convert(source, &["--bits", "8", "--group-size", "32"]);
    let bpw = dearest.report["totals"]["bpw"].to_string();
    let again = convert(source, &["--bpw", &bpw]);
    assert_eq!(again.report["totals"], dearest.report["totals"]);

    let out_of_range = ["1.0", "9.0", "NaN", "inf", "-1", "0"];
    for bpw in out_of_range {
        let refused = refuse(source, &["--bpw", bpw]);
        assert_eq!((refused.exit, refused.text("code")), (2, "plan.infeasible"), "{bpw}");
        assert!(refused.text("hint").contains(&format!("from {lowest} to {highest}")), "{}", refused.error);
    }
}

fn source_linears() -> impl Iterator<Item = String> {
    let source = open(Path::new(FIXTURE));
    let names: Vec<String> = source.modules().iter().map(|m| m.name().to_owned()).collect();
    names.into_iter().filter(|name| name != "lm_head")
}

#[test]
fn the_same_bytes_for_any_number_of_threads() {
    let flags = |threads| ["--bpw", "3.1", "--head-bits", "6", "--shard-size", "600kB", "--threads", threads];
    let first = convert(Path::new(FIXTURE), &flags("1"));
    let expected = files_in(&first.out);
    let assert_same = |found: &BTreeMap<String, Vec<u8>>, threads: &str| {
        assert!(expected.keys().eq(found.keys()));
        for (name, bytes) in &expected {
            assert!(found[name] == *bytes, "{name} differs with {threads} threads");
        }
    };
    assert_same(&files_in(&convert(Path::new(FIXTURE), &flags("2")).out), "2");
    // No path gets into a file, of the source or of the output.
    let copy = tempfile::tempdir().unwrap();
    for (name, bytes) in files_in(Path::new(FIXTURE)) {
        std::fs::write(copy.path().join(name), bytes).unwrap();
    }
    assert_same(&files_in(&convert(copy.path(), &flags("7")).out), "7");
    let traces =
        [copy.path(), first.out.parent().unwrap()].map(|path| path.file_name().unwrap().as_encoded_bytes());
    for (name, bytes) in &expected {
        for trace in traces {
            assert!(!bytes.windows(trace.len()).any(|window| window == trace), "{name}");
        }
    }
}

#[test]
fn fixed_widths_and_floors_are_kept() {
    let source = Path::new(FIXTURE);
    let flags = ["--set", "layers.1.*v_proj=8", "--set", "v_proj=3", "--min", r"down_proj$=5"];
    let converted = convert(source, &[&["--bpw", "4.25"], &flags[..]].concat());
    converted.assert_errors(&open(source));
    for name in source_linears() {
        let widths = converted.widths(&name);
        if name == "model.layers.1.self_attn.v_proj" {
            assert_eq!(widths, [8]); // The first rule that matches counts.
        } else if name.ends_with("v_proj") {
            assert_eq!(widths, [3]);
        } else if name.ends_with("down_proj") {
            assert!(widths.iter().all(|&bits| bits >= 5), "{name}: {widths:?}");
            let options = converted.module(&name)["options"].as_array().unwrap();
            assert_eq!(options.len(), 3 * 3); // 5, 6 and 8 bits.
        }
    }
    let bpw = converted.report["totals"]["bpw"].as_f64().unwrap();
    assert!(bpw <= 4.25, "{bpw}");

    let uniform = convert(source, &[&["--bits", "4"], &flags[..]].concat());
    for name in source_linears() {
        let expected = match name.as_str() {
            "model.layers.1.self_attn.v_proj" => 8,
            name if name.ends_with("v_proj") => 3,
            name if name.ends_with("down_proj") => 5,
            _ => 4,
        };
        assert_eq!(uniform.widths(&name), [expected], "{name}");
    }
}

#[test]
fn small_shards_keep_a_linears_tensors_together() {
    let source = open(Path::new(FIXTURE));
    let converted = convert(Path::new(FIXTURE), &["--bits", "4", "--shard-size", "600kB"]);
    converted.assert_consistent(&source);
    converted.assert_errors(&source);
    let shards = converted.report["shards"].as_array().unwrap();
    assert!(shards.len() >= 4, "{shards:?}");
    let count = shards.len();
    for (i, shard) in shards.iter().enumerate() {
        assert_eq!(shard["file"], format!("model-{:05}-of-{count:05}.safetensors", i + 1));
        assert!(shard["bytes"].as_u64().unwrap() <= 600_000, "{shard}");
    }
    let index = json_of(&converted.out.join("model.safetensors.index.json"));
    let mut shard_of: BTreeMap<&str, &Value> = BTreeMap::new();
    for (tensor, shard) in index["weight_map"].as_object().unwrap() {
        let module = tensor.rsplit_once('.').unwrap().0;
        assert_eq!(*shard_of.entry(module).or_insert(shard), shard, "{module} is torn");
    }
    // A limit below the largest linear: that one is alone in a larger file.
    let tiny = convert(Path::new(FIXTURE), &["--bits", "4", "--shard-size", "100kB"]);
    tiny.assert_consistent(&source);
    let larger =
        tiny.report["shards"].as_array().unwrap().iter().filter(|s| s["bytes"].as_u64() > Some(100_000));
    assert_eq!(larger.count(), 2, "the embedding and the head");
}

#[test]
fn the_reports_side_files_are_the_sources() {
    let dir = Model::new(&Quantized::default()).write();
    let kept = [
        "chat_template.jinja",
        "generation_config.json",
        "LICENSE",
        "modeling_custom.py",
        "preprocessor_config.json",
        "README.md",
    ];
    for name in kept {
        std::fs::write(dir.path().join(name), format!("{name}\r\n\u{e9} as it is")).unwrap();
    }
    for name in ["pytorch_model.bin", "report.json", "quant_config.json"] {
        std::fs::write(dir.path().join(name), "{}").unwrap();
    }
    std::fs::create_dir(dir.path().join("original")).unwrap();
    let converted = convert(dir.path(), &["--bits", "4"]);
    for name in kept {
        let text = std::fs::read_to_string(converted.out.join(name)).unwrap();
        assert_eq!(text, format!("{name}\r\n\u{e9} as it is"));
    }
    let own = ["config.json", "model.safetensors", "model.safetensors.index.json", "report.json"];
    let mut expected: Vec<&str> = own.into_iter().chain(kept).collect();
    expected.sort_unstable();
    assert_eq!(names_in(&converted.out), expected);
    assert_eq!(converted.report["schema"], 1);
}

#[test]
fn llama_3_scaling_stands_where_exllamav2_looks() {
    let Some(assets) = folder("REQUANT_ASSETS") else { return };
    let converted = convert(&assets.join("tiny/tiny-llama3rope"), &["--bits", "4"]);
    let config = &converted.config;
    let source = json_of(&assets.join("tiny/tiny-llama3rope/config.json"));
    let parameters = &source["rope_parameters"];
    assert_eq!(config["rope_theta"], parameters["rope_theta"]);
    let scaling = config["rope_scaling"].as_object().unwrap();
    assert_eq!(scaling["rope_type"], "llama3");
    assert!(!scaling.contains_key("type"));
    for key in ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"] {
        assert_eq!(scaling[key], parameters[key], "{key}");
    }
}

#[test]
fn the_source_is_left_as_it_was() {
    let dir = Model::sized(&Quantized::default(), &Sizes { layers: 2, ..Sizes::default() }).write();
    let before = files_in(dir.path());
    convert(dir.path(), &["--bits", "3"]);
    assert!(files_in(dir.path()) == before);
}

#[test]
fn a_plan_that_is_only_shown_writes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let source = Model::sized(&Quantized::default(), &Sizes { layers: 3, ..Sizes::default() }).write();
    let mut command = requant();
    command.arg("convert").arg(source.path()).args([
        "--to",
        "exl2",
        "--bpw",
        "5",
        "--dry-run",
        "--json",
        "--out",
    ]);
    let ran = command.arg(dir.path().join("out")).output().unwrap();
    assert!(ran.status.success());
    assert_eq!(names_in(dir.path()), [""; 0]);
    let plan: Value = serde_json::from_slice(&ran.stdout).unwrap();
    let converted = convert(source.path(), &["--bpw", "5"]);
    assert_eq!(plan["totals"], converted.report["totals"]);
    assert_eq!(plan["objective"], converted.report["objective"]);
    for (planned, done) in
        plan["modules"].as_array().unwrap().iter().zip(converted.report["modules"].as_array().unwrap())
    {
        assert_eq!((&planned["name"], &planned["options"]), (&done["name"], &done["options"]));
        if let Some(error) = planned["decision"]["relative_error"].as_f64() {
            let done = done["relative_error"].as_f64().unwrap();
            assert!((error - done).abs() <= 1e-9 * done, "{}", planned["name"]);
        }
    }
}

#[test]
fn json_on_stdout_is_the_reports_summary() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let mut command = requant();
    command.args([
        "convert",
        FIXTURE,
        "--to",
        "exl2",
        "--bits",
        "4",
        "--json",
        "--progress",
        "none",
        "--out",
    ]);
    let ran = command.arg(&out).output().unwrap();
    assert_eq!((ran.status.code(), ran.stderr.as_slice()), (Some(0), b"".as_slice()));
    let summary: Value = serde_json::from_slice(&ran.stdout).unwrap();
    let report = json_of(&out.join("report.json"));
    for key in ["totals", "mean_relative_error", "shards", "warnings", "objective"] {
        assert_eq!(summary[key], report[key], "{key}");
    }
}
