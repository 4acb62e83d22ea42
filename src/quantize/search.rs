//! Which ceiling a group gets, and which of its sixteen scales each column.

use super::panel::{LANES, Lanes, Path, Range, Steps, choose_index};
use super::samples::Samples;
use half::f16;
use requant_formats::exl2::{Bits, ceiling_for, decode_scale};

/// How widely to search. `OPTIMIZATION.md` has the measurements behind the defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Search {
    /// Ceilings tried first, evenly spaced, besides the one that just clips nothing.
    pub ceilings: usize,
    /// Ceilings then tried around each of the two best, up to their neighbours.
    pub refinements: usize,
    /// The largest, as a share of the largest scale that clips nothing.
    pub highest: f32,
    /// The smallest, likewise.
    pub lowest: f32,
    /// Indices tried below and above the smallest that clips nothing, while ceilings are compared. The
    /// ceiling chosen is then searched over all sixteen.
    pub window: (i32, i32),
}

impl Search {
    /// The search for a width. `grid` is the source's number of bits, where it has a grid.
    pub fn for_bits(bits: Bits, grid: Option<u32>) -> Self {
        let (highest, lowest, below) = match bits.get() {
            // Few levels: clipping the largest weights pays.
            2 => (1.2, 0.3, 7),
            3 => (1.2, 0.3, 4),
            4 => (1.6, 0.3, 1),
            _ => (2.0, 0.7, 1),
        };
        // A grid coarser than the codes is met exactly at whole multiples of a scale, up to some indices
        // above the one that just clips nothing.
        let above = match grid {
            Some(grid) if grid < bits.get() => 5 + i32::from(bits.get() == 8),
            _ if bits.get() == 2 => 0,
            _ => 1,
        };
        Self { ceilings: 48, refinements: 8, highest, lowest, window: (below, above) }
    }
}

/// Every index, wherever a column's first one is.
const ALL: (i32, i32) = (15, 15);

/// The ceiling as decoded (`q_scale_max / 256`), and an index a column.
pub(super) struct Choice {
    pub(super) ceiling: f16,
    pub(super) index: Vec<u8>,
}

/// The smallest ceiling that doesn't decode to 0; for a group of zeros.
const SMALLEST: f16 = f16::from_bits(1);

pub(super) fn code_range(bits: Bits) -> Range {
    Range { low: -(bits.zero() as f32), high: (bits.max_code() - bits.zero()) as f32 }
}

/// The scales that a ceiling other than 0 offers.
pub(super) fn steps(ceiling: f16, bits: Bits) -> Steps {
    let scale: [f32; 16] = std::array::from_fn(|i| {
        let scale = decode_scale(ceiling, i as u8).to_f32();
        if scale * bits.zero() as f32 <= f16::MAX.to_f32() { scale } else { f32::NAN }
    });
    Steps { inverse: scale.map(|s| 1.0 / s), scale }
}

/// Searches a group.
pub(super) fn search(samples: &Samples<'_>, bits: Bits, search: &Search, path: Path) -> Choice {
    let range = code_range(bits);
    let wanted: Vec<Lanes> = (0..samples.panels()).map(|p| wanted_scales(samples, p, range)).collect();
    let largest = wanted.iter().flatten().fold(0.0f32, |a, &b| a.max(b));
    let errors = |ceilings: &[f16]| {
        let offered: Vec<Steps> = ceilings.iter().map(|&c| steps(c, bits)).collect();
        let mut sums = vec![0.0; offered.len()];
        for (p, wanted) in wanted.iter().enumerate() {
            path.add_best_errors(samples.panel(p), wanted, &offered, search.window, range, &mut sums);
        }
        sums
    };
    let mut tried = even_ceilings(largest, search);
    if tried.is_empty() {
        return Choice { ceiling: SMALLEST, index: vec![0; samples.panels() * LANES] };
    }
    let mut sums = errors(&tried);
    let finer = finer_ceilings(&tried, &sums, largest, search);
    sums.extend(errors(&finer));
    tried.extend(finer);
    let best = (0..sums.len()).fold(0, |best, i| if sums[i] < sums[best] { i } else { best });
    let offered = steps(tried[best], bits);
    let columns = wanted.iter().enumerate();
    let index = columns.flat_map(|(p, w)| choose_index(samples.panel(p), w, &offered, ALL, range)).collect();
    Choice { ceiling: tried[best], index }
}

/// The smallest scale of each column that clips none of its values.
fn wanted_scales(samples: &Samples<'_>, panel: usize, range: Range) -> Lanes {
    let mut wanted = [0.0f32; LANES];
    for values in samples.panel(panel).values {
        for lane in 0..LANES {
            let scale = (values[lane] / range.high).max(values[lane] / range.low);
            wanted[lane] = wanted[lane].max(scale);
        }
    }
    wanted
}

/// Distance of the ceilings that are tried first, as a share of the largest scale.
fn share_between(search: &Search) -> f32 {
    (search.highest - search.lowest) / (search.ceilings - 1).max(1) as f32
}

/// Different ceilings, evenly spaced, and the one that just clips nothing; none for a group of zeros.
fn even_ceilings(largest: f32, search: &Search) -> Vec<f16> {
    if largest == 0.0 {
        return Vec::new();
    }
    let shares = (0..search.ceilings).map(|i| search.highest - share_between(search) * i as f32);
    let mut ceilings: Vec<f16> = shares.filter_map(|share| ceiling(largest * share)).collect();
    ceilings.dedup();
    // Where all columns have one scale, this is the ceiling that meets the source's grid exactly.
    let exact = ceiling(largest).filter(|c| !ceilings.contains(c));
    ceilings.extend(exact);
    ceilings
}

/// Ceilings on both sides of the two best of `tried` that were not tried.
fn finer_ceilings(tried: &[f16], sums: &[f64], largest: f32, search: &Search) -> Vec<f16> {
    let mut order: Vec<usize> = (0..tried.len()).collect();
    order.sort_by(|&a, &b| sums[a].total_cmp(&sums[b]));
    let reach = largest * share_between(search);
    let mut finer: Vec<f16> = Vec::new();
    for &best in order.iter().take(2) {
        for i in 1..=search.refinements {
            let offset = 2.0 * i as f32 / (search.refinements + 1) as f32 - 1.0;
            let close = ceiling(tried[best].to_f32() * 256.0 + offset * reach);
            finer.extend(close.filter(|c| !tried.contains(c) && !finer.contains(c)));
        }
    }
    finer
}

/// The ceiling whose largest scale is about `scale`; `None` where `q_scale_max` can't hold it.
fn ceiling(scale: f32) -> Option<f16> {
    let ceiling = f16::from_f32(scale / 256.0).max(SMALLEST);
    ceiling_for(ceiling).map(|_| ceiling)
}
