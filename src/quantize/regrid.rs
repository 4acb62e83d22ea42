//! A GPTQ matrix on a grid that doesn't hold its weights: scales, and zero points where they are wanted, searched
//! group by group and column by column for the least squared error.

use super::kernel::ROUND;
use super::panel::{LANES, Lanes};
use half::f16;
use rayon::prelude::*;
use requant_formats::gptq::{self, Bits, GIdx, Matrix, Shape, ZeroConvention};

/// The grid to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Width of a code.
    pub bits: Bits,
    /// Rows of a group, counted in the order of the source's groups; `None` keeps these groups.
    pub group_size: Option<usize>,
    /// Where zero points are searched, the convention that must be able to store them; without it each is
    /// `2^(bits − 1)`.
    pub zeros: Option<ZeroConvention>,
}

/// Shares of the scale that just clips nothing which are tried, evenly spaced.
const SHARES: usize = 64;
const LOWEST: f32 = 0.35;
const HIGHEST: f32 = 1.15;

/// Lays `source` onto another grid. Codes are chosen against the scales as stored, in fp16; a group that the new
/// grid holds as it is, the source's scale included, keeps its weights to the bit.
///
/// # Errors
/// [`gptq::Error::Scale`] where a weight of the source isn't finite in fp16, with the scale that makes it so;
/// [`gptq::Error::Size`] and [`gptq::Error::GroupCount`] for a group size of 0.
pub fn regrid(source: &Matrix, grid: &Grid) -> Result<Matrix, gptq::Error> {
    let (k, n) = (source.shape().in_features, source.shape().out_features);
    let weights = source.dequantize();
    if let Some(at) = weights.iter().position(|weight| !weight.is_finite()) {
        let (group, column) = (source.g_idx().groups()[at / n] as usize, at % n);
        return Err(gptq::Error::Scale { group, column, found: source.scales()[group * n + column] });
    }
    let g_idx = match grid.group_size {
        None => source.g_idx().clone(),
        Some(size) => regrouped(source, size)?,
    };
    let groups = 1 + g_idx.groups().iter().max().map_or(0, |&last| last as usize);
    let groups = groups.max(if grid.group_size.is_none() { source.shape().groups } else { 0 });
    let mut rows = vec![Vec::new(); groups];
    g_idx.groups().iter().enumerate().for_each(|(row, &group)| rows[group as usize].push(row));
    let shape = Shape { in_features: k, out_features: n, bits: grid.bits, groups };
    let fitted: Vec<Group> = rows.par_iter().map(|rows| fit(source, &weights, rows, grid)).collect();
    let (mut codes, mut zeros, mut scales) = (vec![0; k * n], Vec::new(), Vec::new());
    for (rows, group) in rows.iter().zip(fitted) {
        for (&row, from) in rows.iter().zip(group.codes.chunks_exact(n)) {
            codes[row * n..][..n].copy_from_slice(from);
        }
        zeros.extend(group.zeros);
        scales.extend(group.scales);
    }
    Matrix::new(shape, codes, zeros, scales, g_idx)
}

/// Consecutive rows of the source's groups in groups of `size`.
fn regrouped(source: &Matrix, size: usize) -> Result<GIdx, gptq::Error> {
    let k = source.shape().in_features;
    if size == 0 {
        return Err(gptq::Error::Size { axis: "group_size", found: 0 });
    }
    let mut index = vec![0i64; k];
    for (place, &row) in source.g_idx().sorted_rows().map().iter().enumerate() {
        index[row as usize] = (place / size) as i64;
    }
    GIdx::new(Some(&index), k, k.div_ceil(size), Some(size))
}

/// Codes `[rows, n]`, a zero point and a scale a column.
struct Group {
    codes: Vec<u8>,
    zeros: Vec<u16>,
    scales: Vec<f32>,
}

fn fit(source: &Matrix, weights: &[f16], rows: &[usize], grid: &Grid) -> Group {
    let n = source.shape().out_features;
    let mut group = Group { codes: vec![0; rows.len() * n], zeros: vec![0; n], scales: vec![0.0; n] };
    let mut values: Vec<Lanes> = vec![[0.0; LANES]; rows.len()];
    for first in (0..n).step_by(LANES) {
        let width = LANES.min(n - first);
        for (values, &row) in values.iter_mut().zip(rows) {
            // Lanes beyond the last column hold zeros.
            *values = [0.0; LANES];
            let from = &weights[row * n + first..][..width];
            values.iter_mut().zip(from).for_each(|(value, weight)| *value = weight.to_f32());
        }
        let mut own = [0.0; LANES];
        if let Some(&row) = rows.first() {
            let from = source.g_idx().groups()[row] as usize * n + first;
            own[..width].copy_from_slice(&source.scales()[from..][..width]);
        }
        let chosen = search(&values, own, grid);
        for lane in 0..width {
            let (scale, zero) = (chosen.scale[lane], chosen.zero[lane]);
            (group.scales[first + lane], group.zeros[first + lane]) = (scale, zero as u16);
            for (values, codes) in values.iter().zip(group.codes.chunks_exact_mut(n)) {
                codes[first + lane] = code(values[lane], 1.0 / scale, zero, grid.bits) as u8;
            }
        }
    }
    group
}

/// Scales as stored and zero points of sixteen columns.
#[derive(Clone, Copy)]
struct Chosen {
    scale: Lanes,
    zero: Lanes,
}

#[inline]
fn code(value: f32, inverse: f32, zero: f32, bits: Bits) -> f32 {
    // Below 2²² even where a scale is far too small for a value: clamped first, then rounded.
    let place = (value * inverse + zero).clamp(0.0, bits.max_code() as f32);
    (place + ROUND) - ROUND
}

/// The best of all that is tried, column by column; of equals the first.
struct Race<'a> {
    values: &'a [Lanes],
    bits: Bits,
    best: Chosen,
    error: Lanes,
}

impl Race<'_> {
    /// Tries a scale and a zero point in each column; a scale that fp16 lacks is rounded to one that it has.
    fn enter(&mut self, scale: Lanes, zero: Lanes) {
        // No decoded weight may overflow.
        let largest = f16::MAX.to_f32() / (self.bits.max_code() + 1) as f32;
        let stored = scale.map(|scale| {
            let scale = if scale.is_finite() { scale } else { 0.0 };
            f16::from_f32(scale.min(largest)).max(f16::from_bits(1)).to_f32()
        });
        let inverse = stored.map(|scale| 1.0 / scale);
        let mut error = [0.0f32; LANES];
        for values in self.values {
            for lane in 0..LANES {
                let code = code(values[lane], inverse[lane], zero[lane], self.bits);
                let miss = values[lane] - (code - zero[lane]) * stored[lane];
                error[lane] += miss * miss;
            }
        }
        for lane in 0..LANES {
            if error[lane] < self.error[lane] {
                self.error[lane] = error[lane];
                (self.best.scale[lane], self.best.zero[lane]) = (stored[lane], zero[lane]);
            }
        }
    }

    /// For the codes of the best so far, the scale of least squares.
    fn refine(&mut self) {
        for _ in 0..3 {
            let Chosen { scale, zero } = self.best;
            let (mut products, mut squares) = ([0.0f32; LANES], [0.0f32; LANES]);
            for values in self.values {
                for lane in 0..LANES {
                    let level = code(values[lane], 1.0 / scale[lane], zero[lane], self.bits) - zero[lane];
                    products[lane] += level * values[lane];
                    squares[lane] += level * level;
                }
            }
            let least = std::array::from_fn(|lane| match squares[lane] > 0.0 {
                true => products[lane] / squares[lane],
                false => scale[lane],
            });
            self.enter(least, zero);
        }
    }
}

fn search(values: &[Lanes], own: Lanes, grid: &Grid) -> Chosen {
    let bits = grid.bits;
    let (codes, centre) = (bits.max_code() as f32, f32::from(bits.symmetric_zero()));
    let (mut low, mut high) = ([0.0f32; LANES], [0.0f32; LANES]);
    for values in values {
        for lane in 0..LANES {
            low[lane] = low[lane].min(values[lane]);
            high[lane] = high[lane].max(values[lane]);
        }
    }
    let middle = [centre; LANES];
    let best = Chosen { scale: [f16::MIN_POSITIVE.to_f32(); LANES], zero: middle };
    let mut race = Race { values, bits, best, error: [f32::INFINITY; LANES] };
    // Of a group that the grid holds as it is, this is the scale; the powers are for wider source grids.
    for power in 0..5 {
        race.enter(own.map(|scale| scale.abs() * (1 << power) as f32), middle);
    }
    let exact = exact_lanes(&race);
    let shares = || (0..SHARES).map(|i| HIGHEST - (HIGHEST - LOWEST) / (SHARES - 1) as f32 * i as f32);
    match grid.zeros {
        None => {
            // What clips nothing, and the two scales that others derive from the largest weight.
            let widest: Lanes =
                std::array::from_fn(|lane| (high[lane] / (centre - 1.0)).max(-low[lane] / centre));
            let largest: Lanes = std::array::from_fn(|lane| high[lane].max(-low[lane]));
            for share in [widest, largest.map(|l| l / (centre - 1.0)), largest.map(|l| 2.0 * l / codes)] {
                race.enter(share, middle);
            }
            for share in shares() {
                race.enter(widest.map(|scale| scale * share), middle);
            }
        }
        Some(convention) => {
            // Fields of only ones mean two things to readers of v1; v2 has no 2^bits.
            let lowest = if convention == ZeroConvention::V1 { 1.0 } else { 0.0 };
            let widest: Lanes = std::array::from_fn(|lane| (high[lane] - low[lane]) / codes);
            for share in std::iter::once(1.0).chain(shares()) {
                let scale = widest.map(|scale| f16::from_f32(scale * share).max(f16::from_bits(1)).to_f32());
                let zero: Lanes = std::array::from_fn(|lane| {
                    // What is clipped is clipped at both ends alike.
                    let clipped = (high[lane] - low[lane]) / scale[lane] - codes;
                    (-low[lane] / scale[lane] - clipped.max(0.0) / 2.0 + ROUND) - ROUND
                });
                for offset in [0.0, -1.0, 1.0] {
                    race.enter(scale, zero.map(|zero| (zero + offset).clamp(lowest, codes)));
                }
                let plain: Lanes = std::array::from_fn(|lane| (-low[lane] / scale[lane]).round());
                race.enter(scale, plain.map(|zero| zero.clamp(lowest, codes)));
            }
        }
    }
    race.refine();
    let mut chosen = race.best;
    for (lane, exact) in exact.into_iter().enumerate() {
        if let Some(scale) = exact {
            (chosen.scale[lane], chosen.zero[lane]) = (scale, centre);
        }
    }
    chosen
}

/// Where the best so far decodes to the values to the bit: its scale, which no other can better.
fn exact_lanes(race: &Race<'_>) -> [Option<f32>; LANES] {
    std::array::from_fn(|lane| {
        let (scale, zero) = (race.best.scale[lane], race.best.zero[lane]);
        let same = |values: &Lanes| {
            let level = code(values[lane], 1.0 / scale, zero, race.bits) - zero;
            f16::from_f32(level * scale).to_f32() == values[lane]
        };
        race.values.iter().all(same).then_some(scale)
    })
}
