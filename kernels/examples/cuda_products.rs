//! Times products on a GPU and measures how exact they are.
//!
//! `cargo run --release -p requant-kernels --example cuda_products [K N]...`
//!
//! Each time is the mean over repeats that are waited for together, of the whole operation: splitting activations,
//! decoding, multiplying. The error is the norm of the difference from fp64 over the decoded weight, relative, of
//! a sample of columns.
#![allow(clippy::print_stdout, reason = "what an example is for")]

use half::f16;
use requant_formats::Permutation;
use requant_formats::exl2::{self, Group, GroupTable};
use requant_formats::gptq::{self, GIdx, Shape};
use requant_kernels::cuda::{Cuda, Setup};
use requant_kernels::{Dense, DenseType, Operations, Weight};
use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

/// Rows of a group.
const GROUP: usize = 128;
/// Columns whose error is measured.
const SAMPLE: usize = 32;

fn main() -> Result<(), Box<dyn Error>> {
    let sizes: Vec<usize> = std::env::args().skip(1).map(|size| size.parse()).collect::<Result<_, _>>()?;
    let shapes: Vec<(usize, usize)> = match sizes.as_chunks::<2>().0 {
        [] => vec![(4096, 4096), (4096, 14336)],
        pairs => pairs.iter().map(|&[k, n]| (k, n)).collect(),
    };
    let cuda = Cuda::new(0, &Setup::from_environment())?;
    println!("{}, {:.1} GiB free", cuda.name(), cuda.memory_left()? as f64 / f64::from(1 << 30));
    for (k, n) in shapes {
        for (name, weight) in [
            ("gptq-4 act-order", gptq(k, n)?),
            ("exl2-4.0", exl2(k, n, &[(4, k)])?),
            ("exl2-mix", exl2(k, n, &mix(k))?),
            ("fp16", dense(k, n, DenseType::F16)),
            ("bf16", dense(k, n, DenseType::Bf16)),
        ] {
            measure(&cuda, name, &weight, k, n)?;
        }
    }
    Ok(())
}

fn measure(cuda: &Cuda, name: &str, weight: &Weight, k: usize, n: usize) -> Result<(), Box<dyn Error>> {
    let before = cuda.memory_left()?;
    let on_device = cuda.upload_weight(weight)?;
    cuda.synchronize()?;
    let bits = (before - cuda.memory_left()?) as f64 * 8.0 / (k * n) as f64;
    let decoded = cuda.dequantize(&on_device)?;
    println!("{name}, {k} × {n}: {bits:.2} bits a weight on the device");
    for m in [1usize, 8, 16, 64, 65, 512, 2048, 8192] {
        let values: Vec<f32> = (0..m * k).map(|i| random(i as u64 + 3) * 4.0 - 2.0).collect();
        let x = cuda.upload(&values, k)?;
        let y = cuda.matmul(&x, &on_device, None)?;
        let found = cuda.download(&y)?;
        drop(y);
        let repeats = if m > 512 { 5 } else { 20 };
        let start = Instant::now();
        for _ in 0..repeats {
            cuda.matmul(&x, &on_device, None)?;
        }
        cuda.synchronize()?;
        let seconds = start.elapsed().as_secs_f64() / f64::from(repeats);
        let tera = 2.0 * (m * k * n) as f64 / seconds / 1e12;
        let (mut error, mut norm) = (0.0, 0.0);
        for row in (0..m).step_by((m / 16).max(1)) {
            for column in (0..n).step_by((n / SAMPLE).max(1)) {
                let sum: f64 =
                    (0..k).map(|i| f64::from(values[row * k + i]) * decoded[i * n + column].to_f64()).sum();
                error += (f64::from(found[row * n + column]) - sum).powi(2);
                norm += sum * sum;
            }
        }
        let error = (error / norm).sqrt();
        println!("  m {m:>5}  {:>9.1} µs  {tera:>7.1} TFLOP/s  error {error:.1e}", seconds * 1e6);
    }
    Ok(())
}

/// Numbers in 0..1 without a pattern (splitmix64).
fn random(i: u64) -> f32 {
    let mut z = i.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z >> 40) as f32 / (1u64 << 24) as f32
}

fn below(i: u64, limit: u32) -> u32 {
    (random(i) * limit as f32) as u32 % limit
}

fn gptq(k: usize, n: usize) -> Result<Weight, Box<dyn Error>> {
    let groups = k / GROUP;
    let order = permutation(k);
    let mut index = vec![0i64; k];
    for (place, &row) in order.iter().enumerate() {
        index[row as usize] = (place / GROUP) as i64;
    }
    let shape = Shape { in_features: k, out_features: n, bits: 4.try_into()?, groups };
    let codes = (0..k * n).map(|i| below(i as u64, 16) as u8).collect();
    let scales = (0..groups * n).map(|i| f16::from_f32(0.01 * random(i as u64 + 9)).to_f32()).collect();
    let g_idx = GIdx::new(Some(&index), k, groups, None)?;
    Ok(gptq::Matrix::new(shape, codes, vec![8; groups * n], scales, g_idx)?.into())
}

/// 10 % at 5 bits, 50 % at 4, 40 % at 3.
fn mix(k: usize) -> [(u32, usize); 3] {
    let part = |share: usize| k * share / 100 / GROUP * GROUP;
    [(5, part(10)), (4, part(50)), (3, k - part(10) - part(50))]
}

fn exl2(k: usize, n: usize, widths: &[(u32, usize)]) -> Result<Weight, Box<dyn Error>> {
    let mut groups = Vec::new();
    for &(bits, rows) in widths {
        let bits = bits.try_into()?;
        groups.extend((0..rows / GROUP).map(|_| Group { bits, rows: GROUP }));
    }
    let mut codes = Vec::with_capacity(k * n);
    for group in &groups {
        let start = codes.len() as u64;
        codes.extend((0..(group.rows * n) as u64).map(|i| below(start + i, group.bits.max_code() + 1) as u8));
    }
    let scale_index = (0..groups.len() * n).map(|i| below(i as u64, 16) as u8).collect();
    let scale_max = groups.iter().map(|_| f16::from_f32(0.01)).collect();
    let invperm = Permutation::new(permutation(k))?;
    let matrix = exl2::Matrix::new(GroupTable::new(groups)?, n, codes, scale_index, scale_max, invperm)?;
    Ok(Weight::Exl2 { matrix: Arc::new(matrix), out_features: n })
}

fn dense(k: usize, n: usize, dtype: DenseType) -> Weight {
    // Multiples of 1/64 up to 2: both types hold them.
    let value = |i: usize| (below(i as u64, 256) as f32 - 128.0) / 64.0;
    let bytes: Vec<u8> = match dtype {
        DenseType::Bf16 => (0..k * n).flat_map(|i| half::bf16::from_f32(value(i)).to_le_bytes()).collect(),
        _ => (0..k * n).flat_map(|i| f16::from_f32(value(i)).to_le_bytes()).collect(),
    };
    Dense { dtype, out_features: n, in_features: k, bytes: Arc::new(bytes) }.into()
}

fn permutation(k: usize) -> Vec<u32> {
    let mut rows: Vec<u32> = (0..k as u32).collect();
    for i in (1..k).rev() {
        rows.swap(i, below(i as u64 + 77, i as u32 + 1) as usize);
    }
    rows
}
