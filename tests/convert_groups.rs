//! Rows, groups and scales that don't fit EXL2's own, and what is said of them.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use half::f16;
use requant::checkpoint::Layout;
use serde_json::json;
use std::path::Path;
use support::binary::{Converted, FIXTURE, convert, convert_model, quantized};
use support::open;
use support::writer::{DOWN, HIDDEN, INTERMEDIATE, LINEARS, Model, Q, Quantized, Sizes, Tensor};

/// Gives a module an act-order: rows of each group are spread.
fn spread(model: &mut Model, module: &str, k: usize) {
    let groups = k / 32;
    let g_idx: Vec<i32> = (0..k).map(|row| (row % groups) as i32).collect();
    model.put(module, "g_idx", Tensor::i32s(&[k], &g_idx)).set("desc_act", json!(true));
}

#[test]
fn with_biases_of_the_mlp_down_projs_order_is_folded_into_gate_and_up() {
    // exllamav2 would permute the columns of gate and up, but not their biases. Sources whose rows stand in the
    // order of their groups need it only for mixed widths.
    let mut model = Model::new(&Quantized::default());
    for (name, _, n) in &LINEARS[4..] {
        model.put(name, "bias", Tensor::f16s(&[*n], &vec![0.0; *n]));
    }
    model.config["mlp_bias"] = json!(true);
    spread(&mut model, DOWN, INTERMEDIATE);
    spread(&mut model, Q, HIDDEN);
    for flags in [["--bits", "5"].as_slice(), &["--bits", "5", "--group-size", "32"], &["--bpw", "5.5"]] {
        let converted = convert_model(&model, flags);
        assert_eq!(quantized(&converted, &model), 7);
        let order = |name: &str| {
            converted.checkpoint.tensor(&format!("{name}.q_invperm")).unwrap().integers().unwrap()
        };
        assert!(order(DOWN).into_iter().eq(0..INTERMEDIATE as i64));
        assert!(!order(Q).into_iter().eq(0..HIDDEN as i64));
        assert_eq!(converted.checkpoint.tensor(&format!("{DOWN}.bias")).unwrap().bytes(), [0; 2 * HIDDEN]);
        // Its groups hold whole groups of the source all the same.
        assert_eq!(converted.warnings("straddling_groups"), []);
        let rows: Vec<usize> = serde_json::from_value(converted.module(DOWN)["row_order"].clone()).unwrap();
        let groups: Vec<usize> = rows.iter().map(|row| row % (INTERMEDIATE / 32)).collect();
        assert!(groups.chunks(32).all(|groups| groups.iter().all(|group| *group == groups[0])), "{groups:?}");
        for (name, ..) in &LINEARS[4..6] {
            assert_eq!(converted.module(name)["decision"]["columns_follow"], DOWN);
        }
    }
}

#[test]
fn groups_of_other_sizes_than_the_sources_are_counted_where_they_straddle() {
    // 96 rows in groups of 48 and of 24: a group of 32 or 64 rows then holds parts of several.
    let sizes = Sizes { hidden: 96, intermediate: 192, heads: 3, ..Sizes::default() };
    for group_size in [16, 24, 48] {
        let model = Model::sized(&Quantized { group_size, ..Quantized::default() }, &sizes);
        let source = model.write();
        for flags in [["--bits", "4"].as_slice(), &["--bits", "5", "--group-size", "32"], &["--bpw", "4.9"]] {
            let converted = convert(source.path(), flags);
            assert_eq!(converted.assert_errors(&open(source.path())), 7);
            let mut straddling = 0;
            for entry in converted.report["modules"].as_array().unwrap() {
                let (rows, Some(size)) =
                    (entry["in_features"].as_u64().unwrap(), entry["group_size"].as_u64())
                else {
                    continue; // The dense head.
                };
                // Counted anew: groups of which a source group has some rows, but not all.
                let torn = |border: u64| !border.is_multiple_of(group_size as u64) && border < rows;
                let groups = (0..rows).step_by(size as usize).map(|start| (start, rows.min(start + size)));
                let counted = groups.filter(|&(start, end)| {
                    let several = start / group_size as u64 != (end - 1) / group_size as u64;
                    several && (torn(start) || torn(end))
                });
                let counted = counted.count() as u64;
                assert_eq!(entry["straddling_groups"], counted, "{group_size} {flags:?} {}", entry["name"]);
                straddling += usize::from(counted > 0);
            }
            assert_eq!(converted.warnings("straddling_groups").len(), straddling, "{group_size} {flags:?}");
            assert_eq!(straddling > 0, group_size != 16, "{group_size} {flags:?}");
        }
    }
}

#[test]
fn padding_columns_of_the_source_are_left_out() {
    let mut model = Model::new(&Quantized::default());
    let weights = |model: &Model| {
        let converted = convert_model(model, &["--bits", "4"]);
        assert_eq!(quantized(&converted, model), 7);
        std::fs::read(converted.out.join("model.safetensors")).unwrap()
    };
    let whole = weights(&model);
    model.pad_columns(Q, HIDDEN).pad_columns(DOWN, HIDDEN);
    assert!(weights(&model) == whole);
}

#[test]
fn a_module_shorter_than_a_group_has_one() {
    let model = Model::new(&Quantized::default());
    let converted = convert_model(&model, &["--bits", "4", "--group-size", "128"]);
    let source = model.write();
    assert_eq!(converted.assert_errors(&open(source.path())), 7);
    for module in converted.checkpoint.modules().iter().filter(|m| m.name() != "lm_head") {
        let Layout::Exl2(exl2) = module.layout() else { panic!("{}", module.name()) };
        assert_eq!(exl2.groups.groups().len(), 1);
    }
}

#[test]
fn an_act_order_of_unequal_groups_converts() {
    let mut model = Model::new(&Quantized::default());
    // 40 rows of one group and 24 of the other, every third row moved.
    let g_idx: Vec<i32> = (0..HIDDEN).map(|row| i32::from((row * 3) % HIDDEN >= 40)).collect();
    assert_eq!(g_idx.iter().filter(|&&group| group == 0).count(), 40);
    model.put(Q, "g_idx", Tensor::i32s(&[HIDDEN], &g_idx)).set("desc_act", json!(true));
    for flags in [["--bits", "4", "--group-size", "32"].as_slice(), &["--bits", "4"], &["--bpw", "5"]] {
        let converted = convert_model(&model, flags);
        assert_eq!(quantized(&converted, &model), 7);
        // Sorted, rows 32 to 39 of the first group share EXL2's second one; 64 rows hold both whole.
        let straddling = usize::from(converted.module(Q)["group_size"] == 32);
        assert_eq!(converted.module(Q)["straddling_groups"], straddling, "{flags:?}");
        assert_eq!(converted.warnings("straddling_groups").len(), straddling, "{flags:?}");
    }
}

#[test]
fn dead_columns_and_groups_decode_to_exact_zeros() {
    let mut model = Model::new(&Quantized::default());
    let mut scales = vec![0.01; 2 * HIDDEN];
    scales[..HIDDEN].fill(0.0); // The first group.
    (scales[HIDDEN + 5], scales[HIDDEN + 6]) = (0.0, -0.02); // A column of the second one, and a negative scale.
    model.put(Q, "scales", Tensor::f16s(&[2, HIDDEN], &scales));
    // A module of nothing but zeros.
    let groups = INTERMEDIATE / 32;
    model.put(DOWN, "scales", Tensor::f16s(&[groups, HIDDEN], &vec![0.0; groups * HIDDEN]));
    for flags in [["--bits", "4", "--group-size", "32"].as_slice(), &["--bits", "2"], &["--bpw", "5"]] {
        let converted = convert_model(&model, flags);
        assert_eq!(quantized(&converted, &model), 7);
        let decoded =
            |name: &str| converted.checkpoint.dequantize(converted.checkpoint.module(name).unwrap()).unwrap();
        let q = decoded(Q);
        assert!(q[..32 * HIDDEN].iter().all(|w| *w == f16::ZERO), "{flags:?}");
        assert!(q.chunks_exact(HIDDEN).all(|row| row[5] == f16::ZERO), "{flags:?}");
        assert!(decoded(DOWN).iter().all(|w| *w == f16::ZERO), "{flags:?}");
        assert_eq!(converted.module(DOWN)["relative_error"], 0.0);
        assert!(converted.module(Q)["relative_error"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn the_same_weights_in_v1_and_v2_give_the_same_bytes() {
    let mut v2 = Model::read(Path::new(FIXTURE));
    for (name, tensor) in v2.tensors.iter_mut().filter(|(name, _)| name.ends_with(".qzeros")) {
        for word in tensor.bytes.chunks_exact_mut(4) {
            assert_eq!(word, [0x77; 4], "{name}");
            word.fill(0x88);
        }
    }
    v2.set("checkpoint_format", json!("gptq_v2")).set("format", json!("gptq_v2"));
    let weights = |converted: &Converted| std::fs::read(converted.out.join("model.safetensors")).unwrap();
    let flags = ["--bits", "3"];
    assert!(weights(&convert_model(&v2, &flags)) == weights(&convert(Path::new(FIXTURE), &flags)));
}
