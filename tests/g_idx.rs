//! Every kind of `g_idx` that files hold, and those that are refused.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use half::f16;
use requant::WarningCode;
use requant::checkpoint::{Fault, Layout};
use requant::formats::gptq::{self, GIdxKind};
use serde_json::json;
use support::writer::{DOWN, HIDDEN, INTERMEDIATE, Model, Q, Quantized, Tensor};
use support::{codes, hashes, open, refused_tensor};

fn q_kind(model: &Model) -> (GIdxKind, Vec<String>, Vec<WarningCode>) {
    let checkpoint = open(model.write().path());
    let Layout::Gptq(stored) = checkpoint.module(Q).unwrap().layout() else { panic!() };
    (stored.g_idx, hashes(&checkpoint), codes(&checkpoint))
}

#[test]
fn g_idx_absent_empty_or_a_leftover_of_zeros_means_rows_in_order() {
    let mut model = Model::new(&Quantized::default());
    let (kind, whole, _) = q_kind(&model);
    assert_eq!(kind, GIdxKind::Sequential);
    for (tensor, kind) in [
        (Tensor::i32s(&[0], &[]), GIdxKind::Absent),
        (Tensor::i32s(&[HIDDEN], &[0; HIDDEN]), GIdxKind::ZeroLeftover),
    ] {
        assert_eq!(q_kind(model.put(Q, "g_idx", tensor)), (kind, whole.clone(), vec![]));
    }
}

#[test]
fn g_idx_of_int64_is_the_same() {
    let mut model = Model::new(&Quantized::default());
    let (_, whole, _) = q_kind(&model);
    let rows: Vec<i64> = (0..HIDDEN as i64).map(|row| row / 32).collect();
    let wide = q_kind(model.put(Q, "g_idx", Tensor::i64s(&[HIDDEN], &rows)));
    assert_eq!(wide, (GIdxKind::Sequential, whole, vec![]));
}

#[test]
fn act_order_counts_even_if_the_config_denies_it() {
    let mut model = Model::new(&Quantized::default());
    let (_, whole, _) = q_kind(&model);
    let rows: Vec<i32> = (0..HIDDEN as i32).map(|row| row % 2).collect();
    model.put(Q, "g_idx", Tensor::i32s(&[HIDDEN], &rows));
    let (kind, permuted, warnings) = q_kind(&model);
    assert_eq!((kind, warnings), (GIdxKind::ActOrder, vec![WarningCode::ActOrderDenied]));
    assert_ne!(permuted, whole);
    let checkpoint = open(model.set("desc_act", json!(true)).write().path());
    assert_eq!(codes(&checkpoint), []);
    let matrix = checkpoint.gptq(checkpoint.module(Q).unwrap()).unwrap();
    let weights = matrix.dequantize();
    for row in [0, 1, 40, 63] {
        let (scale, code) = (matrix.scales()[row % 2 * HIDDEN + 7], matrix.codes()[row * HIDDEN + 7]);
        assert_eq!(weights[row * HIDDEN + 7], f16::from_f32(scale * (f32::from(code) - 8.0)), "row {row}");
    }
}

#[test]
fn g_idx_entries_outside_the_groups() {
    for (row, value) in [(7, -1), (9, 2), (63, i32::MAX), (0, i32::MIN)] {
        let mut model = Model::new(&Quantized::default());
        let mut rows: Vec<i32> = (0..HIDDEN as i32).map(|row| row / 32).collect();
        rows[row] = value;
        model.put(Q, "g_idx", Tensor::i32s(&[HIDDEN], &rows));
        let fault = refused_tensor(&model, &format!("{Q}.g_idx"));
        let Fault::Gptq(gptq::Error::GroupIndex { position, found, groups: 2 }) = fault else {
            panic!("{fault}")
        };
        assert_eq!((position, found), (row, i64::from(value)));
    }
    // Beyond 32 bits: must not come back as group 0.
    let mut model = Model::new(&Quantized::default());
    let mut rows = vec![0i64; HIDDEN];
    rows[3] = 1 << 32;
    model.put(Q, "g_idx", Tensor::i64s(&[HIDDEN], &rows));
    assert!(matches!(
        refused_tensor(&model, &format!("{Q}.g_idx")),
        Fault::Gptq(gptq::Error::GroupIndex { .. })
    ));
}

#[test]
fn g_idx_of_a_wrong_length_or_rank() {
    for shape in [vec![HIDDEN - 1], vec![2 * HIDDEN], vec![1, HIDDEN]] {
        let mut model = Model::new(&Quantized::default());
        let rows = vec![0; shape.iter().product()];
        model.put(Q, "g_idx", Tensor::i32s(&shape, &rows));
        let fault = refused_tensor(&model, &format!("{Q}.g_idx"));
        let fits = matches!(&fault, Fault::Gptq(gptq::Error::GIdxLength { .. }) | Fault::TensorRank { .. });
        assert!(fits, "{fault}");
    }
}

#[test]
fn a_group_size_that_nothing_tells() {
    // Without g_idx, down_proj's 96 rows in 5 groups are explained by 20 rows, but not by the stated 32.
    let mut model = Model::new(&Quantized { group_size: 20, ..Quantized::default() });
    model.set("group_size", json!(32)).remove_all("g_idx");
    let fault = refused_tensor(&model, &format!("{DOWN}.scales"));
    let size = gptq::Error::GroupSize { in_features: INTERMEDIATE, groups: 5, stated: Some(32) };
    assert!(matches!(&fault, Fault::Gptq(e) if *e == size), "{fault}");
    open(model.set("group_size", json!(20)).write().path());
}
