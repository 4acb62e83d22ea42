//! The layer check: faults of layout that are planted in converted files are named for what they are.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use half::f16;
use requant::WarningCode;
use requant::formats::exl2::Matrix;
use requant::formats::gptq::{ZeroConvention, encode_zeros, pack_codes};
use requant::formats::{Permutation, exl2};
use requant::kernels::Cpu;
use requant::progress::Silent;
use requant::validate::Text;
use requant::validate::report::{LayoutFault, Verdict};
use requant::validate::{Options, Validation, validate};
use serde_json::json;
use std::path::{Path, PathBuf};
use support::binary::{Converted, FIXTURE, convert, requant};
use support::open;
use support::writer::{Model, Quantized};
use tempfile::TempDir;

/// A linear with several groups and a permutation.
const VICTIM: &str = "model.layers.0.mlp.down_proj";

/// On tokens that the smallest vocabulary has.
fn validated(source: &Path, converted: &Path) -> Validation {
    let dir = tempfile::tempdir().unwrap();
    let ids = dir.path().join("ids.json");
    std::fs::write(&ids, json!((0..128).map(|i| i * 7 % 48).collect::<Vec<u32>>()).to_string()).unwrap();
    let options = Options { text: Text::TokenIds(ids), window: Some(128), ..Options::default() };
    validate(&open(source), &open(converted), &options, &Cpu::new(2), &Silent).unwrap()
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
    let swap = |codes: bool, scales: bool, first, second| {
        move |matrix: &Matrix| {
            let (rows, n) = (matrix.groups().groups()[1].rows, matrix.out_features());
            change(matrix, |parts| {
                if codes {
                    swap_rows(&mut parts.codes, first, second, rows, n);
                }
                if scales {
                    swap_rows(&mut parts.scale_index, first, second, 1, n);
                    parts.scale_max.swap(first, second);
                }
            })
        }
    };
    assert_eq!(fault_of(swap(true, true, 1, 3)), LayoutFault::GroupsSwapped { first: 1, second: 3 });
    assert_eq!(fault_of(swap(false, true, 0, 2)), LayoutFault::GroupsSwapped { first: 0, second: 2 });
    assert_eq!(fault_of(swap(true, false, 2, 4)), LayoutFault::GroupsSwapped { first: 2, second: 4 });
}

#[test]
fn a_permutation_that_goes_the_other_way_is_named() {
    let inverted = |matrix: &Matrix| change(matrix, |parts| parts.invperm = parts.invperm.inverse());
    assert_eq!(fault_of(inverted), LayoutFault::PermutationInverted);
}

#[test]
fn scale_indices_off_by_one_are_named_whether_they_wrap_or_stay_at_the_end() {
    for by in [1, -1] {
        let wrapped = |index: u8| (i32::from(index) + by).rem_euclid(16) as u8;
        let clamped = |index: u8| (i32::from(index) + by).clamp(0, 15) as u8;
        for shift in [&wrapped as &dyn Fn(u8) -> u8, &clamped] {
            let off = |matrix: &Matrix| {
                change(matrix, |parts| parts.scale_index.iter_mut().for_each(|index| *index = shift(*index)))
            };
            assert_eq!(fault_of(off), LayoutFault::ScaleIndexOff { by });
        }
    }
}

#[test]
fn damage_without_a_known_cause_is_said_to_be_that() {
    let noise = |matrix: &Matrix| change(matrix, |parts| parts.codes[5] ^= 1);
    let LayoutFault::NotAsPromised { promised, found } = fault_of(noise) else { panic!("another cause") };
    assert!(promised > 0.0 && found > 0.0 && promised != found);
}

/// The fixture as a Granite, of whose down_proj exllamav2 multiplies the scales by 0.22.
fn granite() -> TempDir {
    let mut model = Model::read(FIXTURE.as_ref());
    model.config["architectures"] = json!(["GraniteForCausalLM"]);
    model.config["residual_multiplier"] = json!(0.22);
    model.write()
}

#[test]
fn faults_are_named_under_a_prescale() {
    let source = granite();
    let swap = |matrix: &Matrix| {
        let n = matrix.out_features();
        change(matrix, |parts| {
            swap_rows(&mut parts.scale_index, 0, 2, 1, n);
            parts.scale_max.swap(0, 2);
        })
    };
    let inverted = |matrix: &Matrix| change(matrix, |parts| parts.invperm = parts.invperm.inverse());
    let index_off = |matrix: &Matrix| {
        change(matrix, |parts| parts.scale_index.iter_mut().for_each(|index| *index = (*index + 1) % 16))
    };
    type Plant<'a> = &'a dyn Fn(&Matrix) -> Matrix;
    let plants: [(Plant<'_>, LayoutFault); 3] = [
        (&swap, LayoutFault::GroupsSwapped { first: 0, second: 2 }),
        (&inverted, LayoutFault::PermutationInverted),
        (&index_off, LayoutFault::ScaleIndexOff { by: 1 }),
    ];
    for (plant_it, fault) in plants {
        let converted = convert(source.path(), &["--bits", "4"]);
        assert_eq!(converted.module(VICTIM)["decision"]["prescale"], 0.22);
        assert_eq!(validated(source.path(), &converted.out).verdict, Verdict::Passed);
        plant(&converted.out, plant_it);
        assert_eq!(named(source.path(), &converted.out, VICTIM), Some(fault));
    }
}

/// A source as GPTQ again, exactly.
fn to_gptq(source: &Path, flags: &[&str]) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let mut command = requant();
    let command = command.arg("convert").arg(source).args(["--to", "gptq"]).args(flags);
    let ran = command.arg("--out").arg(&out).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    assert_eq!(validated(source, &out).verdict, Verdict::Exact);
    (dir, out)
}

/// What the check calls the fault of a directory in one module.
fn named(source: &Path, out: &Path, module: &str) -> Option<LayoutFault> {
    let validation = validated(source, out);
    assert_eq!(validation.verdict, Verdict::Broken);
    let broken: Vec<_> = validation.layers.iter().filter(|layer| layer.fault.is_some()).collect();
    assert_eq!(broken.iter().map(|layer| layer.source.as_str()).collect::<Vec<_>>(), [module]);
    broken[0].fault.clone()
}

/// The numbers of a GPTQ module.
struct GptqParts {
    /// `[k, n]`
    codes: Vec<u8>,
    /// `[groups, n]`
    zeros: Vec<u16>,
    /// `[groups, n]`
    scales: Vec<f16>,
    /// `[k]`
    g_idx: Vec<u32>,
    n: usize,
}

impl GptqParts {
    /// Rows of a group, in their order.
    fn rows_of(&self, group: u32) -> Vec<usize> {
        self.g_idx.iter().enumerate().filter(|(_, of)| **of == group).map(|(row, _)| row).collect()
    }

    fn swap_codes(&mut self, first: u32, second: u32) {
        for (a, b) in self.rows_of(first).into_iter().zip(self.rows_of(second)) {
            (0..self.n).for_each(|column| self.codes.swap(a * self.n + column, b * self.n + column));
        }
    }

    fn swap_scales(&mut self, first: usize, second: usize) {
        swap_rows(&mut self.scales, first, second, 1, self.n);
        swap_rows(&mut self.zeros, first, second, 1, self.n);
    }
}

/// Replaces the tensors of the GPTQ module in its file by those that `change` makes of it.
fn plant_gptq(out: &Path, convention: ZeroConvention, change: impl Fn(&mut GptqParts)) {
    let (shape, mut parts) = {
        let checkpoint = open(out);
        let matrix = checkpoint.gptq(checkpoint.module(VICTIM).unwrap()).unwrap();
        let parts = GptqParts {
            codes: matrix.codes().to_vec(),
            zeros: matrix.zeros().to_vec(),
            scales: matrix.scales().iter().map(|&scale| f16::from_f32(scale)).collect(),
            g_idx: matrix.g_idx().groups().to_vec(),
            n: matrix.shape().out_features,
        };
        (*matrix.shape(), parts)
    };
    change(&mut parts);
    let (qweight, qzeros) =
        (pack_codes(&shape, &parts.codes).unwrap(), encode_zeros(&shape, &parts.zeros, convention).unwrap());
    let tensors: [(&str, &[u8]); 4] = [
        ("qweight", bytemuck::cast_slice(&qweight)),
        ("qzeros", bytemuck::cast_slice(&qzeros)),
        ("scales", bytemuck::cast_slice(&parts.scales)),
        ("g_idx", bytemuck::cast_slice(&parts.g_idx)),
    ];
    for (suffix, bytes) in tensors {
        overwrite(out, &format!("{VICTIM}.{suffix}"), |at| at.copy_from_slice(bytes));
    }
}

/// The fault that is named when a bug is planted in an exact GPTQ output.
fn planted(change: impl Fn(&mut GptqParts)) -> Option<LayoutFault> {
    let (_dir, out) = to_gptq(FIXTURE.as_ref(), &["--zeros", "v2"]);
    plant_gptq(&out, ZeroConvention::V2, change);
    named(FIXTURE.as_ref(), &out, VICTIM)
}

/// Zero points from 3 to 12: one more or less fits its field, stored less one or as it is.
fn asymmetric() -> TempDir {
    let zero = |group, column| ((group * 5 + column * 3) % 10 + 3) as u16;
    let mut model = Model::new(&Quantized { zero, ..Quantized::default() });
    model.set("sym", json!(false));
    model.write()
}

#[test]
fn zero_points_off_by_one_are_named() {
    let source = asymmetric();
    for zeros in ["v1", "v2"] {
        for by in [1, -1] {
            let (_dir, out) = to_gptq(source.path(), &["--zeros", zeros]);
            // Two fields a byte, of which none overflows.
            overwrite(&out, &format!("{VICTIM}.qzeros"), |bytes| {
                bytes.iter_mut().for_each(|byte| *byte = byte.wrapping_add_signed(by as i8 * 0x11));
            });
            assert_eq!(named(source.path(), &out, VICTIM), Some(LayoutFault::ZeroOff { by }), "{zeros}");
        }
    }
    // In a symmetric one, one more can't be mistaken for the other convention.
    let more = planted(|parts| parts.zeros.iter_mut().for_each(|zero| *zero += 1));
    assert_eq!(more, Some(LayoutFault::ZeroOff { by: 1 }));
}

/// A symmetric model shows by its values how its zero points are stored, so that a false label loses nothing.
#[test]
fn v1_zero_points_of_a_symmetric_model_that_were_not_lessened_are_a_warning() {
    let (_dir, out) = to_gptq(FIXTURE.as_ref(), &["--zeros", "v1"]);
    let mut model = Model::read(&out);
    for (_, tensor) in model.tensors.iter_mut().filter(|(name, _)| name.ends_with(".qzeros")) {
        tensor.bytes.iter_mut().for_each(|byte| *byte += 0x11);
    }
    let dir = model.write();
    std::fs::copy(out.join("report.json"), dir.path().join("report.json")).unwrap();
    let validation = validated(FIXTURE.as_ref(), dir.path());
    assert_eq!(validation.verdict, Verdict::Exact);
    let codes: Vec<WarningCode> = validation.warnings.iter().map(|warning| warning.code).collect();
    assert_eq!(codes, [WarningCode::ZeroLabelWrong]);
}

#[test]
fn rows_with_the_scales_of_another_group_are_named() {
    for by in [1, -1] {
        let wrapped = |group: i32| (group + by).rem_euclid(16) as u32;
        let clamped = |group: i32| (group + by).clamp(0, 15) as u32;
        for shift in [&wrapped as &dyn Fn(i32) -> u32, &clamped] {
            let fault = planted(|parts| {
                assert_eq!(parts.scales.len() / parts.n, 16);
                parts.g_idx.iter_mut().for_each(|group| *group = shift(*group as i32));
            });
            assert_eq!(fault, Some(LayoutFault::ScaleIndexOff { by }));
        }
    }
}

#[test]
fn gptq_groups_that_changed_places_are_named() {
    let whole = planted(|parts| {
        parts.swap_codes(1, 3);
        parts.swap_scales(1, 3);
    });
    assert_eq!(whole, Some(LayoutFault::GroupsSwapped { first: 1, second: 3 }));
    let scales = planted(|parts| parts.swap_scales(2, 7));
    assert_eq!(scales, Some(LayoutFault::GroupsSwapped { first: 2, second: 7 }));
    let codes = planted(|parts| parts.swap_codes(0, 5));
    assert_eq!(codes, Some(LayoutFault::GroupsSwapped { first: 0, second: 5 }));
}

/// Of a writer that sorts rows by group and brings them back with the sorting order itself.
#[test]
fn a_g_idx_or_rows_in_the_inverse_order_are_named() {
    let sorted = {
        let checkpoint = open(FIXTURE.as_ref());
        checkpoint.gptq_g_idx(checkpoint.module(VICTIM).unwrap()).unwrap().sorted_rows()
    };
    assert_ne!(sorted, sorted.inverse());
    let order = sorted.map();
    let turned = |parts: &GptqParts| -> Vec<u32> {
        let mut groups = parts.g_idx.clone();
        groups.sort_unstable();
        order.iter().map(|&place| groups[place as usize]).collect()
    };
    let g_idx = planted(|parts| parts.g_idx = turned(parts));
    assert_eq!(g_idx, Some(LayoutFault::PermutationInverted));
    let rows_too = planted(|parts| {
        let row = |row: u32| parts.codes[row as usize * parts.n..][..parts.n].to_vec();
        // Place p of the sorted rows holds row order[p]; row j of the file then gets place order[j].
        parts.codes = order.iter().flat_map(|&place| row(order[place as usize])).collect();
        parts.g_idx = turned(parts);
    });
    assert_eq!(rows_too, Some(LayoutFault::PermutationInverted));
    // A g_idx that is wrong in another way isn't called so.
    let other = planted(|parts| parts.g_idx.rotate_left(7));
    assert!(matches!(other, Some(LayoutFault::NotAsPromised { .. })), "{other:?}");
}

#[test]
fn a_folded_order_that_goes_the_other_way_is_named() {
    let (_dir, out) = to_gptq(FIXTURE.as_ref(), &["--order", "sorted"]);
    let path = out.join("report.json");
    let mut report: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let mut inverted = None;
    for module in report["modules"].as_array_mut().unwrap() {
        let Ok(order) = serde_json::from_value::<Vec<u32>>(module["row_order"].clone()) else { continue };
        let inverse = Permutation::new(order).unwrap().inverse();
        module["row_order"] = inverse.map().into();
        inverted = module["source"].as_str().map(str::to_owned);
    }
    std::fs::write(&path, report.to_string()).unwrap();
    let validation = validated(FIXTURE.as_ref(), &out);
    let layer = validation.layers.iter().find(|layer| Some(&layer.source) == inverted.as_ref()).unwrap();
    assert_eq!(
        (validation.verdict, &layer.fault),
        (Verdict::Broken, &Some(LayoutFault::PermutationInverted))
    );
}
