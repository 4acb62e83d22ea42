//! Converts a GPTQ checkpoint to EXL2 with one width for all, calibrated on text: the built-in one, or a file.
//! Prints what each module's errors weigh, and how long it all took.
//!
//! ```sh
//! cargo run --release --example calibrated -- SOURCE OUT BITS [GROUP_SIZE [TOKENS [DAMPING [TEXT]]]]
//! ```
#![allow(clippy::print_stdout)]

use anyhow::Context;
use requant::calibrate::{CalibratedQuantizer, Calibrator, DEFAULT_TOKENS};
use requant::checkpoint::OpenOptions;
use requant::convert::convert_with;
use requant::formats::exl2::Bits;
use requant::kernels::Cpu;
use requant::model::Model;
use requant::progress::Silent;
use requant::quantize::Feedback;
use requant::validate::{Text, Windows};
use requant::{Checkpoint, ConvertOptions, Plan, PlanOptions, Target};
use std::time::Instant;

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [source, out, bits, rest @ ..] = &arguments[..] else {
        anyhow::bail!("usage: calibrated SOURCE OUT BITS [GROUP_SIZE [TOKENS [DAMPING [TEXT]]]]")
    };
    let number = |i: usize, default: usize| rest.get(i).map_or(Ok(default), |n| n.parse());
    let bits = Bits::try_from(bits.parse::<u32>().context("BITS is no number")?)?;
    let (group_size, tokens) = (number(0, 64)?, number(1, DEFAULT_TOKENS)?);
    let text = rest.get(3).map_or(Text::Calibration, |path| Text::File(path.into()));
    let mut how = Feedback::default();
    if let Some(damping) = rest.get(2) {
        how.damping.insert(0, damping.parse().context("DAMPING is no number")?);
    }
    let started = Instant::now();
    let checkpoint = Checkpoint::open(source.as_ref(), &OpenOptions::default())?;
    let windows = Windows::new(&text, &checkpoint, tokens, None, false)?;
    let plan = Plan::new(&checkpoint, &PlanOptions::new(Target::Uniform { bits, group_size }), &Silent)?;
    let (ops, model) = (Cpu::new(0), Model::new(&checkpoint).map_err(anyhow::Error::from)?);
    let calibrator = Calibrator::new(&ops, &model, &windows)?;
    let quantizer = CalibratedQuantizer::new(&checkpoint, calibrator, how);
    let report =
        convert_with(&checkpoint, &plan, out.as_ref(), &ConvertOptions::default(), &quantizer, &Silent)?;
    let (mut sum, mut count) = (0.0, 0);
    for (m, calibration) in report.modules.iter().filter_map(|m| Some((m, m.calibration.as_ref()?))) {
        let errors = [calibration.output_error, calibration.output_error_by_weights];
        let [with, without] = errors.map(|error| error.unwrap_or(f64::NAN));
        println!(
            "{}: {with:.6} of {without:.6} {:?} {:?}",
            m.name, calibration.damping, calibration.uncalibrated
        );
        (sum, count) = (sum + with, count + 1);
    }
    let seconds = started.elapsed().as_secs_f64();
    println!(
        "{} windows, mean output error {:.6}, {seconds:.0} s",
        windows.count(),
        sum / f64::from(count.max(1))
    );
    Ok(())
}
