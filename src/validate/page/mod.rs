//! The report as one HTML file: takes a [`Validation`], gives the text of a page that needs no network and no
//! script. It measures nothing, and the same validation gives the same bytes.

mod charts;
mod grid;

use super::report::{LayerScores, Validation, Verdict};
use super::summary::{self, kl, number, rough};
use grid::{Cell, Grid};
use maud::{DOCTYPE, Markup, PreEscaped, html};

const STYLE: &str = include_str!("style.css");

/// Faults listed one by one; report.json has all.
const LISTED_FAULTS: usize = 20;

/// The page.
pub fn html(validation: &Validation) -> String {
    let grid = Grid::new(&validation.layers);
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                link rel="icon" href="data:,";
                title { "Validation of " (validation.converted.name) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                main {
                    (verdict(validation))
                    (faults(validation))
                    (figures(validation))
                    (gates(validation))
                    (not_run(validation))
                    (charts::heat_map(&grid))
                    (charts::panels(&grid, validation.conditions.layer_perplexity))
                    (charts::cumulative(&validation.cumulative))
                    (conditions(validation))
                    (table(&grid))
                }
            }
        }
    };
    page.into_string()
}

fn verdict(validation: &Validation) -> Markup {
    let (class, sign) = match validation.verdict {
        Verdict::Exact | Verdict::Passed => ("good", "✓"),
        Verdict::GateMissed => ("missed", "!"),
        Verdict::Broken | Verdict::NonFinite => ("bad", "✗"),
    };
    html! {
        header class=(class) {
            p.models { (validation.source.name) " → " (validation.converted.name) }
            h1 { span.sign aria-hidden="true" { (sign) } " " (summary::headline(validation)) }
            p { (summary::meaning(validation)) }
            @if let Some(layer) = summary::worst(validation) {
                p { strong { "Worst layer: " } code { (layer.source) } " – " (summary::cost(validation, layer)) "." }
            } @else {
                p { strong { "Worst layer: " } "none, no layer differs." }
            }
            p { strong { "What to do: " } (advice(&summary::advice(validation))) }
        }
    }
}

/// The flag to type looks like one.
fn advice(text: &str) -> Markup {
    let flag = text.split_once("--set '").and_then(|(before, rest)| Some((before, rest.split_once('\'')?)));
    html! {
        @match flag {
            Some((before, (rule, after))) => { (before) code { "--set '" (rule) "'" } (after) }
            None => { (text) }
        }
    }
}

fn faults(validation: &Validation) -> Markup {
    let broken: Vec<&LayerScores> = validation.layers.iter().filter(|l| l.fault.is_some()).collect();
    html! {
        @if !broken.is_empty() {
            section {
                h2 { "Broken layers" }
                ul {
                    @for layer in broken.iter().take(LISTED_FAULTS) {
                        li {
                            code { (layer.source) } ": " @if let Some(f) = &layer.fault { (summary::fault(f)) }
                            "; " (summary::error(layer)) "."
                        }
                    }
                    @if broken.len() > LISTED_FAULTS {
                        li { "and " (broken.len() - LISTED_FAULTS) " more; report.json names all" }
                    }
                }
            }
        }
    }
}

fn figures(validation: &Validation) -> Markup {
    let (source, converted) = (&validation.source, &validation.converted);
    let size = |bytes: u64| format!("{} MB", number(bytes as f64 / 1e6));
    let with_error = |m: super::report::Mean, scale: f64| match m.standard_error {
        0.0 => number(scale * m.mean),
        error => format!("{} ± {}", number(scale * m.mean), rough(scale * error)),
    };
    html! {
        section {
            h2 { "Both models" }
            table.figures {
                thead { tr { th scope="col" { "" } th scope="col" { "source" } th scope="col" { "converted" } } }
                tbody {
                    tr { th scope="row" { "bits a weight" } td { (number(source.bpw)) } td { (number(converted.bpw)) } }
                    tr { th scope="row" { "size" } td { (size(source.bytes)) } td { (size(converted.bytes)) } }
                    @if let Some(m) = &validation.model {
                        tr { th scope="row" { "perplexity" } td { (number(m.source_perplexity)) } td { (number(m.converted_perplexity)) } }
                    }
                }
            }
            @if let Some(m) = &validation.model {
                dl {
                    div { dt { "KL(source ‖ converted), nats a token" } dd { @if m.kl.mean == 0.0 { (kl(0.0)) } @else { (with_error(m.kl, 1.0)) } } }
                    div { dt { "KL(converted ‖ source)" } dd { @if m.reverse_kl.mean == 0.0 { (kl(0.0)) } @else { (with_error(m.reverse_kl, 1.0)) } } }
                    div { dt { "99th percentile of KL" } dd { (kl(m.kl_p99)) } }
                    div { dt { "largest KL of a token" } dd { (kl(m.kl_max)) } }
                    div { dt { "same most likely token" } dd { (with_error(m.top1_agreement, 100.0)) " %" } }
                    div { dt { "loss increase, nats a token" } dd { (with_error(m.nll_increase, 1.0)) } }
                }
                p.note { "± is the standard error over windows." }
            }
        }
    }
}

fn gates(validation: &Validation) -> Markup {
    html! {
        @if !validation.gates.is_empty() {
            section {
                h2 { "Gates" }
                ul { @for gate in &validation.gates {
                    li { strong { (if gate.met { "✓ met: " } else { "✗ missed: " }) } (summary::gate(gate)) }
                } }
            }
        }
    }
}

fn not_run(validation: &Validation) -> Markup {
    html! {
        @if !validation.not_run.is_empty() {
            section { h2 { "Not run" } ul { @for reason in &validation.not_run { li { (reason) } } } }
        }
        @if !validation.warnings.is_empty() {
            section {
                h2 { "Warnings" }
                ul { @for w in &validation.warnings { li { code { (w.subject) } ": " (w.message) } } }
            }
        }
    }
}

fn table(grid: &Grid) -> Markup {
    html! {
        section {
            h2 { "All layers" }
            table.layers {
                thead { tr { @for name in ["layer", "stored as", "bits", "weight error", "output error", "KL", "perplexity"] {
                    th scope="col" { (name) }
                } } }
                tbody { @for cell in grid.cells() { (row(cell)) } }
            }
        }
    }
}

fn row(cell: &Cell) -> Markup {
    let worst = cell.worst;
    let percent = |v: f64| format!("{} %", number(100.0 * v));
    html! {
        tr {
            th scope="row" {
                (cell.label())
                @if let (true, Some(expert)) = (cell.experts > 1, worst.expert) {
                    span.note { " (" (cell.experts) " experts; errors of expert " (expert) ", the worst)" }
                }
                @if cell.faults > 0 { strong.bad { " ✗ broken" } }
            }
            td data-label="stored as" { (worst.layout_before) " → " (worst.layout_after) }
            td data-label="bits" { (cell.bits()) }
            td data-label="weight error" { (percent(worst.weight_error)) }
            td data-label="output error" { @match worst.output { Some(o) => (percent(o.relative_error)), None => "–" } }
            td data-label="KL" { @match cell.swap_in { Some(s) => (kl(s.kl)), None => "–" } }
            td data-label="perplexity" { @match cell.swap_in { Some(s) => (number(s.perplexity)), None => "–" } }
        }
    }
}

fn conditions(validation: &Validation) -> Markup {
    let c = &validation.conditions;
    html! {
        section {
            h2 { "Conditions" }
            dl {
                @if c.tokens > 0 {
                    div { dt { "text" } dd { (c.text) } }
                    div { dt { "tokens" } dd { (c.tokens) " in windows of " (c.window) (if c.bos { ", each after BOS" } else { ", without BOS" }) } }
                }
                @if c.layer_tokens > 0 { div { dt { "tokens for single layers" } dd {
                    (c.layer_tokens) @if let Some(source) = c.layer_perplexity { ", where the source's perplexity is " (number(source)) }
                } } }
                div { dt { "device" } dd { (c.device) } }
                div { dt { "tool" } dd { (validation.tool) } }
                @if c.tokens > 0 { div { dt { "sha256 of the token ids" } dd { code { (c.token_ids_sha256) } } } }
                div { dt { "source's fingerprint" } dd { code { (validation.source.fingerprint) } } }
                div { dt { "converted model's fingerprint" } dd { code { (validation.converted.fingerprint) } } }
            }
        }
    }
}
