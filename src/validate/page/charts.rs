//! The heat map and the charts. Each says in words what it shows; no figure is told by colour alone.

use super::grid::{Cell, Grid};
use super::{kl, number};
use crate::validate::report::BlockScores;
use maud::{Markup, html};

/// Width of a panel in its own units: about the pixels of a phone, so that text keeps its size there.
const WIDTH: f64 = 320.0;
const HEIGHT: f64 = 110.0;
/// Room for the scale at the left, the title above and the block numbers below.
const LEFT: f64 = 60.0;
const TOP: f64 = 22.0;
const BOTTOM: f64 = 18.0;

/// Steps of shade in the heat map; the style sheet has one class each.
const SHADES: f64 = 6.0;

/// Bits a weight, blocks down and roles across, as a table: the numbers are the text alternative.
pub(super) fn heat_map(grid: &Grid) -> Markup {
    let cells = grid.cells();
    let roles: Vec<&str> = grid.roles().into_iter().filter(|role| *role != "head").collect();
    let mut blocks: Vec<usize> = cells.iter().filter_map(|c| c.layer).collect();
    blocks.dedup();
    let find = |block: usize, role: &str| cells.iter().find(|c| c.layer == Some(block) && c.role == role);
    html! {
        section {
            h2 { "Bits a weight" }
            p.note {
                "Darker is more bits. ✗ marks a broken layer"
                @if cells.iter().any(|c| c.experts > 1) { "; where experts differ, the fewest and the most" }
                "."
            }
            table.heat {
                thead { tr { th scope="col" { "block" } @for role in &roles { th scope="col" { (role) } } } }
                tbody { @for block in blocks {
                    tr {
                        th scope="row" { (block) }
                        @for role in &roles { @match find(block, role) { Some(c) => (heat(c)), None => td {} } }
                    }
                } }
            }
            @for head in cells.iter().filter(|c| c.layer.is_none()) { p { (head.label()) ": " (head.bits()) } }
        }
    }
}

fn heat(cell: &Cell) -> Markup {
    // 2 bits or fewer to 8 or more; fp16 is as dark as it gets.
    let shade = (cell.bpw.1 - 2.0).clamp(0.0, SHADES).round();
    html! {
        td class={ "s" (shade) } {
            @if cell.bpw.1 - cell.bpw.0 < 0.005 { (format!("{:.2}", cell.bpw.0)) }
            @else { (format!("{:.1}", cell.bpw.0)) wbr; "–" (format!("{:.1}", cell.bpw.1)) }
            @if cell.faults > 0 { " ✗" }
        }
    }
}

/// Error and swap-in figures, a panel each role.
pub(super) fn panels(grid: &Grid, of_source: Option<f64>) -> Markup {
    let alone = if grid.cells().iter().any(|c| c.experts > 1) {
        "with only this projection of all experts converted"
    } else {
        "with only this layer converted"
    };
    let from = of_source.unwrap_or(f64::INFINITY);
    let of_source = of_source.map_or(String::new(), |p| format!("; the source's is {}", number(p)));
    let measured = grid.cells().iter().filter(|c| c.swap_in.is_some()).count();
    let some = match measured < grid.cells().len() {
        true => format!("; measured for {measured} of {} layers", grid.cells().len()),
        false => String::new(),
    };
    html! {
        (panel_set(grid, "Error of the outputs", "relative to the source's output, on real activations", 0.0,
            |c| c.output_error, |c| c.percent().unwrap_or_default(), |v| format!("{} %", number(100.0 * v))))
        (panel_set(grid, "Harm of each layer alone: KL", &format!("nats a token {alone}{some}"), 0.0,
            |c| Some(c.swap_in?.kl), |c| c.swap_in.map_or(String::new(), |s| kl(s.kl)), number))
        (panel_set(grid, "Harm of each layer alone: perplexity", &format!("{alone}{of_source}{some}; the scale doesn't begin at 0"), from,
            |c| Some(c.swap_in?.perplexity), |c| c.swap_in.map_or(String::new(), |s| number(s.perplexity)), number))
    }
}

fn panel_set(
    grid: &Grid,
    title: &str,
    what: &str,
    // Where the scale begins if no figure is lower.
    from: f64,
    figure: impl Fn(&Cell) -> Option<f64>,
    told: impl Fn(&Cell) -> String,
    scale: impl Fn(f64) -> String,
) -> Markup {
    let finite = |c: &Cell| figure(c).filter(|v| v.is_finite());
    let all: Vec<f64> = grid.cells().iter().filter_map(finite).collect();
    let high = all.iter().copied().fold(0.0, f64::max);
    let low = all.iter().copied().fold(from, f64::min);
    let blocks = grid.cells().iter().filter_map(|c| c.layer).max().map_or(1, |b| b + 1);
    let step = (WIDTH - LEFT - 4.0) / blocks as f64;
    let (base, span) = (HEIGHT - BOTTOM, HEIGHT - BOTTOM - TOP - 8.0);
    // Where nothing differs, there is nothing to see.
    let differs = |c: &Cell| finite(c).is_some_and(|v| v != from || high == 0.0);
    let roles: Vec<&str> = grid.roles().into_iter().filter(|role| grid.of_role(role).any(differs)).collect();
    html! {
        @if !roles.is_empty() {
            section {
                h2 { (title) }
                p.note { (what) "; by block, all panels to one scale." }
                @if high == 0.0 { p { "0 (exact) for every layer." } }
                @else { div.panels { @for role in roles {
                    @let worst = grid.of_role(role).filter(|c| finite(c).is_some())
                        .reduce(|a, b| if finite(b) > finite(a) { b } else { a });
                    @let label = worst.map_or(String::new(), |c| format!("{role}: worst {} in {}", told(c), place(c)));
                    svg viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } role="img" aria-label={ (title) ", " (label) } {
                        text x="0" y="13" class="title" { (label) }
                        text x=(LEFT - 4.0) y=(TOP + 12.0) text-anchor="end" { (scale(high)) }
                        text x=(LEFT - 4.0) y=(base) text-anchor="end" { (scale(low)) }
                        line x1=(LEFT) x2=(WIDTH) y1=(base) y2=(base) {}
                        @for c in grid.of_role(role) { @if let Some(v) = finite(c) {
                            @let tall = (span * (v - low) / (high - low).max(f64::MIN_POSITIVE)).max(1.0);
                            rect class=(if worst.is_some_and(|w| w.layer == c.layer) { "worst" } else { "bar" })
                                x=(format!("{:.2}", LEFT + step * c.layer.unwrap_or(0) as f64))
                                y=(format!("{:.2}", base - tall)) width=(format!("{:.2}", (step - 1.0).max(step * 0.7).min(24.0)))
                                height=(format!("{tall:.2}")) { title { (c.label()) ": " (told(c)) } }
                        } }
                        text x=(LEFT) y=(HEIGHT - 4.0) { "0" }
                        @if blocks > 1 { text x=(WIDTH - 4.0) y=(HEIGHT - 4.0) text-anchor="end" { "block " (blocks - 1) } }
                    }
                } } }
            }
        }
    }
}

/// KL after each block.
pub(super) fn cumulative(blocks: &[BlockScores]) -> Markup {
    let (width, height) = (340.0, 190.0);
    let finite: Vec<&BlockScores> = blocks.iter().filter(|b| b.kl.is_finite()).collect();
    let high = finite.iter().map(|b| b.kl).fold(0.0, f64::max);
    let last = finite.last().map_or(0, |b| b.layer);
    let x = |b: &BlockScores| LEFT + 6.0 + (width - LEFT - 16.0) * b.layer as f64 / last.max(1) as f64;
    let y = |b: &BlockScores| {
        height - BOTTOM - 4.0 - (height - BOTTOM - 24.0) * b.kl / high.max(f64::MIN_POSITIVE)
    };
    let points: Vec<String> = finite.iter().map(|b| format!("{:.2},{:.2}", x(b), y(b))).collect();
    html! {
        @if let Some(end) = finite.last() {
            section {
                h2 { "Growing block by block" }
                p.note {
                    "KL, nats a token, with the blocks up to this one converted. At the last block it is "
                    (kl(end.kl)) ", perplexity " (number(end.perplexity)) "."
                }
                svg.curve viewBox={ "0 0 " (width) " " (height) } role="img" aria-label={ "KL by block, rising to " (kl(high)) } {
                    text x=(LEFT - 4.0) y="20" text-anchor="end" { (number(high)) }
                    text x=(LEFT - 4.0) y=(height - BOTTOM) text-anchor="end" { "0" }
                    line x1=(LEFT) x2=(width) y1=(height - BOTTOM) y2=(height - BOTTOM) {}
                    polyline points=(points.join(" ")) {}
                    @for b in &finite {
                        circle cx=(format!("{:.2}", x(b))) cy=(format!("{:.2}", y(b))) r="2.5" {
                            title { "up to block " (b.layer) ": KL " (kl(b.kl)) ", perplexity " (number(b.perplexity)) }
                        }
                    }
                    text x=(LEFT) y=(height - 4.0) { "0" }
                    @if last > 0 { text x=(width - 4.0) y=(height - 4.0) text-anchor="end" { "block " (last) } }
                }
            }
        }
    }
}

fn place(cell: &Cell) -> String {
    cell.layer.map_or(cell.role.to_string(), |block| format!("block {block}"))
}
