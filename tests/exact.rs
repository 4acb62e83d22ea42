//! Exact conversions: whatever the layout, the weights decode to the same bits, as other tools hashed them.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

#[path = "support/outputs.rs"]
mod outputs;
mod support;

use half::{bf16, f16};
use outputs::{Output, dense, gptq, json_of, output, sorted, source, zeros};
use requant::WarningCode;
use requant::checkpoint::{Checkpoint, Layout, Module};
use requant::formats::gptq::{Bits, GIdxKind, ZeroConvention};
use requant::plan::{self, DenseType, GptqOptions, Order, Plan};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use support::writer::{DOWN, HIDDEN, INTERMEDIATE, Model, Quantized, Tensor};
use support::{codes, sha256};

/// The fixture, and with the assets all GPTQ checkpoints of them.
fn checkpoints() -> Vec<PathBuf> {
    let mut dirs = vec![PathBuf::from("fixtures/tiny-llama-gptq")];
    if let Some(assets) = support::folder("REQUANT_ASSETS") {
        let entries = std::fs::read_dir(assets.join("tiny")).unwrap().map(|entry| entry.unwrap().path());
        dirs.extend(entries.filter(|dir| dir.join("config.json").is_file()));
        assert_eq!(dirs.len(), 18);
        dirs.sort();
    }
    dirs
}

/// exllamav2's own directories, each with the hashes that its kernel gave.
fn exl2_directories() -> Vec<(PathBuf, Value)> {
    let own = PathBuf::from("fixtures/tiny-llama-exl2-4.0bpw");
    let expected = json_of(own.join("expected.json"))["modules"].clone();
    let mut dirs = vec![(own, expected)];
    if let Some(assets) = support::folder("REQUANT_ASSETS") {
        let all = json_of(assets.join("exl2/expected/tiny-decode.json"));
        for (name, model) in all["models"].as_object().unwrap() {
            dirs.push((assets.join("exl2").join(name), model["modules"].clone()));
        }
        assert_eq!(dirs.len(), 4);
    }
    dirs
}

/// What a report says of where rows and columns went, by the module's name in the source.
struct Orders(BTreeMap<String, Value>);

impl Orders {
    fn of(out: &Output) -> Self {
        let report = out.report();
        let modules = report["modules"].as_array().unwrap().iter();
        Self(modules.map(|module| (module["source"].as_str().unwrap().into(), module.clone())).collect())
    }

    fn rows(&self, module: &str) -> Option<Vec<usize>> {
        serde_json::from_value(self.0[module]["row_order"].clone()).unwrap()
    }

    fn columns(&self, module: &str) -> Option<Vec<usize>> {
        let down = self.0[module]["decision"]["columns_follow"].as_str()?;
        Some(self.rows(down).unwrap())
    }

    /// Values `[rows, n]` put back into the source's order.
    fn undo<T: Copy + Default>(&self, module: &str, values: &[T], n: usize) -> Vec<T> {
        let (rows, columns) = (self.rows(module), self.columns(module));
        let mut undone = vec![T::default(); values.len()];
        for (i, &value) in values.iter().enumerate() {
            let row = rows.as_ref().map_or(i / n, |order| order[i / n]);
            undone[row * n + columns.as_ref().map_or(i % n, |order| order[i % n])] = value;
        }
        undone
    }
}

fn decoded(checkpoint: &Checkpoint, module: &Module) -> Vec<f16> {
    checkpoint.dequantize(module).unwrap()
}

/// Checks that every module decodes to the source's bits, and to a hash from outside where there is one.
fn assert_same_weights(from: &Checkpoint, out: &Output, hash: &dyn Fn(&str) -> Option<String>, what: &str) {
    let (to, orders) = (source(&out.dir), Orders::of(out));
    assert_eq!(to.modules().len(), from.modules().len());
    for module in from.modules() {
        let name = module.name();
        let converted = to.module(name).unwrap_or_else(|| panic!("{what}: {name}"));
        let weights = orders.undo(name, &decoded(&to, converted), module.out_features());
        assert_eq!(sha256(&weights), sha256(&decoded(from, module)), "{what}: {name}");
        if let Some(hash) = hash(name) {
            assert_eq!(sha256(&weights), hash, "{what}: {name}");
        }
        if let Some(bias) = to.bias(converted).unwrap() {
            let order = orders.columns(name).unwrap_or_else(|| (0..bias.len()).collect());
            let mut undone = vec![0.0; bias.len()];
            order.iter().zip(&bias).for_each(|(&to, &value)| undone[to] = value);
            assert_eq!(undone, from.bias(module).unwrap().unwrap(), "{what}: {name}.bias");
        }
    }
}

/// What GPTQ files say of themselves must be what they are.
fn assert_config(out: &Output, what: &str) {
    let checkpoint = source(&out.dir);
    let quantization = json_of(out.dir.join("config.json"))["quantization_config"].clone();
    assert_eq!(json_of(out.dir.join("quantize_config.json")), quantization, "{what}");
    // Of the contradictions that opening looks for, none; one zero point of tiny-llama-2bit is worth a word.
    let warnings: Vec<WarningCode> =
        codes(&checkpoint).into_iter().filter(|code| *code != WarningCode::ZeroPointsWrapped).collect();
    assert_eq!(warnings, [], "{what}");
    let act_order = |module: &Module| match module.layout() {
        Layout::Gptq(gptq) => gptq.g_idx == GIdxKind::ActOrder,
        _ => false,
    };
    assert_eq!(quantization["desc_act"], checkpoint.modules().iter().any(act_order), "{what}");
    for module in checkpoint.modules() {
        let Layout::Gptq(gptq) = module.layout() else { continue };
        let rule = quantization["dynamic"].as_object().into_iter().flatten();
        let name = module.name().replace('.', "\\.");
        let rule = rule.filter(|(key, _)| **key == format!("+:^{name}$")).map(|(_, rule)| rule).next();
        let stated = |key: &str| rule.and_then(|rule| rule.get(key)).unwrap_or(&quantization[key]).clone();
        assert_eq!(stated("bits"), gptq.shape.bits.get(), "{what}: {name}");
        assert_eq!(stated("sym"), gptq.zeros.symmetric, "{what}: {name}");
        // Readers expect as many rows of scales as the stated size gives, even where groups differ.
        let (k, groups) = (module.in_features(), gptq.shape.groups);
        let size = match gptq.equal_groups {
            _ if groups == 1 => -1,
            true => gptq.group_size as i64,
            false => (k / groups) as i64,
        };
        assert_eq!(stated("group_size"), size, "{what}: {name}");
    }
}

fn expected_of(dir: &Path) -> impl Fn(&str) -> Option<String> + use<> {
    let expected = json_of(dir.join("expected.json"))["modules"].clone();
    move |name| Some(expected[name]["sha256"].as_str().unwrap().to_owned())
}

fn with_bits(bits: u32) -> GptqOptions {
    GptqOptions { bits: Some(Bits::try_from(bits).unwrap()), ..GptqOptions::default() }
}

fn symmetric() -> GptqOptions {
    GptqOptions { symmetric: true, ..GptqOptions::default() }
}

/// Half of the smallest group.
fn split(from: &Checkpoint) -> GptqOptions {
    let sizes = from.modules().iter().filter_map(|module| match module.layout() {
        Layout::Gptq(gptq) => Some(gptq.group_size),
        _ => None,
    });
    GptqOptions { group_size: sizes.min().map(|size| size / 2), ..GptqOptions::default() }
}

#[test]
fn gptq_in_every_variant_decodes_to_the_same_bits() {
    for dir in checkpoints() {
        let from = source(&dir);
        let hash = expected_of(&dir);
        let everything = GptqOptions { symmetric: true, ..with_bits(8) };
        let everything = GptqOptions { order: Order::Sorted, zeros: Some(ZeroConvention::V2), ..everything };
        let variants = [
            ("as it is", GptqOptions::default()),
            ("v1", zeros(ZeroConvention::V1)),
            ("v2", zeros(ZeroConvention::V2)),
            ("4 bits", with_bits(4)),
            ("8 bits", with_bits(8)),
            ("symmetric", symmetric()),
            ("split", split(&from)),
            ("sorted", sorted()),
            ("everything", everything),
        ];
        for (variant, options) in variants {
            let what = format!("{}, {variant}", dir.display());
            let widest = from.modules().iter().filter_map(|module| match module.layout() {
                Layout::Gptq(gptq) => Some(gptq.shape.bits.get()),
                _ => None,
            });
            let narrow = options.bits.is_some_and(|bits| widest.max().unwrap() > bits.get());
            // Its one zero point of 0 can't be written again in v1.
            let v2 = options.zeros == Some(ZeroConvention::V2);
            let wraps =
                dir.ends_with("tiny-llama-2bit") && !options.symmetric && !v2 && variant != "as it is";
            if narrow {
                continue; // tests/requantize.rs
            }
            match gptq(&from, &options) {
                Err(requant::Error::Plan(plan::Error::ZeroNotStorable { zero: 0, count: 1, .. }))
                    if wraps => {}
                Err(e) => panic!("{what}: {e}"),
                Ok(_) if wraps => panic!("{what}: was not refused"),
                Ok(out) => {
                    assert_same_weights(&from, &out, &hash, &what);
                    assert_config(&out, &what);
                    assert_variant(&source(&out.dir), &options, &what);
                }
            }
        }
    }
}

/// That the options did what they are for.
fn assert_variant(to: &Checkpoint, options: &GptqOptions, what: &str) {
    let mut quantized = 0;
    for module in to.modules() {
        let Layout::Gptq(gptq) = module.layout() else { continue };
        quantized += 1;
        assert!(options.bits.is_none_or(|bits| bits == gptq.shape.bits), "{what}");
        assert!(options.zeros.is_none_or(|zeros| zeros == gptq.zeros.convention), "{what}");
        assert!(!options.symmetric || gptq.zeros.symmetric, "{what}");
        assert!(options.group_size.is_none_or(|size| size == gptq.group_size), "{what}");
        let down = ["down_proj", "w2"].iter().any(|end| module.name().ends_with(end));
        if options.order == Order::Sorted && down {
            assert_ne!(gptq.g_idx, GIdxKind::ActOrder, "{what}: {}", module.name());
            let g_idx = to.tensor(&format!("{}.g_idx", module.name())).unwrap();
            assert_eq!(g_idx.dtype(), safetensors::Dtype::I32);
            let size = gptq.group_size as i64;
            let trivial: Vec<i64> = (0..module.in_features() as i64).map(|row| row / size).collect();
            assert_eq!(g_idx.integers().unwrap(), trivial, "{what}: {}", module.name());
        }
    }
    assert!(quantized >= 14, "{what}");
}

#[test]
fn gptq_to_dense_is_what_it_decodes_to() {
    for dir in checkpoints() {
        let from = source(&dir);
        let what = dir.display().to_string();
        let out = dense(&from, DenseType::Fp16);
        assert_same_weights(&from, &out, &expected_of(&dir), &what);
        assert_eq!(json_of(out.dir.join("config.json")).get("quantization_config"), None);
    }
}

#[test]
fn bf16_is_rounded_once_from_the_product() {
    // How many weights tell one rounding from two, by way of fp16.
    let mut telling = 0;
    for dir in checkpoints() {
        let from = source(&dir);
        let out = dense(&from, DenseType::Bf16);
        let to = source(&out.dir);
        for module in from.modules() {
            let Layout::Gptq(_) = module.layout() else { continue };
            let (matrix, n) = (from.gptq(module).unwrap(), module.out_features());
            let found = to.dense(to.module(module.name()).unwrap()).unwrap();
            for (i, found) in found.iter().enumerate() {
                let at = matrix.g_idx().groups()[i / n] as usize * n + i % n;
                let difference = f64::from(matrix.codes()[i]) - f64::from(matrix.zeros()[at]);
                let product = f64::from(matrix.scales()[at]) * difference;
                assert_eq!(*found, bf16::from_f64(product).to_f32(), "{}: {}", dir.display(), module.name());
                let twice = bf16::from_f32(f16::from_f64(product).to_f32()).to_f32();
                telling += usize::from(twice != *found);
            }
        }
    }
    assert!(telling > 0);
}

#[test]
fn exl2_to_gptq_and_fp16_is_what_exllamav2s_kernel_decodes() {
    for (dir, expected) in exl2_directories() {
        let from = source(&dir);
        let hash = |name: &str| Some(expected[name]["sha256_fp16_in_out"].as_str().unwrap().to_owned());
        let what = dir.display().to_string();
        assert_same_weights(&from, &dense(&from, DenseType::Fp16), &hash, &what);

        let widest = |module: &Module| match module.layout() {
            Layout::Exl2(exl2) => exl2.groups.groups().iter().map(|group| group.bits.get()).max().unwrap(),
            _ => panic!("{}", module.name()),
        };
        let fits = |module: &Module| if widest(module) <= 4 { 4 } else { 8 };
        for (options, bits) in [
            (GptqOptions::default(), &fits as &dyn Fn(&Module) -> u32),
            (sorted(), &fits),
            (with_bits(8), &|_| 8),
        ] {
            let out = gptq(&from, &options).unwrap();
            assert_same_weights(&from, &out, &hash, &what);
            assert_config(&out, &what);
            let to = source(&out.dir);
            for module in from.modules() {
                let Layout::Gptq(gptq) = to.module(module.name()).unwrap().layout() else { panic!() };
                assert_eq!(gptq.shape.bits.get(), bits(module), "{what}: {}", module.name());
                assert!(gptq.zeros.symmetric && gptq.equal_groups && gptq.group_size >= 32);
            }
        }
    }
}

#[test]
fn a_true_zero_point_of_0_is_not_written_in_v1() {
    let Some(assets) = support::folder("REQUANT_ASSETS") else { return };
    let dir = assets.join("tiny/tiny-llama-2bit");
    let from = source(&dir);
    let Err(requant::Error::Plan(error)) = gptq(&from, &zeros(ZeroConvention::V1)) else { panic!() };
    let hint = requant::Diagnose::hint(&error).unwrap();
    assert!(hint.contains("v2") && hint.contains("--sym"), "{hint}");
    let out = gptq(&from, &zeros(ZeroConvention::V2)).unwrap();
    assert_same_weights(&from, &out, &expected_of(&dir), "v2");
    let out = gptq(&from, &GptqOptions { zeros: Some(ZeroConvention::V1), ..symmetric() }).unwrap();
    assert_same_weights(&from, &out, &expected_of(&dir), "symmetric");
}

#[test]
fn the_same_tensors_in_new_shards() {
    for dir in checkpoints() {
        let from = source(&dir);
        let out = output(&from, &Plan::same(&from), outputs::SMALL);
        let to = source(&out.dir);
        let tensors = |checkpoint: &Checkpoint| {
            let of_modules = checkpoint.modules().iter().flat_map(Module::tensor_names);
            let names = of_modules.chain(checkpoint.other_tensors().map(|tensor| tensor.name().into()));
            let found = names.filter_map(|name| Some((name.clone(), checkpoint.tensor(&name)?)));
            found
                .map(|(name, t)| (name, (t.dtype(), t.shape().to_vec(), t.bytes().to_vec())))
                .collect::<BTreeMap<_, _>>()
        };
        assert!(tensors(&from) == tensors(&to), "{}", dir.display());
        assert!(to.files().len() > from.files().len() && to.index().is_some(), "{}", dir.display());
        assert_eq!(codes(&from), codes(&to));
    }
}

/// `down(silu(gate x) · up x)` in f64, weights `[k, n]`.
fn mlp(checkpoint: &Checkpoint, prefix: &str, input: &[f64]) -> Vec<f64> {
    let linear = |name: &str, input: &[f64]| {
        let module = checkpoint.module(&format!("{prefix}.{name}_proj")).unwrap();
        let (weights, n) = (decoded(checkpoint, module), module.out_features());
        let bias = checkpoint.bias(module).unwrap();
        (0..n)
            .map(|column| {
                let products =
                    input.iter().enumerate().map(|(row, x)| x * weights[row * n + column].to_f64());
                products.sum::<f64>() + bias.as_ref().map_or(0.0, |bias| f64::from(bias[column]))
            })
            .collect::<Vec<f64>>()
    };
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let (gate, up) = (linear("gate", input), linear("up", input));
    let hidden: Vec<f64> = gate.iter().zip(&up).map(|(gate, up)| silu(*gate) * up).collect();
    linear("down", &hidden)
}

fn assert_same_mlp(from: &Checkpoint, to: &Checkpoint, prefix: &str) {
    let k = from.module(&format!("{prefix}.gate_proj")).unwrap().in_features();
    let input: Vec<f64> = (0..k).map(|i| ((i * 37 % 101) as f64 - 50.0) / 25.0).collect();
    let (before, after) = (mlp(from, prefix, &input), mlp(to, prefix, &input));
    let largest = before.iter().fold(0.0, |largest: f64, x| largest.max(x.abs()));
    assert!(largest > 1e-3);
    for (before, after) in before.iter().zip(&after) {
        assert!((before - after).abs() <= 1e-12 * largest, "{prefix}: {before} became {after}");
    }
}

#[test]
fn folding_leaves_the_mlp_as_it_was() {
    for dir in ["fixtures/tiny-llama-gptq", "fixtures/tiny-llama-exl2-4.0bpw"] {
        let from = source(dir);
        let out = gptq(&from, &sorted()).unwrap();
        let to = source(&out.dir);
        for layer in 0..2 {
            assert!(Orders::of(&out).rows(&format!("model.layers.{layer}.mlp.down_proj")).is_some());
            assert_same_mlp(&from, &to, &format!("model.layers.{layer}.mlp"));
        }
    }
    let Some(assets) = support::folder("REQUANT_ASSETS") else { return };
    let from = source(assets.join("tiny/tiny-qwen3moe"));
    let out = gptq(&from, &sorted()).unwrap();
    let to = source(&out.dir);
    for expert in 0..4 {
        let prefix = format!("model.layers.1.mlp.experts.{expert}");
        assert!(Orders::of(&out).rows(&format!("{prefix}.down_proj")).is_some());
        assert_same_mlp(&from, &to, &prefix);
    }
    let from = source(assets.join("tiny/tiny-mixtral"));
    let orders = Orders::of(&gptq(&from, &sorted()).unwrap());
    for expert in 0..4 {
        let prefix = format!("model.layers.0.block_sparse_moe.experts.{expert}");
        let rows = orders.rows(&format!("{prefix}.w2"));
        assert!(rows.is_some());
        assert_eq!(
            (orders.columns(&format!("{prefix}.w1")), orders.columns(&format!("{prefix}.w3"))),
            (rows.clone(), rows)
        );
    }
}

/// One block with biases in the MLP and act-order in down_proj, whose groups have these sizes.
fn with_mlp_bias(sizes: [usize; 3]) -> Model {
    let mut model = Model::new(&Quantized::default());
    model.config["mlp_bias"] = true.into();
    for (name, n) in [("gate_proj", INTERMEDIATE), ("up_proj", INTERMEDIATE), ("down_proj", HIDDEN)] {
        let bias: Vec<f32> = (0..n).map(|i| (i * 29 % 64) as f32 / 32.0 - 1.0).collect();
        model.put(&format!("model.layers.0.mlp.{name}"), "bias", Tensor::f16s(&[n], &bias));
    }
    let groups = sizes.iter().enumerate().flat_map(|(g, &rows)| std::iter::repeat_n(g as i32, rows));
    let groups: Vec<i32> = groups.collect();
    let shuffled: Vec<i32> = (0..INTERMEDIATE).map(|row| groups[row * 35 % INTERMEDIATE]).collect();
    model.put(DOWN, "g_idx", Tensor::i32s(&[INTERMEDIATE], &shuffled));
    model.set("desc_act", true.into());
    model
}

#[test]
fn folding_moves_biases() {
    let dir = with_mlp_bias([32, 32, 32]).write();
    let from = source(dir.path());
    let out = gptq(&from, &sorted()).unwrap();
    assert_same_weights(&from, &out, &|_| None, "mlp bias");
    let to = source(&out.dir);
    assert_same_mlp(&from, &to, "model.layers.0.mlp");
    let gate = |checkpoint: &Checkpoint| {
        let module = checkpoint.module("model.layers.0.mlp.gate_proj").unwrap();
        checkpoint.bias(module).unwrap().unwrap()
    };
    assert_ne!(gate(&from), gate(&to));
}

#[test]
fn what_cant_be_folded_is_said_and_left() {
    let unequal = with_mlp_bias([80, 8, 8]);
    let mut dense_gate = with_mlp_bias([32, 32, 32]);
    dense_gate.tensors.retain(|name, _| !name.contains("gate_proj.") || name.ends_with("bias"));
    let weights: Vec<f32> = (0..INTERMEDIATE * HIDDEN).map(|i| (i % 17) as f32 / 16.0 - 0.5).collect();
    let gate = Tensor::f16s(&[INTERMEDIATE, HIDDEN], &weights);
    dense_gate.put("model.layers.0.mlp.gate_proj", "weight", gate);
    for (model, reason) in [(unequal, "differ in size"), (dense_gate, "is dense")] {
        let dir = model.write();
        let from = source(dir.path());
        let out = gptq(&from, &sorted()).unwrap();
        let report = out.report();
        let warnings = report["warnings"].as_array().unwrap();
        let warning = warnings.iter().find(|warning| warning["code"] == "not_folded").unwrap();
        assert_eq!(warning["subject"], DOWN);
        assert!(warning["message"].as_str().unwrap().contains(reason), "{warning}");
        let to = source(&out.dir);
        let Layout::Gptq(down) = to.module(DOWN).unwrap().layout() else { panic!() };
        assert_eq!(down.g_idx, GIdxKind::ActOrder);
        assert_same_weights(&from, &out, &|_| None, reason);
        assert_config(&out, reason);
        assert_same_mlp(&from, &to, "model.layers.0.mlp");
    }
}
