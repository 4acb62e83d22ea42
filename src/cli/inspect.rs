//! `requant inspect`.

use super::errors::Failure;
use super::print;
use requant::checkpoint::{Bias, Checkpoint, OpenOptions};
use requant::convert::report::float_name;
use requant::fit::Fit;
use requant::formats::gptq::GIdxKind;
use requant::inspect::{InspectedLayout, InspectedModule, Inspection};
use serde::Serialize;
use std::path::PathBuf;

/// Say what a checkpoint is: the layout of each linear, sizes, and whatever is odd.
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
}

/// What `--json` prints.
#[derive(Serialize)]
struct Answer<'a> {
    #[serde(flatten)]
    inspection: &'a Inspection,
    /// With `--vram`.
    #[serde(skip_serializing_if = "Option::is_none")]
    fit: Option<Fit>,
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
        if json {
            let answer = Answer { inspection: &inspection, fit };
            let json = serde_json::to_string_pretty(&answer).unwrap_or_default();
            return print::stdout(&(json + "\n"));
        }
        print::stdout(&(text(&inspection) + &fit.map_or(String::new(), |fit| fit_text(&fit))))
    }
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
    let header = ["module", "in", "out", "layout", "group", "groups", "g_idx", "zeros", "bias", "bpw"];
    let mut rows = vec![header.map(String::from).to_vec()];
    rows.extend(inspection.modules.iter().map(row));
    let totals = &inspection.totals;
    let mut text = String::new();
    text.push_str(&format!(
        "{}, {} in {} {}\n\n",
        inspection.architecture.as_deref().unwrap_or("no architecture given"),
        print::bytes(totals.tensor_bytes),
        inspection.files.len(),
        if inspection.files.len() == 1 { "file" } else { "files" },
    ));
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
