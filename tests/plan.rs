//! Plans of checkpoints with oddities: dense members among quantized ones, weights that fp16 can't hold.

mod support;

use requant::checkpoint::{Checkpoint, OpenOptions};
use requant::formats::exl2::Bits;
use requant::plan::{Decision, DenseMembers, Error, Plan, PlanOptions, Target};
use requant::progress::Silent;
use requant::{Diagnose, Kind, WarningCode};
use std::path::Path;
use support::folder;

const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/tiny-llama-gptq");

fn open(dir: &Path) -> Checkpoint {
    Checkpoint::open(dir, &OpenOptions::default()).unwrap_or_else(|e| panic!("{e}"))
}

fn uniform(bits: u32, dense_members: DenseMembers) -> PlanOptions {
    let bits = Bits::try_from(bits).expect("a width of the format");
    PlanOptions { dense_members, ..PlanOptions::new(Target::Uniform { bits, group_size: 64 }) }
}

#[test]
fn a_dense_member_gets_the_widest_option_or_its_set_becomes_dense() {
    let Some(assets) = folder("REQUANT_ASSETS") else { return };
    // layers.0.self_attn.k_proj is fp16.
    let checkpoint = open(&assets.join("tiny/tiny-llama-dynamic"));
    let plan = |options: &PlanOptions| Plan::new(&checkpoint, options, &Silent);
    let options = PlanOptions { target: Target::Bpw(4.25), ..uniform(4, DenseMembers::Quantize) };
    let quantized = plan(&options).unwrap();
    let k_proj = quantized.modules.iter().find(|m| m.name == "model.layers.0.self_attn.k_proj").unwrap();
    let Decision::Exl2(decision) = &k_proj.decision else { panic!("dense") };
    assert!(decision.group_size == 32 && decision.bits.iter().all(|b| b.get() == 8));
    let warning = quantized.warnings.iter().find(|w| w.code == WarningCode::DenseMemberQuantized).unwrap();
    assert_eq!(warning.subject, "model.layers.0.self_attn");
    assert!(warning.message.contains(&format!("{} bits as fp16", 16 * k_proj.weights())), "{warning:?}");
    assert!(warning.message.ends_with(&format!("{} bits", decision.stored_bits)), "{warning:?}");

    let dequantized = plan(&uniform(4, DenseMembers::DequantizeSet)).unwrap();
    for module in dequantized.modules.iter().filter(|m| m.name != "lm_head") {
        let in_set = module.name.starts_with("model.layers.0.self_attn.");
        assert_eq!(matches!(module.decision, Decision::Dense(_)), in_set, "{}", module.name);
    }
    let warning = dequantized.warnings.iter().find(|w| w.code == WarningCode::SetDequantized).unwrap();
    assert_eq!(warning.subject, "model.layers.0.self_attn");

    let error = plan(&uniform(4, DenseMembers::Error)).unwrap_err();
    assert_eq!(error.code(), "plan.dense_member");
    assert_eq!(error.tensor(), Some("model.layers.0.self_attn.k_proj"));
}

#[test]
fn a_weight_that_overflows_is_named() {
    let dir = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(FIXTURE).unwrap().map(Result::unwrap) {
        std::fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
    }
    let tensor = "model.layers.1.mlp.up_proj.scales";
    let path = dir.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let json: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let start = 8 + header + json[tensor]["data_offsets"][0].as_u64().unwrap() as usize;
    // The scale of group 0, column 3: the largest fp16, so that two steps from the zero point overflow.
    bytes[start + 6..start + 8].copy_from_slice(&0x7BFFu16.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    let options = PlanOptions::new(Target::Bpw(4.25));
    let error = Plan::new(&open(dir.path()), &options, &Silent).unwrap_err();
    assert_eq!((error.code(), error.kind()), ("plan.not_finite", Kind::Input));
    assert_eq!((error.tensor(), error.file()), (Some(tensor), Some(path.as_path())));
    let requant::Error::Plan(Error::NotFinite { column, value, .. }) = error else { panic!("{error}") };
    assert!(column == 3 && value.is_infinite());
}
