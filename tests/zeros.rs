//! How zero points are read: by values, label, producer, and never by guess.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use ZeroConvention::{V1, V2};
use requant::checkpoint::{AllOnes, Checkpoint, Fault, Layout, OpenOptions, ZeroEvidence, Zeros};
use requant::formats::gptq::{ZeroConvention, ZeroEncoding};
use requant::{Diagnose, WarningCode};
use serde_json::json;
use support::writer::{DOWN, HIDDEN, INTERMEDIATE, LINEARS, Model, Q, Quantized, gptq_module};
use support::{codes, hashes};

fn open_with(model: &Model, options: &OpenOptions) -> (tempfile::TempDir, Checkpoint) {
    let dir = model.write();
    let checkpoint = Checkpoint::open(dir.path(), options).unwrap_or_else(|e| panic!("{e:#}"));
    (dir, checkpoint)
}

fn open(model: &Model) -> (tempfile::TempDir, Checkpoint) {
    open_with(model, &OpenOptions::default())
}

fn zeros_of(checkpoint: &Checkpoint, module: &str) -> Zeros {
    let Layout::Gptq(stored) = checkpoint.module(module).unwrap().layout() else { panic!("{module}") };
    stored.zeros
}

/// Decoded zero points of the first group.
fn points(checkpoint: &Checkpoint, module: &str, count: usize) -> Vec<u16> {
    let matrix = checkpoint.gptq(checkpoint.module(module).unwrap()).unwrap_or_else(|e| panic!("{e:#}"));
    matrix.zeros()[..count].to_vec()
}

/// An asymmetric model without a zero point of 0.
fn asymmetric(convention: ZeroConvention) -> Model {
    let zero = |group, column| ((group * 5 + column * 3) % 14 + 1) as u16;
    let mut model = Model::new(&Quantized { convention, zero, ..Quantized::default() });
    model.set("sym", json!(false));
    model
}

fn by_gptqmodel(model: &mut Model, version: &str) {
    model.set("meta", json!({"quantizer": [format!("optimum:2.0"), format!("gptqmodel:{version}")]}));
}

#[test]
fn the_same_module_in_v1_and_v2_gives_the_same_bytes() {
    for bits in [2, 3, 4, 8] {
        let zero = match bits {
            2 => |_, _| 2,
            3 => |_, _| 4,
            4 => |_, _| 8,
            _ => |_, _| 128,
        };
        let store = |convention| {
            let model = Model::new(&Quantized { bits, convention, zero, ..Quantized::default() });
            let (_dir, checkpoint) = open(&model);
            let zeros = zeros_of(&checkpoint, Q);
            assert_eq!(
                (zeros.convention, zeros.evidence, zeros.symmetric),
                (convention, ZeroEvidence::Values, true)
            );
            assert_eq!(codes(&checkpoint), []);
            hashes(&checkpoint)
        };
        assert_eq!(store(V1), store(V2), "{bits} bits");
    }
    let store = |convention| {
        let (_dir, checkpoint) = open(&asymmetric(convention));
        assert_eq!(zeros_of(&checkpoint, Q).evidence, ZeroEvidence::Label);
        hashes(&checkpoint)
    };
    assert_eq!(store(V1), store(V2));
}

#[test]
fn values_beat_the_label_of_a_symmetric_model() {
    let mut model = Model::new(&Quantized { convention: V2, ..Quantized::default() });
    let (_dir, right) = open(&model);
    model.set("checkpoint_format", json!("gptq")); // Every stored zero is 8.
    let (_dir, wrong) = open(&model);
    assert_eq!(codes(&wrong), [WarningCode::ZeroLabelWrong]);
    assert_eq!((zeros_of(&wrong, Q).convention, points(&wrong, Q, 2)), (V2, vec![8, 8]));
    assert_eq!(hashes(&wrong), hashes(&right));
    // The user settles it.
    let options = OpenOptions { zeros: Some(V1), ..OpenOptions::default() };
    let (_dir, settled) = open_with(&model, &options);
    assert_eq!((zeros_of(&settled, Q).evidence, points(&settled, Q, 2)), (ZeroEvidence::Option, vec![9, 9]));
}

#[test]
fn a_model_in_both_conventions_is_refused_with_its_modules() {
    let mut model = Model::new(&Quantized::default());
    let other = Quantized { convention: V2, ..Quantized::default() };
    gptq_module(&mut model.tensors, DOWN, INTERMEDIATE, HIDDEN, &other);
    by_gptqmodel(&mut model, "5.1.0");
    let dir = model.write();
    let error = Checkpoint::open(dir.path(), &OpenOptions::default()).unwrap_err();
    let Fault::MixedZeros(mixed) = &*error.fault else { panic!("{error:#}") };
    assert_eq!((mixed.one.len(), mixed.other.as_slice()), (LINEARS.len() - 1, &[DOWN.to_owned()][..]));
    assert_eq!((mixed.label.as_deref(), mixed.producer.as_deref()), (Some("v1"), Some("gptqmodel 5.1.0")));
    assert_eq!(error.tensor(), Some(&*format!("{DOWN}.qzeros")));
    let options = OpenOptions { zeros: Some(V1), ..OpenOptions::default() };
    Checkpoint::open(dir.path(), &options).unwrap();
}

#[test]
fn without_any_evidence_v1_is_assumed_and_said() {
    let mut model = asymmetric(V1);
    model.set("checkpoint_format", json!(null));
    let (_dir, checkpoint) = open(&model);
    assert_eq!(codes(&checkpoint), [WarningCode::ZerosAssumed]);
    assert_eq!(zeros_of(&checkpoint, Q).evidence, ZeroEvidence::Default);
    by_gptqmodel(&mut model, "7.0.0");
    let (_dir, checkpoint) = open(&model);
    assert_eq!((codes(&checkpoint), zeros_of(&checkpoint, Q).evidence), (vec![], ZeroEvidence::Producer));
}

#[test]
fn a_constant_zero_of_an_asymmetric_model_is_no_evidence() {
    let mut model = Model::new(&Quantized { convention: V2, ..Quantized::default() });
    model.set("sym", json!(false)).set("checkpoint_format", json!("gptq"));
    let (_dir, checkpoint) = open(&model);
    assert_eq!((zeros_of(&checkpoint, Q).convention, points(&checkpoint, Q, 1)), (V1, vec![9]));
    assert_eq!(codes(&checkpoint), [WarningCode::ZerosSuspicious]);
}

#[test]
fn a_model_stated_symmetric_that_is_not() {
    let mut model = asymmetric(V1);
    let (_dir, checkpoint) = open(model.set("sym", json!(true)));
    assert_eq!(codes(&checkpoint), [WarningCode::SymConflict]);
    assert!(!zeros_of(&checkpoint, Q).symmetric);
}

#[test]
fn auto_rounds_packing_format_tells_the_convention() {
    for (packing, convention) in [
        ("auto_round:auto_gptq", V1),
        ("auto_round:gptq", V1),
        ("auto_round", V2),
        ("auto_round:gptqmodel", V2),
    ] {
        let mut model = asymmetric(convention);
        model.set("quant_method", json!("auto-round")).set("checkpoint_format", json!(null));
        let (_dir, checkpoint) = open(model.set("packing_format", json!(packing)));
        assert_eq!(zeros_of(&checkpoint, Q).convention, convention, "{packing}");
        assert_eq!(points(&checkpoint, Q, 3), [1, 4, 7], "{packing}");
    }
}

// A true zero point of 0 between columns with 5: which neighbours it may change. 4 bits, z = 0, 5, 8 …

const V2_WORD: u32 = 0x8888_8850;
const WORD_WISE: u32 = 0x7777_773F;
const FIELD_WRAP: u32 = 0x7777_774F;
const SMEAR: u32 = 0xFFFF_FFFF;

/// Asymmetric, with one word replaced.
fn with_word(convention: ZeroConvention, word: u32) -> Model {
    let mut model = asymmetric(convention);
    model.zero_words(Q, &[word]);
    model
}

#[test]
fn gptqmodels_borrow_is_undone_word_by_word() {
    let mut model = with_word(V1, WORD_WISE);
    by_gptqmodel(&mut model, "2.0.0");
    let (_dir, checkpoint) = open(&model);
    assert_eq!(points(&checkpoint, Q, 8), [0, 5, 8, 8, 8, 8, 8, 8]);
    assert_eq!(zeros_of(&checkpoint, Q).encoding, Some(ZeroEncoding::V1WordWise));
    assert_eq!(codes(&checkpoint), [WarningCode::ZeroPointsWrapped]);
    checkpoint.require_decodable().unwrap();
    let (_dir, v2) = open(&with_word(V2, V2_WORD));
    assert_eq!((points(&v2, Q, 8), codes(&v2)), (vec![0, 5, 8, 8, 8, 8, 8, 8], vec![]));
    assert_eq!(hashes(&checkpoint), hashes(&v2));
}

#[test]
fn a_chain_of_borrows_in_gptqmodels_file_is_no_smear() {
    // z = 1, 1, 1, 1, 1, 1, 0, 1 borrows to the top: fields 0 … 0, 15, 15.
    let mut model = with_word(V1, 0xFF00_0000);
    by_gptqmodel(&mut model, "7.7.0");
    let (_dir, checkpoint) = open(&model);
    assert_eq!(points(&checkpoint, Q, 8), [1, 1, 1, 1, 1, 1, 0, 1]);
}

#[test]
fn what_readers_disagree_on_is_refused_until_the_user_chooses() {
    let mut model = with_word(V1, FIELD_WRAP);
    model.zero_words(DOWN, &[0x1F1F_1111]);
    let (_dir, undecided) = open(&model);
    assert_eq!(codes(&undecided), [WarningCode::ZerosUndecided]);
    assert_eq!(zeros_of(&undecided, Q).encoding, None);
    let error = undecided.require_decodable().unwrap_err();
    let Fault::AllOnes { count: 3, modules } = &*error.fault else { panic!("{error:#}") };
    assert_eq!(modules, &[Q, DOWN]);
    assert_eq!(error.tensor(), Some(&*format!("{Q}.qzeros")));
    assert!(error.hint().unwrap().contains("plus-one"));
    assert!(undecided.dequantize(undecided.module(Q).unwrap()).is_err());
    undecided.dequantize(undecided.module(LINEARS[1].0).unwrap()).unwrap();
    for (choice, point) in [(AllOnes::Wrap, 0), (AllOnes::PlusOne, 16)] {
        let options = OpenOptions { all_ones: Some(choice), ..OpenOptions::default() };
        let (_dir, checkpoint) = open_with(&model, &options);
        assert_eq!(points(&checkpoint, Q, 8), [point, 5, 8, 8, 8, 8, 8, 8]);
        assert_eq!(points(&checkpoint, DOWN, 8), [2, 2, 2, 2, point, 2, point, 2]);
        assert_eq!(codes(&checkpoint), [WarningCode::ZeroPointsWrapped]);
        checkpoint.require_decodable().unwrap();
    }
}

#[test]
fn a_smear_is_refused_whatever_the_user_chooses() {
    for word in [SMEAR, 0xFFF0_1234] {
        for all_ones in [None, Some(AllOnes::Wrap), Some(AllOnes::PlusOne)] {
            let options = OpenOptions { all_ones, ..OpenOptions::default() };
            let (_dir, checkpoint) = open_with(&with_word(V1, word), &options);
            assert_eq!(codes(&checkpoint), [WarningCode::ZerosLost]);
            let error = checkpoint.require_decodable().unwrap_err();
            assert!(
                matches!(&*error.fault, Fault::Smear { count: 1, modules } if modules == &[Q]),
                "{error:#}"
            );
        }
    }
}

#[test]
fn an_isolated_all_ones_field_at_the_top_is_no_smear() {
    let options = OpenOptions { all_ones: Some(AllOnes::Wrap), ..OpenOptions::default() };
    let (_dir, checkpoint) = open_with(&with_word(V1, 0xF777_7777), &options);
    assert_eq!(points(&checkpoint, Q, 8), [8, 8, 8, 8, 8, 8, 8, 0]);
}

#[test]
fn all_ones_of_a_v2_file_are_the_largest_zero_point() {
    let (_dir, checkpoint) = open(&with_word(V2, 0xFFFF_8888));
    assert_eq!((points(&checkpoint, Q, 8), codes(&checkpoint)), (vec![8, 8, 8, 8, 15, 15, 15, 15], vec![]));
}

// 3 bits.

/// z[j] = (5j + 2) mod 7 + 1 = 3, 1, 6, 4, 2, 7, 5 … over 32 columns.
const THREE_BIT_V1: [u32; 3] = [0xE853_1742, 0x4C5D_0A62, 0x7429_8BA1];
const THREE_BIT_SWAPPED: [u32; 3] = [0x0CE5_6067, 0x4C5D_0A63, 0x4F97_427C];
const SYMMETRIC_SWAPPED: [u32; 3] = [0x0000_0000, 0xB6DB_6DB7, 0x4924_9249];

fn three_bit(words: &[u32; 3], sym: bool) -> Model {
    let mut model = Model::new(&Quantized { bits: 3, zero: |_, _| 4, ..Quantized::default() });
    for (name, ..) in LINEARS {
        let words = words.repeat(model.tensor(name, "qzeros").bytes.len() / 12);
        model.zero_words(name, &words);
    }
    model.set("sym", json!(sym));
    model
}

#[test]
fn gptqmodel_before_7_exchanged_the_constants_of_3_bits() {
    let expected: Vec<u16> = (0..32).map(|j| (5 * j + 2) % 7 + 1).collect();
    for (words, version, encoding) in [
        (&THREE_BIT_SWAPPED, "6.0.3", ZeroEncoding::V1ThreeBitSwapped),
        (&THREE_BIT_V1, "7.0.0", ZeroEncoding::V1Wrap),
    ] {
        let mut model = three_bit(words, false);
        by_gptqmodel(&mut model, version);
        let (_dir, checkpoint) = open(&model);
        assert_eq!(points(&checkpoint, Q, 32), expected, "{version}");
        assert_eq!(zeros_of(&checkpoint, Q).encoding, Some(encoding));
    }
}

#[test]
fn the_exchanged_constants_of_a_symmetric_model_show_without_a_producer() {
    let (_dir, swapped) = open(&three_bit(&SYMMETRIC_SWAPPED, true));
    assert_eq!(zeros_of(&swapped, Q).encoding, Some(ZeroEncoding::V1ThreeBitSwapped));
    assert_eq!((points(&swapped, Q, 32), zeros_of(&swapped, Q).symmetric), (vec![4; 32], true));
    let plain = Model::new(&Quantized { bits: 3, zero: |_, _| 4, ..Quantized::default() });
    // Values beat the producer: AutoGPTQ's words under a GPTQModel label are read as they are.
    let mut labelled = plain.clone();
    by_gptqmodel(&mut labelled, "4.0.0");
    let (_dir, checkpoint) = open(&labelled);
    assert_eq!(points(&checkpoint, Q, 32), [4; 32]);
    let (_dir, plain) = open(&plain);
    assert_eq!(hashes(&plain), hashes(&swapped));
}

#[test]
fn one_model_with_both_kinds_of_3_bits_is_refused() {
    let mut model = three_bit(&SYMMETRIC_SWAPPED, true);
    let how = Quantized { bits: 3, zero: |_, _| 4, ..Quantized::default() };
    gptq_module(&mut model.tensors, Q, HIDDEN, HIDDEN, &how);
    let error = Checkpoint::open(model.write().path(), &OpenOptions::default()).unwrap_err();
    assert!(matches!(&*error.fault, Fault::MixedZeros(mixed) if mixed.one == [Q]), "{error:#}");
}

#[test]
fn three_bit_zero_points_that_auto_round_repeated_are_told() {
    let repeated = |_: usize, column: usize| (column % 32 % 11 % 10 % 7 + 1) as u16;
    let mut model = Model::new(&Quantized { bits: 3, zero: repeated, ..Quantized::default() });
    model.set("sym", json!(false));
    let (_dir, checkpoint) = open(&model);
    assert_eq!(codes(&checkpoint), []);
    let (_dir, checkpoint) = open(model.set("autoround_version", json!("0.4.1")));
    assert_eq!(codes(&checkpoint), [WarningCode::ZerosRepeated]);
}
