//! Biases of o_proj and down_proj in models that multiply these modules' outputs (Granite's `residual_multiplier`):
//! exllamav2 multiplies the scales and adds the bias as it is, transformers multiplies the sum of both
//! (modeling_granite.py, `residual + hidden_states * self.residual_multiplier`; exllamav2 0.3.2, linear.py, `load`).

#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

#[path = "support/outputs.rs"]
mod outputs;
mod support;

use half::f16;
use outputs::{Output, dense, exl2, gptq, output, source};
use requant::checkpoint::{Checkpoint, Layout, OpenOptions};
use requant::plan::{DenseType, GptqOptions, Plan, PlanOptions, Target};
use requant::progress::Silent;
use requant::verify::verify;
use serde_json::json;
use support::writer::{DOWN, Model, Q, Quantized, Tensor};
use tempfile::TempDir;

const FACTOR: f64 = 0.22;
const O: &str = "model.layers.0.self_attn.o_proj";

fn bias(size: usize) -> Vec<f32> {
    (0..size).map(|i| f16::from_f32(0.01 * (i * 37 % 101) as f32 - 0.5).to_f32()).collect()
}

fn granite() -> TempDir {
    let mut model = Model::new(&Quantized::default());
    model.config["architectures"] = json!(["GraniteForCausalLM"]);
    model.config["residual_multiplier"] = json!(FACTOR);
    model.config["attention_bias"] = json!(true);
    model.config["mlp_bias"] = json!(true);
    for (name, _, n) in support::writer::LINEARS {
        model.put(name, "bias", Tensor::f16s(&[n], &bias(n)));
    }
    model.write()
}

fn stored(checkpoint: &Checkpoint, module: &str) -> Vec<f32> {
    checkpoint.tensor(&format!("{module}.bias")).unwrap().floats().unwrap()
}

fn faults(out: &Output, from: &Checkpoint) -> Vec<Option<String>> {
    let found = verify(&out.dir, &OpenOptions::default(), Some(from), &Silent).unwrap();
    found.faults().map(|(_, fault)| fault.tensor.clone()).collect()
}

#[test]
fn an_exl2_output_holds_the_multiplied_bias() {
    let dir = granite();
    let from = source(dir.path());
    let out = exl2(&from, 8);
    let to = source(&out.dir);
    for name in [O, DOWN] {
        let wanted: Vec<f32> =
            (stored(&from, name).iter()).map(|b| f16::from_f64(f64::from(*b) * FACTOR).to_f32()).collect();
        assert_eq!(stored(&to, name), wanted, "{name}");
    }
    assert_eq!(stored(&to, Q), stored(&from, Q));
    assert_eq!(faults(&out, &from), []);
    // As exllamav2's own converter writes it.
    let plain: Vec<f16> = stored(&from, O).into_iter().map(f16::from_f32).collect();
    out.edit_tensor(&format!("{O}.bias"), |bytes| bytes.copy_from_slice(bytemuck::cast_slice(&plain)));
    assert!(faults(&out, &from).contains(&Some(format!("{O}.bias"))));
}

/// The model's code multiplies by itself what it is given: neither weights nor biases may hold the factor.
#[test]
fn gptq_and_dense_outputs_hold_the_models_own() {
    let dir = granite();
    let original = source(dir.path());
    let middle = exl2(&original, 8);
    let from = source(&middle.dir);
    for out in [gptq(&from, &GptqOptions::default()).unwrap(), dense(&from, DenseType::Fp16)] {
        assert_eq!(faults(&out, &from), []);
        let to = source(&out.dir);
        for name in [O, DOWN, Q] {
            let own =
                |checkpoint: &Checkpoint| checkpoint.bias(checkpoint.module(name).unwrap()).unwrap().unwrap();
            let close = own(&original).iter().zip(stored(&to, name)).all(|(a, b)| (a - b).abs() < 1e-3);
            assert!(close, "{name}");
            let weights =
                |checkpoint: &Checkpoint| checkpoint.dequantize(checkpoint.module(name).unwrap()).unwrap();
            let (wanted, found) = (weights(&original), weights(&to));
            let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
            let miss = squares(&mut found.iter().zip(&wanted).map(|(f, w)| f.to_f64() - w.to_f64()));
            let norm = squares(&mut wanted.iter().map(|w| w.to_f64()));
            assert!(miss < 1e-3 * norm, "{name}: {miss} of {norm}");
        }
    }
}

/// What stays GPTQ has its bias added as it is, too, so it doesn't stay.
#[test]
fn a_module_with_such_a_bias_is_not_kept() {
    let dir = granite();
    let from = source(dir.path());
    let mut options = PlanOptions::new(Target::Bpw(6.0));
    options.keep_gptq = true;
    let out = output(&from, &Plan::new(&from, &options, &Silent).unwrap(), u64::MAX);
    assert_eq!(faults(&out, &from), []);
    let to = source(&out.dir);
    for name in [O, DOWN] {
        assert!(matches!(to.module(name).unwrap().layout(), Layout::Exl2(_)), "{name}");
    }
}
