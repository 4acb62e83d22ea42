//! Sums of products of activations, and the factor that is made of them.

use super::{Cpu, Tensor};
use crate::calibration::Calibration;
use crate::error::{Error, expect};
use faer::dyn_stack::{MemBuffer, MemStack};
use faer::linalg::cholesky::llt::factor::{LltRegularization, cholesky_in_place, cholesky_in_place_scratch};
use faer::{Accum, MatMut, MatRef, Par};
use rayon::prelude::*;

/// Rows of the triangle of a task.
const ROWS: usize = 128;

/// A sum under way.
#[derive(Debug)]
pub struct Sums {
    columns: usize,
    /// The lower triangle, row by row.
    lower: Vec<f64>,
}

impl Calibration for Cpu {
    type Sums = Sums;

    fn new_sums(&self, columns: usize) -> Result<Sums, Error> {
        Ok(Sums { columns, lower: vec![0.0; columns * (columns + 1) / 2] })
    }

    fn add_products(&self, sums: &mut Sums, x: &Tensor) -> Result<(), Error> {
        expect("add_products", x.columns == sums.columns, || {
            (x.in_words("activations"), format!("[m, {}]", sums.columns))
        })?;
        if x.rows == 0 {
            return Ok(());
        }
        let all = MatRef::from_row_major_slice(&x.values, x.rows, x.columns);
        let mut blocks: Vec<(usize, usize, &mut [f64])> = Vec::new();
        let mut rest = sums.lower.as_mut_slice();
        for first in (0..x.columns).step_by(ROWS) {
            let end = x.columns.min(first + ROWS);
            let (block, others) = rest.split_at_mut((end * (end + 1) - first * (first + 1)) / 2);
            blocks.push((first, end, block));
            rest = others;
        }
        self.run(|| {
            // The longest rows first.
            blocks.into_par_iter().rev().with_max_len(1).for_each(|(first, end, block)| {
                let rows = end - first;
                let mut products = vec![0.0f32; rows * end];
                faer::linalg::matmul::matmul(
                    MatMut::from_row_major_slice_mut(&mut products, rows, end),
                    Accum::Replace,
                    all.subcols(first, rows).transpose(),
                    all.subcols(0, end),
                    1.0,
                    Par::Seq,
                );
                let mut to = block.iter_mut();
                for (i, row) in products.chunks_exact(end).enumerate() {
                    row[..=first + i].iter().zip(&mut to).for_each(|(&p, to)| *to += f64::from(p));
                }
            });
        });
        Ok(())
    }

    fn download_sums(&self, sums: Sums) -> Result<Vec<f64>, Error> {
        Ok(sums.lower)
    }
}

/// Factors a positive definite matrix `[k, k]`, of which the lower triangle counts, in place: column by column,
/// L of A = LLᵀ stands in the lower triangle then. Gives whether it is positive definite; if not, what stands in
/// `matrix` means nothing. On one thread.
pub fn cholesky(matrix: &mut [f64], k: usize) -> bool {
    if k == 0 || matrix.len() != k * k {
        return k == 0 && matrix.is_empty();
    }
    let mut memory = MemBuffer::new(cholesky_in_place_scratch::<f64>(k, Par::Seq, Default::default()));
    let regularization =
        LltRegularization { dynamic_regularization_delta: 0.0, dynamic_regularization_epsilon: 0.0 };
    let stack = MemStack::new(&mut memory);
    let to = MatMut::from_column_major_slice_mut(matrix, k, k);
    let factored = cholesky_in_place(to, regularization, Par::Seq, stack, Default::default()).is_ok();
    // NaN is no pivot that is too small.
    factored && (0..k).all(|i| matrix[i * k + i].is_finite() && matrix[i * k + i] > 0.0)
}
