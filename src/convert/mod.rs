//! Executes a plan: reads, quantizes, checks and writes one module at a time.
//!
//! Takes a checkpoint, a [`Plan`] and the name of an output directory; gives the directory, complete, and a
//! [`Report`]: at one go ([`convert`]), or as a [`Job`] that can be stopped and go on. Must not decide
//! anything: the plan has. Nothing is written before every value that could be refused has been looked at,
//! and nothing stands under the final name before all is on disk.

mod config;
mod done;
mod error;
mod job;
mod module;
mod preflight;
mod relayout;
pub mod report;
mod run;

pub use crate::output::REPORT_FILE;
pub use error::Error;
pub use job::{Begun, Check, Existing, Job, Published, needed_bytes};
pub use report::{Calibration, Report};

use crate::checkpoint::Checkpoint;
use crate::output::{self, Staging};
use crate::plan::{Exl2Decision, Plan, PlannedModule};
use crate::progress::Observer;
use crate::quantize::{Quantized, Source, quantize};
use std::path::Path;

/// How the output is laid out.
#[derive(Clone, Debug)]
pub struct ConvertOptions {
    /// Largest size of a shard, in bytes.
    pub shard_size: u64,
}

impl Default for ConvertOptions {
    fn default() -> Self {
        Self { shard_size: 5_000_000_000 }
    }
}

/// Makes the EXL2 matrices that a plan decides on.
pub trait Quantizer: Sync {
    /// Whether modules must come in the plan's order: block after block.
    fn goes_in_plan_order(&self) -> bool {
        false
    }

    /// Quantizes a module.
    ///
    /// # Errors
    /// What the module's weights can't be, and what the quantizer itself fails at.
    fn quantize(
        &self,
        module: &PlannedModule,
        decision: &Exl2Decision,
        source: &Source,
    ) -> Result<Made, crate::Error>;
}

/// What a [`Quantizer`] made.
#[derive(Debug)]
pub struct Made {
    /// The matrix.
    pub quantized: Quantized,
    /// How it was calibrated, for the report; `None` where calibration has no say.
    pub calibration: Option<Calibration>,
}

/// Quantizes each module by itself, by its weights alone.
#[derive(Clone, Copy, Debug, Default)]
pub struct ByWeights;

impl Quantizer for ByWeights {
    fn quantize(
        &self,
        module: &PlannedModule,
        decision: &Exl2Decision,
        source: &Source,
    ) -> Result<Made, crate::Error> {
        let broken = |source| Error::Matrix { module: module.source.clone(), source };
        let cut = source.cut(decision.group_size);
        let quantized = quantize(source, &cut, &decision.bits).map_err(broken)?;
        Ok(Made { quantized, calibration: None })
    }
}

/// Converts `checkpoint` as `plan` says into a new directory `out`, at one go.
///
/// # Errors
/// Those of reading and writing; a value that fp16 can't hold; [`crate::Error::Cancelled`]. After an error
/// nothing stands under `out`, nor beside it.
pub fn convert(
    checkpoint: &Checkpoint,
    plan: &Plan,
    out: &Path,
    options: &ConvertOptions,
    observer: &dyn Observer,
) -> Result<Report, crate::Error> {
    convert_with(checkpoint, plan, out, options, &ByWeights, observer)
}

/// [`convert`] with a quantizer of one's own.
///
/// # Errors
/// Those of [`convert`] and of the quantizer.
pub fn convert_with(
    checkpoint: &Checkpoint,
    plan: &Plan,
    out: &Path,
    options: &ConvertOptions,
    quantizer: &dyn Quantizer,
    observer: &dyn Observer,
) -> Result<Report, crate::Error> {
    output::check_side_files(checkpoint.dir())?;
    let staging = Staging::create(out)?;
    let report =
        run::run(checkpoint, plan, serde_json::Map::new(), &staging, false, options, (quantizer, observer))?;
    staging.commit()?;
    Ok(report)
}
