//! Validation: faults planted in real converted files are named, and what is exact is said to be.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use half::f16;
use requant::checkpoint::{Checkpoint, OpenOptions};
use requant::formats::exl2::Matrix;
use requant::formats::{Permutation, exl2};
use requant::kernels::Cpu;
use requant::progress::Silent;
use requant::validate::report::{LayoutFault, Verdict};
use requant::validate::{Options, Validation, validate};
use std::path::{Path, PathBuf};
use support::binary::{Converted, FIXTURE, convert, names_in};
use support::open;

/// A linear with several groups and a permutation.
const VICTIM: &str = "model.layers.0.mlp.down_proj";

fn options() -> Options {
    Options { tokens: 512, window: Some(128), ..Options::default() }
}

fn validated(source: &Path, converted: &Path) -> Validation {
    validate(&open(source), &open(converted), &options(), &Cpu::new(2), &Silent).unwrap()
}

/// A 4-bit conversion of the fixture.
fn converted() -> Converted {
    convert(FIXTURE.as_ref(), &["--bits", "4"])
}

/// Replaces the tensors of an EXL2 module in its file by those that `change` makes of it.
fn plant(out: &Path, change: impl Fn(&Matrix) -> Matrix) {
    let matrix = {
        let checkpoint = open(out);
        checkpoint.exl2(checkpoint.module(VICTIM).unwrap()).unwrap()
    };
    let packed = change(&matrix).pack();
    let parts: [(&str, &[u8]); 5] = [
        ("q_weight", bytemuck::cast_slice(&packed.q_weight)),
        ("q_invperm", bytemuck::cast_slice(&packed.q_invperm)),
        ("q_scale", bytemuck::cast_slice(&packed.q_scale)),
        ("q_scale_max", bytemuck::cast_slice(&packed.q_scale_max)),
        ("q_groups", bytemuck::cast_slice(&packed.q_groups)),
    ];
    for (suffix, bytes) in parts {
        overwrite(out, &format!("{VICTIM}.{suffix}"), |at| at.copy_from_slice(bytes));
    }
}

/// Changes the bytes of a tensor in its file.
fn overwrite(dir: &Path, tensor: &str, change: impl Fn(&mut [u8])) {
    let path: PathBuf = open(dir).tensor(tensor).unwrap().file().into();
    let mut bytes = std::fs::read(&path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let entries: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let offset = |i: usize| entries[tensor]["data_offsets"][i].as_u64().unwrap() as usize + 8 + header;
    let range = offset(0)..offset(1);
    change(&mut bytes[range]);
    std::fs::write(&path, bytes).unwrap();
}

struct Parts {
    codes: Vec<u8>,
    scale_index: Vec<u8>,
    scale_max: Vec<f16>,
    invperm: Permutation,
}

/// Builds a changed matrix.
fn change(matrix: &Matrix, change: impl Fn(&mut Parts)) -> Matrix {
    let mut parts = Parts {
        codes: matrix.codes().to_vec(),
        scale_index: matrix.scale_index().to_vec(),
        scale_max: matrix.scale_max().to_vec(),
        invperm: matrix.invperm().clone(),
    };
    change(&mut parts);
    let (groups, n) = (matrix.groups().clone(), matrix.out_features());
    exl2::Matrix::new(groups, n, parts.codes, parts.scale_index, parts.scale_max, parts.invperm).unwrap()
}

/// The fault that is named when a bug is planted; all other linears are as promised.
fn fault_of(plan: impl Fn(&Matrix) -> Matrix) -> LayoutFault {
    let converted = converted();
    plant(&converted.out, plan);
    let validation = validated(FIXTURE.as_ref(), &converted.out);
    assert_eq!(validation.verdict, Verdict::Broken);
    let mut faults = validation.layers.iter().filter_map(|layer| Some((&layer.source, layer.fault.clone()?)));
    let (name, fault) = faults.next().expect("a fault");
    assert_eq!(name, VICTIM);
    assert_eq!(faults.next(), None);
    fault
}

fn swap_rows<T: Copy>(values: &mut [T], first: usize, second: usize, rows: usize, n: usize) {
    for i in 0..rows * n {
        values.swap(first * rows * n + i, second * rows * n + i);
    }
}

#[test]
fn two_groups_that_changed_places_are_named() {
    let whole = |matrix: &Matrix| {
        let (rows, n) = (matrix.groups().groups()[1].rows, matrix.out_features());
        change(matrix, |parts| {
            swap_rows(&mut parts.codes, 1, 3, rows, n);
            swap_rows(&mut parts.scale_index, 1, 3, 1, n);
            parts.scale_max.swap(1, 3);
        })
    };
    assert_eq!(fault_of(whole), LayoutFault::GroupsSwapped { first: 1, second: 3 });
    let scales = |matrix: &Matrix| {
        let n = matrix.out_features();
        change(matrix, |parts| {
            swap_rows(&mut parts.scale_index, 0, 2, 1, n);
            parts.scale_max.swap(0, 2);
        })
    };
    assert_eq!(fault_of(scales), LayoutFault::GroupsSwapped { first: 0, second: 2 });
}

#[test]
fn a_permutation_that_goes_the_other_way_is_named() {
    let inverted = |matrix: &Matrix| change(matrix, |parts| parts.invperm = parts.invperm.inverse());
    assert_eq!(fault_of(inverted), LayoutFault::PermutationInverted);
}

#[test]
fn scale_indices_off_by_one_are_named_whether_they_wrap_or_stay_at_the_end() {
    let wrapped = |matrix: &Matrix| {
        change(matrix, |parts| parts.scale_index.iter_mut().for_each(|index| *index = (*index + 1) % 16))
    };
    assert_eq!(fault_of(wrapped), LayoutFault::ScaleIndexOff { by: 1 });
    let clamped = |matrix: &Matrix| {
        change(matrix, |parts| {
            parts.scale_index.iter_mut().for_each(|index| *index = index.saturating_sub(1))
        })
    };
    assert_eq!(fault_of(clamped), LayoutFault::ScaleIndexOff { by: -1 });
}

#[test]
fn damage_without_a_known_cause_is_said_to_be_that() {
    let noise = |matrix: &Matrix| change(matrix, |parts| parts.codes[5] ^= 1);
    let LayoutFault::NotAsPromised { promised, found } = fault_of(noise) else { panic!("another cause") };
    assert!(promised > 0.0 && found > 0.0 && promised != found);
}

/// The fixture as GPTQ again, exactly.
fn to_gptq(flags: &[&str]) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let mut command = support::binary::requant();
    let ran = command.args(["convert", FIXTURE, "--to", "gptq"]).args(flags).arg("--out").arg(&out).output();
    let ran = ran.unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    assert_eq!(validated(FIXTURE.as_ref(), &out).verdict, Verdict::Exact);
    (dir, out)
}

/// What the check calls the fault of a directory in one module.
fn named(out: &Path, module: &str) -> Option<LayoutFault> {
    let validation = validated(FIXTURE.as_ref(), out);
    assert_eq!(validation.verdict, Verdict::Broken);
    let layer = validation.layers.iter().find(|layer| layer.source == module).unwrap();
    assert_eq!(layer.promised_error, Some(0.0));
    layer.fault.clone()
}

/// The same of an exact GPTQ output, a tensor of which was changed.
fn gptq_fault_of(suffix: &str, change: impl Fn(&mut [u8])) -> Option<LayoutFault> {
    let (_dir, out) = to_gptq(&["--zeros", "v2"]);
    overwrite(&out, &format!("{VICTIM}.{suffix}"), change);
    named(&out, VICTIM)
}

#[test]
fn zero_points_off_by_one_are_named() {
    // 4-bit fields of 8: one more in each.
    let fault = gptq_fault_of("qzeros", |bytes| bytes.iter_mut().for_each(|byte| *byte += 0x11));
    assert_eq!(fault, Some(LayoutFault::ZeroOff { by: 1 }));
}

#[test]
fn rows_with_the_scales_of_the_next_group_are_named() {
    let fault = gptq_fault_of("g_idx", |bytes| {
        let (words, _) = bytes.as_chunks_mut::<4>();
        let groups = words.iter().map(|word| i32::from_le_bytes(*word)).max().unwrap() + 1;
        words.iter_mut().for_each(|word| *word = ((i32::from_le_bytes(*word) + 1) % groups).to_le_bytes());
    });
    assert_eq!(fault, Some(LayoutFault::ScaleIndexOff { by: 1 }));
}

#[test]
fn gptq_groups_with_each_others_scales_are_named() {
    let n = open(FIXTURE.as_ref()).module(VICTIM).unwrap().out_features();
    let fault = gptq_fault_of("scales", |bytes| {
        let (first, rest) = bytes.split_at_mut(2 * n * 2);
        first[2 * n..].swap_with_slice(&mut rest[2 * n..2 * n * 2]);
    });
    assert_eq!(fault, Some(LayoutFault::GroupsSwapped { first: 1, second: 3 }));
}

#[test]
fn a_folded_order_that_goes_the_other_way_is_named() {
    let (_dir, out) = to_gptq(&["--order", "sorted"]);
    let path = out.join("report.json");
    let mut report: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let mut inverted = None;
    for module in report["modules"].as_array_mut().unwrap() {
        let Ok(order) = serde_json::from_value::<Vec<u32>>(module["row_order"].clone()) else { continue };
        let inverse = requant_formats::Permutation::new(order).unwrap().inverse();
        module["row_order"] = inverse.map().into();
        inverted = module["source"].as_str().map(str::to_owned);
    }
    std::fs::write(&path, report.to_string()).unwrap();
    assert_eq!(named(&out, &inverted.unwrap()), Some(LayoutFault::PermutationInverted));
}

#[test]
fn errors_are_those_of_the_conversion() {
    let converted = converted();
    let validation = validated(FIXTURE.as_ref(), &converted.out);
    assert_eq!(validation.verdict, Verdict::Passed);
    for layer in &validation.layers {
        let stated = converted.module(&layer.converted)["relative_error"].as_f64().unwrap();
        assert!((layer.weight_error - stated).abs() <= 1e-6 * stated, "{}", layer.source);
        assert_eq!(layer.promised_error, Some(stated));
    }
    let quantized = validation.layers.iter().filter(|layer| layer.weight_error > 0.0).count();
    assert_eq!(quantized, 21, "all linears of three blocks");
    let totals = converted.report["totals"]["bpw"].as_f64().unwrap();
    assert!((validation.converted.bpw - totals).abs() < 1e-9);
}

#[test]
fn a_report_of_another_source_is_refused() {
    let converted = converted();
    let dir = tempfile::tempdir().unwrap();
    for name in names_in(FIXTURE.as_ref()) {
        std::fs::copy(Path::new(FIXTURE).join(&name), dir.path().join(&name)).unwrap();
    }
    let config = dir.path().join("config.json");
    let changed = std::fs::read_to_string(&config).unwrap().replacen('{', "{\"x\": 1,", 1);
    std::fs::write(&config, changed).unwrap();
    let source = Checkpoint::open(dir.path(), &OpenOptions::default()).unwrap();
    let error = validate(&source, &open(&converted.out), &options(), &Cpu::new(1), &Silent).unwrap_err();
    assert!(error.to_string().contains("another source"), "{error}");
}
