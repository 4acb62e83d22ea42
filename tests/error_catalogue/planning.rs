//! What no plan can be made of, and what only shows while it is executed.

use super::EXL2;
use super::case::*;
use super::support::writer::{HIDDEN, LINEARS, Model, Q, Quantized, Sizes, Tensor, VOCAB};
use requant::formats::gptq::ZeroConvention;
use serde_json::json;

pub(super) fn planning() -> Vec<Given> {
    let narrow = Sizes { hidden: 72, intermediate: 104, head_dim: 40, ..Sizes::default() };
    let bias = |module: &str, n: usize, value: f32| {
        changed(|m| {
            m.put(module, "bias", Tensor::f16s(&[n], &vec![value; n]));
        })
    };
    let architecture = |name: &str| changed(|m| m.config["architectures"] = json!([name]));
    let one_dense = changed(|m| {
        m.make_dense(LINEARS[1].0, HIDDEN, HIDDEN);
    });
    let infinite = changed(|m| {
        for (name, k, n) in LINEARS {
            m.make_dense(name, k, n);
        }
        m.quant = None;
        m.put(Q, "weight", Tensor::f32s(&[HIDDEN, HIDDEN], &[1e6; HIDDEN * HIDDEN]));
    });
    let overflow = changed(|m| {
        m.tensors.insert("model.norm.weight".into(), Tensor::f32s(&[HIDDEN], &[7e4; HIDDEN]));
    });
    vec![
        ("plan.architecture", to_exl2(&architecture("SomethingNew"), &[])),
        ("plan.nothing_to_quantize", to_exl2(&dense(&narrow), &[])),
        ("plan.infeasible", convert(&model(), &["--to", "exl2", "--bpw", "1"])),
        ("plan.already_exl2", {
            let out = tempfile::tempdir().unwrap();
            let to = out.path().join("out");
            let command = ["convert", EXL2, "--to", "exl2", "--bits", "4", "--out", text(&to)];
            Case::new(vec![], &command)
        }),
        ("plan.dense_member", to_exl2(&one_dense, &["--dense-members", "error"])),
        ("plan.unexpected_bias", to_exl2(&bias(Q, HIDDEN, 0.5), &[])),
        ("plan.missing_bias", to_exl2(&architecture("Qwen2ForCausalLM"), &[])),
        ("plan.transposed_dense", convert(&gpt2(), &["--to", "fp16"])),
        ("plan.head_bias", to_exl2(&bias("lm_head", VOCAB, 0.5), &[])),
        (
            "plan.not_finite",
            convert(
                &changed(|m| {
                    m.put(Q, "scales", scales(60_000.0));
                }),
                &["--to", "exl2", "--bpw", "4"],
            ),
        ),
        ("convert.not_finite", convert(&infinite, &["--to", "exl2", "--bpw", "4"])),
        ("plan.overflow", to_exl2(&overflow, &["--dry-run"])),
        ("plan.head_size", to_exl2(&dense(&narrow), &["--head-bits", "6"])),
        ("plan.group_size", to_exl2(&model(), &["--group-size", "48"])),
        ("plan.pattern", to_exl2(&model(), &["--set", "(=4"])),
        ("plan.unused_rule", to_exl2(&model(), &["--set", "q_prj=4"])),
        ("plan.rules_disagree", to_exl2(&model(), &["--set", "q_proj=3", "--min", "q_proj=4"])),
        ("plan.nothing_quantized", to_gptq(&dense(&Sizes::default()), &[])),
        ("plan.group_split", to_gptq(&model(), &["--group-size", "24"])),
        (
            "plan.cannot_recentre",
            to_gptq(&asymmetric(8, ZeroConvention::V1, |_, column| 100 + column as u16 % 5), &["--sym"]),
        ),
        (
            "plan.zero_not_storable",
            to_gptq(&asymmetric(4, ZeroConvention::V2, |_, column| column as u16 % 5), &["--zeros", "v1"]),
        ),
        (
            "plan.scale_overflow",
            to_gptq(
                &changed(|m| {
                    m.put(Q, "scales", scales(1e6));
                }),
                &["--for", "gptqmodel"],
            ),
        ),
        (
            "plan.scale_rounded",
            to_gptq(
                &changed(|m| {
                    m.put(Q, "scales", scales(0.1));
                }),
                &["--for", "gptqmodel"],
            ),
        ),
        ("plan.reader_refuses", {
            let order: Vec<i32> = (0..HIDDEN as i32).map(|row| row % 2).collect();
            to_gptq(
                &changed(|m| {
                    m.put(Q, "g_idx", Tensor::i32s(&[HIDDEN], &order));
                }),
                &["--for", "vllm"],
            )
        }),
        ("simd.unknown", to_exl2(&model(), &[]).env("REQUANT_SIMD", "mmx")),
        (
            "convert.weight_overflow",
            to_exl2(
                &changed(|m| {
                    m.put(Q, "scales", scales(60_000.0));
                }),
                &[],
            ),
        ),
        (
            "convert.not_a_float",
            to_exl2(
                &changed(|m| {
                    m.tensors.insert("model.norm.weight".into(), Tensor::i32s(&[HIDDEN], &[1; HIDDEN]));
                }),
                &[],
            ),
        ),
    ]
}

/// A GPT-2 of one block, whose dense linears would be stored transposed.
fn gpt2() -> Model {
    let config = json!({
        "architectures": ["GPT2LMHeadModel"], "n_embd": HIDDEN, "n_head": 2, "n_layer": 1, "n_positions": 32,
        "vocab_size": VOCAB
    });
    Model::of(config, &Quantized::default())
}
