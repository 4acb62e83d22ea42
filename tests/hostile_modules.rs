//! Configurations and modules that lie: each is refused with the file and tensor at fault.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use requant::checkpoint::Fault;
use requant::formats::{exl2, gptq};
use safetensors::Dtype;
use serde_json::{Value, json};
use std::path::Path;
use support::writer::{
    DOWN, HIDDEN, INTERMEDIATE, MakeFloats, Model, Q, Quantized, Tensor, Tensors, gptq_module,
};
use support::{refused, refused_tensor, try_open};

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
    assert!(matches!(fault, Fault::TensorDtype { found: Dtype::I16, .. }), "{fault}");
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
    gptq_module(&mut model.tensors, name, HIDDEN, HIDDEN, &Quantized::default());
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

// Values.

#[test]
fn scales_that_are_no_numbers_are_named_by_position() {
    let makers: [MakeFloats; 3] = [Tensor::f16s, Tensor::bf16s, Tensor::f32s];
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
    let checkpoint = try_open(dir).unwrap();
    let names = |module: &requant::checkpoint::Module| module.tensor_names().collect::<Vec<_>>();
    let of_modules = checkpoint.modules().iter().flat_map(names);
    let others = checkpoint.other_tensors().map(|tensor| tensor.name().to_owned());
    let mut tensors = Tensors::new();
    for name in of_modules.chain(others) {
        let Some(tensor) = checkpoint.tensor(&name) else { continue };
        let dtype = match tensor.dtype() {
            Dtype::I32 => "I32",
            Dtype::I16 => "I16",
            _ => "F16",
        };
        tensors.insert(name, Tensor::of(dtype, tensor.shape(), tensor.bytes()));
    }
    Model { config: Value::Object(checkpoint.config().clone()), quant: None, tensors }
}

#[test]
fn exl2_tensors_that_do_not_fit() {
    let valid = exl2_model();
    try_open(valid.write().path()).unwrap();
    type Break = fn(&mut Tensor);
    type Is = fn(&Fault) -> bool;
    let cases: [(&str, Break, Is); 9] = [
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
    let checkpoint = try_open(dir.path()).unwrap();
    let error = checkpoint.dequantize(checkpoint.module(Q).unwrap()).unwrap_err();
    assert!(matches!(*error.fault, Fault::Exl2(exl2::Error::VanishingGroup { group: 0, .. })), "{error:#}");
    assert_eq!(error.tensor, Some(format!("{Q}.q_scale_max")));
}
