//! What `requant convert` does with its flags: plans, jobs, checks, what is printed.

use super::calibration::Calibration;
use super::convert::{Arguments, Layout};
use super::errors::Failure;
use super::print;
use super::progress::Progress;
use super::summary::{plan_table, success, totals_line};
use super::validate::{self, PAGE_FILE, VALIDATION_FILE};
use super::validate_summary;
use requant::checkpoint::{Checkpoint, OpenOptions};
use requant::convert::{Begun, ByWeights, Check, ConvertOptions, Existing, Job, Quantizer, needed_bytes};
use requant::output;
use requant::plan::{DenseType, Plan};
use requant::validate::Validation;
use requant::validate::page::html;
use serde::Serialize;
use std::path::{Path, PathBuf};

impl Arguments {
    pub(super) fn show_plans(
        &self,
        checkpoint: &Checkpoint,
        progress: &Progress,
        json: bool,
    ) -> Result<(), Failure> {
        let calibration = Calibration::new(self, checkpoint)?;
        let dir = std::env::temp_dir().join(format!("requant-{}", std::process::id()));
        let plans = self.plans(checkpoint, &self.bpw, calibration.as_ref(), &dir, progress);
        progress.finish();
        let mut plans = plans?;
        for plan in &mut plans {
            plan.warnings.splice(..0, checkpoint.warnings().iter().cloned());
        }
        if json {
            let shown: Vec<ShownPlan<'_>> = (plans.iter())
                .map(|plan| ShownPlan { plan, peak_memory: plan.peak_memory(checkpoint) })
                .collect();
            return print_json(&shown);
        }
        for plan in &plans {
            let table = plan_table(plan) + "\n" + &totals_line(plan);
            print::stdout(&(table + &print::warnings(&plan.warnings)))?;
            // Not among the results: it depends on the number of threads. It doesn't hold what a calibration takes.
            if calibration.is_none() {
                progress.memory(plan.peak_memory(checkpoint));
            }
        }
        Ok(())
    }

    pub(super) fn convert(
        &self,
        checkpoint: &Checkpoint,
        out: &Path,
        progress: &Progress,
        json: bool,
    ) -> Result<(), Failure> {
        if self.validate {
            requant::validate::check_options(checkpoint, &self.measure.options(false))?;
        }
        let calibration = Calibration::new(self, checkpoint)?;
        let mut outputs = self.begin(checkpoint, out, calibration.as_ref())?;
        let planned = self.give_plans(checkpoint, &mut outputs, calibration.as_ref(), progress);
        progress.finish();
        planned?;
        let options = ConvertOptions { shard_size: self.shard_size };
        let mut summaries = Vec::new();
        let mut rejected = Ok(());
        let mut outputs = outputs.into_iter();
        while let Some(Output { dir, job, .. }) = outputs.next() {
            let Some(job) = job else {
                summaries.push(serde_json::json!({ "out": dir, "already_complete": true }));
                if !json {
                    print::stdout(&format!("{}: complete already, nothing to do\n", dir.display()))?;
                }
                continue;
            };
            if let (Some(plan), None) = (job.plan(), &calibration) {
                progress.memory(plan.peak_memory(checkpoint));
            }
            let mut validation = None;
            let run = |quantizer: &dyn Quantizer| {
                job.run_and_check(checkpoint, &options, quantizer, progress, |complete| {
                    self.check(checkpoint, complete, &dir, &mut validation, progress)
                })
            };
            let published = match &calibration {
                Some(calibration) => calibration.quantizing(checkpoint, run),
                None => run(&ByWeights),
            };
            progress.finish();
            let published = published.map_err(|error| {
                let failure = Failure::working_on(checkpoint, error);
                if !failure.may_go_on() {
                    outputs.by_ref().filter_map(|output| output.job).for_each(Job::discard);
                }
                match output::is_resumable(&dir) {
                    true => failure.with_hint("what is done is kept: the same command with --resume goes on"),
                    false => failure,
                }
            })?;
            let (report, path) = (published.report, published.path);
            for line in print::warnings(&report.warnings).lines() {
                print::stderr(line);
            }
            summaries.push(serde_json::json!({
                "out": path, "totals": report.totals, "objective": report.objective,
                "mean_relative_error": report.mean_relative_error, "shards": report.shards,
                "warnings": report.warnings, "validation": report.validation,
            }));
            if !json {
                print::stdout(&success(&path.display().to_string(), &report))?;
            }
            if let Some(validation) = &validation {
                if !json {
                    print::stdout(&validate_summary::text(validation))?;
                }
                // The first failure decides the exit code; the other outputs are made all the same.
                rejected = rejected.and(validate::outcome(&path, validation));
            }
        }
        if json {
            print_json(&summaries)?;
        }
        rejected
    }

    /// Validates a complete output that doesn't have its name yet.
    fn check(
        &self,
        source: &Checkpoint,
        complete: &Path,
        out: &Path,
        validation: &mut Option<Validation>,
        progress: &Progress,
    ) -> Result<Check, requant::Error> {
        if !self.validate {
            return Ok(Check::default());
        }
        let converted = Checkpoint::open(complete, &OpenOptions::default())?;
        let mut found = self.measure.validate(source, &converted, &self.measure.options(false), progress)?;
        found.converted.name =
            out.file_name().map_or(String::new(), |name| name.to_string_lossy().into_owned());
        let check = Check {
            rejected: !found.is_good(),
            files: vec![
                (VALIDATION_FILE.into(), validate::to_json(&found).into_bytes()),
                (PAGE_FILE.into(), html(&found).into_bytes()),
            ],
            summary: serde_json::to_value(found.summary()).ok(),
        };
        *validation = Some(found);
        Ok(check)
    }

    /// Locks every output, before anything long is done for one of them.
    fn begin(
        &self,
        checkpoint: &Checkpoint,
        out: &Path,
        calibration: Option<&Calibration>,
    ) -> Result<Vec<Output>, Failure> {
        let existing = Existing { resume: self.resume, force: self.force };
        let begin = |dir: PathBuf, bpw: Option<f64>| -> Result<Output, Failure> {
            let job = match Job::begin(checkpoint, self.flags(bpw, calibration), &dir, existing)? {
                Begun::Complete => None,
                Begun::Job(job) => Some(*job),
            };
            Ok(Output { dir, bpw, job })
        };
        match self.bpw[..] {
            [] => Ok(vec![begin(out.into(), None)?]),
            [bpw] => Ok(vec![begin(out.into(), Some(bpw))?]),
            ref several => {
                several.iter().map(|&bpw| begin(out.join(format!("{bpw:?}bpw")), Some(bpw))).collect()
            }
        }
    }

    /// Plans what has no plan yet, if its disk has room for all of that.
    fn give_plans(
        &self,
        checkpoint: &Checkpoint,
        outputs: &mut [Output],
        calibration: Option<&Calibration>,
        progress: &Progress,
    ) -> Result<(), Failure> {
        let unplanned: Vec<(&mut Job, Option<f64>)> = (outputs.iter_mut())
            .filter_map(|output| Some((output.job.as_mut()?, output.bpw)))
            .filter(|(job, _)| job.plan().is_none())
            .collect();
        let Some((first, _)) = unplanned.first() else { return Ok(()) };
        let budgets: Vec<f64> = unplanned.iter().filter_map(|(_, bpw)| *bpw).collect();
        if !budgets.is_empty() {
            let mut needed = 0u64;
            for &bpw in &budgets {
                let bytes = needed_bytes(checkpoint, &self.exl2_options(Some(bpw))?);
                needed = needed.saturating_add(bytes.map_err(|e| Failure::working_on(checkpoint, e))?);
            }
            first.check_space(needed)?;
        }
        let dir = first.beside("calibrating");
        let plans = self.plans(checkpoint, &budgets, calibration, &dir, progress)?;
        for ((job, _), plan) in unplanned.into_iter().zip(plans) {
            job.set_plan(checkpoint, plan)?;
        }
        Ok(())
    }

    /// A plan for each budget, and one where there is none.
    fn plans(
        &self,
        checkpoint: &Checkpoint,
        budgets: &[f64],
        calibration: Option<&Calibration>,
        dir: &Path,
        progress: &Progress,
    ) -> Result<Vec<Plan>, Failure> {
        let at = |error| Failure::working_on(checkpoint, error);
        if self.to == Layout::Exl2 && !budgets.is_empty() {
            let options = self.exl2_options(budgets.first().copied())?;
            return match calibration {
                Some(calibration) => calibration.plans(checkpoint, &options, budgets, dir, progress),
                None => Plan::for_budgets(checkpoint, &options, budgets, progress),
            }
            .map_err(at);
        }
        let plan = match self.to {
            Layout::Exl2 => Plan::new(checkpoint, &self.exl2_options(None)?, progress),
            Layout::Gptq => Plan::to_gptq(checkpoint, &self.gptq_options()?),
            Layout::Fp16 => Plan::to_dense(checkpoint, DenseType::Fp16),
            Layout::Bf16 => Plan::to_dense(checkpoint, DenseType::Bf16),
            Layout::Same => Ok(Plan::same(checkpoint)),
        };
        Ok(vec![plan.map_err(at)?])
    }
}

/// A plan and what executing it takes.
#[derive(Serialize)]
struct ShownPlan<'a> {
    #[serde(flatten)]
    plan: &'a Plan,
    /// Bytes, of a conversion without calibration.
    peak_memory: u64,
}

/// Where one bitrate goes.
struct Output {
    dir: PathBuf,
    bpw: Option<f64>,
    /// `None` where it is complete already.
    job: Option<Job>,
}

/// Prints one result as itself, several as a list.
fn print_json<T: Serialize>(results: &[T]) -> Result<(), Failure> {
    let json = match results {
        [one] => serde_json::to_string_pretty(one),
        all => serde_json::to_string_pretty(all),
    };
    print::stdout(&(json.unwrap_or_default() + "\n"))
}
