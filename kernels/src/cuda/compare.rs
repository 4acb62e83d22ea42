//! Comparing (`compare.cu`).

use super::cubins::Kernel;
use super::launch::{Argument, Grid};
use super::memory::Tensor;
use super::{Cuda, shapes};
use crate::error::Error;
use crate::operations::{Difference, TokenScore};

/// Elements of a block of `difference`, as `compare.cu` has it.
const PIECE: usize = 16_384;
/// Sums of each piece, and scores of each row.
const SUMS: usize = 5;

impl Cuda {
    pub(super) fn not_finite(&self, x: &Tensor) -> Result<Option<usize>, Error> {
        let operation = "first_non_finite";
        let found = self.filled(operation, size_of::<u32>(), 0xff)?;
        // SAFETY: the arguments of `first_non_finite`; `found` is one number, the largest.
        unsafe {
            self.launch(
                operation,
                Kernel::FirstNonFinite,
                Grid::new([shapes::blocks(operation, x.len(), 256)?, 1, 1], 256),
                &mut [
                    Argument::Address(x.address()),
                    Argument::U64(x.len() as u64),
                    Argument::U32(shapes::count(operation, x.columns)?),
                    Argument::Address(found.address()),
                ],
            )?;
        }
        let row: Vec<u32> = self.to_host(operation, &found, 1)?;
        Ok(row.first().filter(|&&row| row != u32::MAX).map(|&row| row as usize))
    }

    pub(super) fn distance(&self, source: &Tensor, converted: &Tensor) -> Result<Difference, Error> {
        let operation = "difference";
        shapes::expect_same(operation, source, converted)?;
        let pieces = shapes::blocks(operation, source.len(), PIECE)?;
        let count = pieces as usize * SUMS;
        let parts = self.allocate(operation, count * size_of::<f64>())?;
        // SAFETY: the arguments of `difference`; `parts` has five for each block.
        unsafe {
            self.launch(
                operation,
                Kernel::Difference,
                Grid::new([pieces, 1, 1], 256),
                &mut [
                    Argument::Address(source.address()),
                    Argument::Address(converted.address()),
                    Argument::U64(source.len() as u64),
                    Argument::Address(parts.address()),
                ],
            )?;
        }
        let parts: Vec<f64> = self.to_host(operation, &parts, count)?;
        let (parts, _) = parts.as_chunks::<SUMS>();
        Ok(parts.iter().fold(Difference::default(), |sum, part| Difference {
            squared_error: sum.squared_error + part[0],
            squared_source: sum.squared_source + part[1],
            squared_converted: sum.squared_converted + part[2],
            product: sum.product + part[3],
            max_error: sum.max_error.max(part[4]),
        }))
    }

    pub(super) fn likelihoods(&self, logits: &Tensor, targets: &[u32]) -> Result<Vec<f32>, Error> {
        let operation = "negative_log_likelihood";
        shapes::expect_targets(operation, logits, targets)?;
        let of = self.to_device(operation, targets)?;
        let nll = self.allocate(operation, size_of_val(targets))?;
        // SAFETY: the arguments of `negative_log_likelihood`; a target below the vocabulary for each row.
        unsafe {
            self.launch(
                operation,
                Kernel::NegativeLogLikelihood,
                Grid::new([shapes::blocks(operation, logits.rows, 1)?, 1, 1], 256),
                &mut [
                    Argument::Address(logits.address()),
                    Argument::Address(of.address()),
                    Argument::U32(shapes::count(operation, logits.columns)?),
                    Argument::Address(nll.address()),
                ],
            )?;
        }
        self.to_host(operation, &nll, logits.rows)
    }

    pub(super) fn scores(
        &self,
        source: &Tensor,
        converted: &Tensor,
        targets: &[u32],
    ) -> Result<Vec<TokenScore>, Error> {
        let operation = "compare_logits";
        shapes::expect_same(operation, source, converted)?;
        shapes::expect_targets(operation, source, targets)?;
        let of = self.to_device(operation, targets)?;
        let count = source.rows * SUMS;
        let scores = self.allocate(operation, count * size_of::<f32>())?;
        // SAFETY: the arguments of `compare_logits`; equal shapes, a target below the vocabulary and five scores for
        // each row.
        unsafe {
            self.launch(
                operation,
                Kernel::CompareLogits,
                Grid::new([shapes::blocks(operation, source.rows, 1)?, 1, 1], 256),
                &mut [
                    Argument::Address(source.address()),
                    Argument::Address(converted.address()),
                    Argument::Address(of.address()),
                    Argument::U32(shapes::count(operation, source.columns)?),
                    Argument::Address(scores.address()),
                ],
            )?;
        }
        let scores: Vec<f32> = self.to_host(operation, &scores, count)?;
        let (rows, _) = scores.as_chunks::<SUMS>();
        Ok(rows
            .iter()
            .map(|row| TokenScore {
                source_nll: row[0],
                converted_nll: row[1],
                kl: row[2],
                reverse_kl: row[3],
                top1_agrees: row[4] != 0.0,
            })
            .collect())
    }
}
