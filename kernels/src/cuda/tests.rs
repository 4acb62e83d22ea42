//! What only this device has: panels, chunks, padding, scales that fp16 doesn't hold, the compiler and its cache.

use super::cubins::{self, FILES, HEADERS};
use super::unavailable::Unavailable;
use super::{Compiler, Cuda, Setup, nvrtc, survey};
use crate::tests::Stream;
use crate::{Cpu, Dense, DenseType, Error, Operations, Weight};
use half::f16;
use requant_formats::Permutation;
use requant_formats::exl2::{self, Group, GroupTable};
use requant_formats::gptq::{self, GIdx, Shape};
use std::sync::{Arc, OnceLock};

fn required(variable: &str) -> bool {
    std::env::var_os(variable).is_some_and(|value| value == "1")
}

/// The device of all tests, with poisoned memory; none where there is none, unless one is required.
pub(crate) fn gpu() -> &'static Option<Cuda> {
    static GPU: OnceLock<Option<Cuda>> = OnceLock::new();
    let gpu = GPU.get_or_init(|| {
        let cuda = Cuda::new(0, &Setup::from_environment());
        cuda.map(Cuda::poisoned).map_err(|unavailable| skip("tests on a GPU", &unavailable)).ok()
    });
    assert!(gpu.is_some() || !required("REQUIRE_GPU"), "a GPU is required");
    gpu
}

#[allow(clippy::print_stderr, reason = "a test that is skipped must be seen")]
fn skip(what: &str, why: &Unavailable) {
    eprintln!("SKIPPED: {what}: {why}");
}

fn compiler() -> Option<Compiler> {
    match nvrtc::find(&Setup::from_environment(), None, None) {
        Ok(compiler) => Some(compiler),
        Err(unavailable) => {
            assert!(!required("REQUIRE_NVRTC"), "NVRTC is required: {unavailable}");
            skip("compiling kernels", &unavailable);
            None
        }
    }
}

#[test]
fn every_kernel_compiles_for_every_architecture() {
    let Some(compiler) = compiler() else { return };
    // CUDA 12.8 is the first that knows Blackwell.
    assert!(compiler.version() >= (12, 8) || !required("REQUIRE_NVRTC"), "NVRTC 12.8 or later is required");
    let known = |&capability: &(u32, u32)| capability < (10, 0) || compiler.version() >= (12, 8);
    let capabilities = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)];
    std::thread::scope(|scope| {
        for capability in capabilities.into_iter().filter(known) {
            let compiler = &compiler;
            scope.spawn(move || compiles(compiler, capability));
        }
    });
}

fn compiles(compiler: &Compiler, capability: (u32, u32)) {
    for (file, source, names) in FILES {
        let code = compiler.compile(file, source, &HEADERS, &cubins::options(capability));
        let code = code.unwrap_or_else(|error| panic!("{capability:?}: {error}"));
        for name in *names {
            let name = name.as_bytes();
            assert!(code.windows(name.len()).any(|part| part == name), "{file} lacks a kernel");
        }
    }
}

#[test]
fn compiled_kernels_are_kept_and_damaged_ones_made_anew() {
    let Some(compiler) = compiler() else { return };
    let cache = tempfile::tempdir().expect("a folder");
    let (file, source, _) = FILES[2];
    let compiled = |source: &str, capability| {
        let options = cubins::options(capability);
        cubins::compiled(&compiler, Some(cache.path()), file, source, &options).expect("code")
    };
    let entries = || {
        let folder = std::fs::read_dir(cache.path().join("kernels")).expect("entries");
        folder.map(|entry| entry.expect("an entry").path()).collect::<Vec<_>>()
    };
    let first = compiled(source, (8, 0));
    let [entry] = &entries()[..] else { panic!("one entry") };
    let whole = std::fs::read(entry).expect("an entry");

    // What is kept is used: an entry with other code and its checksum comes back as it is.
    let other = b"other code";
    let sum = xxhash_rust::xxh3::xxh3_128(other).to_le_bytes();
    std::fs::write(entry, [&sum[..], other].concat()).expect("an entry");
    assert_eq!(compiled(source, (8, 0)), other);

    // Cut short, empty, one bit off: compiled anew, and whole again.
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    for damaged in [&whole[..whole.len() - 1], &whole[..7], &[], &flipped] {
        std::fs::write(entry, damaged).expect("an entry");
        assert_eq!(compiled(source, (8, 0)), first);
        assert_eq!(std::fs::read(entry).expect("an entry"), whole);
    }
    // Another source and another architecture are other entries.
    compiled(&format!("{source}\n"), (8, 0));
    compiled(source, (9, 0));
    assert_eq!(entries().len(), 3);
}

#[test]
fn a_kernel_that_is_wrong_is_told_by_its_file_and_the_compiler() {
    let Some(compiler) = compiler() else { return };
    let result = compiler.compile("rows.cu", "__global__ void wrong() { nonsense; }", &[], &[]);
    let Err(Unavailable::Compilation { file: "rows.cu", log }) = result else { panic!("{result:?}") };
    assert!(log.contains("nonsense"), "{log}");
}

#[test]
fn probing_never_panics() {
    let survey = survey(&Setup { cuda_path: Some("/nonexistent".into()), ..Setup::default() });
    assert_eq!(survey.compiler.err(), Some(Unavailable::NoCompiler));
    match survey.driver {
        Ok(_) => assert!(!survey.devices.is_empty()),
        Err(unavailable) => {
            assert!(survey.devices.is_empty());
            assert!(!unavailable.hint().is_empty());
            assert_eq!(Cuda::new(0, &Setup::default()).err(), Some(unavailable));
        }
    }
}

#[test]
fn a_device_beyond_the_last_is_told() {
    if gpu().is_none() {
        return;
    }
    let result = Cuda::new(1000, &Setup::from_environment());
    assert!(matches!(result, Err(Unavailable::NoSuchDevice { ordinal: 1000, .. })), "{result:?}");
}

#[test]
fn memory_that_is_not_there_is_told() {
    let Some(cuda) = gpu() else { return };
    let result = cuda.tensor("copy", 1 << 30, 1 << 14).err();
    assert!(
        matches!(result, Some(Error::OutOfMemory { operation: "copy", needed, .. }) if needed == 1 << 46),
        "{result:?}"
    );
    assert!(matches!(cuda.tensor("copy", 1 << 40, 1 << 40), Err(Error::Shape { .. })));
    // It works on.
    let x = cuda.upload(&[1.0, 2.0], 2).expect("room");
    assert_eq!(cuda.download(&x), Ok(vec![1.0, 2.0]));
    assert!(cuda.memory_left().expect("a number") > 0);
}

/// How rows belong to groups.
#[derive(Clone, Copy, Debug)]
enum Order {
    /// Runs of so many rows.
    Size(usize),
    /// Any row to any group of so many.
    Any(usize),
}

fn gptq(bits: u32, k: usize, n: usize, order: Order, scale: impl Fn(f32) -> f32, symmetric: bool) -> Weight {
    let mut random = Stream(u64::from(bits) << 40 | (k as u64) << 20 | n as u64 | 1);
    let bits: gptq::Bits = bits.try_into().expect("a width");
    let (index, groups): (Vec<i64>, usize) = match order {
        Order::Size(size) => ((0..k).map(|row| (row / size) as i64).collect(), k.div_ceil(size)),
        Order::Any(groups) => ((0..k).map(|_| i64::from(random.below(groups as u32))).collect(), groups),
    };
    let codes = (0..k * n).map(|_| random.below(bits.max_code() + 1) as u8).collect();
    let zeros = (0..groups * n)
        .map(|_| if symmetric { bits.symmetric_zero() } else { random.below(bits.max_code() + 2) as u16 })
        .collect();
    let scales = (0..groups * n).map(|_| scale(random.activation())).collect();
    let g_idx = GIdx::new(Some(&index), k, groups, None).expect("groups in range");
    let shape = Shape { in_features: k, out_features: n, bits, groups };
    gptq::Matrix::new(shape, codes, zeros, scales, g_idx).expect("a matrix").into()
}

fn half_scale(x: f32) -> f32 {
    f16::from_f32(x * 0.02).to_f32()
}

fn exl2(groups: &[(u32, usize)], n: usize, out_features: usize) -> Weight {
    let mut random = Stream(n as u64 * 77 + groups.len() as u64);
    let groups: Vec<Group> =
        groups.iter().map(|&(bits, rows)| Group { bits: bits.try_into().expect("a width"), rows }).collect();
    let mut codes = Vec::new();
    for group in &groups {
        codes.extend((0..group.rows * n).map(|_| random.below(group.bits.max_code() + 1) as u8));
    }
    let scale_index = (0..groups.len() * n).map(|_| random.below(16) as u8).collect();
    let scale_max = groups.iter().map(|_| f16::from_bits(0x0100 + random.below(0x3000) as u16)).collect();
    let table = GroupTable::new(groups).expect("groups");
    let k = table.rows();
    let mut map: Vec<u32> = (0..k as u32).collect();
    (1..k).for_each(|i| map.swap(i, random.below(i as u32 + 1) as usize));
    let invperm = Permutation::new(map).expect("a permutation");
    let matrix = exl2::Matrix::new(table, n, codes, scale_index, scale_max, invperm).expect("a matrix");
    Weight::Exl2 { matrix: Arc::new(matrix), out_features }
}

fn dense(dtype: DenseType, k: usize, n: usize) -> Weight {
    let mut random = Stream((k * n) as u64 | 1);
    let bytes: Vec<u8> = (0..k * n)
        .flat_map(|_| {
            let value = random.activation();
            match dtype {
                DenseType::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
                DenseType::Bf16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
                DenseType::F32 => value.to_le_bytes().to_vec(),
            }
        })
        .collect();
    Dense { dtype, out_features: n, in_features: k, bytes: Arc::new(bytes) }.into()
}

/// Every form that a weight has on the device, degenerate ones with the reason.
fn weights() -> Vec<(&'static str, Weight)> {
    use DenseType::{Bf16, F16, F32};
    vec![
        ("2 bits", gptq(2, 320, 130, Order::Size(64), half_scale, false)),
        ("3 bits: codes straddle words", gptq(3, 320, 130, Order::Size(64), half_scale, false)),
        ("4 bits, one zero point", gptq(4, 576, 192, Order::Size(64), half_scale, true)),
        ("8 bits: zero points up to 256", gptq(8, 288, 64, Order::Size(128), half_scale, false)),
        ("act-order: units of several groups", gptq(4, 576, 129, Order::Any(9), half_scale, false)),
        ("groups that end inside units", gptq(4, 300, 33, Order::Size(48), half_scale, false)),
        ("a last unit of one row", gptq(3, 257, 31, Order::Size(257), half_scale, false)),
        ("a single column", gptq(4, 64, 1, Order::Size(32), half_scale, false)),
        ("a single row", gptq(8, 1, 40, Order::Size(1), half_scale, false)),
        ("scales beyond fp16's precision", gptq(4, 320, 70, Order::Size(64), |x| x * 0.0173, false)),
        ("scales beyond fp16's range", gptq(8, 64, 32, Order::Any(2), |x| x * 2e-7, false)),
        ("all widths of EXL2", exl2(&[(8, 32), (6, 64), (5, 32), (4, 96), (3, 32), (2, 64)], 160, 160)),
        ("padding columns", exl2(&[(4, 128), (3, 128)], 64, 37)),
        ("a last group that is shorter", exl2(&[(5, 128), (4, 128), (4, 32)], 128, 128)),
        ("one group of EXL2", exl2(&[(2, 32)], 32, 32)),
        ("fp16", dense(F16, 320, 130)),
        ("fp16, rows of no whole 16 bytes", dense(F16, 37, 19)),
        ("bf16", dense(Bf16, 288, 70)),
        ("fp32", dense(F32, 290, 150)),
    ]
}

/// Relative to Σ |x · w|: the parts that activations are split into keep 22 bits, and each step of 16 rows is
/// rounded or cut at fp32's last bit, chunk by chunk.
const PRODUCT: f64 = 8.0 * f32::EPSILON as f64;

#[test]
fn decodes_the_references_bits_and_multiplies_by_them() {
    let Some(cuda) = gpu() else { return };
    let cpu = Cpu::new(0);
    for (why, weight) in weights() {
        let (k, n) = (weight.in_features(), weight.out_features());
        let on_device = cuda.upload_weight(&weight).expect("room");
        let decoded = cuda.dequantize(&on_device).expect("weights");
        let expected =
            cpu.upload_weight(&weight).and_then(|weight| cpu.dequantize(&weight)).expect("weights");
        let differs = decoded.iter().zip(&expected).position(|(a, b)| a.to_bits() != b.to_bits());
        assert_eq!(decoded.len(), expected.len(), "{why}");
        assert_eq!(differs, None, "{why}: element {differs:?} of [{k}, {n}]");

        // As stored, where that isn't fp16.
        let stored = |row: usize, column: usize| match &weight {
            Weight::Dense(dense) if dense.dtype != DenseType::F16 => {
                let size = dense.dtype.size();
                let at = (column * k + row) * size;
                let bytes = &(*dense.bytes).as_ref()[at..at + size];
                match dense.dtype {
                    DenseType::F32 => f64::from(f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])),
                    _ => half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
                }
            }
            _ => expected[row * n + column].to_f64(),
        };
        let mut random = Stream(91);
        // Few rows and many, at and beyond the sizes of blocks.
        let most = 200;
        let x = random.activations(most * k, 3.0);
        let mut largest: Option<Vec<f32>> = None;
        for m in [most, 129, 128, 65, 64, 33, 17, 16, 1] {
            let y = cuda.matmul(&cuda.upload(&x[..m * k], k).expect("room"), &on_device, None);
            let y = cuda.download(&y.expect("a product")).expect("a product");
            assert_eq!(y.len(), m * n);
            match &largest {
                // A row doesn't depend on the others, nor on the kernel that their number chooses.
                Some(largest) => {
                    let differs = y.iter().zip(largest).position(|(a, b)| a.to_bits() != b.to_bits());
                    assert_eq!(differs, None, "{why}: {m} rows");
                }
                None => largest = Some(y),
            }
        }
        let y = largest.expect("a product");
        for row in [0, 1, 63, 64, 127, 128, 199] {
            for column in 0..n {
                let terms = (0..k).map(|i| f64::from(x[row * k + i]) * stored(i, column));
                let (sum, magnitude) = terms.fold((0.0, 0.0), |(s, a), term| (s + term, a + term.abs()));
                let off = (f64::from(y[row * n + column]) - sum).abs();
                assert!(
                    off <= PRODUCT * magnitude,
                    "{why}: [{row}, {column}]: {} for {sum}",
                    y[row * n + column]
                );
            }
        }
    }
}

#[test]
fn panels_of_any_width_give_the_same_bits() {
    if gpu().is_none() {
        return;
    }
    let mut cuda = Cuda::new(0, &Setup::from_environment()).expect("the device of other tests").poisoned();
    let bias_of = |n: usize| Stream(7).activations(n, 1.0);
    for weight in [
        gptq(4, 96, 300, Order::Any(3), half_scale, false),
        exl2(&[(5, 64), (3, 32)], 288, 270),
        dense(DenseType::F32, 70, 300),
    ] {
        let (k, n) = (weight.in_features(), weight.out_features());
        let x = Stream(5).activations(80 * k, 1.0);
        let mut products = Vec::new();
        // One panel, three.
        for panel in [1 << 20, 1] {
            cuda.panel = panel;
            let on_device = cuda.upload_weight(&weight).expect("room");
            let bias = cuda.upload(&bias_of(n), n).expect("room");
            let x = cuda.upload(&x, k).expect("room");
            let y = cuda.matmul(&x, &on_device, Some(&bias)).expect("a product");
            products.push(cuda.download(&y).expect("a product"));
            let few = cuda.select_rows(&x, &[3, 79]).expect("rows");
            let few = cuda.matmul(&few, &on_device, Some(&bias)).expect("a product");
            let few = cuda.download(&few).expect("a product");
            let rows = [&products[0][3 * n..4 * n], &products[0][79 * n..]].concat();
            assert!(few.iter().zip(&rows).all(|(a, b)| a.to_bits() == b.to_bits()));
        }
        assert!(products[0].iter().zip(&products[1]).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}

#[test]
fn activations_of_any_size_keep_fp32s_accuracy() {
    let Some(cuda) = gpu() else { return };
    let weight = gptq(4, 64, 8, Order::Size(32), half_scale, false);
    let cpu = Cpu::new(0);
    let decoded = cpu.upload_weight(&weight).and_then(|weight| cpu.dequantize(&weight)).expect("weights");
    let on_device = cuda.upload_weight(&weight).expect("room");
    // Far outside of fp16's range: each row has its own power of two. Last, one that is much larger than the others.
    let mut rows: Vec<Vec<f32>> = [1e30, 1e-30, 1e-38, 65_504.0, 1e9, 0.0]
        .iter()
        .map(|&scale| Stream(3).activations(64, scale))
        .collect();
    rows.push(Stream(3).activations(64, 1e-3));
    rows[6][17] = 5e4;
    let y = cuda.matmul(&cuda.upload(&rows.concat(), 64).expect("room"), &on_device, None);
    let y = cuda.download(&y.expect("a product")).expect("a product");
    for (row, y) in rows.iter().zip(y.chunks(8)) {
        for (column, &y) in y.iter().enumerate() {
            let terms = (0..64).map(|i| f64::from(row[i]) * decoded[i * 8 + column].to_f64());
            let (sum, magnitude) = terms.fold((0.0, 0.0), |(s, a), term| (s + term, a + term.abs()));
            // Below fp32's smallest normal number, its step.
            let bound = PRODUCT * magnitude + f64::from(f32::from_bits(2));
            assert!((f64::from(y) - sum).abs() <= bound, "{y:e} for {sum:e}");
        }
    }
    // What isn't finite stays so, in its row alone.
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for rows in [3, 70] {
            let mut x = Stream(3).activations(rows * 64, 1.0);
            x[64 + 5] = bad;
            let y = cuda.matmul(&cuda.upload(&x, 64).expect("room"), &on_device, None).expect("a product");
            assert_eq!(cuda.first_non_finite(&y), Ok(Some(1)));
            let y = cuda.download(&y).expect("a product");
            assert!(y[2 * 8..].iter().all(|y| y.is_finite()));
        }
    }
}

#[test]
fn heads_of_all_sizes_attend_as_on_the_cpu() {
    let Some(cuda) = gpu() else { return };
    let cpu = Cpu::new(0);
    // Each kernel, full and not; beyond the largest it is refused.
    for head_dim in [1, 5, 64, 65, 96, 128, 160, 256] {
        let shape = crate::Attention {
            heads: 2,
            kv_heads: 1,
            head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            window: 70,
            sliding: Some(40),
            soft_cap: None,
        };
        let mut random = Stream(head_dim as u64);
        let q = random.activations(100 * 2 * head_dim, 3.0);
        let (k, v) = (random.activations(100 * head_dim, 3.0), random.activations(100 * head_dim, 1.0));
        let expected = attend(&cpu, &q, &k, &v, &shape);
        let found = attend(cuda, &q, &k, &v, &shape);
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert!((found - expected).abs() < 4e-6, "{head_dim}: element {i}: {found} for {expected}");
        }
    }
    let x = cuda.upload(&[0.0; 257], 257).expect("room");
    let shape = crate::Attention {
        heads: 1,
        kv_heads: 1,
        head_dim: 257,
        scale: 1.0,
        window: 1,
        sliding: None,
        soft_cap: None,
    };
    assert!(matches!(cuda.attention(&x, &x, &x, &shape), Err(Error::Shape { operation: "attention", .. })));
}

fn attend<O: Operations>(ops: &O, q: &[f32], k: &[f32], v: &[f32], shape: &crate::Attention) -> Vec<f32> {
    let of = |x: &[f32], heads: usize| ops.upload(x, heads * shape.head_dim).expect("room");
    let y = ops.attention(&of(q, shape.heads), &of(k, shape.kv_heads), &of(v, shape.kv_heads), shape);
    ops.download(&y.expect("shapes that fit")).expect("a result")
}
