//! Measures what a conversion did to a model, with a limit of time: `validate SOURCE CONVERTED`.
#![allow(clippy::print_stdout)]

use anyhow::bail;
use requant::checkpoint::{Checkpoint, OpenOptions};
use requant::kernels::Cpu;
use requant::progress::{CancelFlag, Event, Observer};
use requant::validate::{Gates, Layers, Options, SwapIn, validate};
use std::sync::Arc;
use std::time::Duration;

/// Prints stages and estimates, and stops when the flag is set.
struct Printer(Arc<CancelFlag>);

impl Observer for Printer {
    fn event(&self, event: &Event<'_>) {
        match event {
            Event::Stage { name, modules, .. } => println!("{name}: {modules} to come"),
            Event::Estimate { stage, time } => println!("{stage}: about {time:.0?}"),
            _ => {}
        }
    }

    fn cancelled(&self) -> bool {
        self.0.is_set()
    }
}

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [source, converted] = &arguments[..] else { bail!("usage: validate SOURCE CONVERTED") };
    let open = |dir: &String| Checkpoint::open(dir.as_ref(), &OpenOptions::default());
    let (source, converted) = (open(source)?, open(converted)?);
    let options = Options {
        tokens: 2048,
        // The three layers whose outputs are furthest off, each alone.
        swap_in: Some(SwapIn { layers: Layers::Worst(3), tokens: 512 }),
        gates: Gates { max_kl: Some(0.1), ..Gates::default() },
        ..Options::default()
    };
    let flag = Arc::new(CancelFlag::default());
    let timeout = Arc::clone(&flag);
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(3600));
        timeout.cancel();
    });
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let validation = validate(&source, &converted, &options, &Cpu::new(threads), &Printer(flag))?;
    if let Some(model) = &validation.model {
        println!("KL {:.6} ± {:.6}", model.kl.mean, model.kl.standard_error);
    }
    for layer in validation.layers.iter().filter(|layer| layer.swap_in.is_some()) {
        println!("{}: {:?}", layer.source, layer.swap_in);
    }
    println!("{:?}", validation.verdict);
    Ok(())
}
