//! Executes a plan: reads, quantizes, checks and writes one module at a time.
//!
//! Takes a checkpoint, a [`Plan`] and the name of an output directory; gives the directory, complete, and a
//! [`Report`]. Must not decide anything: the plan has. Nothing is written before every value that could be
//! refused has been looked at, and nothing stands under the final name before all is on disk.

mod config;
mod error;
mod module;
mod preflight;
mod relayout;
pub mod report;

pub use error::Error;
pub use report::Report;

use crate::checkpoint::Checkpoint;
use crate::output::{self, Exl2Facts, ShardPlan, ShardWriter, Staging};
use crate::plan::{self, Decision, DenseType, Plan, Target};
use crate::progress::{Event, Observer};
use crate::warning::{Warning, WarningCode};
use report::{ReportModule, TensorOrigin};
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

/// Name of the report in the output.
pub const REPORT_FILE: &str = "report.json";

/// Converts `checkpoint` as `plan` says into a new directory `out`.
///
/// # Errors
/// Those of reading and writing; a value that fp16 can't hold; [`crate::Error::Cancelled`]. After an error
/// nothing stands under `out`.
pub fn convert(
    checkpoint: &Checkpoint,
    plan: &Plan,
    out: &Path,
    options: &ConvertOptions,
    observer: &dyn Observer,
) -> Result<Report, crate::Error> {
    let shards = ShardPlan::new(units(checkpoint, plan), options.shard_size)?;
    let losses = preflight::check(checkpoint, plan, observer)?;
    let staging = Staging::create(out)?;
    let writer = ShardWriter::create(staging.path(), shards)?;
    let mut origins: Vec<TensorOrigin> = Vec::new();
    for tensor in &plan.dense_tensors {
        module::write_dense_tensor(checkpoint, tensor, &writer, &mut origins)?;
    }
    let weights = plan.modules.iter().map(|m| m.weights()).sum();
    observer.event(&Event::Stage { name: "convert", modules: plan.modules.len(), weights });
    let mut modules: Vec<ReportModule> = Vec::with_capacity(plan.modules.len());
    for planned in &plan.modules {
        if observer.cancelled() {
            return Err(crate::Error::Cancelled);
        }
        modules.push(module::convert(checkpoint, planned, &writer, &mut origins)?);
        observer.event(&Event::Module { name: &planned.source, weights: planned.weights() });
    }
    let shards = writer.finish(observer)?;
    let notes = write_configs(checkpoint, plan, &staging)?;
    let side_files = output::copy_side_files(checkpoint.dir(), staging.path())?;
    let mut warnings: Vec<Warning> = checkpoint.warnings().to_vec();
    warnings.extend(plan.warnings.iter().cloned());
    warnings.extend(losses);
    warnings.extend(notes.iter().map(|note| Warning {
        code: WarningCode::Config,
        subject: "config.json".into(),
        message: note.to_string(),
    }));
    let report = Report::new(checkpoint, plan, modules, origins, shards, side_files, warnings);
    staging.write(REPORT_FILE, report.to_json().as_bytes())?;
    checkpoint.check_unchanged()?;
    if observer.cancelled() {
        return Err(crate::Error::Cancelled);
    }
    staging.commit()?;
    Ok(report)
}

/// The tensors of the output, a module's together.
fn units(checkpoint: &Checkpoint, plan: &Plan) -> Vec<Vec<output::TensorSpec>> {
    let dense = plan.dense_tensors.iter().map(|tensor| vec![plan::dense_spec(tensor)]);
    dense.chain(plan.modules.iter().map(|module| plan::specs(checkpoint, module))).collect()
}

/// Writes the configuration files that the output's readers look for.
fn write_configs(
    checkpoint: &Checkpoint,
    plan: &Plan,
    staging: &Staging,
) -> Result<Vec<output::ConfigNote>, crate::Error> {
    let source = checkpoint.config();
    let config = match plan.target {
        Target::Bpw(_) | Target::Uniform { .. } => output::exl2_config(source, &exl2_facts(plan)),
        Target::Dense(dtype) => output::dense_config(source, dtype_name(dtype)),
        Target::Gptq => {
            let quantization = config::gptq(checkpoint, plan);
            let json = output::config_json(&quantization);
            staging.write("quantize_config.json", json.as_bytes())?;
            output::gptq_config(source, quantization)
        }
        Target::Same => output::Config { json: source.clone(), notes: Vec::new() },
    };
    staging.write("config.json", output::config_json(&config.json).as_bytes())?;
    Ok(config.notes)
}

fn dtype_name(dtype: DenseType) -> &'static str {
    match dtype {
        DenseType::Fp16 => "float16",
        DenseType::Bf16 => "bfloat16",
    }
}

fn exl2_facts(plan: &Plan) -> Exl2Facts {
    let head = plan.modules.iter().find(|m| m.is_head()).map(|m| &m.decision);
    let head_bits = match head {
        Some(Decision::Exl2(head)) => head.bits[0].get() as u8,
        _ => 16,
    };
    Exl2Facts { bpw: plan.totals.bpw, head_bits, untied: plan.untied }
}
