//! The work itself: every tensor of a plan into a staging directory, and the files beside them.

use super::done::{Outcome, Progress, Syncs};
use super::report::{ReportModule, TensorOrigin};
use super::{ConvertOptions, Quantizer, Report, config, module, preflight};
use crate::checkpoint::Checkpoint;
use crate::output::{self, Exl2Facts, REPORT_FILE, ShardPlan, ShardWriter, Staging};
use crate::plan::{self, Decision, DenseType, Plan, Target};
use crate::progress::{Event, Observer};
use crate::warning::{Warning, WarningCode};
use serde_json::{Map, Value};

/// Fills `staging`; what its journal says is done stays, if the job is `resumable`. All that is missing then
/// is the commit.
pub(super) fn run(
    checkpoint: &Checkpoint,
    plan: &Plan,
    flags: Map<String, Value>,
    staging: &Staging,
    resumable: bool,
    options: &ConvertOptions,
    (quantizer, observer): (&dyn Quantizer, &dyn Observer),
) -> Result<Report, crate::Error> {
    let shards = ShardPlan::new(units(checkpoint, plan), options.shard_size)?;
    let losses = preflight::check(checkpoint, plan, observer)?;
    // What an earlier run wrote after the tensors is written again.
    staging.clear_but_state(|name| shards.files().iter().any(|shard| shard.file() == name))?;
    let writer = ShardWriter::resume(staging.path(), shards)?;
    let mut progress = match resumable {
        true => Progress::resume(staging, &writer, observer)?,
        false => Progress::unrecorded(),
    };
    let mut origins: Vec<TensorOrigin> = Vec::new();
    let modules = std::thread::scope(|scope| {
        let mut syncs = Syncs::new(scope, &writer);
        write_dense_tensors(checkpoint, plan, &writer, &mut progress, &mut syncs, &mut origins)?;
        let done = convert_modules(
            checkpoint,
            plan,
            &writer,
            &mut progress,
            &mut syncs,
            &mut origins,
            (quantizer, observer),
        )?;
        syncs.wait()?;
        Ok::<_, crate::Error>(done)
    })?;
    let shards = writer.finish(observer)?;
    let notes = write_configs(checkpoint, plan, staging)?;
    let side_files = output::copy_side_files(checkpoint.dir(), staging.path(), observer)?;
    let mut warnings: Vec<Warning> = checkpoint.warnings().to_vec();
    warnings.extend(plan.warnings.iter().cloned());
    warnings.extend(losses);
    warnings.extend(notes.iter().map(|note| Warning {
        code: WarningCode::Config,
        subject: "config.json".into(),
        message: note.to_string(),
    }));
    let report = Report::new(checkpoint, plan, flags, modules, origins, shards, side_files, warnings);
    staging.write(REPORT_FILE, report.to_json().as_bytes())?;
    checkpoint.check_unchanged()?;
    if observer.cancelled() {
        return Err(crate::Error::Cancelled);
    }
    Ok(report)
}

/// The tensors of the output, a module's together.
fn units(checkpoint: &Checkpoint, plan: &Plan) -> Vec<Vec<output::TensorSpec>> {
    let dense = plan.dense_tensors.iter().map(|tensor| vec![plan::dense_spec(tensor)]);
    dense.chain(plan.modules.iter().map(|module| plan::specs(checkpoint, module))).collect()
}

fn write_dense_tensors(
    checkpoint: &Checkpoint,
    plan: &Plan,
    writer: &ShardWriter,
    progress: &mut Progress,
    syncs: &mut Syncs<'_, '_>,
    origins: &mut Vec<TensorOrigin>,
) -> Result<(), crate::Error> {
    for tensor in &plan.dense_tensors {
        if let Some(done) = progress.of(&tensor.name) {
            origins.extend_from_slice(&done.origins);
            continue;
        }
        let before = origins.len();
        module::write_dense_tensor(checkpoint, tensor, writer, origins)?;
        progress.record(&tensor.name, &origins[before..], None, writer, syncs)?;
    }
    Ok(())
}

fn convert_modules(
    checkpoint: &Checkpoint,
    plan: &Plan,
    writer: &ShardWriter,
    progress: &mut Progress,
    syncs: &mut Syncs<'_, '_>,
    origins: &mut Vec<TensorOrigin>,
    (quantizer, observer): (&dyn Quantizer, &dyn Observer),
) -> Result<Vec<ReportModule>, crate::Error> {
    let to_do = || plan.modules.iter().filter(|module| progress.of(&module.name).is_none());
    let weights = to_do().map(|module| module.weights()).sum();
    observer.event(&Event::Stage { name: "convert", modules: to_do().count(), weights });
    let mut modules: Vec<ReportModule> = Vec::with_capacity(plan.modules.len());
    for planned in &plan.modules {
        if let Some(done) = progress.of(&planned.name)
            && let Some(outcome) = &done.outcome
        {
            origins.extend_from_slice(&done.origins);
            let Outcome { relative_error, exactness, row_order, calibration } = outcome.clone();
            let module = ReportModule::new(checkpoint, planned, relative_error, exactness, row_order);
            modules.push(ReportModule { calibration, ..module });
            continue;
        }
        if observer.cancelled() {
            return Err(crate::Error::Cancelled);
        }
        let before = origins.len();
        let module = module::convert(checkpoint, plan, planned, quantizer, writer, origins)?;
        let outcome = Outcome {
            relative_error: module.relative_error,
            exactness: module.exactness,
            row_order: module.row_order.clone(),
            calibration: module.calibration.clone(),
        };
        progress.record(&planned.name, &origins[before..], Some(outcome), writer, syncs)?;
        modules.push(module);
        observer.event(&Event::Module { name: &planned.source, weights: planned.weights() });
    }
    Ok(modules)
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
