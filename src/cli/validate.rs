//! `requant validate`, and what `convert --validate` shares with it.

use super::device::{Device, Opened};
use super::errors::Failure;
use super::print;
use super::progress::{Progress, Style};
use requant::checkpoint::{AllOnes, Checkpoint, OpenOptions};
use requant::progress::Observer;
use requant::validate::page::html;
use requant::validate::report::{GateKind, LayerScores, LayoutFault, ModelSide, Verdict};
use requant::validate::{DEFAULT_TOKENS, Gates, Layers, Options, SwapIn, Text, Validation, validate};
use std::path::{Path, PathBuf};

/// Name of a validation's report in a directory.
pub(super) const VALIDATION_FILE: &str = "validation.json";

/// Name of its page.
pub(super) const PAGE_FILE: &str = "report.html";

/// Measure what a conversion did: every layer, perplexity, KL divergence.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// The model that was converted.
    source: PathBuf,
    /// What was made of it.
    converted: PathBuf,
    #[command(flatten)]
    measure: Measure,
    /// Measure the perplexity of each converted layer alone, and block by block. On a CPU this takes as long as
    /// dozens of forward passes: an estimate is printed before it begins.
    #[arg(long, value_name = "WHETHER", default_value = "off", value_enum)]
    swap_in: Switch,
    /// Of which layers: a number (those whose outputs are furthest off) or a pattern of names; all if left out.
    #[arg(long, value_name = "N|REGEX", requires = "swap_in")]
    layers: Option<String>,
    /// Tokens to measure each layer on: the first windows of the text.
    #[arg(long, value_name = "N", default_value_t = 1024)]
    layer_tokens: usize,
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
    /// Where to compute: auto (a GPU if one can be used), cpu, cuda, or cuda:N for one of several.
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
        let gates = self.gates();
        self.text.is_some()
            || self.token_ids.is_some()
            || self.window.is_some()
            || self.bos
            || !gates.is_empty()
    }

    fn gates(&self) -> Gates {
        Gates { max_kl: self.max_kl, max_ppl_increase: self.max_ppl_increase, min_top1: self.min_top1 }
    }

    pub(super) fn options(&self) -> Options {
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
            Opened::Cuda(ops) => validate(source, converted, options, &*ops, observer),
        }
    }
}

impl Arguments {
    pub(super) fn run(&self, json: bool) -> Result<(), Failure> {
        if self.layers.is_some() && self.swap_in == Switch::Off {
            return Err(Failure::usage(
                "--layers says which layers --swap-in measures".into(),
                "add --swap-in on",
            ));
        }
        let options = OpenOptions { all_ones: self.all_ones.map(AllOnes::from), ..OpenOptions::default() };
        let of_source = OpenOptions { zeros: self.source_zeros.map(Into::into), ..options };
        let source = Checkpoint::open(&self.source, &of_source)?;
        let converted = Checkpoint::open(&self.converted, &options)?;
        let swap_in = (self.swap_in == Switch::On)
            .then(|| SwapIn { layers: layers(self.layers.as_deref()), tokens: self.layer_tokens });
        let options = Options { swap_in, ..self.measure.options() };
        let progress = Progress::new(self.progress);
        let validation = self.measure.validate(&source, &converted, &options, &progress);
        progress.finish();
        let validation = validation?;
        if let Some(path) = &self.report {
            write_report(path, &validation)?;
        }
        print::stdout(&match json {
            true => to_json(&validation),
            false => text(&validation),
        })?;
        outcome(&self.converted, &validation)
    }
}

fn layers(text: Option<&str>) -> Layers {
    match text.map(|text| (text, text.parse())) {
        None => Layers::All,
        Some((_, Ok(count))) => Layers::Worst(count),
        Some((pattern, Err(_))) => Layers::Matching(pattern.into()),
    }
}

/// The exit code of a validation, and what is said of it.
pub(super) fn outcome(converted: &Path, validation: &Validation) -> Result<(), Failure> {
    match validation.verdict {
        Verdict::Exact | Verdict::Passed => Ok(()),
        verdict => Err(Failure::validation(converted, verdict, reason(validation))),
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

/// A short text: the verdict, the figures, the worst layers.
pub(super) fn text(validation: &Validation) -> String {
    let mut lines = vec![verdict_line(validation)];
    let conditions = &validation.conditions;
    if let Some(model) = &validation.model {
        let bos = if conditions.bos { "BOS" } else { "no BOS" };
        lines.push(format!(
            "  {} tokens of {}, windows of {}, {bos}, on {}",
            conditions.tokens, conditions.text, conditions.window, conditions.device
        ));
        let growth = (model.converted_perplexity / model.source_perplexity - 1.0) * 100.0;
        lines.push(format!(
            "  perplexity     {:.4} → {:.4} ({growth:+.2} %)",
            model.source_perplexity, model.converted_perplexity
        ));
        lines.push(format!(
            "  KL divergence  {:.6} ± {:.6} nats a token (reverse {:.6}, 99 % of tokens below {:.4}, largest {:.4})",
            model.kl.mean, model.kl.standard_error, model.reverse_kl.mean, model.kl_p99, model.kl_max
        ));
        lines.push(format!(
            "  same top token {:.2} % ± {:.2} %",
            model.top1_agreement.mean * 100.0,
            model.top1_agreement.standard_error * 100.0
        ));
    }
    lines.push(format!("  {:.4} bpw → {:.4} bpw", validation.source.bpw, validation.converted.bpw));
    let error = |layer: &LayerScores| layer.output.map_or(layer.weight_error, |output| output.relative_error);
    let worst = validation.layers.iter().max_by(|a, b| error(a).total_cmp(&error(b)));
    if let Some(layer) = worst.filter(|layer| error(layer) > 0.0) {
        let of = if layer.output.is_some() { "outputs" } else { "weights" };
        lines.push(format!(
            "  worst layer    {}: its {of} are off by {:.2} %",
            layer.source,
            error(layer) * 100.0
        ));
    }
    let alone = validation.layers.iter().filter_map(|layer| Some((layer, layer.swap_in?)));
    if let Some((layer, swap)) = alone.max_by(|a, b| a.1.kl.total_cmp(&b.1.kl)) {
        lines.push(format!(
            "  costliest      {}: alone it makes KL {:.6}, perplexity {:.4} ({} tokens)",
            layer.source, swap.kl, swap.perplexity, conditions.layer_tokens
        ));
    }
    for gate in &validation.gates {
        let name = match gate.kind {
            GateKind::MaxKl => "--max-kl",
            GateKind::MaxPplIncrease => "--max-ppl-increase",
            GateKind::MinTop1 => "--min-top1",
        };
        let met = if gate.met { "met" } else { "missed" };
        lines.push(format!("  {name} {}: {met} ({:.6})", gate.limit, gate.found));
    }
    for layer in &validation.layers {
        if let Some(fault) = &layer.fault {
            lines.push(format!("  broken: {}: {}", layer.converted, fault_text(fault)));
        }
    }
    lines.extend(validation.not_run.iter().map(|reason| format!("  not measured: {reason}")));
    lines.join("\n") + "\n"
}

fn verdict_line(validation: &Validation) -> String {
    match validation.verdict {
        Verdict::Exact => "exact: every value as decoded is the source's".into(),
        Verdict::Passed => "passed".into(),
        _ => reason(validation),
    }
}

fn reason(validation: &Validation) -> String {
    match (validation.verdict, validation.non_finite) {
        (Verdict::Broken, _) => {
            let broken = validation.layers.iter().filter(|layer| layer.fault.is_some()).count();
            let first =
                validation.layers.iter().find_map(|layer| Some((&layer.converted, layer.fault.as_ref()?)));
            let first = first.map_or(String::new(), |(name, fault)| format!("{name}: {}", fault_text(fault)));
            match broken {
                0 | 1 => format!("broken: {first}"),
                broken => format!("broken: {broken} layers, the first {first}"),
            }
        }
        (Verdict::NonFinite, Some(place)) => {
            let model = match place.model {
                ModelSide::Source => "the source",
                ModelSide::Converted => "the converted model",
                ModelSide::Variant => "the source with a converted layer",
            };
            let block = place.layer.map_or("the logits".into(), |layer| format!("block {layer}"));
            format!("not finite: a NaN or an infinity in {block} of {model}, at token {}", place.token)
        }
        (Verdict::GateMissed, _) => {
            let missed = validation.gates.iter().filter(|gate| !gate.met).count();
            format!("{missed} of {} limits missed", validation.gates.len())
        }
        _ => String::new(),
    }
}

fn fault_text(fault: &LayoutFault) -> String {
    match fault {
        LayoutFault::NotAsPromised { promised, found } => {
            format!("its relative error is {found:.6}, the conversion promised {promised:.6}")
        }
        LayoutFault::PermutationInverted => "its permutation is inverted".into(),
        LayoutFault::GroupsSwapped { first, second } => format!("groups {first} and {second} are swapped"),
        LayoutFault::ScaleIndexOff { by } => format!("scale indices are off by {by}"),
        LayoutFault::ZeroOff { by } => format!("zero points are off by {by}"),
        _ => "its layout is wrong".into(),
    }
}

fn parse_limit(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(limit) if limit >= 0.0 && limit.is_finite() => Ok(limit),
        _ => Err("expected a number that isn't negative".into()),
    }
}
