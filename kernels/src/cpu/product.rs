//! Products with a weight, decoded panel by panel.

use super::Tensor;
use crate::weight::{Dense, DenseType, Weight};
use faer::{Accum, MatMut, MatRef, Par};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;

/// Elements of a weight in fp32 at a time: 64 MiB.
const PANEL: usize = 1 << 24;
/// Rows of activations of a task.
const ROWS: usize = 512;
/// Columns of a task: a multiple of the 96 that AVX-512 multiplies together.
const COLUMNS: usize = 384;

/// A weight as this device holds it.
#[derive(Clone, Debug)]
pub enum Loaded {
    /// As stored: it is widened at each use.
    Dense(Dense),
    /// Decoded once, when it was brought here.
    Decoded {
        /// n, without padding.
        out_features: usize,
        /// The weights `[k, n]`.
        values: Vec<f16>,
    },
}

impl Loaded {
    pub(super) fn new(weight: &Weight) -> Self {
        let out_features = weight.out_features();
        let values = match weight {
            Weight::Dense(dense) => return Self::Dense(dense.clone()),
            Weight::Gptq(matrix) => matrix.dequantize(),
            Weight::Exl2 { matrix, .. } => {
                let stored = matrix.out_features();
                let decoded = matrix.dequantize();
                match stored == out_features {
                    true => decoded,
                    false => {
                        let rows = decoded.chunks_exact(stored);
                        rows.flat_map(|row| &row[..out_features]).copied().collect()
                    }
                }
            }
        };
        Self::Decoded { out_features, values }
    }

    /// k and n.
    pub(super) fn shape(&self) -> (usize, usize) {
        match self {
            Self::Dense(dense) => (dense.in_features, dense.out_features),
            Self::Decoded { out_features, values } => (values.len() / (*out_features).max(1), *out_features),
        }
    }

    /// The decoded weight `[k, n]`.
    pub(super) fn decoded(&self) -> Vec<f16> {
        match self {
            Self::Decoded { values, .. } => values.clone(),
            Self::Dense(dense) => {
                let (k, n) = (dense.in_features, dense.out_features);
                let mut decoded = vec![f16::ZERO; k * n];
                let mut row = vec![0.0; k];
                for column in 0..n {
                    dense.widen_rows(column..column + 1, &mut row);
                    for (i, &value) in row.iter().enumerate() {
                        decoded[i * n + column] = f16::from_f32(value);
                    }
                }
                decoded
            }
        }
    }
}

/// `y = x · weight`.
pub(super) fn multiply(x: &Tensor, weight: &Loaded, y: &mut Tensor) {
    let (k, n) = weight.shape();
    if x.rows == 0 || k == 0 || n == 0 {
        return;
    }
    let width = (PANEL / k).clamp(1, n);
    let mut panel = vec![0.0; width * k];
    let decoded = match weight {
        Loaded::Decoded { values, .. } => values,
        Loaded::Dense(dense) => return multiply_dense(x, dense, &mut panel, y),
    };
    for first in (0..n).step_by(width) {
        let count = width.min(n - first);
        let panel = &mut panel[..count * k];
        panel.par_chunks_mut(count).enumerate().with_min_len(64).for_each(|(row, chunk)| {
            decoded[row * n + first..][..count].convert_to_f32_slice(chunk);
        });
        product(x, MatRef::from_row_major_slice(panel, k, count), first, y);
    }
}

/// The same of a weight stored `[n, k]`, of which a panel of columns is a run of rows.
fn multiply_dense(x: &Tensor, dense: &Dense, panel: &mut [f32], y: &mut Tensor) {
    let (k, n) = (dense.in_features, dense.out_features);
    let width = panel.len() / k;
    for first in (0..n).step_by(width) {
        let count = width.min(n - first);
        let panel = &mut panel[..count * k];
        panel.par_chunks_mut(COLUMNS * k).enumerate().for_each(|(i, chunk)| {
            let start = first + i * COLUMNS;
            dense.widen_rows(start..start + chunk.len() / k, chunk);
        });
        product(x, MatRef::from_row_major_slice(panel, count, k).transpose(), first, y);
    }
}

/// Columns `first..` of `y = x · panel`, a task a block of `ROWS` × `COLUMNS`.
fn product(x: &Tensor, panel: MatRef<'_, f32>, first: usize, y: &mut Tensor) {
    let (k, count, n) = (x.columns, panel.ncols(), y.columns);
    let x = MatRef::from_row_major_slice(&x.values, x.rows, k);
    let y = MatMut::from_row_major_slice_mut(&mut y.values, x.nrows(), n);
    let y = y.submatrix_mut(0, first, x.nrows(), count);
    y.par_row_chunks_mut(ROWS).enumerate().for_each(|(i, rows)| {
        let x = x.subrows(i * ROWS, rows.nrows());
        rows.par_col_chunks_mut(COLUMNS).enumerate().for_each(|(j, block)| {
            let panel = panel.subcols(j * COLUMNS, block.ncols());
            faer::linalg::matmul::matmul(block, Accum::Replace, x, panel, 1.0, Par::Seq);
        });
    });
}

/// Little-endian elements at any alignment as fp32.
pub(super) fn widen(dtype: DenseType, bytes: &[u8], to: &mut [f32]) {
    match dtype {
        DenseType::F16 => match bytemuck::try_cast_slice::<u8, f16>(bytes) {
            Ok(halves) => halves.convert_to_f32_slice(to),
            Err(_) => pairs(bytes).zip(to).for_each(|(pair, to)| *to = f16::from_le_bytes(pair).to_f32()),
        },
        DenseType::Bf16 => match bytemuck::try_cast_slice::<u8, bf16>(bytes) {
            Ok(halves) => halves.convert_to_f32_slice(to),
            Err(_) => pairs(bytes).zip(to).for_each(|(pair, to)| *to = bf16::from_le_bytes(pair).to_f32()),
        },
        DenseType::F32 => {
            let (words, _) = bytes.as_chunks::<4>();
            words.iter().zip(to).for_each(|(&word, to)| *to = f32::from_le_bytes(word));
        }
    }
}

fn pairs(bytes: &[u8]) -> impl Iterator<Item = [u8; 2]> + '_ {
    bytes.as_chunks::<2>().0.iter().copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cpu, Operations};
    use std::sync::Arc;

    /// More rows and columns than a task has, and not a multiple of them; and few rows.
    #[test]
    fn products_are_the_same_to_the_bit_for_any_number_of_threads() {
        let (k, n) = (192, 2 * COLUMNS + 40);
        let value = |i: usize| ((i * 37 + i / 11) % 101) as f32 * 0.013 - 0.6;
        let bytes: Vec<u8> = (0..k * n).flat_map(|i| value(i).to_le_bytes()).collect();
        let dense = Dense { dtype: DenseType::F32, out_features: n, in_features: k, bytes: Arc::new(bytes) };
        for m in [2 * ROWS + 17, 3] {
            let x: Vec<f32> = (0..m * k).map(|i| value(i * 5 + 3)).collect();
            let product = |threads| {
                let cpu = Cpu::new(threads);
                let weight = cpu.upload_weight(&Weight::Dense(dense.clone())).unwrap();
                let y = cpu.matmul(&cpu.upload(&x, k).unwrap(), &weight, None).unwrap();
                cpu.download(&y).unwrap()
            };
            let one = product(1);
            assert!(one == product(2) && one == product(7), "{m} rows");
            // The last element, by the definition.
            let (row, column) = (m - 1, n - 1);
            let exact: f64 =
                (0..k).map(|i| f64::from(x[row * k + i]) * f64::from(value(column * k + i))).sum();
            assert!((f64::from(one[row * n + column]) - exact).abs() < 1e-4, "{exact}");
        }
    }
}
