//! Checkpoints that lie.

use super::EXL2;
use super::case::*;
use super::support::writer::{
    DOWN, HIDDEN, INTERMEDIATE, Model, Q, Quantized, Tensor, Tensors, gptq_module, safetensors,
};
use requant::formats::gptq::ZeroConvention;
use serde_json::json;
use std::fs;

pub(super) fn reading() -> Vec<Given> {
    let q = |suffix: &str| format!("{Q}.{suffix}");
    vec![
        ("checkpoint.io", Case::new(vec![], &["inspect", "/nowhere/at/all"])),
        ("checkpoint.not_a_folder", Case::new(vec![], &["inspect", "Cargo.toml"])),
        ("checkpoint.missing", inspect(tempfile::tempdir().unwrap())),
        ("checkpoint.no_weights", {
            let dir = tempfile::tempdir().unwrap();
            model().write_config(dir.path());
            inspect(dir)
        }),
        ("checkpoint.pickle", weights(b"PK\x03\x04 and a zip archive")),
        (
            "checkpoint.lfs_pointer",
            weights(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"),
        ),
        ("checkpoint.empty_file", weights(b"")),
        ("checkpoint.no_length_field", weights(b"1234")),
        ("checkpoint.header_past_end", weights(b"\xff\0\0\0\0\0\0\0{}")),
        ("checkpoint.header_too_large", {
            let case = weights(&(200u64 << 20).to_le_bytes());
            let path = case.dirs[0].path().join("model.safetensors");
            fs::File::options().write(true).open(path).unwrap().set_len(201 << 20).unwrap();
            case
        }),
        ("checkpoint.header_not_json", raw_header("[]", 0)),
        ("checkpoint.tensor_entry", header(|h| h[&q("scales")]["shape"] = json!("64"))),
        (
            "checkpoint.repeated_tensor",
            raw_header(
                r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#,
                2,
            ),
        ),
        ("checkpoint.unknown_dtype", header(|h| h[&q("scales")]["dtype"] = json!("F9"))),
        ("checkpoint.shape_overflow", header(|h| h[&q("scales")]["shape"] = json!([1u64 << 62, 1u64 << 62]))),
        ("checkpoint.offsets_reversed", header(|h| h[&q("scales")]["data_offsets"] = json!([64, 32]))),
        ("checkpoint.byte_count", header(|h| h[&q("scales")]["shape"] = json!([1, 1]))),
        (
            "checkpoint.overlap",
            header(|h| {
                let first = h[&q("qzeros")].clone();
                h.insert("model.zzz".into(), first);
            }),
        ),
        ("checkpoint.gap", header(|h| drop(h.remove(&q("qzeros"))))),
        ("checkpoint.truncated", weights(&valid()[..valid().len() - 1])),
        ("checkpoint.trailing_bytes", weights(&[valid(), vec![0]].concat())),
        ("checkpoint.index_malformed", index("{}")),
        (
            "checkpoint.index_repeated",
            index(r#"{"weight_map": {"x": "a.safetensors", "x": "b.safetensors"}}"#),
        ),
        ("checkpoint.shard_outside", index(r#"{"weight_map": {"x": "../a.safetensors"}}"#)),
        (
            "checkpoint.shard_missing",
            index(r#"{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}"#),
        ),
        ("checkpoint.not_in_shard", index(r#"{"weight_map": {"x": "a.safetensors"}}"#)),
        ("checkpoint.in_two_files", {
            let dir = model().write();
            let copy: Tensors = [(q("scales"), model().tensors[&q("scales")].clone())].into();
            fs::write(dir.path().join("other.safetensors"), safetensors(&copy, |_| {})).unwrap();
            inspect(dir)
        }),
        ("checkpoint.config_not_json", {
            let dir = model().write();
            fs::write(dir.path().join("config.json"), "[]").unwrap();
            inspect(dir)
        }),
        (
            "checkpoint.config_value",
            inspect_model(|m| {
                m.set("bits", json!(5));
            }),
        ),
        (
            "checkpoint.foreign_layout",
            inspect_model(|m| {
                m.set("quant_method", json!("awq"));
            }),
        ),
        ("checkpoint.sizes", inspect_model(|m| m.config["hidden_size"] = json!(null))),
        (
            "checkpoint.dynamic_rule",
            inspect_model(|m| {
                m.set("dynamic", json!({"+:(": {"bits": 4}}));
            }),
        ),
        ("checkpoint.module_missing", inspect_model(|m| m.tensors.retain(|name, _| !name.starts_with(Q)))),
        ("checkpoint.dense_missing", inspect_model(|m| drop(m.tensors.remove("model.norm.weight")))),
        ("checkpoint.head_missing", inspect_model(|m| drop(m.tensors.remove("lm_head.weight")))),
        (
            "checkpoint.module_unexpected",
            inspect_model(|m| {
                gptq_module(&mut m.tensors, "model.layers.0.self_attn.x_proj", 64, 64, &Quantized::default())
            }),
        ),
        ("checkpoint.tensor_missing", inspect_model(|m| drop(m.tensors.remove(&q("scales"))))),
        (
            "checkpoint.two_layouts",
            inspect_model(|m| {
                m.put(Q, "weight", Tensor::f16s(&[HIDDEN, HIDDEN], &[0.0; HIDDEN * HIDDEN]));
            }),
        ),
        ("checkpoint.tensor_dtype", inspect_model(|m| m.tensor(Q, "qweight").dtype = "F32")),
        (
            "checkpoint.tensor_rank",
            inspect_model(|m| {
                let scales = m.tensor(Q, "scales");
                scales.shape = vec![scales.shape.iter().product()];
            }),
        ),
        (
            "checkpoint.tensor_shape",
            inspect_model(|m| {
                m.tensors.insert("model.norm.weight".into(), Tensor::f16s(&[1], &[1.0]));
            }),
        ),
        (
            "checkpoint.scale",
            inspect_model(|m| {
                m.put(Q, "scales", scales(f32::INFINITY));
            }),
        ),
        (
            "checkpoint.group_index",
            inspect_model(|m| {
                m.put(Q, "g_idx", Tensor::i32s(&[HIDDEN], &[-1; HIDDEN]));
            }),
        ),
        (
            "checkpoint.gptq",
            inspect_model(|m| {
                // Zero points of 8 bits beside codes of 4.
                m.put(Q, "qzeros", Tensor::u32s(&[2, 16], &[0; 32]));
            }),
        ),
        ("checkpoint.exl2", {
            let dir = copy_of(EXL2.as_ref());
            overwrite(dir.path(), &q("q_groups"), |bytes| bytes[0] = 7);
            inspect(dir)
        }),
        (
            "checkpoint.mixed_zeros",
            inspect_model(|m| {
                let other = Quantized { convention: ZeroConvention::V2, ..Quantized::default() };
                gptq_module(&mut m.tensors, DOWN, INTERMEDIATE, HIDDEN, &other);
            }),
        ),
        ("checkpoint.all_ones", to_exl2(&all_ones(0x7777_774F), &[])),
        ("checkpoint.smear", to_exl2(&all_ones(0xFFFF_FFFF), &[])),
    ]
}

/// An asymmetric v1 model whose first word of zero points is this.
fn all_ones(word: u32) -> Model {
    let mut model = asymmetric(4, ZeroConvention::V1, |_, column| 5 + column as u16 % 3);
    model.zero_words(Q, &[word]);
    model
}
