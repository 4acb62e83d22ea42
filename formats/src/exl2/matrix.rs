//! An EXL2 weight unpacked, its decoding, and its five tensors (SPEC §1, §3, §4).

use super::groups::check_columns;
use super::{Error, GroupTable, decode_ceiling, decode_scale};
use crate::{Permutation, bitstream};
use half::{f16, slice::HalfFloatSliceExt, vec::HalfBitsVecExt};

/// The least value that rounds to infinity in fp16: half a step above 65504.
const FP16_OVERFLOW: f32 = 65_520.0;

/// The five tensors as read, row-major.
#[derive(Clone, Copy, Debug)]
pub struct Tensors<'a> {
    /// `[word_rows, n]`.
    pub q_weight: &'a [u32],
    /// `[k]`: model row to packed row.
    pub q_invperm: &'a [u32],
    /// `[groups, n / 8]`.
    pub q_scale: &'a [u32],
    /// `[groups]`.
    pub q_scale_max: &'a [f16],
    /// `[2 · groups]`.
    pub q_groups: &'a [i16],
}

/// The five tensors to write.
#[derive(Clone, Debug, PartialEq)]
pub struct Packed {
    /// `[word_rows, n]`.
    pub q_weight: Vec<u32>,
    /// `[k]`: model row to packed row.
    pub q_invperm: Vec<u32>,
    /// `[groups, n / 8]`.
    pub q_scale: Vec<u32>,
    /// `[groups]`.
    pub q_scale_max: Vec<f16>,
    /// `[2 · groups]`.
    pub q_groups: Vec<i16>,
}

impl Packed {
    /// The tensors as a reader sees them.
    pub fn tensors(&self) -> Tensors<'_> {
        Tensors {
            q_weight: &self.q_weight,
            q_invperm: &self.q_invperm,
            q_scale: &self.q_scale,
            q_scale_max: &self.q_scale_max,
            q_groups: &self.q_groups,
        }
    }
}

/// An unpacked EXL2 weight. Rows of `codes` are in packed order.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    groups: GroupTable,
    out_features: usize,
    codes: Vec<u8>,
    scale_index: Vec<u8>,
    scale_max: Vec<f16>,
    invperm: Permutation,
}

impl Matrix {
    /// Puts a matrix together. `codes` is `[k, n]` in packed order, `scale_index` `[groups, n]` (0 to 15),
    /// `scale_max` `[groups]`, `invperm` maps a row of the model to its packed row.
    ///
    /// # Errors
    /// Everything that SPEC §7 asks of a matrix.
    pub fn new(
        groups: GroupTable,
        out_features: usize,
        codes: Vec<u8>,
        scale_index: Vec<u8>,
        scale_max: Vec<f16>,
        invperm: Permutation,
    ) -> Result<Self, Error> {
        let (k, n, count) = (groups.rows(), out_features, groups.groups().len());
        check_columns(n)?;
        // Saturated products match no length.
        expect_len("codes", codes.len(), k.saturating_mul(n))?;
        expect_len("q_scale", scale_index.len(), count.saturating_mul(n))?;
        expect_len("q_scale_max", scale_max.len(), count)?;
        expect_len("q_invperm", invperm.len(), k)?;
        let matrix = Self { groups, out_features, codes, scale_index, scale_max, invperm };
        matrix.check_values()?;
        Ok(matrix)
    }

    /// Unpacks and checks the tensors of a matrix with `out_features` columns as stored.
    ///
    /// # Errors
    /// Everything that SPEC §7 asks of a matrix.
    pub fn unpack(tensors: Tensors<'_>, out_features: usize) -> Result<Self, Error> {
        let n = out_features;
        check_columns(n)?;
        if !tensors.q_weight.len().is_multiple_of(n) {
            let expected = tensors.q_weight.len().next_multiple_of(n);
            return Err(Error::Length { tensor: "q_weight", found: tensors.q_weight.len(), expected });
        }
        let groups = GroupTable::parse(tensors.q_groups, tensors.q_weight.len() / n)?;
        let (k, count) = (groups.rows(), groups.groups().len());
        if tensors.q_invperm.len() != k {
            return Err(Error::TotalRows { found: k, expected: tensors.q_invperm.len() });
        }
        expect_len("q_scale", tensors.q_scale.len(), count * n / 8)?;
        let mut codes = vec![0; k * n];
        let (mut row, mut word) = (0, 0);
        for group in groups.groups() {
            let codes = &mut codes[row * n..][..group.rows * n];
            bitstream::unpack_rows(&tensors.q_weight[word * n..], n, group.bits.get(), codes);
            row += group.rows;
            word += group.words();
        }
        let mut scale_index = vec![0; count * n];
        bitstream::unpack_row(tensors.q_scale, 4, &mut scale_index);
        let invperm = Permutation::new(tensors.q_invperm.to_vec())?;
        Self::new(groups, n, codes, scale_index, tensors.q_scale_max.to_vec(), invperm)
    }

    /// Packs into the five tensors, the inverse of [`Matrix::unpack`].
    pub fn pack(&self) -> Packed {
        let n = self.out_features;
        let mut q_weight = vec![0; self.groups.word_rows() * n];
        let (mut row, mut word) = (0, 0);
        for group in self.groups.groups() {
            let words = &mut q_weight[word * n..][..group.words() * n];
            bitstream::pack_rows(&self.codes[row * n..][..group.rows * n], n, group.bits.get(), words);
            row += group.rows;
            word += group.words();
        }
        let mut q_scale = vec![0; self.scale_index.len() / 8];
        bitstream::pack_row(&self.scale_index, 4, &mut q_scale);
        Packed {
            q_weight,
            q_invperm: self.invperm.map().to_vec(),
            q_scale,
            q_scale_max: self.scale_max.clone(),
            q_groups: self.groups.to_q_groups(),
        }
    }

    /// Checks that the columns from `out_features` on, which only pad, decode to 0 (SPEC E7.14).
    ///
    /// # Errors
    /// [`Error::Padding`].
    pub fn check_padding(&self, out_features: usize) -> Result<(), Error> {
        self.each_packed_row(|row, group, codes| {
            let zero = self.groups.groups()[group].bits.zero();
            match codes.iter().skip(out_features).position(|&c| u32::from(c) != zero) {
                Some(i) => {
                    Err(Error::Padding { row, column: out_features + i, found: codes[out_features + i] })
                }
                None => Ok(()),
            }
        })
    }

    /// The weights `[k, n]` in the model's row order (SPEC E5.2), exactly as exllamav2's kernel gives them (SPEC §4)
    /// with a prescale of 1.
    pub fn dequantize(&self) -> Vec<f16> {
        self.dequantize_prescaled(1.0)
    }

    /// The weights times a positive prescale, as [`Matrix::dequantize`] gives them and exactly as exllamav2's kernel
    /// does: the ceilings are multiplied before they are rounded (SPEC E4.9), so that a weight isn't the product of
    /// `prescale` and what it decodes to without.
    pub fn dequantize_prescaled(&self, prescale: f64) -> Vec<f16> {
        let n = self.out_features;
        let perm = self.invperm.inverse();
        // Zeros of an integer type come as untouched pages: a third faster than a vector of f16.
        let mut weights = vec![0u16; self.codes.len()].reinterpret_into::<f16>();
        let mut scales = vec![0.0f32; n];
        let mut values = vec![0.0f32; n];
        let mut current = None;
        let done = self.each_packed_row(|row, group, codes| {
            if current != Some(group) {
                self.decode_scales(group, prescale, &mut scales);
                current = Some(group);
            }
            let zero = self.groups.groups()[group].bits.zero() as i32;
            for ((value, &code), &scale) in values.iter_mut().zip(codes).zip(&scales) {
                *value = (i32::from(code) - zero) as f32 * scale;
            }
            let model_row = perm.map()[row] as usize;
            weights[model_row * n..][..n].convert_from_f32_slice(&values);
            Ok(())
        });
        debug_assert!(done.is_ok());
        weights
    }

    /// The decoded scales of a group, one a column (SPEC E4.4).
    fn decode_scales(&self, group: usize, prescale: f64, scales: &mut [f32]) {
        let ceiling = decode_ceiling(self.scale_max[group], prescale);
        let steps: [f32; 16] = std::array::from_fn(|i| decode_scale(ceiling, i as u8).to_f32());
        let index = &self.scale_index[group * self.out_features..];
        for (scale, &index) in scales.iter_mut().zip(index) {
            *scale = steps[usize::from(index)];
        }
    }

    /// The scales of a group as decoded, one a column (SPEC §4).
    pub fn scales_of(&self, group: usize) -> Vec<f32> {
        let mut scales = vec![0.0; self.out_features];
        self.decode_scales(group, 1.0, &mut scales);
        scales
    }

    /// Groups in packed order.
    pub fn groups(&self) -> &GroupTable {
        &self.groups
    }

    /// k.
    pub fn in_features(&self) -> usize {
        self.groups.rows()
    }

    /// n as stored, padding included.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Codes `[k, n]`, rows in packed order.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// Scale indices `[groups, n]`, 0 to 15.
    pub fn scale_index(&self) -> &[u8] {
        &self.scale_index
    }

    /// Ceilings `[groups]` as stored.
    pub fn scale_max(&self) -> &[f16] {
        &self.scale_max
    }

    /// Maps a row of the model to its packed row.
    pub fn invperm(&self) -> &Permutation {
        &self.invperm
    }

    /// The same weights in another order: row `j` of the result is the model's row `rows[j]`, and likewise of
    /// columns. What is packed stays in its place, columns aside; `q_invperm` names the rows anew.
    ///
    /// # Panics
    /// If an order isn't of as many rows or columns as there are.
    #[must_use]
    pub fn reordered(self, rows: Option<&Permutation>, columns: Option<&Permutation>) -> Self {
        let Self { groups, out_features, mut codes, mut scale_index, scale_max, invperm } = self;
        if let Some(columns) = columns {
            assert_eq!(columns.len(), out_features, "an order of all columns");
            let mut from = vec![0; out_features];
            for row in codes.chunks_exact_mut(out_features).chain(scale_index.chunks_exact_mut(out_features))
            {
                from.copy_from_slice(row);
                row.iter_mut().zip(columns.map()).for_each(|(to, &column)| *to = from[column as usize]);
            }
        }
        let invperm = rows.map_or(invperm.clone(), |rows| rows.then(&invperm));
        Self { groups, out_features, codes, scale_index, scale_max, invperm }
    }

    /// Gives each packed row with its group.
    fn each_packed_row(
        &self,
        mut give: impl FnMut(usize, usize, &[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let n = self.out_features;
        let mut rows = self.codes.chunks_exact(n).enumerate();
        for (group, table) in self.groups.groups().iter().enumerate() {
            for (row, codes) in rows.by_ref().take(table.rows) {
                give(row, group, codes)?;
            }
        }
        Ok(())
    }

    /// SPEC E7.11 to E7.13, and that codes and scale indices fit their widths.
    fn check_values(&self) -> Result<(), Error> {
        let n = self.out_features;
        for (group, ceiling) in self.scale_max.iter().enumerate() {
            if !ceiling.is_finite() || (ceiling.is_sign_negative() && *ceiling != f16::ZERO) {
                return Err(Error::Ceiling { group, found: ceiling.to_f32() });
            }
        }
        if let Some(i) = self.scale_index.iter().position(|&s| s > 15) {
            return Err(Error::ScaleIndex { group: i / n, column: i % n, found: self.scale_index[i] });
        }
        let (mut lowest_code, mut highest_code) = (vec![u8::MAX; n], vec![0u8; n]);
        let mut scales = vec![0.0f32; n];
        let mut first_row = 0;
        for (group, table) in self.groups.groups().iter().enumerate() {
            let (bits, zero) = (table.bits, table.bits.zero());
            let codes = &self.codes[first_row * n..][..table.rows * n];
            let largest = codes.iter().fold(0, |largest, &code| code.max(largest));
            if u32::from(largest) > bits.max_code() {
                let i = codes.iter().position(|&c| c == largest).unwrap_or(0);
                let (row, column) = (first_row + i / n, i % n);
                return Err(Error::Code { row, column, found: codes[i], bits });
            }
            let found = self.scale_max[group].to_f32();
            if decode_ceiling(self.scale_max[group], 1.0) == f16::ZERO
                && codes.iter().any(|&c| u32::from(c) != zero)
            {
                return Err(Error::VanishingGroup { group, found });
            }
            lowest_code.fill(u8::MAX);
            highest_code.fill(0);
            for row in codes.chunks_exact(n) {
                for ((low, high), &code) in lowest_code.iter_mut().zip(&mut highest_code).zip(row) {
                    *low = code.min(*low);
                    *high = code.max(*high);
                }
            }
            self.decode_scales(group, 1.0, &mut scales);
            for column in 0..n {
                let below = zero as i32 - i32::from(lowest_code[column]);
                let above = i32::from(highest_code[column]) - zero as i32;
                let largest = below.max(above).max(0) as f32 * scales[column];
                if largest >= FP16_OVERFLOW {
                    return Err(Error::Overflow { group, column });
                }
            }
            first_row += table.rows;
        }
        Ok(())
    }
}

fn expect_len(tensor: &'static str, found: usize, expected: usize) -> Result<(), Error> {
    if found == expected { Ok(()) } else { Err(Error::Length { tensor, found, expected }) }
}
