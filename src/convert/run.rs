//! The work itself: every tensor of a plan into a staging directory, and the files beside them.

use super::done::{Followers, Outcome, Progress};
use super::report::{ReportModule, TensorOrigin};
use super::{ConvertOptions, Quantizer, Report, config, module, preflight};
use crate::checkpoint::Checkpoint;
use crate::output::{self, Exl2Facts, REPORT_FILE, ShardPlan, ShardWriter, Staging, TensorSpec};
use crate::plan::{self, Decision, DenseType, Plan, PlannedModule, PlannedTensor, Target};
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
    let shards = ShardPlan::new(
        Unit::all(plan).iter().map(|unit| unit.specs(checkpoint)).collect(),
        options.shard_size,
    )?;
    let losses = preflight::check(checkpoint, plan, observer)?;
    // What an earlier run wrote after the tensors is written again.
    staging.clear_but_state(|name| shards.files().iter().any(|shard| shard.file() == name))?;
    let writer = ShardWriter::resume(staging.path(), shards)?;
    let mut progress = match resumable {
        true => Progress::resume(staging, &writer, observer)?,
        false => Progress::unrecorded(),
    };
    let made = std::thread::scope(|scope| {
        let mut followers = Followers::new(scope, &writer);
        let made =
            convert_units(checkpoint, plan, &writer, &mut progress, &mut followers, (quantizer, observer))?;
        followers.wait()?;
        Ok::<_, crate::Error>(made)
    })?;
    let shards = writer.finish(observer)?;
    let (origins, modules): (Vec<_>, Vec<_>) = made.into_iter().unzip();
    let (origins, modules) = (origins.concat(), modules.into_iter().flatten().collect());
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

/// What is written as a whole.
#[derive(Clone, Copy)]
enum Unit<'a> {
    Dense(&'a PlannedTensor),
    Module(&'a PlannedModule),
}

impl<'a> Unit<'a> {
    /// All, in the report's order.
    fn all(plan: &'a Plan) -> Vec<Self> {
        let dense = plan.dense_tensors.iter().map(Unit::Dense);
        dense.chain(plan.modules.iter().map(Unit::Module)).collect()
    }

    /// Its name in the output.
    fn name(&self) -> &'a str {
        match self {
            Unit::Dense(tensor) => &tensor.name,
            Unit::Module(module) => &module.name,
        }
    }

    /// Its tensors in the output.
    fn specs(&self, checkpoint: &Checkpoint) -> Vec<TensorSpec> {
        match self {
            Unit::Dense(tensor) => vec![plan::dense_spec(tensor)],
            Unit::Module(module) => plan::specs(checkpoint, module),
        }
    }
}

/// What came of a unit: where its tensors come from, and what the report says of it if it is a module.
type Written = (Vec<TensorOrigin>, Option<ReportModule>);

/// Writes all units, and gives what came of each in the report's order.
fn convert_units(
    checkpoint: &Checkpoint,
    plan: &Plan,
    writer: &ShardWriter,
    progress: &mut Progress,
    followers: &mut Followers<'_, '_>,
    (quantizer, observer): (&dyn Quantizer, &dyn Observer),
) -> Result<Vec<Written>, crate::Error> {
    let to_do = || plan.modules.iter().filter(|module| progress.of(&module.name).is_none());
    let weights = to_do().map(|module| module.weights()).sum();
    observer.event(&Event::Stage { name: "convert", modules: to_do().count(), weights });
    let mut units: Vec<(usize, Unit<'_>)> = Unit::all(plan).into_iter().enumerate().collect();
    // In the order of the files, so that these can be hashed meanwhile.
    if !quantizer.goes_in_plan_order() {
        units.sort_by_cached_key(|(_, unit)| {
            let specs = unit.specs(checkpoint);
            specs.iter().filter_map(|spec| writer.plan().position(&spec.name)).min()
        });
    }
    let mut made: Vec<Written> = vec![Written::default(); units.len()];
    for (place, unit) in units {
        if matches!(unit, Unit::Module(_)) && observer.cancelled() {
            return Err(crate::Error::Cancelled);
        }
        made[place] =
            convert_unit(checkpoint, plan, unit, writer, progress, followers, (quantizer, observer))?;
    }
    Ok(made)
}

fn convert_unit(
    checkpoint: &Checkpoint,
    plan: &Plan,
    unit: Unit<'_>,
    writer: &ShardWriter,
    progress: &mut Progress,
    followers: &mut Followers<'_, '_>,
    (quantizer, observer): (&dyn Quantizer, &dyn Observer),
) -> Result<Written, crate::Error> {
    let report = |outcome: Option<Outcome>| match (unit, outcome) {
        (Unit::Module(planned), Some(outcome)) => Some(ReportModule::new(checkpoint, planned, outcome)),
        _ => None,
    };
    if let Some(done) = progress.of(unit.name()) {
        return Ok((done.origins.clone(), report(done.outcome.clone())));
    }
    let mut origins = Vec::new();
    let outcome = match unit {
        Unit::Dense(tensor) => {
            module::write_dense_tensor(checkpoint, tensor, writer, &mut origins)?;
            None
        }
        Unit::Module(planned) => {
            Some(module::convert(checkpoint, plan, planned, quantizer, writer, &mut origins)?)
        }
    };
    progress.record(unit.name(), &origins, outcome.clone(), writer, followers)?;
    if let Unit::Module(planned) = unit {
        observer.event(&Event::Module { name: &planned.source, weights: planned.weights() });
    }
    Ok((origins, report(outcome)))
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
