//! `requant convert`: its flags, and what they mean to the library.

use super::calibration::Calibration;
use super::errors::Failure;
use super::progress::{Progress, Style};
use super::validate::Measure;
use clap::ValueEnum;
use requant::calibrate;
use requant::checkpoint::{AllOnes, Checkpoint, OpenOptions};
use requant::formats::exl2::Bits;
use requant::formats::gptq;
use requant::plan::readers::{READERS, Reader};
use requant::plan::{DenseMembers, GptqOptions, Order, PlanOptions, Target, WidthRule};
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};
use std::path::PathBuf;

/// Convert a checkpoint to another layout.
#[derive(Debug, clap::Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Arguments {
    /// A directory with config.json and .safetensors files.
    #[serde(skip)]
    pub(super) source: PathBuf,
    /// The layout to convert to.
    #[arg(long, value_name = "LAYOUT")]
    pub(super) to: Layout,
    /// The directory to write, which must not exist yet. It is written as DIR.partial and gets its name when
    /// it is complete.
    #[arg(long, value_name = "DIR", required_unless_present = "dry_run")]
    #[serde(skip)]
    pub(super) out: Option<PathBuf>,
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
    pub(super) bpw: Vec<f64>,
    /// One width: for EXL2 that of all of the decoder's linears (2, 3, 4, 5, 6 or 8), for GPTQ the width to
    /// store codes in: exact where it holds them, and a module that it doesn't hold is requantized, which is
    /// said.
    #[arg(long, value_name = "N", conflicts_with = "bpw")]
    bits: Option<u32>,
    /// Rows of a group: for EXL2 with --bits a multiple of 32 (64 if left out), for GPTQ a divisor of the
    /// source's, or any size for a module that is requantized.
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
    /// Calibrate on text: errors count by what they do to the outputs of linears, rounding errors of weights make up for
    /// each other, and with --bpw widths go where the model needs them. Takes minutes to hours on a CPU.
    #[arg(help_heading = "EXL2 output", long)]
    pub(super) calibrate: bool,
    /// The text to calibrate on: plain, or .jsonl or .parquet with a field `text`; a built-in one if left out.
    #[arg(help_heading = "EXL2 output", long, value_name = "FILE", requires = "calibrate")]
    #[serde(skip)]
    pub(super) calibration_text: Option<PathBuf>,
    /// Tokens to calibrate on.
    #[arg(
        help_heading = "EXL2 output",
        long,
        value_name = "N",
        requires = "calibrate",
        default_value_t = calibrate::DEFAULT_TOKENS
    )]
    #[serde(skip)]
    pub(super) calibration_tokens: usize,
    /// Convert an architecture that isn't known as a Llama, which exllamav2 takes it for.
    #[arg(help_heading = "EXL2 output", long)]
    any_arch: bool,
    /// Convention of the source's stored zero points, where files contradict themselves.
    #[arg(long, value_name = "CONVENTION", value_enum)]
    source_zeros: Option<Zeros>,
    /// Convention of stored zero points in a GPTQ output; the source's if left out. Modules that are
    /// requantized get zero points of their own with it, and are symmetric without.
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
    pub(super) shard_size: u64,
    /// Go on with a conversion that was stopped, from the same source with the same flags; it ends in the same
    /// bytes. Begins where there is nothing to go on with, does nothing where it is complete.
    #[arg(long)]
    #[serde(skip)]
    pub(super) resume: bool,
    /// Replace an output of requant that exists, once the new one is complete, and throw an unfinished one
    /// away (with --resume: go on with it).
    #[arg(long)]
    #[serde(skip)]
    pub(super) force: bool,
    /// Validate the output before it gets its name: every layer, perplexity and KL divergence, in
    /// validation.json and report.html beside it. What misses a limit or is broken is left as DIR.rejected.
    #[arg(help_heading = "Validation", long, conflicts_with = "dry_run")]
    #[serde(skip)]
    pub(super) validate: bool,
    #[command(flatten)]
    #[serde(skip)]
    pub(super) measure: Measure,
    /// Print the plan and the size, and write nothing.
    #[arg(long)]
    #[serde(skip)]
    pub(super) dry_run: bool,
    /// How progress is shown.
    #[arg(long, value_name = "HOW", value_enum, default_value_t = Style::Auto)]
    #[serde(skip)]
    progress: Style,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Layout {
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

    /// The flags that decide the bytes of one output: all but those that have no say in them.
    pub(super) fn flags(&self, bpw: Option<f64>, calibration: Option<&Calibration>) -> Map<String, Value> {
        let mut flags = match serde_json::to_value(self) {
            Ok(Value::Object(flags)) => flags,
            _ => Map::new(),
        };
        flags.insert("bpw".into(), bpw.into());
        flags.insert("calibrate".into(), calibration.map_or(Value::Null, Calibration::flags));
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
            (self.calibrate, "--calibrate"),
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

    pub(super) fn gptq_options(&self) -> Result<GptqOptions, Failure> {
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

    pub(super) fn exl2_options(&self, bpw: Option<f64>) -> Result<PlanOptions, Failure> {
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
