//! `requant inspect`.

use super::errors::Failure;
use super::print;
use requant::checkpoint::{Bias, Checkpoint, OpenOptions, ZeroEvidence};
use requant::convert::report::float_name;
use requant::fit::Fit;
use requant::formats::gptq::GIdxKind;
use requant::inspect::{Counted, InspectedLayout, InspectedModule, Inspection, Parallel, Summary, Verdict};
use requant::plan::readers::{READERS, Reader};
use serde::Serialize;
use std::path::PathBuf;

/// Say what a checkpoint is: the layout of each linear, sizes, whatever is odd, and who loads it.
///
/// The exit code tells whether the question was answered, not how: it is 0 also where no program loads the files.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// A directory with config.json and .safetensors files.
    checkpoint: PathBuf,
    /// Convention of the stored zero points, where files contradict themselves.
    #[arg(long, value_name = "CONVENTION", value_enum)]
    source_zeros: Option<super::convert::Zeros>,
    /// Say whether it fits into so much memory of a GPU, with a cache for --context: 24G or 24GiB, 24GB.
    #[arg(long, value_name = "SIZE", value_parser = super::size::parse)]
    vram: Option<u64>,
    /// Tokens of context, in an fp16 cache.
    #[arg(long, value_name = "N", default_value_t = 8192, requires = "vram", value_parser = clap::value_parser!(u64).range(1..))]
    context: u64,
    /// Say, instead of listing modules, whether these programs load it, and why not: exllamav2, aphrodite, tgi, vllm,
    /// vllm-0.10, sglang, gptqmodel or transformers; several with commas, or all.
    #[arg(long = "for", value_name = "READER", value_delimiter = ',', value_parser = parse_readers)]
    readers: Vec<Readers>,
    /// Say whether it can be cut for so many GPUs (tensor parallelism), what stands in the way, and at which other
    /// numbers it can.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    tp: Option<u16>,
}

/// One program, or all.
type Readers = &'static [Reader];

fn parse_readers(name: &str) -> Result<Readers, String> {
    if name == "all" {
        return Ok(READERS);
    }
    let found = READERS.iter().find(|reader| reader.name == name).map(std::slice::from_ref);
    found.ok_or_else(|| {
        let names: Vec<&str> = READERS.iter().map(|reader| reader.name).collect();
        format!("known are all, {}", names.join(", "))
    })
}

/// What `--json` prints.
#[derive(Serialize)]
struct Answer<'a> {
    #[serde(flatten)]
    inspection: &'a Inspection,
    /// With `--vram`.
    #[serde(skip_serializing_if = "Option::is_none")]
    fit: Option<Fit>,
    /// With `--for` or `--tp`.
    #[serde(skip_serializing_if = "Option::is_none")]
    summary: Option<Summary>,
    /// With `--for`.
    #[serde(rename = "for", skip_serializing_if = "Vec::is_empty")]
    verdicts: Vec<Verdict>,
    /// With `--tp`.
    #[serde(skip_serializing_if = "Option::is_none")]
    tp: Option<Parallel>,
}

impl Arguments {
    pub(super) fn run(&self, json: bool) -> Result<(), Failure> {
        let options = OpenOptions { zeros: self.source_zeros.map(Into::into), ..OpenOptions::default() };
        let checkpoint = Checkpoint::open(&self.checkpoint, &options)?;
        let inspection = Inspection::new(&checkpoint);
        let fit = self.vram.map(|vram| {
            let fit = Fit::new(&checkpoint, &inspection, vram, self.context);
            fit.ok_or_else(|| {
                let message = "config.json gives no dimensions that a cache can be counted from".into();
                Failure::usage(message, "leave --vram out")
            })
        });
        let fit = fit.transpose()?;
        let mut verdicts = Vec::new();
        let mut asked: Vec<&'static Reader> = self.readers.iter().copied().flatten().collect();
        let mut seen = Vec::new();
        asked.retain(|reader| {
            !seen.contains(&reader.name) && {
                seen.push(reader.name);
                true
            }
        });
        for reader in asked {
            verdicts.push(Verdict::new(&checkpoint, reader)?);
        }
        let tp = self.tp.map(|size| {
            Parallel::new(&checkpoint, usize::from(size)).ok_or_else(|| {
                let message = "the architecture isn't known, nor how its linears are cut".into();
                Failure::usage(message, "leave --tp out")
            })
        });
        let tp = tp.transpose()?;
        let summary = (!verdicts.is_empty() || tp.is_some()).then(|| Summary::new(&checkpoint));
        if json {
            let answer = Answer { inspection: &inspection, fit, summary, verdicts, tp };
            let json = serde_json::to_string_pretty(&answer).unwrap_or_default();
            return print::stdout(&(json + "\n"));
        }
        let mut answer = match summary {
            None => text(&inspection),
            Some(summary) => summary_text(&inspection, &summary) + &verdict_text(&verdicts, tp.as_ref()),
        };
        answer.push_str(&fit.map_or(String::new(), |fit| fit_text(&fit)));
        print::stdout(&answer)
    }
}

fn summary_text(inspection: &Inspection, summary: &Summary) -> String {
    let mut text = header(inspection);
    text.push_str(match summary.complete {
        Some(_) => "whole: every file is as long as its header says, and every tensor of the architecture is there\n",
        None => "every file is as long as its header says; whether tensors are missing, an unknown architecture doesn't tell\n",
    });
    for zeros in &summary.zeros {
        let evidence = match zeros.evidence {
            ZeroEvidence::Option => "as you say",
            ZeroEvidence::Values => "which their values show",
            ZeroEvidence::Label => "which the label says, and nothing else tells",
            ZeroEvidence::Producer => "as the program that wrote them does",
            ZeroEvidence::Default => "which is assumed: nothing tells",
        };
        let modules = if zeros.modules == 1 { "module" } else { "modules" };
        text.push_str(&format!(
            "zero points: {} in {} {modules}, {evidence}\n",
            zeros.convention, zeros.modules
        ));
    }
    if summary.gptq_modules > 0 {
        let stated = match (summary.desc_act, summary.act_order_modules) {
            (Some(true), 0) => ", although the configuration says desc_act: true",
            (Some(false), 1..) => ", although the configuration says desc_act: false",
            _ => "",
        };
        let (found, all) = (summary.act_order_modules, summary.gptq_modules);
        text.push_str(&format!("act-order: {found} of {all} modules{stated}\n"));
    }
    text.push_str(&print::warnings(&inspection.warnings));
    text
}

fn verdict_text(verdicts: &[Verdict], tp: Option<&Parallel>) -> String {
    let mut text = String::from("\n");
    for verdict in verdicts {
        let loads = if verdict.loads { "loads it" } else { "no" };
        text.push_str(&format!("{}: {loads}\n{}", verdict.reader, reasons(&verdict.reasons)));
    }
    if let Some(tp) = tp {
        let works = if tp.works { "can be cut" } else { "no" };
        let programs = tp.programs.join(", ");
        text.push_str(&format!("for {} GPUs in {programs}: {works}\n{}", tp.size, reasons(&tp.reasons)));
        let sizes: Vec<String> = tp.sizes.iter().map(ToString::to_string).collect();
        text.push_str(&format!("numbers of GPUs that work: {}\n", sizes.join(", ")));
    }
    text
}

fn reasons(reasons: &[Counted]) -> String {
    let line = |reason: &Counted| {
        let more = match reason.subjects.len() {
            0 | 1 => String::new(),
            subjects => format!(" and {} more", subjects - 1),
        };
        format!("  {}{more}: {}\n", reason.subjects.first().map_or("", String::as_str), reason.message)
    };
    reasons.iter().map(line).collect()
}

/// The line that every inspection begins with.
fn header(inspection: &Inspection) -> String {
    format!(
        "{}, {} in {} {}\n\n",
        inspection.architecture.as_deref().unwrap_or("no architecture given"),
        print::bytes(inspection.totals.tensor_bytes),
        inspection.files.len(),
        if inspection.files.len() == 1 { "file" } else { "files" },
    )
}

fn fit_text(fit: &Fit) -> String {
    let mut text = format!(
        "\n{}: {} of weights + {} of cache for {} tokens ({} bytes each) + {} assumed for the loader = {} of {}\n",
        if fit.fits { "fits" } else { "does not fit" },
        print::memory(fit.weight_bytes),
        print::memory(fit.cache_bytes),
        fit.context,
        fit.cache_bytes_per_token,
        print::memory(fit.overhead_bytes),
        print::memory(fit.total_bytes),
        print::memory(fit.vram_bytes),
    );
    text.push_str(&match (fit.largest_context, fit.positions) {
        (None, _) => "largest context that fits: none, without a cache it is too large already\n".into(),
        (Some(context), Some(positions)) if positions < context => {
            format!("largest context that fits: {context} tokens; the model has positions for {positions}\n")
        }
        (Some(context), _) => format!("largest context that fits: {context} tokens\n"),
    });
    text
}

fn text(inspection: &Inspection) -> String {
    let columns = ["module", "in", "out", "layout", "group", "groups", "g_idx", "zeros", "bias", "bpw"];
    let mut rows = vec![columns.map(String::from).to_vec()];
    rows.extend(inspection.modules.iter().map(row));
    let totals = &inspection.totals;
    let mut text = header(inspection);
    text.push_str(&print::table(&rows));
    text.push_str(&format!(
        "\n{} of {} linears quantized, {} weights at {:.4} bpw; all tensors: {} weights at {:.4} bits\n",
        totals.quantized_modules,
        totals.modules,
        print::count(totals.quantized_weights),
        totals.bpw,
        print::count(totals.all_weights),
        totals.file_bpw,
    ));
    text.push_str(&print::warnings(&inspection.warnings));
    text
}

fn row(module: &InspectedModule) -> Vec<String> {
    let (layout, group, groups, g_idx, zeros) = match &module.layout {
        InspectedLayout::Gptq { bits, group_size, groups, g_idx, equal_groups, zeros, scales } => {
            let order = match g_idx {
                GIdxKind::Absent => "absent",
                GIdxKind::ZeroLeftover => "zeros, ignored",
                GIdxKind::OneGroup => "one group",
                GIdxKind::Sequential => "sequential",
                GIdxKind::ActOrder if *equal_groups => "act-order",
                GIdxKind::ActOrder => "act-order, unequal",
            };
            let symmetry = if zeros.symmetric { "sym" } else { "asym" };
            let undecided = if zeros.encoding.is_none() { " undecided" } else { "" };
            let scales = if scales == "F16" { String::new() } else { format!(" {}", float_name(scales)) };
            (
                format!("gptq {bits}-bit{scales}"),
                group_size.to_string(),
                groups.to_string(),
                order.to_string(),
                format!("{} {symmetry}{undecided}", zeros.convention),
            )
        }
        InspectedLayout::Exl2 { widths, groups, stored_out_features } => {
            let widths: Vec<String> = widths.iter().map(|(bits, _)| bits.get().to_string()).collect();
            let padded = match *stored_out_features == module.out_features {
                true => String::new(),
                false => format!(" padded to {stored_out_features}"),
            };
            let layout = format!("exl2 {}-bit{padded}", widths.join("/"));
            (layout, "".into(), groups.to_string(), "".into(), "".into())
        }
        InspectedLayout::Dense { dtype } => (float_name(dtype), "".into(), "".into(), "".into(), "".into()),
    };
    let bias = match module.bias {
        None => "",
        Some(Bias::AllZero) => "zeros",
        Some(Bias::NonZero) => "yes",
    };
    let (name, k, n) = (module.name.clone(), module.in_features.to_string(), module.out_features.to_string());
    vec![name, k, n, layout, group, groups, g_idx, zeros, bias.into(), format!("{:.4}", module.bpw)]
}
