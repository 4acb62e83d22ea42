//! Quantizes every GPTQ linear of a checkpoint at each width, with one group size for all, and prints the
//! mean relative Frobenius error and the weights per second that the search takes. `REQUANT_SIMD` forces an
//! instruction set.
//!
//! ```sh
//! cargo run --release --example uniform_error -- smollm2-135m-gptq 64
//! ```
#![allow(clippy::print_stdout)]

use anyhow::Context;
use rayon::prelude::*;
use requant::checkpoint::{Checkpoint, OpenOptions};
use requant::formats::exl2::Bits;
use requant::quantize::{RowOrder, Samples, SimdPath, Source, fit_group};
use std::time::Instant;

fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().context("usage: uniform_error DIR [GROUP_SIZE]")?;
    let group_size: usize = args.next().map_or(Ok(64), |size| size.parse())?;
    let checkpoint = Checkpoint::open(dir.as_ref(), &OpenOptions::default())?;
    let mut sources = Vec::new();
    for module in checkpoint.modules().iter().filter(|m| m.layout().is_quantized()) {
        sources.push(Source::gptq(checkpoint.gptq(module)?, RowOrder::Grouped));
    }
    let weights: usize = sources.iter().map(|s| s.in_features() * s.out_features()).sum();
    let path = SimdPath::chosen()?;
    println!("{} linears, {weights} weights, group {group_size}, {path}", sources.len());
    println!("bits  mean relative error  M weights/s ({} threads)", rayon::current_num_threads());
    for bits in Bits::ALL {
        let start = Instant::now();
        let errors = sources.iter().map(|source| {
            let groups: Vec<(f64, f64)> = (source.cut(group_size).groups.into_par_iter())
                .map(|places| {
                    let samples = Samples::new(source, places);
                    (fit_group(&samples, bits).squared_error, samples.squared_norm())
                })
                .collect();
            let sum = |part: fn(&(f64, f64)) -> f64| groups.iter().map(part).sum::<f64>();
            (sum(|g| g.0) / sum(|g| g.1)).sqrt()
        });
        let mean = errors.sum::<f64>() / sources.len() as f64;
        println!(
            "{:4}  {mean:19.6}  {:.1}",
            bits.get(),
            weights as f64 / start.elapsed().as_secs_f64() / 1e6
        );
    }
    Ok(())
}
