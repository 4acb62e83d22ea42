//! Every architecture of the table, from a small GPTQ checkpoint under each of its namings: converted to
//! EXL2, each linear decodes to its own columns of the source, and the output verifies.

#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

#[path = "support/outputs.rs"]
mod outputs;
mod support;

use requant::arch::{ARCHITECTURES, Architecture, DenseRole, Dims, Names, Part, Role};
use requant::checkpoint::{Checkpoint, Layout, OpenOptions};
use requant::formats::exl2::Bits;
use requant::plan::{Decision, DenseType, Plan, PlanOptions, Target};
use requant::progress::Silent;
use requant::quantize::{RowOrder, Source, quantize};
use requant::verify::verify;
use requant::{ConvertOptions, Diagnose, Error, WarningCode, convert};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use support::writer::{LINEARS, Model, Quantized, Tensor, Tensors, gptq_module};
use tempfile::TempDir;

const BLOCKS: usize = 2;

fn config(arch: &Architecture) -> Value {
    json!({
        "architectures": [arch.name], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": BLOCKS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 48,
        "num_experts": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
        "use_qk_norm": true, "max_position_embeddings": 40, "rope_theta": 10000.0,
        "attention_bias": true, "tie_word_embeddings": arch.tied_head
    })
}

/// A checkpoint whose tensors are named by `names`, all of them different.
fn source(arch: &Architecture, names: &Names, how: &Quantized) -> TempDir {
    let mut model = Model::new(how);
    model.config = config(arch);
    let dims = Dims::read(arch, model.config.as_object().unwrap()).unwrap();
    let mut tensors = Tensors::new();
    let ramp = |seed: usize, count: usize| -> Vec<f32> {
        (0..count).map(|i| 0.5 + 0.01 * ((i * 13 + seed * 29) % 61) as f32).collect()
    };
    // Width, rows and whether there is a bias, of each stored linear.
    let mut stored: BTreeMap<String, (usize, usize, bool)> = BTreeMap::new();
    for linear in arch.linears(&dims, names) {
        let entry = stored.entry(linear.name).or_insert((linear.in_features, 0, linear.bias));
        entry.1 += linear.out_features;
    }
    for (seed, (name, (k, n, bias))) in stored.iter().enumerate() {
        gptq_module(&mut tensors, name, *k, *n, how);
        let scales: Vec<f32> = ramp(seed, k.div_ceil(how.group_size) * n).iter().map(|s| s * 0.01).collect();
        tensors.insert(format!("{name}.scales"), Tensor::f16s(&[k.div_ceil(how.group_size), *n], &scales));
        if *bias {
            tensors.insert(format!("{name}.bias"), Tensor::f16s(&[*n], &ramp(seed, *n)));
        }
    }
    for (seed, tensor) in arch.dense_tensors(&dims, names).into_iter().enumerate() {
        let count = tensor.shape.iter().product();
        tensors.insert(tensor.name, Tensor::f16s(&tensor.shape, &ramp(seed, count)));
    }
    if !dims.tied {
        tensors.insert(format!("{}.weight", names.head), Tensor::f16s(&[48, 64], &ramp(7, 48 * 64)));
    }
    for prefix in names.others {
        tensors.insert(format!("{prefix}layers.0.weight"), Tensor::bf16s(&[3, 5], &ramp(3, 15)));
    }
    model.tensors = tensors;
    model.write()
}

fn open(dir: &Path) -> Checkpoint {
    Checkpoint::open(dir, &OpenOptions::default()).unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
}

/// A plan of one width for all, groups of 32.
fn uniform(checkpoint: &Checkpoint, bits: u32) -> Plan {
    let target = Target::Uniform { bits: bits.try_into().unwrap(), group_size: 32 };
    Plan::new(checkpoint, &PlanOptions::new(target), &Silent).unwrap()
}

/// What a plan makes, in a folder that goes with the first.
fn converted(checkpoint: &Checkpoint, plan: &Plan) -> (TempDir, PathBuf) {
    let place = tempfile::tempdir().unwrap();
    let out = place.path().join("out");
    convert(checkpoint, plan, &out, &ConvertOptions::default(), &Silent).unwrap();
    (place, out)
}

fn verified(out: &Path, source: &Checkpoint, what: &str) {
    let verification = verify(out, &OpenOptions::default(), Some(source), &Silent).unwrap();
    let faults: Vec<_> = verification.faults().collect();
    assert!(faults.is_empty(), "{what}: {faults:?}");
}

fn report(out: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(out.join("report.json")).unwrap()).unwrap()
}

/// Each architecture under each of its namings.
fn cases() -> impl Iterator<Item = (&'static Architecture, &'static Names, String)> {
    let cases = |arch: &'static Architecture| {
        arch.names.iter().enumerate().map(move |(i, names)| (arch, names, format!("{} {i}", arch.name)))
    };
    ARCHITECTURES.iter().flat_map(cases)
}

#[test]
fn every_architecture_becomes_exl2_under_exllamav2s_names() {
    // Zero points of all kinds, so that cuts within a word would show.
    let how =
        Quantized { zero: |group, column| ((3 * group + 5 * column) % 15 + 1) as u16, ..Default::default() };
    for (arch, names, what) in cases().filter(|(arch, ..)| arch.exllamav2) {
        let dir = source(arch, names, &how);
        let checkpoint = open(dir.path());
        assert_eq!(checkpoint.naming(), names, "{what}");
        let (_place, out) = converted(&checkpoint, &uniform(&checkpoint, 8));
        verified(&out, &checkpoint, &what);
        let (written, dims) = (open(&out), checkpoint.dims().unwrap());
        assert_eq!(written.naming(), arch.exl2_names(), "{what}");
        for linear in arch.linears(dims, names) {
            let found = written.module(&linear.exl2_name).unwrap_or_else(|| panic!("{what}: {linear:?}"));
            assert!(matches!(found.layout(), Layout::Exl2(_)), "{what}: {}", linear.exl2_name);
            // The part by itself, cut here out of the whole as it is stored.
            let whole = checkpoint.module(&linear.name).unwrap();
            let weights = checkpoint.dequantize(whole).unwrap();
            let n = whole.out_features();
            let columns: Vec<usize> = match &linear.columns {
                Some(columns) => columns.iter().collect(),
                None => (0..n).collect(),
            };
            let wanted: Vec<_> =
                weights.chunks_exact(n).flat_map(|row| columns.iter().map(|&c| row[c])).collect();
            let part = checkpoint.of_linear(&linear).unwrap();
            assert_eq!(checkpoint.dequantize(part).unwrap(), wanted, "{what}: {linear:?}");
            let found_weights = written.dequantize(found).unwrap();
            let pairs = || found_weights.iter().zip(&wanted).map(|(f, w)| (f.to_f32(), w.to_f32()));
            let miss: f32 = pairs().map(|(f, w)| (f - w) * (f - w)).sum();
            let norm: f32 = pairs().map(|(_, w)| w * w).sum();
            assert!(miss < 1e-3 * norm, "{what}: {}: {miss} of {norm}", linear.exl2_name);
            assert_eq!(found.bias().is_some(), linear.bias, "{what}: {}", linear.exl2_name);
            if linear.bias {
                let bias = checkpoint.bias(whole).unwrap().unwrap();
                let wanted: Vec<f32> = columns.iter().map(|&c| bias[c]).collect();
                assert_eq!(written.bias(found).unwrap().unwrap(), wanted, "{what}: {}", linear.exl2_name);
            }
        }
        for tensor in arch.dense_tensors(dims, names) {
            let (from, to) = (checkpoint.tensor(&tensor.name), written.tensor(&tensor.exl2_name));
            assert_eq!(from.unwrap().bytes(), to.unwrap().bytes(), "{what}: {}", tensor.exl2_name);
        }
        for (from, to) in names.others.iter().zip(arch.exl2_names().others) {
            let tensor = |checkpoint: &Checkpoint, prefix| {
                checkpoint
                    .tensor(&format!("{prefix}layers.0.weight"))
                    .map(|t| (t.dtype(), t.bytes().to_vec()))
            };
            let stored = tensor(&checkpoint, from);
            assert!(stored.is_some() && stored == tensor(&written, to), "{what}: {to}");
        }
    }
}

/// A source of an architecture whose MLPs have biases, down_proj in act-order.
fn biased_in_act_order(arch: &Architecture, names: &Names, mlp_bias: bool) -> TempDir {
    let dir = source(arch, names, &Quantized::default());
    let mut model = Model::read(dir.path());
    let mut config = config(arch);
    config["mlp_bias"] = json!(mlp_bias);
    let dims = Dims::read(arch, config.as_object().unwrap()).unwrap();
    model.config = config;
    for linear in arch.linears(&dims, names).iter().filter(|linear| linear.role.part() == Part::Mlp) {
        if linear.role == Role::Down {
            let order: Vec<i32> =
                (0..linear.in_features).map(|row| ((row * 5 + linear.layer) % 3) as i32).collect();
            model.put(&linear.name, "g_idx", Tensor::i32s(&[linear.in_features], &order));
        }
        if mlp_bias {
            let bias: Vec<f32> =
                (0..linear.out_features).map(|i| 0.25 + (i * 7 % 97) as f32 / 64.0).collect();
            model.put(&linear.name, "bias", Tensor::f16s(&[linear.out_features], &bias));
        }
    }
    model.write()
}

/// The EXL2 tensors that exllamav2 would misread with biases: it matches gate's and up's columns with down_proj's
/// rows at load, not their biases.
#[test]
fn mlps_with_biases_have_down_proj_in_the_models_order() {
    let with_biases = ARCHITECTURES.iter().filter(|arch| arch.mlp_bias);
    let mut seen: Vec<&str> = with_biases.clone().map(|arch| arch.name).collect();
    seen.sort_unstable();
    assert_eq!(seen, ["GPT2LMHeadModel", "GPTBigCodeForCausalLM", "Starcoder2ForCausalLM"]);
    let llama = ARCHITECTURES.iter().filter(|arch| arch.name == "LlamaForCausalLM");
    let uniform = Target::Uniform { bits: 4.try_into().unwrap(), group_size: 32 };
    for (arch, target) in
        with_biases.chain(llama).flat_map(|arch| [(arch, uniform), (arch, Target::Bpw(4.9))])
    {
        for names in arch.names {
            let what = format!("{} {target:?}", arch.name);
            let dir = biased_in_act_order(arch, names, !arch.mlp_bias);
            let checkpoint = open(dir.path());
            let plan = Plan::new(&checkpoint, &PlanOptions::new(target), &Silent).unwrap();
            let (_place, out) = converted(&checkpoint, &plan);
            verified(&out, &checkpoint, &what);
            let (written, json) = (open(&out), report(&out));
            let entry = |name: &str| {
                let modules = json["modules"].as_array().unwrap();
                modules.iter().find(|module| module["name"] == name).unwrap().clone()
            };
            let linears = arch.linears(checkpoint.dims().unwrap(), names);
            for down in linears.iter().filter(|linear| linear.role == Role::Down) {
                let entry_of_down = entry(&down.exl2_name);
                assert_eq!(entry_of_down["decision"]["order"], "grouped", "{what}");
                let rows: Vec<usize> = serde_json::from_value(entry_of_down["row_order"].clone()).unwrap();
                // Each group of the output holds the rows of one of the source.
                let group = |row: usize| (row * 5 + down.layer) % 3;
                assert!(rows.chunks_exact(32).all(|rows| rows.iter().all(|&r| group(r) == group(rows[0]))));
                let matrix = written.exl2(written.module(&down.exl2_name).unwrap()).unwrap();
                assert!(matrix.invperm().is_identity(), "{what}: {}", down.exl2_name);
                for linear in linears.iter().filter(|linear| linear.layer == down.layer) {
                    let (k, n) = (linear.in_features, linear.out_features);
                    let place = |at: usize| match linear.role {
                        Role::Down => rows[at / n] * n + at % n,
                        Role::Gate | Role::Up => at / n * n + rows[at % n],
                        _ => at,
                    };
                    let from = checkpoint.of_linear(linear).unwrap();
                    let to = written.module(&linear.exl2_name).unwrap();
                    let (wanted, found) = (checkpoint.dequantize(from), written.dequantize(to));
                    let (wanted, found) = (wanted.unwrap(), found.unwrap());
                    let squared = |at: usize| {
                        let (f, w) = (f64::from(found[at].to_f32()), f64::from(wanted[place(at)].to_f32()));
                        ((f - w) * (f - w), w * w)
                    };
                    let sums = (0..k * n).map(squared).fold((0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1));
                    let error = (sums.0 / sums.1).sqrt();
                    let entry = entry(&linear.exl2_name);
                    let reported = entry["relative_error"].as_f64().unwrap();
                    assert!((error - reported).abs() < 1e-9 && error < 0.2, "{what}: {error} {reported}");
                    let feeds = matches!(linear.role, Role::Gate | Role::Up);
                    let follows = entry["decision"]["columns_follow"].as_str();
                    assert_eq!(follows, feeds.then_some(down.name.as_str()), "{what}");
                    if linear.bias {
                        let (from, to) = (checkpoint.bias(from).unwrap(), written.bias(to).unwrap());
                        let (from, to) = (from.unwrap(), to.unwrap());
                        let from = |i: usize| from[if feeds { rows[i] } else { i }];
                        assert!((0..n).all(|i| to[i] == from(i)), "{what}: {}", linear.exl2_name);
                    }
                }
            }
        }
    }
}

/// What folding is for: grouped rows follow the source's grids, rows in the model's order don't.
#[test]
fn biases_of_the_mlp_cost_nothing() {
    let arch = ARCHITECTURES.iter().find(|arch| arch.name == "LlamaForCausalLM").unwrap();
    let error = |mlp_bias: bool| {
        let dir = biased_in_act_order(arch, &arch.names[0], mlp_bias);
        let checkpoint = open(dir.path());
        let (_place, out) = converted(&checkpoint, &uniform(&checkpoint, 4));
        let modules = report(&out)["modules"].clone();
        modules.as_array().unwrap().iter().map(|m| m["relative_error"].as_f64().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(error(true), error(false));
}

/// An order that isn't the one that was folded is found out, in the weights and in the biases.
#[test]
fn verify_undoes_the_folded_order() {
    let arch = ARCHITECTURES.iter().find(|arch| arch.name == "Starcoder2ForCausalLM").unwrap();
    let dir = biased_in_act_order(arch, &arch.names[0], false);
    let checkpoint = open(dir.path());
    let (_place, out) = converted(&checkpoint, &uniform(&checkpoint, 4));
    let mut json = report(&out);
    let (down, up) = ("model.layers.1.mlp.c_proj", "model.layers.1.mlp.c_fc");
    let modules = json["modules"].as_array_mut().unwrap();
    let entry = modules.iter_mut().find(|module| module["name"] == down).unwrap();
    entry["row_order"].as_array_mut().unwrap().reverse();
    std::fs::write(out.join("report.json"), serde_json::to_vec(&json).unwrap()).unwrap();
    let verification = verify(&out, &OpenOptions::default(), Some(&checkpoint), &Silent).unwrap();
    let names: Vec<_> = verification.faults().filter_map(|(_, fault)| fault.tensor.clone()).collect();
    for name in [down.to_string(), up.to_string(), format!("{up}.bias")] {
        assert!(names.contains(&name), "{name}: {names:?}");
    }
}

#[test]
fn other_layouts_keep_the_sources_modules() {
    for (arch, names, what) in cases() {
        let dir = source(arch, names, &Quantized::default());
        let checkpoint = open(dir.path());
        let dense = match Plan::to_dense(&checkpoint, DenseType::Fp16) {
            Err(error) if arch.transposed => {
                assert_eq!(error.code(), "plan.transposed_dense", "{what}");
                None
            }
            plan => Some(plan.unwrap()),
        };
        let plans = [
            ("gptq", Some(Plan::to_gptq(&checkpoint, &Default::default()).unwrap())),
            ("dense", dense),
            ("same", Some(Plan::same(&checkpoint))),
        ];
        for (to, plan) in plans.into_iter().filter_map(|(to, plan)| Some((to, plan?))) {
            let (_place, out) = converted(&checkpoint, &plan);
            let written = open(&out);
            let list = |checkpoint: &Checkpoint| -> Vec<String> {
                checkpoint.modules().iter().map(|module| module.name().into()).collect()
            };
            assert_eq!(list(&written), list(&checkpoint), "{what} {to}");
            verified(&out, &checkpoint, &format!("{what} {to}"));
        }
    }
}

#[test]
fn parts_and_ungated_mlps_stay_gptq_where_that_is_better() {
    for (arch, names, what) in cases().filter(|(arch, ..)| arch.exllamav2) {
        let dir = source(arch, names, &Quantized::default());
        let checkpoint = open(dir.path());
        let mut options = PlanOptions::new(Target::Bpw(6.0));
        options.keep_gptq = true;
        let plan = Plan::new(&checkpoint, &options, &Silent).unwrap();
        let (_place, out) = converted(&checkpoint, &plan);
        verified(&out, &checkpoint, &what);
        let written = open(&out);
        let kept = |module: &&requant::checkpoint::Module| matches!(module.layout(), Layout::Gptq(_));
        let count = written.modules().iter().filter(kept).count();
        assert!(count > 0, "{what}");
        for module in written.modules().iter().filter(kept) {
            let linears = arch.linears(checkpoint.dims().unwrap(), names);
            let linear = linears.iter().find(|linear| linear.exl2_name == module.name()).unwrap();
            let part = checkpoint.of_linear(linear).unwrap();
            let (found, wanted) = (written.dequantize(module), checkpoint.dequantize(part));
            assert_eq!(found.unwrap(), wanted.unwrap(), "{what}: {}", module.name());
        }
    }
}

#[test]
fn the_report_maps_one_source_to_several_outputs() {
    let arch = ARCHITECTURES.iter().find(|arch| arch.name == "Phi3ForCausalLM").unwrap();
    let dir = source(arch, &arch.names[1], &Quantized::default());
    let checkpoint = open(dir.path());
    let (_place, out) = converted(&checkpoint, &uniform(&checkpoint, 4));
    let mut json = report(&out);
    let of = |json: &Value, name: &str| -> (Value, Value) {
        let modules = json["modules"].as_array().unwrap();
        let module = modules.iter().find(|module| module["name"] == name).unwrap();
        (module["source"].clone(), module["columns"].clone())
    };
    let qkv = json!("model.layers.1.self_attn.qkv_proj");
    assert_eq!(of(&json, "model.layers.1.self_attn.q_proj"), (qkv.clone(), json!([[0, 128]])));
    assert_eq!(of(&json, "model.layers.1.self_attn.k_proj"), (qkv.clone(), json!([[128, 192]])));
    assert_eq!(of(&json, "model.layers.1.self_attn.v_proj"), (qkv, json!([[192, 256]])));
    assert_eq!(of(&json, "model.layers.1.self_attn.o_proj").1, Value::Null);
    // Columns that aren't the module's are found out.
    let modules = json["modules"].as_array_mut().unwrap();
    let q = modules.iter_mut().find(|module| module["name"] == "model.layers.1.self_attn.q_proj").unwrap();
    q["columns"] = json!([[0, 64]]);
    std::fs::write(out.join("report.json"), serde_json::to_vec(&json).unwrap()).unwrap();
    let verification = verify(&out, &OpenOptions::default(), Some(&checkpoint), &Silent).unwrap();
    let names: Vec<_> = verification.faults().filter_map(|(_, fault)| fault.tensor.clone()).collect();
    assert!(names.contains(&"model.layers.1.self_attn.qkv_proj".into()), "{names:?}");
    assert!(names.contains(&"model.layers.1.self_attn.q_proj".into()), "{names:?}");
}

#[test]
fn an_unknown_architecture_needs_a_word() {
    let mut model = Model::new(&Quantized::default());
    model.config["architectures"] = json!(["LlamaLookalikeForCausalLM"]);
    let dir = model.write();
    let plan = |options: &OpenOptions| {
        let checkpoint = Checkpoint::open(dir.path(), options).unwrap();
        let target = Target::Uniform { bits: 4.try_into().unwrap(), group_size: 32 };
        let warned = checkpoint.warnings().iter().any(|w| w.message.contains("read as a Llama"));
        (Plan::new(&checkpoint, &PlanOptions::new(target), &Silent), warned)
    };
    let (refused, _) = plan(&OpenOptions::default());
    let Err(Error::Plan(refused)) = refused else { panic!() };
    assert_eq!(refused.code(), "plan.architecture");
    assert!(refused.hint().unwrap().contains("--any-arch"));
    let (planned, warned) = plan(&OpenOptions { any_arch: true, ..OpenOptions::default() });
    assert_eq!(planned.unwrap().modules.len(), 8);
    assert!(warned);
}

#[test]
fn what_exllamav2_does_not_know_is_refused() {
    for arch in ARCHITECTURES.iter().filter(|arch| !arch.exllamav2) {
        let dir = source(arch, &arch.names[0], &Quantized::default());
        let target = Target::Uniform { bits: 4.try_into().unwrap(), group_size: 32 };
        let planned = Plan::new(&open(dir.path()), &PlanOptions::new(target), &Silent);
        assert_eq!(planned.unwrap_err().code(), "plan.architecture", "{}", arch.name);
    }
}

/// What exllamav2's loader and kernel make of an EXL2 weight with a prescale, step by step: half times a Python
/// float is a product of fp32, rounded to half; then step² · m1 and (code − zero) · m2, rounded to half each.
fn as_exllamav2_loads(written: &Checkpoint, name: &str, prescale: f64) -> Vec<f64> {
    let matrix = written.exl2(written.module(name).unwrap()).unwrap();
    let (n, rows) = (matrix.out_features(), matrix.in_features());
    let half = |value: f32| half::f16::from_f32(value).to_f32();
    let mut packed: Vec<Vec<f64>> = Vec::new();
    for (group, table) in matrix.groups().groups().iter().enumerate() {
        let m1 = half(matrix.scale_max()[group].to_f32() * (prescale / 256.0) as f32);
        let zero = (1i32 << (table.bits.get() - 1)) as f32;
        for _ in 0..table.rows {
            let codes = &matrix.codes()[packed.len() * n..][..n];
            let weight = |column: usize| {
                let step = f32::from(matrix.scale_index()[group * n + column] + 1);
                f64::from(half((f32::from(codes[column]) - zero) * half(step * step * m1)))
            };
            packed.push((0..n).map(weight).collect());
        }
    }
    (0..rows).flat_map(|row| packed[matrix.invperm().map()[row] as usize].clone()).collect()
}

/// Frobenius norm of the difference over that of the weights.
fn relative(found: &[f64], wanted: &[f64]) -> f64 {
    assert_eq!(found.len(), wanted.len());
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
    let miss = squares(&mut found.iter().zip(wanted).map(|(f, w)| f - w));
    (miss / squares(&mut wanted.iter().copied())).sqrt()
}

#[test]
fn errors_are_those_after_exllamav2s_prescale() {
    // One block: `scale_depth / √1`. The head's, of MiniCPM, is 1 / (hidden_size / dim_model_base).
    let granite = json!({"residual_multiplier": 0.22, "logits_scaling": 8.0});
    let minicpm = json!({"scale_depth": 0.7, "dim_model_base": 16});
    for (name, factors, residual, logits) in
        [("GraniteForCausalLM", granite, 0.22, 0.125), ("MiniCPMForCausalLM", minicpm, 0.7, 0.25)]
    {
        let mut model = Model::new(&Quantized::default());
        model.config["architectures"] = json!([name]);
        for (key, value) in factors.as_object().unwrap() {
            model.config[key] = value.clone();
        }
        // Scales of a real model.
        for (linear, k, n) in LINEARS {
            let scales: Vec<f32> =
                (0..k.div_ceil(32) * n).map(|i| 0.0021 + 0.00003 * (i * 7 % 61) as f32).collect();
            model.put(linear, "scales", Tensor::f16s(&[k.div_ceil(32), n], &scales));
        }
        let dir = model.write();
        let checkpoint = open(dir.path());
        for bits in [4, 6, 8] {
            let bits: Bits = bits.try_into().unwrap();
            let what = format!("{name} {}", bits.get());
            let mut options = PlanOptions::new(Target::Uniform { bits, group_size: 32 });
            options.head_bits = Some(bits);
            let plan = Plan::new(&checkpoint, &options, &Silent).unwrap();
            assert!(plan.warnings.iter().all(|w| w.code != WarningCode::ScalesMultiplied), "{what}");
            let (_place, out) = converted(&checkpoint, &plan);
            verified(&out, &checkpoint, &what);
            let (written, json) = (open(&out), report(&out));
            for module in json["modules"].as_array().unwrap() {
                let name = module["name"].as_str().unwrap();
                let prescale = match name.rsplit('.').next().unwrap() {
                    "o_proj" | "down_proj" => residual,
                    "lm_head" => logits,
                    _ => 1.0,
                };
                assert_eq!(module["decision"]["prescale"].as_f64().unwrap_or(1.0), prescale, "{what} {name}");
                let source = checkpoint.module(module["source"].as_str().unwrap()).unwrap();
                let weights = checkpoint.decoded(source).unwrap();
                let n = source.out_features();
                let mut wanted = Vec::new();
                for row in weights.chunks_exact(n) {
                    wanted.extend(row.iter().map(|w| f64::from(*w) * prescale));
                    wanted.extend(std::iter::repeat_n(0.0, n.next_multiple_of(32) - n));
                }
                let error = relative(&as_exllamav2_loads(&written, name, prescale), &wanted);
                let reported = module["relative_error"].as_f64().unwrap();
                assert!((error - reported).abs() <= 1e-6 * error, "{what} {name}: {error}, not {reported}");
                if prescale == 1.0 || name == "lm_head" {
                    continue;
                }
                // The same without knowing of the prescale.
                let source = Source::gptq(checkpoint.gptq(source).unwrap(), RowOrder::Grouped);
                let cut = source.cut(32);
                let unaware = quantize(&source, &cut, &vec![bits; cut.groups.len()]).unwrap().matrix;
                let decoded = unaware.dequantize_prescaled(prescale);
                let decoded: Vec<f64> = decoded.iter().map(|w| w.to_f64()).collect();
                let unaware = relative(&decoded, &wanted);
                println!("{what} {name}: {error:.5}, unaware {unaware:.5}");
                assert!(error <= unaware, "{what} {name}: {error}, unaware {unaware}");
                assert!(bits.get() < 8 || error < unaware, "{what} {name}: {error}, unaware {unaware}");
            }
        }
    }
}

/// 2⁻¹⁶ decodes to one step of fp16; times 0.22 to less than half a step.
#[test]
fn a_group_that_vanishes_under_the_prescale_is_found() {
    let mut model = Model::new(&Quantized::default());
    model.config["architectures"] = json!(["GraniteForCausalLM"]);
    model.config["residual_multiplier"] = json!(0.22);
    let dir = model.write();
    let out = outputs::exl2(&open(dir.path()), 8);
    for (part, vanishes) in [("mlp.gate_proj", false), ("mlp.down_proj", true)] {
        let tensor = format!("model.layers.0.{part}.q_scale_max");
        out.edit_tensor(&tensor, |bytes| bytes[..2].copy_from_slice(&0x0100u16.to_le_bytes()));
        let found = verify(&out.dir, &OpenOptions::default(), None, &Silent).unwrap();
        let vanish = |message: &str| message.contains("vanish");
        let faults: Vec<_> = found.faults().filter(|(_, fault)| vanish(&fault.message)).collect();
        assert_eq!(faults.len(), usize::from(vanishes), "{faults:?}");
        assert!(faults.iter().all(|(_, fault)| fault.tensor.as_ref() == Some(&tensor)), "{faults:?}");
    }
}

#[test]
fn experts_and_kept_gptq_know_no_prescale() {
    let arch = ARCHITECTURES.iter().find(|arch| arch.name == "Qwen3MoeForCausalLM").unwrap();
    let mut config = config(arch);
    config["residual_multiplier"] = json!(0.5);
    let dims = Dims::read(arch, config.as_object().unwrap()).unwrap();
    for linear in arch.linears(&dims, arch.exl2_names()) {
        let expected = if linear.role == Role::O { 0.5 } else { 1.0 };
        assert_eq!(dims.prescale(&linear), expected, "{linear:?}");
    }
    // exllamav2 rounds the products with the scales of what stays GPTQ.
    let mut model = Model::new(&Quantized::default());
    model.config["architectures"] = json!(["GraniteForCausalLM"]);
    model.config["residual_multiplier"] = json!(0.22);
    let dir = model.write();
    let mut options = PlanOptions::new(Target::Bpw(6.0));
    options.keep_gptq = true;
    let plan = Plan::new(&open(dir.path()), &options, &Silent).unwrap();
    let kept =
        plan.modules.iter().any(|m| m.name.ends_with("o_proj") && !matches!(m.decision, Decision::Exl2(_)));
    let warned = plan.warnings.iter().find(|w| w.code == WarningCode::ScalesMultiplied);
    assert!(kept && warned.is_some_and(|w| w.message.contains("by 0.2200")), "{:?}", plan.warnings);
}

#[test]
fn norms_and_routers_are_named() {
    let arch = ARCHITECTURES.iter().find(|arch| arch.name == "Gemma2ForCausalLM").unwrap();
    let dims = Dims::read(arch, config(arch).as_object().unwrap()).unwrap();
    let tensors = arch.dense_tensors(&dims, arch.exl2_names());
    let norms = tensors.iter().filter(|tensor| tensor.role == DenseRole::Norm).count();
    assert_eq!(norms, 4 * BLOCKS + 1);
}
