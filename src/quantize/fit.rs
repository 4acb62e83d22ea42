//! Fits one group, and puts a module together from its groups.

use super::kernel::total;
use super::panel::LANES;
use super::relative_error::relative_error;
use super::samples::Samples;
use super::search::{Search, code_range, search, steps};
use super::simd::SimdPath;
use super::source::{Cut, Source, stored_groups, stored_places};
use half::f16;
use rayon::prelude::*;
use requant_formats::Permutation;
use requant_formats::exl2::{Bits, Error, Group, GroupTable, Matrix, ceiling_for};

/// How a group was quantized.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    bits: Bits,
    /// The ceiling as decoded.
    pub(super) ceiling: f16,
    /// Scale of each column, 0 to 15.
    pub(super) index: Vec<u8>,
    /// Code of each sample, `[panels][values][16]`.
    pub(super) table: Vec<[u8; LANES]>,
    /// Sum of squared differences between the source's weights and the decoded ones.
    pub squared_error: f64,
}

/// An EXL2 matrix and what it cost.
#[derive(Debug)]
pub struct Quantized {
    /// The matrix.
    pub matrix: Matrix,
    /// Sum of squared differences between the source's weights and the decoded ones.
    pub squared_error: f64,
    /// Sum of squares of the source's weights.
    pub squared_norm: f64,
}

impl Quantized {
    /// Frobenius norm of the difference over that of the weights; 0 for a module of zeros.
    pub fn relative_error(&self) -> f64 {
        relative_error((self.squared_error, self.squared_norm))
    }
}

/// Quantizes one group.
pub fn fit_group(samples: &Samples<'_>, bits: Bits) -> Fit {
    fit_group_with(samples, bits, &Search::for_bits(bits, samples.grid()))
}

/// Quantizes one group with a search of one's own.
pub fn fit_group_with(samples: &Samples<'_>, bits: Bits, how: &Search) -> Fit {
    fit_group_on(samples, bits, how, SimdPath::or_fastest())
}

/// Quantizes one group with a search and an instruction set of one's own.
pub fn fit_group_on(samples: &Samples<'_>, bits: Bits, how: &Search, path: SimdPath) -> Fit {
    let choice = search(samples, bits, how, path);
    // The lowest of a ceiling's scales is always usable, so that no column has chosen NaN.
    let (range, offered) = (code_range(bits), steps(choice.ceiling, bits));
    let mut table = Vec::with_capacity(samples.panels() * samples.depth());
    let mut errors = [0.0f64; LANES];
    for panel in 0..samples.panels() {
        let scale =
            std::array::from_fn(|lane| offered.scale[usize::from(choice.index[panel * LANES + lane])]);
        path.encode(samples.panel(panel), &scale, range, &mut table, &mut errors);
    }
    Fit { bits, ceiling: choice.ceiling, index: choice.index, table, squared_error: total(&errors) }
}

/// Quantizes a module: group `i` of `cut` gets `bits[i]`. Groups are stored widest first, as the format
/// wants, and otherwise in the order of the cut.
///
/// # Errors
/// [`Error::Length`] if there aren't as many widths as groups; those of [`Matrix::new`], which finds nothing
/// in sizes that the format allows and finite weights.
pub fn quantize(source: &Source, cut: &Cut, bits: &[Bits]) -> Result<Quantized, Error> {
    quantize_on(source, cut, bits, SimdPath::or_fastest())
}

pub(super) fn quantize_on(
    source: &Source,
    cut: &Cut,
    bits: &[Bits],
    path: SimdPath,
) -> Result<Quantized, Error> {
    let n = source.n;
    if bits.len() != cut.groups.len() {
        return Err(Error::Length { tensor: "q_groups", found: bits.len(), expected: cut.groups.len() });
    }
    let fitted: Vec<_> = stored_groups(bits)
        .map()
        .par_iter()
        .map(|&g| {
            let (places, bits) = (cut.groups[g as usize].clone(), bits[g as usize]);
            let samples = Samples::new(source, places);
            let fit = fit_group_on(&samples, bits, &Search::for_bits(bits, samples.grid()), path);
            let codes = samples.codes(&fit.table);
            (fit, codes, samples.squared_norm())
        })
        .collect();
    let (mut squared_error, mut squared_norm) = (0.0, 0.0);
    let mut codes = Vec::with_capacity(source.k * n);
    let (mut index, mut scale_max, mut groups) = (Vec::new(), Vec::new(), Vec::new());
    for (fit, group_codes, norm) in fitted {
        squared_error += fit.squared_error;
        squared_norm += norm;
        groups.push(Group { bits: fit.bits, rows: group_codes.len() / n });
        codes.extend(group_codes);
        index.extend(fit.index);
        // The search tries no other ceilings; Matrix::new refuses an infinite one.
        scale_max.push(ceiling_for(fit.ceiling, source.prescale).unwrap_or(f16::INFINITY));
    }
    let places = stored_places(&cut.groups, bits).into_iter();
    let packed_rows: Vec<u32> = places.map(|place| source.rows.map()[place]).collect();
    let invperm = Permutation::new(packed_rows)?.inverse();
    let matrix = Matrix::new(GroupTable::new(groups)?, n, codes, index, scale_max, invperm)?;
    Ok(Quantized { matrix, squared_error, squared_norm })
}
