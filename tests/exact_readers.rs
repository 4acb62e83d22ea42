//! `--for`: what each reader accepts is written for it, exactly; what nothing exact makes readable is refused,
//! with the reason.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

#[path = "support/outputs.rs"]
mod outputs;
mod support;

use outputs::{Output, gptq, json_of, output, reader, source};
use requant::checkpoint::{Checkpoint, Gptq, Layout, Module};
use requant::formats::gptq::{GIdxKind, ZeroConvention};
use requant::plan::readers::{Objection, READERS};
use requant::plan::{self, GptqOptions, Plan};
use requant::{Diagnose, Error};
use safetensors::Dtype;
use serde_json::json;
use support::sha256;
use support::writer::{DOWN, HIDDEN, INTERMEDIATE, LINEARS, Model, Q, Quantized, Sizes, Tensor, gptq_module};

const K: &str = "model.layers.0.self_attn.k_proj";

/// The refusal of a plan: module and objection.
fn refused(from: &Checkpoint, name: &str) -> (String, Objection) {
    match gptq(from, &reader(name)) {
        Err(Error::Plan(error)) => {
            assert!(error.hint().is_some_and(|hint| !hint.is_empty()));
            let text = error.to_string();
            let plan::Error::ReaderRefuses { module, reader, objection } = error else { panic!("{text}") };
            assert_eq!(reader, name);
            assert!(text.contains(&objection.to_string()), "{text}");
            (module, objection)
        }
        Err(other) => panic!("{name}: {other}"),
        Ok(_) => panic!("{name} accepted it"),
    }
}

fn layouts(checkpoint: &Checkpoint) -> Vec<(&Module, &Gptq)> {
    let gptq = checkpoint.modules().iter().filter_map(|module| match module.layout() {
        Layout::Gptq(gptq) => Some((module, gptq)),
        _ => None,
    });
    gptq.collect()
}

/// Accepted, and the same weights.
fn accepted(from: &Checkpoint, options: &GptqOptions) -> Output {
    let name = options.reader.unwrap().name;
    let out = gptq(from, options).unwrap_or_else(|e| panic!("{name}: {e}"));
    let to = source(&out.dir);
    for (module, gptq) in layouts(&to) {
        assert!(options.reader.unwrap().bits.contains(&gptq.shape.bits.get()), "{name}");
        assert!(options.reader.unwrap().zeros.contains(&gptq.zeros.convention), "{name}");
        assert!(gptq.zeros.symmetric || !options.reader.unwrap().symmetric_only, "{name}");
        assert_eq!(gptq.scales, Dtype::F16, "{name}");
        let before = from.module(module.name()).unwrap();
        let folded = out.report().to_string().contains("\"sorted\":true");
        if !folded {
            let hash = |checkpoint: &Checkpoint, module| sha256(&checkpoint.dequantize(module).unwrap());
            assert_eq!(hash(from, before), hash(&to, module), "{name}: {}", module.name());
        }
    }
    out
}

/// The fixture with rows in order everywhere but in down_proj: other weights, whole sizes.
fn act_order_in_down_only() -> Output {
    let from = source("fixtures/tiny-llama-gptq");
    let out = output(&from, &Plan::same(&from), u64::MAX);
    for (module, _) in layouts(&from).into_iter().filter(|(module, _)| !module.name().ends_with("down_proj"))
    {
        out.edit_tensor(&format!("{}.g_idx", module.name()), |bytes| {
            let rows: &mut [i32] = bytemuck::cast_slice_mut(bytes);
            rows.iter_mut().enumerate().for_each(|(row, group)| *group = row as i32 / 32);
        });
    }
    out
}

#[test]
fn act_order_for_readers_that_ignore_it() {
    let from = source("fixtures/tiny-llama-gptq");
    assert_eq!(refused(&from, "vllm"), (Q.into(), Objection::ActOrder));
    for name in ["vllm-0.10", "sglang", "exllamav2", "gptqmodel", "transformers"] {
        accepted(&from, &reader(name));
    }
    // What can be folded is.
    let foldable = act_order_in_down_only();
    let from = source(&foldable.dir);
    let out = accepted(&from, &reader("vllm"));
    let to = source(&out.dir);
    for (module, gptq) in layouts(&to) {
        assert_eq!(gptq.g_idx, GIdxKind::Sequential, "{}", module.name());
        assert_eq!(to.tensor(&format!("{}.g_idx", module.name())).unwrap().dtype(), Dtype::I32);
    }
    assert_eq!(json_of(out.dir.join("quantize_config.json"))["desc_act"], false);
    let report = out.report();
    assert!(report["modules"].as_array().unwrap().iter().any(|module| !module["row_order"].is_null()));
    // Unless it is asked to stay.
    let kept = GptqOptions { order: plan::Order::Keep, ..reader("vllm") };
    let Err(Error::Plan(plan::Error::ReaderRefuses { module, objection, .. })) = gptq(&from, &kept) else {
        panic!()
    };
    assert_eq!((module.as_str(), objection), (DOWN, Objection::ActOrder));
}

#[test]
fn the_tiny_checkpoints_that_vllm_reads() {
    let Some(assets) = support::folder("REQUANT_ASSETS") else { return };
    for name in ["tiny-llama-g128", "tiny-llama-autogptq"] {
        accepted(&source(assets.join("tiny").join(name)), &reader("vllm"));
    }
    for name in ["tiny-llama", "tiny-llama-asym", "tiny-qwen2", "tiny-mixtral", "tiny-llama-3bit"] {
        let (_, objection) = refused(&source(assets.join("tiny").join(name)), "vllm");
        assert_eq!(objection, Objection::ActOrder, "{name}");
    }
    // Asymmetric, and narrower than Marlin has: symmetric and wider, exactly.
    for (name, bits) in [("tiny-llama-asym", 8), ("tiny-llama-2bit", 4), ("tiny-llama-3bit", 4)] {
        let from = source(assets.join("tiny").join(name));
        let to = accepted(&from, &reader("sglang"));
        for (_, gptq) in layouts(&source(&to.dir)) {
            assert_eq!((gptq.shape.bits.get(), gptq.zeros.symmetric), (bits, true), "{name}");
        }
    }
    // One k_proj is fp16 and q_proj isn't.
    let dynamic = source(assets.join("tiny/tiny-llama-dynamic"));
    assert_eq!(refused(&dynamic, "sglang").1, Objection::Siblings);
    accepted(&dynamic, &reader("gptqmodel"));
}

#[test]
fn asymmetric_modules() {
    let asym = |bits, zero| Model::new(&Quantized { bits, zero, ..Quantized::default() });
    // 8 bits can't be re-centred in 8 bits.
    let mut eight = asym(8, |_, column| 100 + column as u16 % 5);
    let dir = eight.set("sym", json!(false)).set("bits", json!(8)).write();
    let from = source(dir.path());
    for name in ["vllm", "sglang"] {
        let Err(Error::Plan(error)) = gptq(&from, &reader(name)) else { panic!() };
        assert!(matches!(error, plan::Error::CannotRecentre { .. }), "{error}");
    }
    accepted(&from, &reader("gptqmodel"));
    let mut four = asym(4, |_, column| 5 + column as u16 % 5);
    let dir = four.set("sym", json!(false)).write();
    let from = source(dir.path());
    for name in ["vllm-0.10", "exllamav2", "gptqmodel"] {
        let out = accepted(&from, &reader(name));
        assert!(layouts(&source(&out.dir)).iter().all(|(_, gptq)| !gptq.zeros.symmetric));
    }
}

#[test]
fn group_sizes() {
    let mut model = Model::new(&Quantized { group_size: 16, ..Quantized::default() });
    let dir = model.set("group_size", json!(16)).write();
    let from = source(dir.path());
    for name in ["vllm", "vllm-0.10", "sglang", "exllamav2"] {
        assert_eq!(refused(&from, name), (Q.into(), Objection::GroupSize { size: 16 }), "{name}");
    }
    accepted(&from, &reader("gptqmodel"));
    // A split that one reader takes and another doesn't.
    let from = source("fixtures/tiny-llama-gptq");
    let out = accepted(&from, &GptqOptions { group_size: Some(16), ..reader("transformers") });
    assert!(layouts(&source(&out.dir)).iter().all(|(_, gptq)| gptq.group_size == 16));
    let refusal = gptq(&from, &GptqOptions { group_size: Some(16), ..reader("exllamav2") });
    let Err(Error::Plan(plan::Error::ReaderRefuses { objection, .. })) = refusal else { panic!() };
    assert_eq!(objection, Objection::GroupSize { size: 16 });
}

#[test]
fn groups_of_different_sizes() {
    let mut model = Model::new(&Quantized::default());
    let groups: Vec<i32> = (0..HIDDEN).map(|row| i32::from(row % 8 > 2)).collect();
    model.put(Q, "g_idx", Tensor::i32s(&[HIDDEN], &groups));
    let dir = model.set("desc_act", json!(true)).write();
    let from = source(dir.path());
    for name in ["vllm-0.10", "exllamav2"] {
        assert_eq!(refused(&from, name), (Q.into(), Objection::UnequalGroups), "{name}");
    }
    accepted(&from, &reader("gptqmodel"));
}

#[test]
fn columns_and_widths() {
    let dir = Model::new(&Quantized::default()).write();
    let from = source(dir.path());
    let gate = "model.layers.0.mlp.gate_proj";
    assert_eq!(INTERMEDIATE % 64, 32);
    for name in ["vllm", "sglang"] {
        assert_eq!(refused(&from, name), (gate.into(), Objection::Columns { multiple: 64 }), "{name}");
    }
    let mut eight = Model::new(&Quantized { bits: 8, zero: |_, _| 128, ..Quantized::default() });
    let dir = eight.set("bits", json!(8)).write();
    assert_eq!(refused(&source(dir.path()), "exllamav2"), (Q.into(), Objection::Bits { bits: 8 }));
    // 3 bits are widened to 4, which is exact.
    let mut three = Model::new(&Quantized { bits: 3, zero: |_, _| 4, ..Quantized::default() });
    let dir = three.set("bits", json!(3)).write();
    let out = accepted(&source(dir.path()), &reader("exllamav2"));
    assert!(layouts(&source(&out.dir)).iter().all(|(_, gptq)| gptq.shape.bits.get() == 4));
}

#[test]
fn zero_points_in_the_readers_convention() {
    let v2 = Quantized { convention: ZeroConvention::V2, ..Quantized::default() };
    let dir = Model::new(&v2).write();
    let from = source(dir.path());
    for (name, convention) in [
        ("exllamav2", ZeroConvention::V1),
        ("vllm-0.10", ZeroConvention::V1),
        ("gptqmodel", ZeroConvention::V2),
    ] {
        let out = accepted(&from, &reader(name));
        assert!(layouts(&source(&out.dir)).iter().all(|(_, gptq)| gptq.zeros.convention == convention));
    }
    let asked = GptqOptions { zeros: Some(ZeroConvention::V2), ..reader("exllamav2") };
    let Err(Error::Plan(plan::Error::ReaderRefuses { objection, .. })) = gptq(&from, &asked) else {
        panic!()
    };
    assert_eq!(objection, Objection::Zeros { zeros: ZeroConvention::V2 });
}

#[test]
fn scales_that_fp16_does_not_have() {
    let scales = |first: f32| -> Vec<f32> {
        let mut scales = vec![0.0078125; 2 * HIDDEN];
        scales[5] = first;
        scales
    };
    // bf16 has small numbers that fp16 lacks.
    let mut model = Model::new(&Quantized::default());
    let dir = model.put(Q, "scales", Tensor::bf16s(&[2, HIDDEN], &scales(1e-7))).write();
    let from = source(dir.path());
    let Err(Error::Plan(error)) = gptq(&from, &reader("gptqmodel")) else { panic!() };
    let plan::Error::ScaleRounded { module, count: 1, dtype } = &error else { panic!("{error}") };
    assert_eq!((module.as_str(), dtype.as_str()), (Q, "BF16"));
    assert!(error.hint().unwrap().contains("--allow-rounding"));
    let out = gptq(&from, &GptqOptions { allow_rounding: true, ..reader("gptqmodel") }).unwrap();
    let report = out.report();
    let module = report["modules"].as_array().unwrap().iter().find(|module| module["name"] == Q).unwrap();
    assert_eq!(module["exactness"], "rounded");
    assert_eq!(source(&out.dir).tensor(&format!("{Q}.scales")).unwrap().dtype(), Dtype::F16);
    // Without a reader they keep their type; and one that fp16 has is moved.
    let out = gptq(&from, &GptqOptions { symmetric: true, ..GptqOptions::default() }).unwrap();
    assert_eq!(source(&out.dir).tensor(&format!("{Q}.scales")).unwrap().dtype(), Dtype::BF16);
    let dir = model.put(Q, "scales", Tensor::bf16s(&[2, HIDDEN], &scales(0.015625))).write();
    accepted(&source(dir.path()), &reader("gptqmodel"));
    // Too large for fp16 can't be rounded, either.
    let dir = model.put(Q, "scales", Tensor::bf16s(&[2, HIDDEN], &scales(1e6))).write();
    let options = GptqOptions { allow_rounding: true, ..reader("gptqmodel") };
    let Err(error) = gptq(&source(dir.path()), &options) else { panic!() };
    assert!(matches!(error, Error::Plan(plan::Error::ScaleOverflow { .. })), "{error}");
}

#[test]
fn siblings_that_a_reader_joins() {
    let mut model = Model::new(&Quantized::default());
    let wide = Quantized { bits: 8, zero: |_, _| 128, ..Quantized::default() };
    gptq_module(&mut model.tensors, K, HIDDEN, HIDDEN, &wide);
    let dir = model.set("dynamic", json!({"+:.*k_proj$": {"bits": 8}})).write();
    let from = source(dir.path());
    assert_eq!(refused(&from, "vllm-0.10"), (K.into(), Objection::Siblings));
    accepted(&from, &reader("gptqmodel"));
    // All in one width are alike.
    let out = accepted(&from, &GptqOptions { bits: Some(8.try_into().unwrap()), ..reader("vllm-0.10") });
    assert_eq!(layouts(&source(&out.dir)).len(), LINEARS.len());
}

#[test]
fn readers_with_one_width_for_all() {
    const O: &str = "model.layers.0.self_attn.o_proj";
    let mut model = Model::new(&Quantized::default());
    let wide = Quantized { bits: 8, zero: |_, _| 128, ..Quantized::default() };
    gptq_module(&mut model.tensors, O, HIDDEN, HIDDEN, &wide);
    let dir = model.set("dynamic", json!({"+:.*o_proj$": {"bits": 8}})).write();
    let from = source(dir.path());
    for name in ["tgi", "aphrodite"] {
        assert_eq!(refused(&from, name), (O.into(), Objection::Mixed));
        accepted(&from, &GptqOptions { bits: Some(8.try_into().unwrap()), ..reader(name) });
    }
    accepted(&from, &reader("vllm-0.10"));
    // TGI has no kernel for 3 bits.
    let dir = Model::new(&Quantized { bits: 3, zero: |_, _| 4, ..Quantized::default() }).write();
    for (name, bits) in [("tgi", 4), ("aphrodite", 3)] {
        let out = accepted(&source(dir.path()), &reader(name));
        assert!(layouts(&source(&out.dir)).iter().all(|(_, gptq)| gptq.shape.bits.get() == bits), "{name}");
    }
}

/// A model of sizes that Marlin's kernels take.
fn wide(how: &Quantized) -> Model {
    let sizes = Sizes { hidden: 128, intermediate: 192, heads: 4, ..Sizes::default() };
    Model::sized(how, &sizes)
}

/// Marlin ignores stored zero points: 4 bits that aren't symmetric are re-centred in 8, each weight as it was.
#[test]
fn asymmetric_four_bits_for_vllm() {
    let how = Quantized { zero: |group, column| 3 + ((group + column) % 11) as u16, ..Quantized::default() };
    let dir = wide(&how).set("sym", json!(false)).write();
    let from = source(dir.path());
    for name in ["vllm", "sglang"] {
        let out = accepted(&from, &reader(name));
        let to = source(&out.dir);
        assert_eq!(layouts(&to).len(), LINEARS.len());
        for (module, gptq) in layouts(&to) {
            assert_eq!((gptq.shape.bits.get(), gptq.zeros.symmetric), (8, true), "{}", module.name());
        }
        for file in ["quantize_config.json", "config.json"] {
            let config = json_of(out.dir.join(file));
            let config = config.get("quantization_config").unwrap_or(&config);
            assert_eq!((&config["bits"], &config["sym"]), (&json!(8), &json!(true)), "{file}");
        }
    }
    // 2 bits fit 4.
    let how = Quantized { bits: 2, zero: |group, column| 1 + ((group + column) % 3) as u16, ..how };
    let dir = wide(&how).set("sym", json!(false)).set("bits", json!(2)).write();
    let out = accepted(&source(dir.path()), &reader("vllm"));
    assert!(layouts(&source(&out.dir)).iter().all(|(_, gptq)| gptq.shape.bits.get() == 4));
}

#[test]
fn queries_and_keys_of_different_group_sizes() {
    let mut model = wide(&Quantized::default());
    for part in ["k_proj", "v_proj"] {
        let how = Quantized { group_size: 64, ..Quantized::default() };
        gptq_module(&mut model.tensors, &format!("model.layers.0.self_attn.{part}"), 128, 128, &how);
    }
    let dir = model.set("dynamic", json!({"+:.*[kv]_proj$": {"group_size": 64}})).write();
    let from = source(dir.path());
    for name in ["vllm", "vllm-0.10", "sglang"] {
        assert_eq!(refused(&from, name), (K.into(), Objection::Siblings), "{name}");
        let out = accepted(&from, &GptqOptions { group_size: Some(32), ..reader(name) });
        assert!(layouts(&source(&out.dir)).iter().all(|(_, gptq)| gptq.group_size == 32), "{name}");
    }
    accepted(&from, &reader("gptqmodel"));
}

/// vLLM, SGLang and TGI want whole groups, exllamav2 sorts rows into groups of one size, GPTQModel goes by the index.
#[test]
fn a_last_group_shorter_than_the_others() {
    let model = || wide(&Quantized { group_size: 128, ..Quantized::default() });
    let dir = model().set("group_size", json!(128)).write();
    let in_order = source(dir.path());
    // Rows dealt to the groups so that the first has 128 and the second 64.
    let index: Vec<i32> = (0..192).map(|row| i32::from(row % 3 == 2)).collect();
    let mut dealt = model();
    dealt.put(DOWN, "g_idx", Tensor::i32s(&[192], &index));
    let dealt = dealt.set("group_size", json!(128)).set("desc_act", json!(true)).write();
    let act_order = source(dealt.path());
    let short = Objection::ShortGroup { rows: 192, size: 128 };
    for reader in READERS {
        let reads = |from: &Checkpoint| {
            let options = self::reader(reader.name);
            match gptq(from, &options) {
                Ok(_) => true,
                Err(_) => {
                    assert_eq!(refused(from, reader.name), (DOWN.into(), short), "{}", reader.name);
                    false
                }
            }
        };
        let expected = match reader.name {
            "gptqmodel" | "transformers" => (true, true),
            "exllamav2" => (true, false),
            _ => (false, false),
        };
        assert_eq!((reads(&in_order), reads(&act_order)), expected, "{}", reader.name);
        // Half the size divides the rows.
        accepted(&in_order, &GptqOptions { group_size: Some(64), ..self::reader(reader.name) });
    }
}

/// Keys of `quantization_config` that all of the targets' parsers take: AutoGPTQ's `BaseQuantizeConfig`, GPTQModel's
/// `QuantizeConfig.from_quant_config`, transformers' `GPTQConfig`, vLLM's and SGLang's `GPTQConfig.from_config`. Among
/// the others are some that stop GPTQModel (`is_marlin_format`) or name modules that the output hasn't.
const KEYS: [&str; 12] = [
    "bits",
    "group_size",
    "desc_act",
    "sym",
    "static_groups",
    "true_sequential",
    "lm_head",
    "quant_method",
    "checkpoint_format",
    "pack_dtype",
    "dynamic",
    "meta",
];

/// What is quantized is written from the tensors, whatever lists the source has.
#[test]
fn lists_of_modules_are_rewritten_from_the_tensors() {
    let dense = "model.layers.0.self_attn.o_proj";
    let lists = [
        json!([["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]),
        json!(["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj"]),
        json!([[["self_attn.q_proj"]], "mlp.down_proj", 3]),
    ];
    for list in lists {
        let mut model = wide(&Quantized::default());
        model.make_dense(dense, 128, 128);
        for (key, value) in [
            ("modules_in_block_to_quantize", list.clone()),
            ("inside_layer_modules", list.clone()),
            ("modules_to_not_convert", json!(["mlp"])),
            ("is_marlin_format", json!(false)),
            ("dataset", json!("c4")),
        ] {
            model.set(key, value);
        }
        let dir = model.write();
        let from = source(dir.path());
        for reader in READERS {
            let out = accepted(&from, &GptqOptions { group_size: Some(32), ..self::reader(reader.name) });
            let written = json_of(out.dir.join("quantize_config.json"));
            assert_eq!(json_of(out.dir.join("config.json"))["quantization_config"], written);
            for key in written.as_object().unwrap().keys() {
                assert!(KEYS.contains(&key.as_str()), "{}: {key}", reader.name);
            }
            assert_eq!(
                written["dynamic"],
                json!({"-:^model\\.layers\\.0\\.self_attn\\.o_proj$": {}}),
                "{list}"
            );
            let to = source(&out.dir);
            assert_eq!(to.warnings(), [], "{}: {list}", reader.name);
            assert_eq!(layouts(&to).len(), LINEARS.len() - 1);
        }
    }
}

#[test]
fn every_reader_has_a_test() {
    let names: Vec<&str> = READERS.iter().map(|reader| reader.name).collect();
    assert_eq!(
        names,
        ["vllm", "vllm-0.10", "sglang", "exllamav2", "gptqmodel", "transformers", "tgi", "aphrodite"]
    );
}
