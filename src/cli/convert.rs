//! `requant convert`.

use super::errors::Failure;
use super::print;
use super::progress::{Progress, Style};
use super::summary::{plan_table, success, totals_line};
use super::validate::{self, Measure, PAGE_FILE, VALIDATION_FILE};
use super::validate_summary;
use clap::ValueEnum;
use requant::checkpoint::{AllOnes, Checkpoint, OpenOptions};
use requant::convert::{Begun, Check, ConvertOptions, Existing, Job, needed_bytes};
use requant::formats::exl2::Bits;
use requant::formats::gptq;
use requant::output;
use requant::plan::readers::{READERS, Reader};
use requant::plan::{DenseMembers, DenseType, GptqOptions, Order, Plan, PlanOptions, Target, WidthRule};
use requant::validate::Validation;
use requant::validate::page::html;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// Convert a checkpoint to another layout.
#[derive(Debug, clap::Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Arguments {
    /// A directory with config.json and .safetensors files.
    #[serde(skip)]
    source: PathBuf,
    /// The layout to convert to.
    #[arg(long, value_name = "LAYOUT")]
    to: Layout,
    /// The directory to write, which must not exist yet. It is written as DIR.partial and gets its name when
    /// it is complete.
    #[arg(long, value_name = "DIR", required_unless_present = "dry_run")]
    #[serde(skip)]
    out: Option<PathBuf>,
    /// Stored bits a weight of the decoder's linears, at most; widths are chosen by measured error. Several
    /// with commas are measured once and written to DIR/3.0bpw, DIR/4.0bpw and so on.
    #[arg(
        help_heading = "EXL2 output",
        long,
        value_name = "BITS",
        value_delimiter = ',',
        allow_negative_numbers = true
    )]
    #[serde(skip)]
    bpw: Vec<f64>,
    /// One width: for EXL2 that of all of the decoder's linears (2, 3, 4, 5, 6 or 8), for GPTQ the width to
    /// store codes in (exact, so never less than they need).
    #[arg(long, value_name = "N", conflicts_with = "bpw")]
    bits: Option<u32>,
    /// Rows of a group: for EXL2 with --bits a multiple of 32 (64 if left out), for GPTQ a divisor of the
    /// source's.
    #[arg(long, value_name = "N", conflicts_with = "bpw")]
    group_size: Option<usize>,
    /// Leave modules GPTQ where that is smaller or better and exllamav2 reads them; with --bpw.
    #[arg(help_heading = "EXL2 output", long, requires = "bpw", conflicts_with = "bits")]
    keep_gptq: bool,
    /// Quantize the output head at this width; without it the head stays fp16.
    #[arg(help_heading = "EXL2 output", long, value_name = "N", value_parser = parse_bits)]
    head_bits: Option<Bits>,
    /// Fix the width of modules whose name a pattern matches; may be repeated.
    #[arg(help_heading = "EXL2 output", long, value_name = "REGEX=BITS", value_parser = parse_rule)]
    set: Vec<(String, Bits)>,
    /// Lowest width of modules whose name a pattern matches; may be repeated.
    #[arg(help_heading = "EXL2 output", long, value_name = "REGEX=BITS", value_parser = parse_rule)]
    min: Vec<(String, Bits)>,
    /// What to do with dense linears among quantized ones that exllamav2 loads together with them.
    #[arg(help_heading = "EXL2 output", long, value_name = "WHAT", value_enum)]
    dense_members: Option<Members>,
    /// What a stored zero point of only ones means in an asymmetric v1 file that GPTQModel didn't write.
    #[arg(long, value_name = "MEANING", value_enum)]
    all_ones: Option<Ones>,
    /// Convert an architecture that isn't known as a Llama, which exllamav2 takes it for.
    #[arg(help_heading = "EXL2 output", long)]
    any_arch: bool,
    /// Convention of the source's stored zero points, where files contradict themselves.
    #[arg(long, value_name = "CONVENTION", value_enum)]
    source_zeros: Option<Zeros>,
    /// Convention of stored zero points in a GPTQ output; the source's if left out.
    #[arg(help_heading = "GPTQ output", long, value_enum)]
    zeros: Option<Zeros>,
    /// Re-centre asymmetric modules in a GPTQ output, exactly: 2 and 3 bits become 4, 4 bits become 8.
    #[arg(help_heading = "GPTQ output", long)]
    sym: bool,
    /// Order of rows in a GPTQ output.
    #[arg(help_heading = "GPTQ output", long, value_enum)]
    order: Option<RowOrder>,
    /// The program that is to read a GPTQ output: what it doesn't accept is changed exactly, or refused.
    #[arg(help_heading = "GPTQ output", long = "for", value_name = "READER", value_parser = parse_reader)]
    #[serde(rename = "for", serialize_with = "reader_name")]
    reader: Option<&'static Reader>,
    /// Let --for round scales that fp16 doesn't have.
    #[arg(help_heading = "GPTQ output", long)]
    allow_rounding: bool,
    /// Largest size of an output file: a number of bytes, or with kB, MB, GB, KiB, MiB, GiB.
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = super::size::parse)]
    shard_size: u64,
    /// Go on with a conversion that was stopped, from the same source with the same flags; it ends in the same
    /// bytes. Begins where there is nothing to go on with, does nothing where it is complete.
    #[arg(long)]
    #[serde(skip)]
    resume: bool,
    /// Replace an output of requant that exists, once the new one is complete, and throw an unfinished one
    /// away (with --resume: go on with it).
    #[arg(long)]
    #[serde(skip)]
    force: bool,
    /// Validate the output before it gets its name: every layer, perplexity and KL divergence, in
    /// validation.json and report.html beside it. What misses a limit or is broken is left as DIR.rejected.
    #[arg(help_heading = "Validation", long, conflicts_with = "dry_run")]
    #[serde(skip)]
    validate: bool,
    #[command(flatten)]
    #[serde(skip)]
    measure: Measure,
    /// Print the plan and the size, and write nothing.
    #[arg(long)]
    #[serde(skip)]
    dry_run: bool,
    /// How progress is shown.
    #[arg(long, value_name = "HOW", value_enum, default_value_t = Style::Auto)]
    #[serde(skip)]
    progress: Style,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Layout {
    /// Mixed-width layout of exllamav2.
    Exl2,
    /// GPTQ, with the same weights.
    Gptq,
    /// Dense fp16, as decoded.
    Fp16,
    /// Dense bf16, rounded once.
    Bf16,
    /// The same tensors in new files.
    Same,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Zeros {
    /// Stored less one: what most programs read.
    V1,
    /// Stored as they are.
    V2,
}

impl From<Zeros> for gptq::ZeroConvention {
    fn from(zeros: Zeros) -> Self {
        match zeros {
            Zeros::V1 => Self::V1,
            Zeros::V2 => Self::V2,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum RowOrder {
    /// As in the source.
    Keep,
    /// down_proj's rows sorted by group, gate's and up's columns in the same order: exact.
    Sorted,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Members {
    /// Quantize them at the widest option of the plan.
    Quantize,
    /// Make the others dense, too.
    DequantizeSet,
    /// Refuse.
    Error,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Ones {
    /// Zero point 0: what the quantizer meant.
    Wrap,
    /// Zero point 2^bits: what most kernels compute.
    PlusOne,
}

impl From<Ones> for AllOnes {
    fn from(ones: Ones) -> Self {
        match ones {
            Ones::Wrap => Self::Wrap,
            Ones::PlusOne => Self::PlusOne,
        }
    }
}

impl Arguments {
    pub(super) fn run(&self, json: bool) -> Result<(), Failure> {
        self.check_flags()?;
        let options = OpenOptions {
            all_ones: self.all_ones.map(AllOnes::from),
            zeros: self.source_zeros.map(Into::into),
            any_arch: self.any_arch,
        };
        let checkpoint = Checkpoint::open(&self.source, &options)?;
        let progress = Progress::new(self.progress);
        match &self.out {
            Some(out) if !self.dry_run => self.convert(&checkpoint, out, &progress, json),
            _ => self.show_plans(&checkpoint, &progress, json),
        }
    }

    fn show_plans(&self, checkpoint: &Checkpoint, progress: &Progress, json: bool) -> Result<(), Failure> {
        let plans = self.plans(checkpoint, &self.bpw, progress);
        progress.finish();
        let mut plans = plans?;
        for plan in &mut plans {
            plan.warnings.splice(..0, checkpoint.warnings().iter().cloned());
        }
        if json {
            return print_json(&plans);
        }
        for plan in &plans {
            let table = plan_table(plan) + "\n" + &totals_line(plan);
            print::stdout(&(table + &print::warnings(&plan.warnings)))?;
        }
        Ok(())
    }

    fn convert(
        &self,
        checkpoint: &Checkpoint,
        out: &Path,
        progress: &Progress,
        json: bool,
    ) -> Result<(), Failure> {
        if self.validate {
            requant::validate::check_options(checkpoint, &self.measure.options(false))?;
        }
        let mut outputs = self.begin(checkpoint, out)?;
        let planned = self.give_plans(checkpoint, &mut outputs, progress);
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
            let mut validation = None;
            let published = job.run_and_check(checkpoint, &options, progress, |complete| {
                self.check(checkpoint, complete, &dir, &mut validation, progress)
            });
            progress.finish();
            let published = published.map_err(|error| {
                let failure = Failure::from(error);
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
    fn begin(&self, checkpoint: &Checkpoint, out: &Path) -> Result<Vec<Output>, Failure> {
        let existing = Existing { resume: self.resume, force: self.force };
        let begin = |dir: PathBuf, bpw: Option<f64>| -> Result<Output, Failure> {
            let job = match Job::begin(checkpoint, self.flags(bpw), &dir, existing)? {
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
                needed = needed.saturating_add(needed_bytes(checkpoint, &self.exl2_options(Some(bpw))?)?);
            }
            first.check_space(needed)?;
        }
        let plans = self.plans(checkpoint, &budgets, progress)?;
        for ((job, _), plan) in unplanned.into_iter().zip(plans) {
            job.set_plan(checkpoint, plan)?;
        }
        Ok(())
    }

    /// The flags that decide the bytes of one output: all but those that have no say in them.
    fn flags(&self, bpw: Option<f64>) -> Map<String, Value> {
        let mut flags = match serde_json::to_value(self) {
            Ok(Value::Object(flags)) => flags,
            _ => Map::new(),
        };
        flags.insert("bpw".into(), bpw.into());
        flags.retain(|_, value| {
            !matches!(value, Value::Null | Value::Bool(false)) && value != &Value::Array(vec![])
        });
        flags
    }

    /// Flags that say nothing about the layout asked for are mistakes.
    fn check_flags(&self) -> Result<(), Failure> {
        self.measure.check_flags()?;
        if self.measure.is_given() && !self.validate {
            let message = "limits and texts are for --validate".into();
            return Err(Failure::usage(message, "add --validate, or leave them out"));
        }
        let exl2 = [
            (!self.bpw.is_empty(), "--bpw"),
            (self.head_bits.is_some(), "--head-bits"),
            (!self.set.is_empty(), "--set"),
            (!self.min.is_empty(), "--min"),
            (self.dense_members.is_some(), "--dense-members"),
            (self.any_arch, "--any-arch"),
        ];
        let gptq = [
            (self.zeros.is_some(), "--zeros"),
            (self.sym, "--sym"),
            (self.order.is_some(), "--order"),
            (self.reader.is_some(), "--for"),
            (self.allow_rounding, "--allow-rounding"),
        ];
        let widths = [(self.bits.is_some(), "--bits"), (self.group_size.is_some(), "--group-size")];
        let wrong: Vec<(bool, &str)> = match self.to {
            Layout::Exl2 => gptq.to_vec(),
            Layout::Gptq => exl2.to_vec(),
            Layout::Fp16 | Layout::Bf16 | Layout::Same => [&exl2[..], &gptq, &widths].concat(),
        };
        if let Some((_, flag)) = wrong.iter().find(|(given, _)| *given) {
            let to = self.to.to_possible_value().map_or(String::new(), |v| v.get_name().into());
            let message = format!("{flag} says nothing about --to {to}");
            return Err(Failure::usage(message, "`requant convert --help` says which flags go together"));
        }
        let repeated = |(i, bpw): (usize, &f64)| self.bpw[..i].contains(bpw);
        if self.bpw.iter().enumerate().any(repeated) {
            return Err(Failure::usage("--bpw names a bitrate twice".into(), "name each once"));
        }
        // What makes no sense in itself is told before anything is opened.
        match self.to {
            Layout::Exl2 => self.exl2_options(self.bpw.first().copied()).map(drop),
            Layout::Gptq => self.gptq_options().map(drop),
            Layout::Fp16 | Layout::Bf16 | Layout::Same => Ok(()),
        }
    }

    /// A plan for each budget, and one where there is none.
    fn plans(
        &self,
        checkpoint: &Checkpoint,
        budgets: &[f64],
        progress: &Progress,
    ) -> Result<Vec<Plan>, Failure> {
        if self.to == Layout::Exl2 && !budgets.is_empty() {
            let options = self.exl2_options(budgets.first().copied())?;
            return Ok(Plan::for_budgets(checkpoint, &options, budgets, progress)?);
        }
        Ok(vec![match self.to {
            Layout::Exl2 => Plan::new(checkpoint, &self.exl2_options(None)?, progress)?,
            Layout::Gptq => Plan::to_gptq(checkpoint, &self.gptq_options()?)?,
            Layout::Fp16 => Plan::to_dense(checkpoint, DenseType::Fp16)?,
            Layout::Bf16 => Plan::to_dense(checkpoint, DenseType::Bf16)?,
            Layout::Same => Plan::same(checkpoint),
        }])
    }

    fn gptq_options(&self) -> Result<GptqOptions, Failure> {
        let bits = self.bits.map(|bits| {
            gptq::Bits::try_from(bits)
                .map_err(|e| Failure::usage(e.to_string(), "GPTQ has 2, 3, 4 and 8 bits"))
        });
        let order = match self.order {
            Some(RowOrder::Sorted) => Order::Sorted,
            Some(RowOrder::Keep) => Order::Keep,
            // A reader that ignores g_idx needs whatever can be folded.
            None if self.reader.is_some_and(|reader| !reader.act_order) => Order::Sorted,
            None => Order::Keep,
        };
        Ok(GptqOptions {
            zeros: self.zeros.map(Into::into),
            bits: bits.transpose()?,
            symmetric: self.sym,
            group_size: self.group_size,
            order,
            allow_rounding: self.allow_rounding,
            reader: self.reader,
        })
    }

    fn exl2_options(&self, bpw: Option<f64>) -> Result<PlanOptions, Failure> {
        let target = match (bpw, self.bits) {
            (Some(bpw), _) => Target::Bpw(bpw),
            (None, Some(bits)) => {
                let bits =
                    Bits::try_from(bits).map_err(|e| Failure::usage(e.to_string(), "choose one of these"))?;
                Target::Uniform { bits, group_size: self.group_size.unwrap_or(64) }
            }
            (None, None) => {
                return Err(Failure::usage(
                    "--to exl2 needs --bpw or --bits".into(),
                    "--bpw 4.25 is a good start",
                ));
            }
        };
        let rules = |rules: &[(String, Bits)]| -> Result<Vec<WidthRule>, Failure> {
            rules.iter().map(|(pattern, bits)| Ok(WidthRule::new(pattern, *bits)?)).collect()
        };
        Ok(PlanOptions {
            target,
            head_bits: self.head_bits,
            dense_members: match self.dense_members {
                None | Some(Members::Quantize) => DenseMembers::Quantize,
                Some(Members::DequantizeSet) => DenseMembers::DequantizeSet,
                Some(Members::Error) => DenseMembers::Error,
            },
            set: rules(&self.set)?,
            min: rules(&self.min)?,
            keep_gptq: self.keep_gptq,
        })
    }
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

fn reader_name<S: Serializer>(reader: &Option<&'static Reader>, serializer: S) -> Result<S::Ok, S::Error> {
    reader.map(|reader| reader.name).serialize(serializer)
}

fn parse_reader(name: &str) -> Result<&'static Reader, String> {
    let names: Vec<&str> = READERS.iter().map(|reader| reader.name).collect();
    Reader::named(name).ok_or_else(|| format!("known are {}", names.join(", ")))
}

fn parse_bits(text: &str) -> Result<Bits, String> {
    let bits: u32 = text.parse().map_err(|_| "not a number".to_string())?;
    Bits::try_from(bits).map_err(|_| "EXL2 has 2, 3, 4, 5, 6 and 8 bits".to_string())
}

fn parse_rule(text: &str) -> Result<(String, Bits), String> {
    let (pattern, bits) = text.rsplit_once('=').ok_or("expected REGEX=BITS")?;
    Ok((pattern.into(), parse_bits(bits)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_may_hold_an_equals_sign() {
        assert_eq!(parse_rule("(?=a)b=6"), Ok(("(?=a)b".into(), Bits::try_from(6).unwrap())));
        assert!(parse_rule("abc").is_err());
        assert!(parse_rule("abc=7").is_err());
    }
}
