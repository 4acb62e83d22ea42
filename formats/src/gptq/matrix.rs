//! A GPTQ weight unpacked: the integers, scales and group index, and their decoding (SPEC §5).

use super::{Error, GIdx, Shape, check_codes, expect_len};
use half::{bf16, f16, slice::HalfFloatSliceExt, vec::HalfBitsVecExt};

/// An unpacked GPTQ weight: `w[i, j] = scales[g, j] · (codes[i, j] − zeros[g, j])` with `g` the row's group.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    shape: Shape,
    codes: Vec<u8>,
    zeros: Vec<u16>,
    scales: Vec<f32>,
    g_idx: GIdx,
}

impl Matrix {
    /// Puts a matrix together. `codes` is `[k, n]`, `zeros` and `scales` are `[groups, n]`; scales of any
    /// stored float type are exact as `f32`.
    ///
    /// # Errors
    /// [`Error::Size`], [`Error::GroupCount`] for a shape that no weight has; [`Error::Length`],
    /// [`Error::GIdxLength`], [`Error::GroupIndex`] when parts disagree; [`Error::Code`], [`Error::Zero`]
    /// for integers that the width doesn't have, [`Error::Scale`] for a scale that is NaN or infinite.
    pub fn new(
        shape: Shape,
        codes: Vec<u8>,
        zeros: Vec<u16>,
        scales: Vec<f32>,
        g_idx: GIdx,
    ) -> Result<Self, Error> {
        shape.check()?;
        check_codes(&shape, &codes)?;
        expect_len("zeros", zeros.len(), shape.scales())?;
        if let Some(i) = zeros.iter().position(|&z| u32::from(z) > shape.bits.max_code() + 1) {
            let (group, column) = (i / shape.out_features, i % shape.out_features);
            return Err(Error::Zero { group, column, found: zeros[i], bits: shape.bits });
        }
        check_scales(&shape, &scales)?;
        if g_idx.groups().len() != shape.in_features {
            return Err(Error::GIdxLength { found: g_idx.groups().len(), expected: shape.in_features });
        }
        if let Some(position) = g_idx.groups().iter().position(|&g| g as usize >= shape.groups) {
            let found = i64::from(g_idx.groups()[position]);
            return Err(Error::GroupIndex { position, found, groups: shape.groups });
        }
        Ok(Self { shape, codes, zeros, scales, g_idx })
    }

    /// Sizes and width.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Codes `[k, n]`, rows in the model's order.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// Zero points `[groups, n]`.
    pub fn zeros(&self) -> &[u16] {
        &self.zeros
    }

    /// Scales `[groups, n]`.
    pub fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// Group of each row.
    pub fn g_idx(&self) -> &GIdx {
        &self.g_idx
    }

    /// The weights `[k, n]`: the product in fp32, rounded once to fp16 (SPEC §5). What overflows fp16
    /// becomes infinite.
    pub fn dequantize(&self) -> Vec<f16> {
        // Zeros of an integer type come as untouched pages: a third faster than a vector of f16.
        let mut weights = vec![0u16; self.codes.len()].reinterpret_into::<f16>();
        self.each_row(|row, values| {
            weights[row * values.len()..][..values.len()].convert_from_f32_slice(values);
        });
        weights
    }

    /// The weights `[k, n]`: the product in fp32, rounded once to bf16 (SPEC §5), never by way of fp16.
    pub fn dequantize_bf16(&self) -> Vec<bf16> {
        let mut weights = vec![0u16; self.codes.len()].reinterpret_into::<bf16>();
        self.each_row(|row, values| {
            weights[row * values.len()..][..values.len()].convert_from_f32_slice(values);
        });
        weights
    }

    /// Gives each row's products in fp32: exact for scales stored as fp16 or bf16.
    fn each_row(&self, mut give: impl FnMut(usize, &[f32])) {
        let n = self.shape.out_features;
        let mut values = vec![0.0f32; n];
        for (row, codes) in self.codes.chunks_exact(n).enumerate() {
            let group = self.g_idx.groups()[row] as usize * n;
            let (zeros, scales) = (&self.zeros[group..][..n], &self.scales[group..][..n]);
            for (((value, &code), &zero), &scale) in values.iter_mut().zip(codes).zip(zeros).zip(scales) {
                // Both are at most 256.
                *value = scale * f32::from(i16::from(code) - zero as i16);
            }
            give(row, &values);
        }
    }
}

/// Checks that scales are `[groups, n]` and finite (SPEC G5.4).
///
/// # Errors
/// [`Error::Length`]; [`Error::Scale`] for the first that is not finite.
pub fn check_scales(shape: &Shape, scales: &[f32]) -> Result<(), Error> {
    expect_len("scales", scales.len(), shape.scales())?;
    match scales.iter().position(|s| !s.is_finite()) {
        None => Ok(()),
        Some(i) => Err(Error::Scale {
            group: i / shape.out_features,
            column: i % shape.out_features,
            found: scales[i],
        }),
    }
}
