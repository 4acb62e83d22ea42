//! `requant validate`, and what `convert --validate` shares with it.

use super::device::{Device, Opened};
use super::errors::Failure;
use super::print;
use super::progress::{Progress, Style};
use super::validate_summary;
use requant::checkpoint::{AllOnes, Checkpoint, OpenOptions};
use requant::progress::Observer;
use requant::validate::page::html;
use requant::validate::report::Verdict;
use requant::validate::{
    DEFAULT_TOKENS, Gates, Layers, Options, SwapIn, Text, Validation, summary, validate, validate_on,
};
use std::path::{Path, PathBuf};

/// Name of a validation's report in a directory.
pub(super) const VALIDATION_FILE: &str = "validation.json";

/// Name of its page.
pub(super) const PAGE_FILE: &str = "report.html";

/// Layers that are measured alone where no choice is made.
const LAYERS: usize = 8;

/// Each of them on this part of the text. A layer alone costs the blocks from its own to the last, so eight on
/// a quarter cost at most two and a quarter passes of one model: about what comparing both models costs.
const LAYER_PART: usize = 4;

/// Measure what a conversion did: every layer, perplexity, KL divergence.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// The model that was converted.
    source: PathBuf,
    /// What was made of it.
    converted: PathBuf,
    #[command(flatten)]
    measure: Measure,
    /// Write the report: a .json or .html file, or a directory for both.
    #[arg(long, value_name = "FILE|DIR")]
    report: Option<PathBuf>,
    /// What a stored zero point of only ones means, if the conversion was told.
    #[arg(long, value_name = "MEANING", value_enum)]
    all_ones: Option<super::convert::Ones>,
    /// Convention of the source's stored zero points, if the conversion was told.
    #[arg(long, value_name = "CONVENTION", value_enum)]
    source_zeros: Option<super::convert::Zeros>,
    /// How progress is shown.
    #[arg(long, value_name = "HOW", value_enum, default_value_t = Style::Auto)]
    progress: Style,
}

/// What is measured, and its limits.
#[derive(Debug, Default, clap::Args)]
pub(super) struct Measure {
    /// The text: plain, or .jsonl or .parquet with a field `text`; a built-in sample if left out.
    #[arg(help_heading = "Validation", long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// The tokens themselves: a JSON list of numbers.
    #[arg(help_heading = "Validation", long, value_name = "FILE", conflicts_with = "text")]
    token_ids: Option<PathBuf>,
    /// Tokens to measure on.
    #[arg(help_heading = "Validation", long, value_name = "N", default_value_t = DEFAULT_TOKENS)]
    tokens: usize,
    /// Tokens of a window; windows don't overlap. 512 if left out, or what the model has positions for.
    #[arg(help_heading = "Validation", long, value_name = "N")]
    window: Option<usize>,
    /// Begin each window with the BOS token.
    #[arg(help_heading = "Validation", long)]
    bos: bool,
    /// Fail, with exit code 1, if the mean KL divergence (nats a token) is larger.
    #[arg(help_heading = "Validation", long, value_name = "NATS", value_parser = parse_limit)]
    max_kl: Option<f64>,
    /// Fail if the perplexity grows by a larger part: 0.01 is one percent.
    #[arg(help_heading = "Validation", long, value_name = "PART", value_parser = parse_limit)]
    max_ppl_increase: Option<f64>,
    /// Fail if both models find the same token most likely for a smaller part of the tokens: 0.95.
    #[arg(help_heading = "Validation", long, value_name = "PART", value_parser = parse_limit)]
    min_top1: Option<f64>,
    /// Measure the perplexity of converted layers alone. The time that it will take is printed before it
    /// begins. On for `validate`, off for `convert`, if left out.
    #[arg(help_heading = "Validation", long, value_name = "WHETHER", value_enum)]
    swap_in: Option<Switch>,
    /// Of which layers: so many of those whose outputs are furthest off, those whose name a pattern matches, or
    /// `all`, also block by block, which on a CPU takes as long as dozens of forward passes. 8 if left out.
    #[arg(help_heading = "Validation", long, value_name = "N|REGEX|all")]
    layers: Option<String>,
    /// Tokens to measure each layer on, the first windows of the text; a quarter of --tokens if left out.
    #[arg(help_heading = "Validation", long, value_name = "N")]
    layer_tokens: Option<usize>,
    /// Where to compute: auto (all GPUs, or the CPU), cpu, cuda, or cuda:N for one of several.
    #[arg(help_heading = "Validation", long, value_name = "DEVICE", default_value_t = Device::Auto)]
    device: Device,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Switch {
    On,
    Off,
}

impl Measure {
    /// Whether a flag was given that needs a validation.
    pub(super) fn is_given(&self) -> bool {
        self.text.is_some()
            || self.token_ids.is_some()
            || self.tokens != DEFAULT_TOKENS
            || self.window.is_some()
            || self.bos
            || self.device != Device::Auto
            || self.swap_in.is_some()
            || self.chooses_layers()
            || !self.gates().is_empty()
    }

    /// Flags that contradict each other are mistakes.
    pub(super) fn check_flags(&self) -> Result<(), Failure> {
        if self.chooses_layers() && self.swap_in == Some(Switch::Off) {
            let message = "--layers and --layer-tokens say what --swap-in measures".into();
            return Err(Failure::usage(message, "leave --swap-in off out"));
        }
        Ok(())
    }

    fn chooses_layers(&self) -> bool {
        self.layers.is_some() || self.layer_tokens.is_some()
    }

    fn gates(&self) -> Gates {
        Gates { max_kl: self.max_kl, max_ppl_increase: self.max_ppl_increase, min_top1: self.min_top1 }
    }

    /// What is to be measured; single layers if the flags say so, or leave it open and `swap_in` does.
    pub(super) fn options(&self, swap_in: bool) -> Options {
        let swap_in = match self.swap_in {
            Some(switch) => switch == Switch::On,
            None => swap_in || self.chooses_layers(),
        };
        let text = match (&self.text, &self.token_ids) {
            (Some(path), _) => Text::File(path.clone()),
            (None, Some(path)) => Text::TokenIds(path.clone()),
            (None, None) => Text::Sample,
        };
        Options {
            text,
            tokens: self.tokens,
            window: self.window,
            bos: self.bos,
            gates: self.gates(),
            swap_in: swap_in.then(|| SwapIn {
                layers: layers(self.layers.as_deref()),
                tokens: self.layer_tokens.unwrap_or(self.tokens / LAYER_PART),
            }),
            ..Options::default()
        }
    }

    /// Validates on the device that was asked for.
    pub(super) fn validate(
        &self,
        source: &Checkpoint,
        converted: &Checkpoint,
        options: &Options,
        observer: &dyn Observer,
    ) -> Result<Validation, requant::Error> {
        match self.device.open().map_err(requant::validate::Error::from)? {
            Opened::Cpu(ops) => validate(source, converted, options, &ops, observer),
            #[cfg(feature = "cuda")]
            Opened::Cuda(gpus) => validate_on(source, converted, options, &gpus, observer),
        }
    }
}

impl Arguments {
    pub(super) fn run(&self, json: bool) -> Result<(), Failure> {
        self.measure.check_flags()?;
        let options = OpenOptions { all_ones: self.all_ones.map(AllOnes::from), ..OpenOptions::default() };
        let of_source = OpenOptions { zeros: self.source_zeros.map(Into::into), ..options };
        let source = Checkpoint::open(&self.source, &of_source)?;
        let converted = Checkpoint::open(&self.converted, &options)?;
        let options = self.measure.options(true);
        let progress = Progress::new(self.progress);
        let validation = self.measure.validate(&source, &converted, &options, &progress);
        progress.finish();
        let validation = validation?;
        if let Some(path) = &self.report {
            write_report(path, &validation)?;
        }
        print::stdout(&match json {
            true => to_json(&validation),
            false => validate_summary::text(&validation),
        })?;
        outcome(&self.converted, &validation)
    }
}

fn layers(text: Option<&str>) -> Layers {
    match text {
        None => Layers::Worst(LAYERS),
        Some("all") => Layers::All,
        Some(text) => text.parse().map_or_else(|_| Layers::Matching(text.into()), Layers::Worst),
    }
}

/// The exit code of a validation, and what is said of it.
pub(super) fn outcome(converted: &Path, validation: &Validation) -> Result<(), Failure> {
    match validation.verdict {
        Verdict::Exact | Verdict::Passed => Ok(()),
        verdict => Err(Failure::validation(converted, verdict, summary::headline(validation))),
    }
}

pub(super) fn to_json(validation: &Validation) -> String {
    // Maps have string keys: nothing here can fail to serialise.
    serde_json::to_string_pretty(validation).unwrap_or_default() + "\n"
}

fn write_report(path: &Path, validation: &Validation) -> Result<(), Failure> {
    let failed = |e: std::io::Error| Failure::environment(format!("{}: {e}", path.display()));
    let end = path.extension().and_then(|end| end.to_str());
    match end {
        Some("json") => std::fs::write(path, to_json(validation)).map_err(failed),
        Some("html") => std::fs::write(path, html(validation)).map_err(failed),
        _ => {
            std::fs::create_dir_all(path).map_err(failed)?;
            std::fs::write(path.join(VALIDATION_FILE), to_json(validation)).map_err(failed)?;
            std::fs::write(path.join(PAGE_FILE), html(validation)).map_err(failed)
        }
    }
}

fn parse_limit(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(limit) if limit >= 0.0 && limit.is_finite() => Ok(limit),
        _ => Err("expected a number that isn't negative".into()),
    }
}
