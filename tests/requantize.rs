//! GPTQ narrower than the source's codes: asked for, said, and better than rounding to the nearest.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

#[path = "support/outputs.rs"]
mod outputs;
mod support;

use half::f16;
use outputs::{Output, gptq, json_of, reader, source};
use requant::WarningCode;
use requant::checkpoint::{Checkpoint, Layout, Module, OpenOptions};
use requant::formats::gptq::{Bits, ZeroConvention};
use requant::plan::{GptqOptions, Order, Plan};
use requant::progress::Silent;
use requant::verify::{CheckKind, verify};
use serde_json::Value;
use support::binary::{relative_error, requant};
use support::writer::{DOWN, Model, Quantized};

const EXL2: &str = "fixtures/tiny-llama-exl2-4.0bpw";

fn bits(bits: u32) -> GptqOptions {
    GptqOptions { bits: Some(Bits::try_from(bits).unwrap()), ..GptqOptions::default() }
}

/// 8 bits, asymmetric, with zero points that leave little of the range below zero.
fn eight_bits() -> Model {
    let zero = |_, column| 60 + column as u16 % 9;
    let mut model = Model::new(&Quantized { bits: 8, zero, ..Quantized::default() });
    model.set("bits", 8.into()).set("sym", false.into());
    model
}

/// The words of a tensor.
fn words(checkpoint: &Checkpoint, name: &str) -> Vec<u32> {
    let bytes = checkpoint.tensor(name).unwrap().bytes();
    bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
}

/// The weights of a 4-bit or 8-bit module by the formula of the format, from its words and nothing of requant's.
fn decoded(checkpoint: &Checkpoint, module: &Module, width: u32, v1: bool) -> Vec<f16> {
    let (k, n, name) = (module.in_features(), module.out_features(), module.name());
    let (qweight, qzeros) =
        (words(checkpoint, &format!("{name}.qweight")), words(checkpoint, &format!("{name}.qzeros")));
    let g_idx = words(checkpoint, &format!("{name}.g_idx"));
    let scales = checkpoint.tensor(&format!("{name}.scales")).unwrap();
    assert_eq!(scales.dtype(), safetensors::Dtype::F16);
    let scales = scales.floats().unwrap();
    let (per_word, mask) = ((32 / width) as usize, (1 << width) - 1);
    let field = |word: u32, i: usize| (word >> (i % per_word * width as usize)) & mask;
    let mut weights = Vec::with_capacity(k * n);
    for row in 0..k {
        let group = g_idx[row] as usize;
        for column in 0..n {
            let code = field(qweight[row / per_word * n + column], row);
            let zero = field(qzeros[group * (n / per_word) + column / per_word], column) + u32::from(v1);
            let product = f64::from(scales[group * n + column]) * (f64::from(code) - f64::from(zero));
            weights.push(f16::from_f64(product));
        }
    }
    weights
}

/// The error of rounding to the nearest on the same groups, the scale of each column being its largest weight
/// over 7 or over 7.5, whichever is better in all.
fn nearest(wanted: &[f16], groups: &[u32], n: usize, width: u32) -> f64 {
    let (highest, lowest) = (f64::from((1 << (width - 1)) - 1), -f64::from(1 << (width - 1)));
    let count = 1 + *groups.iter().max().unwrap() as usize;
    let mut largest = vec![0.0f64; count * n];
    for (i, weight) in wanted.iter().enumerate() {
        let place = &mut largest[groups[i / n] as usize * n + i % n];
        *place = place.max(weight.to_f64().abs());
    }
    let error = |divisor: f64| {
        let found: Vec<f16> = (wanted.iter().enumerate())
            .map(|(i, weight)| {
                let scale = f16::from_f64(largest[groups[i / n] as usize * n + i % n] / divisor).to_f64();
                let code = (weight.to_f64() / scale).round().clamp(lowest, highest);
                f16::from_f64(if scale == 0.0 { 0.0 } else { code * scale })
            })
            .collect();
        relative_error(wanted, &found)
    };
    error(highest).min(error(highest + 0.5))
}

fn modules(out: &Output) -> Vec<Value> {
    out.report()["modules"].as_array().unwrap().clone()
}

/// Checks each module's claim and its error; gives the relative errors, ours and that of the nearest, of those
/// that are requantized, and the number of the others.
fn assert_claims(from: &Checkpoint, out: &Output, width: u32, v1: bool) -> (Vec<(f64, f64)>, usize) {
    let (to, mut errors, mut exact) = (source(&out.dir), Vec::new(), 0);
    for entry in modules(out) {
        let name = entry["name"].as_str().unwrap();
        let (module, before) = (to.module(name).unwrap(), from.module(name).unwrap());
        let Layout::Gptq(layout) = module.layout() else { continue };
        assert_eq!(layout.shape.bits.get(), width);
        let (wanted, found) = (from.dequantize(before).unwrap(), decoded(&to, module, width, v1));
        let stated = entry["relative_error"].as_f64().unwrap();
        let measured = relative_error(&wanted, &found);
        assert!((stated - measured).abs() <= 1e-6 * measured, "{name}: {stated}, {measured}");
        if entry["exactness"] == "requantized" {
            assert_eq!(entry["decision"]["requantized"], true, "{name}");
            let groups = words(&to, &format!("{name}.g_idx"));
            errors.push((measured, nearest(&wanted, &groups, before.out_features(), width)));
        } else {
            assert_eq!((stated, &wanted), (0.0, &found), "{name}");
            exact += 1;
        }
    }
    (errors, exact)
}

fn assert_verified(from: &Checkpoint, out: &Output) {
    let found = verify(&out.dir, &OpenOptions::default(), Some(from), &Silent).unwrap();
    assert!(found.good, "{found:#?}");
}

#[test]
fn exl2_to_4_bits_is_measured_and_better_than_the_nearest() {
    let mut dirs = vec![EXL2.into()];
    if let Some(assets) = support::folder("REQUANT_ASSETS") {
        let entries = std::fs::read_dir(assets.join("exl2")).unwrap().map(|entry| entry.unwrap().path());
        dirs.extend(entries.filter(|dir| dir.join("config.json").is_file()));
        assert!(dirs.len() > 2);
    }
    for dir in dirs {
        let from = source(&dir);
        let out = gptq(&from, &bits(4)).unwrap();
        let (errors, _) = assert_claims(&from, &out, 4, true);
        assert!(!errors.is_empty());
        for (ours, nearest) in &errors {
            assert!(*ours > 0.0 && ours < nearest, "{}: {ours}, {nearest}", dir.display());
        }
        // By how much, in the mean: a search worth its time.
        let mean = |of: fn(&(f64, f64)) -> f64| errors.iter().map(of).sum::<f64>() / errors.len() as f64;
        let (ours, nearest) = (mean(|e| e.0), mean(|e| e.1));
        println!("{}: {} modules, {ours:.5}, nearest {nearest:.5}", dir.display(), errors.len());
        assert!(ours < 0.95 * nearest, "{}: {ours}, {nearest}", dir.display());
        assert_verified(&from, &out);
    }
}

#[test]
fn groups_that_fit_keep_their_weights() {
    let from = source(EXL2);
    let out = gptq(&from, &bits(4)).unwrap();
    let to = source(&out.dir);
    let (mut kept, mut changed) = (0, 0);
    for module in from.modules() {
        let Layout::Exl2(exl2) = module.layout() else { continue };
        let n = module.out_features();
        let (wanted, found) =
            (from.dequantize(module).unwrap(), to.dequantize(to.module(module.name()).unwrap()).unwrap());
        let packed = from.exl2(module).unwrap().invperm().inverse();
        let mut place = 0;
        for group in exl2.groups.groups() {
            for &row in &packed.map()[place..place + group.rows] {
                let same = wanted[row as usize * n..][..n] == found[row as usize * n..][..n];
                assert!(same || group.bits.get() > 4, "{}: row {row}", module.name());
                (kept, changed) = (kept + usize::from(same), changed + usize::from(!same));
            }
            place += group.rows;
        }
    }
    assert!(kept > 500 && changed > 500, "{kept}, {changed}");
}

#[test]
fn it_is_said_and_never_done_unasked() {
    let place = tempfile::tempdir().unwrap();
    let convert = |name: &str, flags: &[&str]| {
        let out = place.path().join(name);
        let ran = requant().args(["convert", EXL2, "--to", "gptq", "--out"]).arg(&out).args(flags).output();
        let ran = ran.unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let (stdout, stderr) = (text(ran.stdout), text(ran.stderr));
        assert!(ran.status.success(), "{stderr}");
        let report = json_of(out.join("report.json"));
        let modules = report["modules"].as_array().unwrap().iter();
        let lossy = modules.filter(|module| module["exactness"] == "requantized").count();
        (lossy, stdout, stderr)
    };
    let (lossy, stdout, stderr) = convert("narrow", &["--bits", "4"]);
    assert!(lossy > 0 && stderr.contains(&format!("{lossy} modules")), "{stderr}");
    assert!(stderr.contains("requantized"), "{stderr}");
    assert!(stdout.contains(&format!("{lossy} of ")), "{stdout}");
    for (name, flags) in [("plain", &[][..]), ("wide", &["--bits", "8"]), ("sym", &["--sym"])] {
        let (lossy, stdout, stderr) = convert(name, flags);
        assert!(lossy == 0 && !stderr.contains("requantized") && !stdout.contains("requantized"), "{name}");
    }
}

#[test]
fn eight_bits_to_four() {
    let dir = eight_bits().write();
    let from = source(dir.path());
    let out = gptq(&from, &bits(4)).unwrap();
    let (symmetric, exact) = assert_claims(&from, &out, 4, true);
    assert_eq!((symmetric.len(), exact), (7, 0));
    assert!(symmetric.iter().all(|(ours, nearest)| ours < nearest), "{symmetric:?}");
    assert_verified(&from, &out);
    assert!(gptq_layouts(&out).iter().all(|gptq| gptq.zeros.symmetric && gptq.group_size == 32));
    // Zero points of its own suit a module whose weights are mostly positive.
    for (convention, v1) in [(ZeroConvention::V2, false), (ZeroConvention::V1, true)] {
        let out = gptq(&from, &GptqOptions { zeros: Some(convention), ..bits(4) }).unwrap();
        let (asymmetric, _) = assert_claims(&from, &out, 4, v1);
        for ((asymmetric, _), (symmetric, _)) in asymmetric.iter().zip(&symmetric) {
            assert!(*asymmetric < 0.8 * symmetric, "{asymmetric}, {symmetric}");
        }
        assert!(gptq_layouts(&out).iter().all(|gptq| gptq.zeros.convention == convention));
        assert_verified(&from, &out);
    }
    // Symmetric at 8 bits isn't exact, either: refused until a width is asked for.
    assert!(gptq(&from, &GptqOptions { symmetric: true, ..GptqOptions::default() }).is_err());
    let out = gptq(&from, &GptqOptions { symmetric: true, ..bits(8) }).unwrap();
    let (errors, _) = assert_claims(&from, &out, 8, true);
    assert!(errors.len() == 7 && errors.iter().all(|(ours, _)| *ours < 0.01), "{errors:?}");
}

fn gptq_layouts(out: &Output) -> Vec<requant::checkpoint::Gptq> {
    let to = source(&out.dir);
    let gptq = to.modules().iter().filter_map(|module| match module.layout() {
        Layout::Gptq(gptq) => Some(gptq.clone()),
        _ => None,
    });
    gptq.collect()
}

#[test]
fn groups_of_any_size_and_sorted_rows() {
    let from = source(EXL2);
    for (size, order) in [(64, Order::Keep), (48, Order::Keep), (128, Order::Sorted), (100_000, Order::Keep)]
    {
        let out = gptq(&from, &GptqOptions { group_size: Some(size), order, ..bits(3) }).unwrap();
        assert_verified(&from, &out);
        for (entry, gptq) in modules(&out).iter().zip(gptq_layouts(&out)) {
            let k = entry["in_features"].as_u64().unwrap() as usize;
            assert_eq!((gptq.shape.bits.get(), gptq.group_size), (3, size.min(k)));
            let sorted = order == Order::Sorted && entry["name"].as_str().unwrap().contains("down_proj");
            assert_eq!(entry["decision"]["sorted"], sorted);
        }
    }
}

#[test]
fn a_wrong_error_is_found_out() {
    let dir = eight_bits().write();
    let from = source(dir.path());
    let out = gptq(&from, &bits(4)).unwrap();
    out.edit_json("report.json", |report| {
        let modules = report["modules"].as_array_mut().unwrap();
        let module = modules.iter_mut().find(|module| module["name"] == DOWN).unwrap();
        module["relative_error"] = (module["relative_error"].as_f64().unwrap() * 0.99).into();
    });
    let found = verify(&out.dir, &OpenOptions::default(), Some(&from), &Silent).unwrap();
    let faults: Vec<_> = found.faults().map(|(kind, fault)| (kind, fault.tensor.as_deref())).collect();
    assert_eq!(faults, [(CheckKind::Exactness, Some(DOWN))]);
}

#[test]
fn act_order_stays_refused_where_it_is_ignored() {
    let options = GptqOptions { bits: Bits::try_from(4).ok(), ..reader("vllm") };
    assert!(matches!(gptq(&source(EXL2), &options), Err(requant::Error::Plan(_))));
    // Other readers take it, symmetric.
    let options = GptqOptions { bits: Bits::try_from(4).ok(), group_size: Some(32), ..reader("sglang") };
    let out = gptq(&source(EXL2), &options).unwrap();
    assert!(gptq_layouts(&out).iter().all(|gptq| gptq.zeros.symmetric && gptq.shape.bits.get() == 4));
}

#[test]
fn one_warning_names_the_first() {
    let plan = Plan::to_gptq(&source(EXL2), &bits(4)).unwrap();
    let said: Vec<_> = plan.warnings.iter().filter(|w| w.code == WarningCode::Requantized).collect();
    assert_eq!(said.len(), 1);
    assert!(source(EXL2).module(&said[0].subject).is_some());
}
