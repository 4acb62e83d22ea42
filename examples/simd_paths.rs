//! Quantizes the same module on every instruction set of this processor: asserts that codes, scales and errors
//! are the same bit for bit, and prints million weights a second of one core for each, the best of several runs.
//!
//! ```sh
//! taskset -c 0 cargo run --release --example simd_paths            # a synthetic 4096 × 4096, 4-bit act-order
//! taskset -c 0 cargo run --release --example simd_paths -- DIR     # the first GPTQ linears of a checkpoint
//! ```
#![allow(clippy::print_stdout)]

#[path = "../benches/synthetic/mod.rs"]
mod synthetic;

use anyhow::ensure;
use requant::checkpoint::{Checkpoint, OpenOptions};
use requant::formats::exl2::Bits;
use requant::quantize::{Fit, RowOrder, Samples, Search, SimdPath, Source, fit_group_on};
use std::time::{Duration, Instant};

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
        None => vec![synthetic::source(128)],
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
