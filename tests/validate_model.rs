//! Both models on a text: what the whole differs by, what each layer adds, and what is done about it.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use half::f16;
use requant::kernels::Cpu;
use requant::progress::{CancelFlag, Event, Observer, Silent};
use requant::validate::report::{ModelSide, NonFinite, Verdict};
use requant::validate::{Layers, Options, SwapIn, Text, Validation, page, summary, validate};
use requant::{Diagnose, Kind};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use support::binary::{FIXTURE, convert, json_of, names_in, requant};
use support::writer::{Model, Quantized, Tensor};
use support::{folder, open};
use tempfile::TempDir;

const DOWN: &str = "model.layers.1.mlp.down_proj";

fn options() -> Options {
    let swap_in = Some(SwapIn { layers: Layers::All, tokens: 512 });
    Options { tokens: 512, window: Some(128), swap_in, ..Options::default() }
}

fn validated(converted: &Path, options: &Options) -> Validation {
    validate(&open(FIXTURE.as_ref()), &open(converted), options, &Cpu::new(2), &Silent).unwrap()
}

/// A copy of the fixture with the bytes of a tensor changed.
fn copy_with(tensor: &str, change: impl Fn(&mut [u8])) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in names_in(FIXTURE.as_ref()) {
        std::fs::copy(Path::new(FIXTURE).join(&name), dir.path().join(&name)).unwrap();
    }
    let path: PathBuf = open(dir.path()).tensor(tensor).unwrap().file().into();
    let mut bytes = std::fs::read(&path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let entries: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let offset = |i: usize| entries[tensor]["data_offsets"][i].as_u64().unwrap() as usize + 8 + header;
    let range = offset(0)..offset(1);
    change(&mut bytes[range]);
    std::fs::write(&path, bytes).unwrap();
    dir
}

fn scale_by(factor: f32) -> impl Fn(&mut [u8]) {
    move |bytes| {
        for pair in bytes.chunks_exact_mut(2) {
            let value = f16::from_le_bytes([pair[0], pair[1]]).to_f32() * factor;
            pair.copy_from_slice(&f16::from_f32(value.clamp(-65504.0, 65504.0)).to_le_bytes());
        }
    }
}

#[test]
fn the_blocks_up_to_the_last_are_the_whole_model() {
    let converted = convert(FIXTURE.as_ref(), &["--bits", "4"]);
    let validation = validated(&converted.out, &options());
    let model = validation.model.unwrap();
    let last = validation.cumulative.last().unwrap();
    assert_eq!(validation.cumulative.len(), 3);
    // The head is the source's, so nothing is left to differ.
    assert!((last.kl - model.kl.mean).abs() <= 1e-9 * model.kl.mean, "{} {}", last.kl, model.kl.mean);
    assert!((last.perplexity / model.converted_perplexity - 1.0).abs() < 1e-9);
    assert!(model.kl.mean > 1e-4 && model.kl.standard_error > 0.0 && model.kl_max >= model.kl_p99);
    let head = validation.layers.iter().find(|layer| layer.role == "head").unwrap();
    assert_eq!(head.swap_in.unwrap().kl, 0.0);
    for layer in validation.layers.iter().filter(|layer| layer.role != "head") {
        let (output, swap) = (layer.output.unwrap(), layer.swap_in.unwrap());
        assert!(swap.kl > 0.0 && swap.kl < model.kl.mean, "{}: {}", layer.source, swap.kl);
        assert!(output.relative_error > 0.0 && output.relative_error < 0.5, "{}", layer.source);
        assert!(output.cosine > 0.9 && output.cosine < 1.0 && output.max_error > 0.0);
        assert_eq!(output.rows, 512);
    }
}

#[test]
fn a_layer_alone_is_what_a_model_with_only_that_layer_changed_is() {
    let copy = copy_with(&format!("{DOWN}.scales"), scale_by(1.05));
    let validation = validated(copy.path(), &options());
    let model = validation.model.unwrap();
    let layer = validation.layers.iter().find(|layer| layer.source == DOWN).unwrap();
    let swap = layer.swap_in.unwrap();
    assert_eq!((swap.kl, swap.perplexity), (model.kl.mean, model.converted_perplexity));
    assert!((layer.weight_error - 0.05).abs() < 1e-3 && layer.promised_error.is_none());
    assert!((layer.output.unwrap().relative_error - 0.05).abs() < 1e-3);
    for other in validation.layers.iter().filter(|layer| layer.source != DOWN) {
        assert_eq!((other.weight_error, other.swap_in.unwrap().kl), (0.0, 0.0));
        assert_eq!((other.output.unwrap().relative_error, other.output.unwrap().cosine), (0.0, 1.0));
    }
    let kl: Vec<f64> = validation.cumulative.iter().map(|block| block.kl).collect();
    assert_eq!(kl[0], 0.0);
    assert_eq!((kl[1], kl[2]), (model.kl.mean, model.kl.mean));
}

/// The converted model with biases in its MLPs has its intermediate channels in another order: run as it lies, it is
/// the same model, and each layer is compared in the source's order.
#[test]
fn an_order_folded_with_biases_is_undone() {
    let mut model = Model::read(FIXTURE.as_ref());
    model.config["mlp_bias"] = json!(true);
    let intermediate = model.config["intermediate_size"].as_u64().unwrap() as usize;
    let hidden = model.config["hidden_size"].as_u64().unwrap() as usize;
    for layer in 0..3 {
        let name = |part: &str| format!("model.layers.{layer}.mlp.{part}_proj");
        for (part, n) in [("gate", intermediate), ("up", intermediate), ("down", hidden)] {
            let bias: Vec<f32> = (0..n).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect();
            model.put(&name(part), "bias", Tensor::f16s(&[n], &bias));
        }
        let groups = model.tensor(&name("down"), "scales").shape[0];
        let g_idx: Vec<i32> = (0..intermediate).map(|row| (row % groups) as i32).collect();
        model.put(&name("down"), "g_idx", Tensor::i32s(&[intermediate], &g_idx));
    }
    let source = model.write();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        let from = Path::new(FIXTURE).join(name);
        if from.exists() {
            std::fs::copy(from, source.path().join(name)).unwrap();
        }
    }
    let converted = convert(source.path(), &["--bits", "8", "--group-size", "32"]);
    assert_ne!(converted.module(DOWN)["row_order"], Value::Null);
    let (from, to) = (open(source.path()), open(&converted.out));
    let validation = validate(&from, &to, &options(), &Cpu::new(2), &Silent).unwrap();
    for layer in validation.layers.iter().filter(|layer| layer.role != "head") {
        assert!(
            layer.weight_error > 0.0 && layer.weight_error < 0.02,
            "{}: {}",
            layer.source,
            layer.weight_error
        );
        let (output, swap) = (layer.output.unwrap(), layer.swap_in.unwrap());
        assert!(output.relative_error < 0.02, "{}: {}", layer.source, output.relative_error);
        assert!(swap.kl.abs() < 0.01, "{}: {}", layer.source, swap.kl);
    }
    let model = validation.model.unwrap();
    assert!(model.kl.mean > 0.0 && model.kl.mean < 0.01, "{}", model.kl.mean);
}

#[test]
fn an_exact_conversion_has_a_divergence_of_exactly_0() {
    let dir = tempfile::tempdir().unwrap();
    for (name, flags) in [
        ("gptq", &["--to", "gptq"][..]),
        ("v2", &["--to", "gptq", "--zeros", "v2"]),
        ("fp16", &["--to", "fp16"]),
        ("same", &["--to", "same"]),
        ("kept", &["--to", "exl2", "--bpw", "6", "--keep-gptq"]),
    ] {
        let out = dir.path().join(name);
        requant().args(["convert", FIXTURE, "--out"]).arg(&out).args(flags).assert().success();
        if name == "kept" {
            let report = json_of(&out.join("report.json"));
            let modules = report["modules"].as_array().unwrap().iter();
            let kept = modules.filter(|module| module["decision"]["layout"] == "kept").count();
            assert_eq!(kept, 21, "all but the head, which is fp16");
        }
        let validation = validated(&out, &options());
        assert_eq!(validation.verdict, Verdict::Exact, "{name}");
        let html = page::html(&validation);
        let meaning = summary::meaning(&validation);
        assert!(meaning.contains("the KL divergence is 0 (exact)"), "{name}: {meaning}");
        assert!(html.contains(&meaning) && html.contains("<dd>0 (exact)</dd>"), "{name}");
        let model = validation.model.unwrap();
        assert_eq!((model.kl.mean, model.kl_max, model.reverse_kl.mean), (0.0, 0.0, 0.0), "{name}");
        assert_eq!(model.top1_agreement.mean, 1.0);
        assert_eq!(model.source_perplexity, model.converted_perplexity);
        assert!(validation.layers.iter().all(|layer| layer.swap_in.unwrap().kl == 0.0));
    }
}

#[test]
fn rows_and_columns_in_another_order_are_exact_and_each_layer_alone_is_0() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let flags = ["--to", "gptq", "--order", "sorted"];
    requant().args(["convert", FIXTURE, "--out"]).arg(&out).args(flags).assert().success();
    let validation = validated(&out, &options());
    assert_eq!(validation.verdict, Verdict::Exact);
    assert!(validation.layers.iter().all(|layer| layer.weight_error == 0.0));
    assert!(validation.layers.iter().all(|layer| layer.swap_in.unwrap().kl == 0.0));
    // The sums of down_proj are taken in another order, which fp32 rounds otherwise: not 0, and called by its name.
    let kl = validation.model.as_ref().unwrap().kl.mean;
    assert!(kl > 0.0 && kl < 1e-6, "{kl}");
    let meaning = summary::meaning(&validation);
    assert!(meaning.contains("summed in another order") && !meaning.contains("0 (exact)"), "{meaning}");
    let figure = page::html(&validation);
    let figure = figure.split_once("KL(source ‖ converted)").unwrap().1.split_once("</dd>").unwrap().0;
    assert!(!figure.contains("exact"), "{figure}");
}

#[test]
fn a_head_that_was_tied_and_is_quantized_is_compared_with_the_embedding() {
    let tied = Path::new("fixtures/models/gemma");
    let converted = convert(tied, &["--bits", "4", "--group-size", "32", "--head-bits", "6"]);
    let ids = converted.out.parent().unwrap().join("ids.json");
    std::fs::write(&ids, json!((0..128).map(|i| i % 60).collect::<Vec<u32>>()).to_string()).unwrap();
    let options = Options { text: Text::TokenIds(ids), window: Some(64), ..options() };
    let validation = validate(&open(tied), &open(&converted.out), &options, &Cpu::new(2), &Silent).unwrap();
    let head = validation.layers.iter().find(|layer| layer.converted == "lm_head").unwrap();
    assert_eq!(head.source, "model.embed_tokens");
    assert!((1e-3..0.1).contains(&head.weight_error), "{}", head.weight_error);
    assert!(head.swap_in.as_ref().unwrap().kl > 0.0);
}

#[test]
fn any_budget_of_memory_gives_the_same_figures() {
    let converted = convert(FIXTURE.as_ref(), &["--bits", "3"]);
    let figures = |memory| {
        let validation = validated(&converted.out, &Options { memory, ..options() });
        let swaps: Vec<String> =
            validation.layers.iter().map(|layer| format!("{:?}", layer.swap_in)).collect();
        (swaps, format!("{:?}", validation.cumulative))
    };
    let whole = figures(1 << 30);
    assert_eq!(whole, figures(0));
    assert_eq!(whole, figures(26 * 128 * 256 * 4));
}

#[test]
fn a_choice_of_layers_is_kept_to() {
    let converted = convert(FIXTURE.as_ref(), &["--bits", "4"]);
    let chosen = |layers| {
        let swap_in = Some(SwapIn { layers, tokens: 128 });
        let validation = validated(&converted.out, &Options { swap_in, ..options() });
        assert_eq!(validation.conditions.layer_tokens, 128);
        let with = validation.layers.iter().filter(|layer| layer.swap_in.is_some());
        with.map(|layer| layer.source.clone()).collect::<Vec<String>>()
    };
    assert_eq!(chosen(Layers::Matching(r"1\.mlp\.down".into())), [DOWN]);
    let validation = validated(&converted.out, &Options { swap_in: None, ..options() });
    let error = |name: &String| {
        validation.layers.iter().find(|l| l.source == *name).unwrap().output.unwrap().relative_error
    };
    let worst = chosen(Layers::Worst(1));
    assert!(validation.layers.iter().all(|layer| error(&layer.source) <= error(&worst[0])));
    let swap_in = Some(SwapIn { layers: Layers::Matching("nothing".into()), tokens: 128 });
    let options = Options { swap_in, ..options() };
    let (source, out) = (open(FIXTURE.as_ref()), open(&converted.out));
    let error = validate(&source, &out, &options, &Cpu::new(1), &Silent).unwrap_err();
    assert_eq!((error.code(), error.kind()), ("validate.no_layers", Kind::Usage));
}

#[test]
fn hidden_states_beyond_fp16_are_no_infinity() {
    let copy = copy_with(&format!("{DOWN}.scales"), scale_by(1000.0));
    let validation = validated(copy.path(), &Options { swap_in: None, ..options() });
    assert_eq!(validation.non_finite, None);
    let kl = validation.model.unwrap().kl.mean;
    assert!(kl.is_finite() && kl > 1.0, "{kl}");
}

#[test]
fn an_infinity_fails_and_names_its_block() {
    // Each weight of the largest scale that fp16 has overflows.
    let copy = copy_with(&format!("{DOWN}.scales"), scale_by(1e9));
    let gates = requant::validate::Gates { max_kl: Some(1e9), ..Default::default() };
    let validation = validated(copy.path(), &Options { gates, ..options() });
    assert_eq!(validation.verdict, Verdict::NonFinite);
    let module = Some(DOWN.into());
    let place = NonFinite { model: ModelSide::Converted, layer: Some(1), module, token: 0 };
    assert_eq!(validation.non_finite, Some(place));
    assert!(validation.model.is_none() && !validation.gates[0].met);
    let mut command = requant();
    let ran = command.args(["validate", FIXTURE, "--tokens", "256"]).arg(copy.path()).output().unwrap();
    let stderr = String::from_utf8(ran.stderr).unwrap();
    assert_eq!(ran.status.code(), Some(3), "{stderr}");
    assert!(stderr.contains("block 1 of the converted model"), "{stderr}");
}

/// Cancels when so many blocks are done.
struct After(AtomicUsize, CancelFlag);

impl Observer for After {
    fn event(&self, event: &Event<'_>) {
        if let Event::Module { name, .. } = event
            && name.starts_with("block")
            && self.0.fetch_sub(1, Ordering::Relaxed) == 1
        {
            self.1.cancel();
        }
    }

    fn cancelled(&self) -> bool {
        self.1.is_set()
    }
}

#[test]
fn it_stops_where_it_is_told_to() {
    let source = open(FIXTURE.as_ref());
    // In the models, and in the layers alone.
    for blocks in [1, 4] {
        let converted = copy_with(&format!("{DOWN}.scales"), scale_by(1.1));
        let observer = After(AtomicUsize::new(blocks), CancelFlag::default());
        let result = validate(&source, &open(converted.path()), &options(), &Cpu::new(1), &observer);
        assert!(matches!(result, Err(requant::Error::Cancelled)), "{blocks}");
    }
}

#[test]
fn of_an_unknown_architecture_the_weights_are_compared_and_the_rest_says_why_not() {
    let mut model = Model::new(&Quantized::default());
    model.config["architectures"] = json!(["SomethingNewForCausalLM"]);
    let dir = model.write();
    let (a, b) = (open(dir.path()), open(dir.path()));
    let gates = requant::validate::Gates { max_kl: Some(1.0), ..Default::default() };
    let validation = validate(&a, &b, &options(), &Cpu::new(1), &Silent).unwrap();
    assert_eq!((validation.verdict, validation.model.is_none()), (Verdict::Exact, true));
    assert!(!validation.layers.is_empty() && validation.layers.iter().all(|layer| layer.weight_error == 0.0));
    assert!(validation.not_run[0].starts_with("Perplexity, KL"), "{:?}", validation.not_run);
    // What couldn't be measured meets no limit.
    let validation = validate(&a, &b, &Options { gates, ..options() }, &Cpu::new(1), &Silent).unwrap();
    assert_eq!(validation.verdict, Verdict::GateMissed);
}

#[test]
fn a_missed_limit_leaves_the_output_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let run = |more: &[&str]| {
        let mut command = requant();
        command.args(["convert", FIXTURE, "--to", "exl2", "--bits", "4", "--progress", "none", "--out"]);
        command.arg(&out).args(["--validate", "--tokens", "512", "--window", "128"]).args(more);
        command.output().unwrap()
    };
    let ran = run(&["--max-kl", "1e-9", "--json"]);
    assert_eq!(ran.status.code(), Some(1), "{}", String::from_utf8_lossy(&ran.stderr));
    let error: Value = serde_json::from_slice(&ran.stderr).unwrap();
    assert_eq!((&error["code"], &error["kind"]), (&json!("validate.gate_missed"), &json!("gate")));
    assert_eq!(names_in(dir.path()), ["out.rejected"]);
    // Again: the older one gives way.
    assert_eq!(run(&["--min-top1", "1"]).status.code(), Some(1));
    assert_eq!(names_in(dir.path()), ["out.rejected"]);
    let ran = run(&["--max-kl", "10", "--max-ppl-increase", "1", "--min-top1", "0.1"]);
    assert_eq!(ran.status.code(), Some(0), "{}", String::from_utf8_lossy(&ran.stderr));
    assert_eq!(names_in(dir.path()), ["out", "out.rejected"]);
    let validation = json_of(&out.join("validation.json"));
    let report = json_of(&out.join("report.json"));
    assert_eq!(validation["converted"]["name"], "out");
    assert_eq!(report["validation"]["model"], validation["model"]);
    assert_eq!(report["validation"]["verdict"], "passed");
    requant().args(["verify"]).arg(&out).args(["--against", FIXTURE]).assert().success();
    let ran = run(&["--resume"]);
    assert_eq!(ran.status.code(), Some(0), "complete already");
}

#[test]
fn limits_decide_the_exit_code() {
    let converted = convert(FIXTURE.as_ref(), &["--bits", "4"]);
    let code = |flags: &[&str]| {
        let mut command = requant();
        command.args(["validate", FIXTURE]).arg(&converted.out).args(["--tokens", "256"]).args(flags);
        command.output().unwrap().status.code().unwrap()
    };
    assert_eq!(code(&["--max-kl", "1"]), 0);
    assert_eq!(code(&["--max-kl", "0"]), 1);
    assert_eq!(code(&["--min-top1", "1"]), 1);
    assert_eq!(code(&["--max-ppl-increase", "-1"]), 2);
    assert_eq!(code(&["--layers", "q_proj", "--swap-in", "off"]), 2);
    assert_eq!(code(&["--text", "/nowhere.txt"]), 4);
    assert_eq!(code(&["--window", "4096"]), 2);
    let report = converted.out.parent().unwrap().join("v.json");
    assert_eq!(code(&["--swap-in", "on", "--layers", "1", "--report", report.to_str().unwrap()]), 0);
    assert_eq!(json_of(&report)["schema"], 1);
    let mut command = requant();
    command.args(["convert", FIXTURE, "--to", "same", "--out", "/nowhere", "--max-kl", "1"]);
    assert_eq!(command.output().unwrap().status.code(), Some(2), "a limit without --validate");
}

/// KL of files that exllamav2 made, against what transformers computes in fp32 of the same decoded weights.
#[test]
fn files_of_exllamav2_have_the_divergence_that_transformers_finds() {
    let Some(assets) = folder("REQUANT_ASSETS") else { return };
    let expected = json_of(&assets.join("exl2/expected/tiny-kl.json"));
    let source = open(&assets.join("tiny/dense/tiny-llama"));
    let options = Options {
        text: Text::File(assets.join("text/wikitext2-test.txt")),
        window: Some(256),
        ..Options::default()
    };
    for bpw in ["2.5", "4.0", "6.0"] {
        let converted = open(&assets.join(format!("exl2/tiny-llama-exl2-{bpw}bpw")));
        let validation = validate(&source, &converted, &options, &Cpu::new(2), &Silent).unwrap();
        let model = validation.model.unwrap();
        let wanted = &expected["results"][bpw]["fp32_head_as_converted"];
        for (found, key) in [
            (model.kl.mean, "kl_mean"),
            (model.kl.standard_error, "kl_se_windows"),
            (model.kl_max, "kl_max"),
            (model.source_perplexity, "ppl_source"),
            (model.converted_perplexity, "ppl_converted"),
            (model.top1_agreement.mean, "top1_agreement"),
        ] {
            let wanted = wanted[key].as_f64().unwrap();
            assert!((found / wanted - 1.0).abs() < 0.01, "{bpw} {key}: {found}, expected {wanted}");
        }
    }
}
