//! Which ceiling a group gets, and which of its sixteen scales each column.

use super::panel::{LANES, Lanes, Panel, Range, Steps, Window};
use super::samples::Samples;
use super::simd::SimdPath;
use half::f16;
use requant_formats::exl2::{Bits, ceiling_for, decode_ceiling, decode_scale};

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
    /// How often at most the ceilings that do worst on the columns so far are given up, before all columns
    /// have been looked at.
    pub cuts: u32,
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
        Self { ceilings: 56, refinements: 12, highest, lowest, window: (below, above), cuts: 4 }
    }
}

/// Panels that are looked at before any ceiling is given up.
const FEWEST_PANELS: usize = 16;

/// Of `ceilings`, how many stay in the race after so many panels.
fn staying(ceilings: usize, panels: usize) -> usize {
    let stay = if panels < 2 * FEWEST_PANELS { (ceilings * 3).div_ceil(4) } else { ceilings.div_ceil(2) };
    stay.max(2)
}

/// The ceiling as decoded (`q_scale_max · prescale / 256`), and an index a column.
pub(super) struct Choice {
    pub(super) ceiling: f16,
    pub(super) index: Vec<u8>,
}

/// The smallest ceiling that isn't 0; for a group of zeros.
const SMALLEST: f16 = f16::from_bits(1);

/// 2⁻¹⁶, the smallest `q_scale_max` that doesn't decode to 0 without a prescale: no reader refuses it.
const SMALLEST_STORED: f16 = f16::from_bits(0x0100);

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
pub(super) fn search(samples: &Samples<'_>, bits: Bits, search: &Search, path: SimdPath) -> Choice {
    let range = code_range(bits);
    let panel = |p: usize| samples.panel(p);
    let Some(ceiling) = best_ceiling(samples.panels(), panel, samples.prescale(), bits, search, path) else {
        let ceiling = no_ceiling(samples.prescale());
        return Choice { ceiling, index: vec![0; samples.panels() * LANES] };
    };
    let offered = steps(ceiling, bits);
    let index = (0..samples.panels()).flat_map(|p| path.best_index(panel(p), &offered, range));
    Choice { ceiling, index: index.collect() }
}

/// The ceiling of a group of zeros.
pub(super) fn no_ceiling(prescale: f64) -> f16 {
    ceiling(0.0, prescale).unwrap_or(SMALLEST)
}

/// The ceiling under which the columns of all panels, each with the scale that suits it, have the least error;
/// `None` for zeros.
pub(super) fn best_ceiling<'a>(
    panels: usize,
    panel: impl Fn(usize) -> Panel<'a>,
    prescale: f64,
    bits: Bits,
    search: &Search,
    path: SimdPath,
) -> Option<f16> {
    let range = code_range(bits);
    let wanted: Vec<Lanes> = (0..panels).map(|p| wanted_scales(panel(p).values, range)).collect();
    let largest = wanted.iter().flatten().fold(0.0f32, |a, &b| a.max(b));
    let laps = laps(panels, search.cuts);
    let race = |ceilings: &[f16]| {
        let mut running: Vec<(Steps, Runner)> =
            (ceilings.iter()).map(|&ceiling| (steps(ceiling, bits), Runner { ceiling, sum: 0.0 })).collect();
        let mut seen = 0;
        for (lap, panels) in laps.iter().enumerate() {
            let (offered, mut runners): (Vec<Steps>, Vec<Runner>) = running.into_iter().unzip();
            let mut sums: Vec<f64> = runners.iter().map(|r| r.sum).collect();
            for &p in panels {
                let window = Window { wanted: &wanted[p], reach: search.window };
                path.add_best_errors(panel(p), window, &offered, range, &mut sums);
            }
            runners.iter_mut().zip(sums).for_each(|(runner, sum)| runner.sum = sum);
            running = offered.into_iter().zip(runners).collect();
            // Stable, so that of equals the earlier stays.
            running.sort_by(|a, b| a.1.sum.total_cmp(&b.1.sum));
            seen += panels.len();
            if lap + 1 < laps.len() {
                running.truncate(staying(running.len(), seen));
            }
        }
        running.into_iter().map(|(_, runner)| runner).collect::<Vec<_>>()
    };
    let tried = even_ceilings(largest, search, prescale);
    let mut last = race(&tried);
    let finer = finer_ceilings(&tried, &last, largest, search, prescale);
    last.extend(race(&finer));
    last.iter().min_by(|a, b| a.sum.total_cmp(&b.sum)).map(|best| best.ceiling)
}

/// A ceiling and the squared error of the columns that were looked at.
pub(super) struct Runner {
    pub(super) ceiling: f16,
    pub(super) sum: f64,
}

/// The panels of each lap of the race between ceilings: evenly spread ones, then as many as before in each.
pub(super) fn laps(panels: usize, cuts: u32) -> Vec<Vec<usize>> {
    let cuts = (panels / FEWEST_PANELS).checked_ilog2().unwrap_or(0).min(cuts);
    let every = |step: usize, start: usize| (start..panels).step_by(step).collect();
    let mut laps = vec![every(1 << cuts, 0)];
    laps.extend((0..cuts).rev().map(|h| every(2 << h, 1 << h)));
    laps
}

/// The smallest scale of each column that clips none of its values.
fn wanted_scales(of: &[Lanes], range: Range) -> Lanes {
    let mut wanted = [0.0f32; LANES];
    for values in of {
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
fn even_ceilings(largest: f32, search: &Search, prescale: f64) -> Vec<f16> {
    if largest == 0.0 {
        return Vec::new();
    }
    let shares = (0..search.ceilings).map(|i| search.highest - share_between(search) * i as f32);
    let mut ceilings: Vec<f16> = shares.filter_map(|share| ceiling(largest * share, prescale)).collect();
    ceilings.dedup();
    // Where all columns have one scale, this is the ceiling that meets the source's grid exactly.
    let exact = ceiling(largest, prescale).filter(|c| !ceilings.contains(c));
    ceilings.extend(exact);
    ceilings
}

/// Ceilings on both sides of the two best that were not tried.
fn finer_ceilings(
    tried: &[f16],
    best_first: &[Runner],
    largest: f32,
    search: &Search,
    prescale: f64,
) -> Vec<f16> {
    let reach = largest * share_between(search);
    let mut finer: Vec<f16> = Vec::new();
    for best in best_first.iter().take(2) {
        for i in 1..=search.refinements {
            let offset = 2.0 * i as f32 / (search.refinements + 1) as f32 - 1.0;
            let close = ceiling(best.ceiling.to_f32() * 256.0 + offset * reach, prescale);
            finer.extend(close.filter(|c| !tried.contains(c) && !finer.contains(c)));
        }
    }
    finer
}

/// The ceiling whose largest scale is about `scale`, one that some `q_scale_max` decodes to; `None` where none is as
/// large.
fn ceiling(scale: f32, prescale: f64) -> Option<f16> {
    let wanted = f16::from_f32(scale / 256.0).max(SMALLEST);
    Some(decode_ceiling(ceiling_for(wanted, prescale)?.max(SMALLEST_STORED), prescale))
}
