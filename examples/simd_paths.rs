//! Quantizes the same module on every instruction set of this processor: asserts that codes, scales and errors
//! are the same bit for bit, and prints million weights a second of one core for each, the best of several runs.
//!
//! ```sh
//! taskset -c 0 cargo run --release --example simd_paths            # a synthetic 4096 × 4096, 4-bit act-order
//! taskset -c 0 cargo run --release --example simd_paths -- DIR     # the first GPTQ linears of a checkpoint
//! ```
#![allow(clippy::print_stdout)]

use anyhow::ensure;
use requant::checkpoint::{Checkpoint, OpenOptions};
use requant::formats::exl2::Bits;
use requant::formats::gptq::{self, GIdx, Shape};
use requant::quantize::{Fit, RowOrder, Samples, Search, SimdPath, Source, fit_group_on};
use std::time::{Duration, Instant};

const SIZE: usize = 4096;
const GROUP_SIZES: [usize; 3] = [32, 64, 128];
const RUNS: usize = 5;
/// Linears of a checkpoint, and groups of each.
const LINEARS: usize = 7;
const GROUPS: usize = 8;

fn main() -> anyhow::Result<()> {
    let sources = match std::env::args().nth(1) {
        Some(dir) => {
            let checkpoint = Checkpoint::open(dir.as_ref(), &OpenOptions::default())?;
            let linears = checkpoint.modules().iter().filter(|m| m.layout().is_quantized()).take(LINEARS);
            let source = |module| Ok(Source::gptq(checkpoint.gptq(module)?, RowOrder::Grouped));
            linears.map(source).collect::<anyhow::Result<Vec<_>>>()?
        }
        None => vec![synthetic()?],
    };
    let paths = SimdPath::available();
    let names: Vec<&str> = paths.iter().map(|path| path.name()).collect();
    println!("M weights/s of one core, best of {RUNS}; this machine has {}", names.join(", "));
    println!("group  bits  {}", names.iter().map(|name| format!("{name:>8}")).collect::<String>());
    let mut seconds_a_weight = vec![0.0; paths.len()];
    for group_size in GROUP_SIZES {
        for bits in Bits::ALL {
            let mut line = format!("{group_size:5}  {:4}  ", bits.get());
            let mut expected: Option<Vec<Fit>> = None;
            for (&path, total) in paths.iter().zip(&mut seconds_a_weight) {
                let mut best = Duration::MAX;
                let mut weights = 0;
                for _ in 0..RUNS {
                    let start = Instant::now();
                    let (fits, count) = fit(&sources, group_size, bits, path);
                    best = best.min(start.elapsed());
                    weights = count;
                    let same = expected.get_or_insert_with(|| fits.clone()) == &fits;
                    ensure!(same, "{path} differs from {}: group {group_size}, {bits:?}", names[0]);
                }
                let seconds = best.as_secs_f64() / weights as f64;
                *total += seconds;
                line += &format!("{:8.1}", 1e-6 / seconds);
            }
            println!("{line}");
        }
    }
    let all: String = seconds_a_weight.iter().map(|total| format!("{:8.1}", 1e-6 / total)).collect();
    println!("all 18 options {}", all.trim_start_matches("  "));
    println!("all paths gave the same codes, scales and errors, bit for bit");
    Ok(())
}

/// Samples, search and codes of some groups of each source, on this thread.
fn fit(sources: &[Source], group_size: usize, bits: Bits, path: SimdPath) -> (Vec<Fit>, usize) {
    let (mut fits, mut weights) = (Vec::new(), 0);
    for source in sources {
        for places in source.cut(group_size).groups.into_iter().take(GROUPS) {
            weights += places.len() * source.out_features();
            let samples = Samples::new(source, places);
            fits.push(fit_group_on(&samples, bits, &Search::for_bits(bits, samples.grid()), path));
        }
    }
    (fits, weights)
}

/// Nearly normal codes under scales that differ by column.
fn synthetic() -> anyhow::Result<Source> {
    let groups = SIZE / 128;
    let shape = Shape { in_features: SIZE, out_features: SIZE, bits: gptq::Bits::try_from(4)?, groups };
    let words = |len: usize| (0..len as u32).map(|i| i.wrapping_mul(0x9E37_79B9).rotate_left(i % 31) ^ i);
    let code =
        |word: u32| (((word & 15) + (word >> 4 & 15) + (word >> 8 & 15) + (word >> 12 & 15)) / 4) as u8;
    let codes = words(SIZE * SIZE).map(code).collect();
    let scales = words(groups * SIZE).map(|word| 2e-3 + (word & 1023) as f32 * 4e-6).collect();
    let index: Vec<i64> = (0..SIZE as i64).map(|row| row % groups as i64).collect();
    let g_idx = GIdx::new(Some(&index), SIZE, groups, None)?;
    let matrix = gptq::Matrix::new(shape, codes, vec![8; groups * SIZE], scales, g_idx)?;
    Ok(Source::gptq(matrix, RowOrder::Grouped))
}
