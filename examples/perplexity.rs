//! The perplexity of a model of any layout, and how fast it was measured.
//!
//! `cargo run --release --example perplexity -- CHECKPOINT TEXT [TOKENS] [WINDOW] [THREADS]`

use anyhow::Context;
use requant::checkpoint::{Checkpoint, Layout, OpenOptions};
use requant::kernels::Cpu;
use requant::progress::Silent;
use requant::validate::{Text, Windows, perplexity};
use std::io::Write;
use std::time::Instant;

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [checkpoint, text, rest @ ..] = arguments.as_slice() else {
        anyhow::bail!("usage: perplexity CHECKPOINT TEXT [TOKENS] [WINDOW] [THREADS]");
    };
    let number = |i: usize, default: usize| rest.get(i).map_or(Ok(default), |number| number.parse());
    let checkpoint = Checkpoint::open(checkpoint.as_ref(), &OpenOptions::default())?;
    let windows =
        Windows::new(&Text::File(text.into()), &checkpoint, number(0, 8192)?, Some(number(1, 512)?), false)?;
    let cpu = Cpu::new(number(2, 0)?);
    let started = Instant::now();
    let found = perplexity(&checkpoint, &windows, &cpu, &Silent)?;
    let seconds = started.elapsed().as_secs_f64();
    let dims = checkpoint.dims().context("an architecture of the table")?;
    let head = checkpoint.modules().iter().any(|module| module.linear().is_none());
    let linears: u64 = checkpoint.modules().iter().map(|module| module.weights()).sum();
    let weights = linears + if head { 0 } else { (dims.vocab * dims.hidden) as u64 };
    let dense = checkpoint.modules().iter().filter(|m| matches!(m.layout(), Layout::Dense { .. })).count();
    writeln!(
        std::io::stdout(),
        "perplexity {:.4} (nll {:.6}, {} predictions, tokens {}), {dense} dense linears, {seconds:.2} s, \
         {:.1} GFLOP/s in products with weights",
        found.value(),
        found.mean_nll,
        found.predictions,
        windows.sha256(),
        2.0 * weights as f64 * windows.tokens.len() as f64 / seconds / 1e9,
    )?;
    Ok(())
}
