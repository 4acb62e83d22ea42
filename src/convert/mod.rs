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
pub use report::Report;

use crate::checkpoint::Checkpoint;
use crate::output::{self, Staging};
use crate::plan::Plan;
use crate::progress::Observer;
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
    output::check_side_files(checkpoint.dir())?;
    let staging = Staging::create(out)?;
    let report = run::run(checkpoint, plan, serde_json::Map::new(), &staging, false, options, observer)?;
    staging.commit()?;
    Ok(report)
}
