//! Converts a GPTQ checkpoint to EXL2 through the library: what `requant convert` does, in a program of your
//! own, with progress and a way to stop.
//!
//! ```sh
//! cargo run --release --example convert -- fixtures/tiny-llama-gptq out/by-example 4.25
//! ```
#![allow(clippy::print_stdout)]

use anyhow::{Context, bail};
use requant::checkpoint::OpenOptions;
use requant::progress::{CancelFlag, Event, Observer};
use requant::{Checkpoint, ConvertOptions, Diagnose, Error, Plan, PlanOptions, Target, convert};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Prints stages and modules, and stops when the flag is set.
struct Printer(Arc<CancelFlag>);

impl Observer for Printer {
    fn event(&self, event: &Event<'_>) {
        match event {
            Event::Stage { name, modules, .. } => println!("{name}: {modules} to come"),
            Event::Module { name, .. } => println!("  {name}"),
            _ => {}
        }
    }

    fn cancelled(&self) -> bool {
        self.0.is_set()
    }
}

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [source, out, bpw] = &arguments[..] else { bail!("usage: convert SOURCE OUT BPW") };
    let options = PlanOptions::new(Target::Bpw(bpw.parse().context("BPW is no number")?));

    // Any thread may set the flag; the work stops at the next module and leaves nothing behind.
    let flag = Arc::new(CancelFlag::default());
    let timeout = Arc::clone(&flag);
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(3600));
        timeout.cancel();
    });

    match run(Path::new(source), Path::new(out), &options, &Printer(flag)) {
        Err(Error::Cancelled) => bail!("took more than an hour: stopped"),
        Err(error) => {
            // What the command line would show: who has to act, where, and how.
            let hint = error.hint().map(|hint| format!(" ({hint})")).unwrap_or_default();
            bail!("{:?} error in {:?}, {:?}: {error}{hint}", error.kind(), error.file(), error.tensor())
        }
        Ok(()) => Ok(()),
    }
}

fn run(source: &Path, out: &Path, options: &PlanOptions, observer: &dyn Observer) -> Result<(), Error> {
    let checkpoint = Checkpoint::open(source, &OpenOptions::default())?;
    let plan = Plan::new(&checkpoint, options, observer)?;
    let report = convert(&checkpoint, &plan, out, &ConvertOptions::default(), observer)?;
    for warning in &report.warnings {
        println!("warning: {}: {}", warning.subject, warning.message);
    }
    println!("{:.4} bpw, mean relative error {:.5}", report.totals.bpw, report.mean_relative_error);
    Ok(())
}
