//! What is done to the elements of rows (`rows.cu`).

use super::cubins::Kernel;
use super::launch::{Argument, Grid};
use super::memory::Tensor;
use super::{Cuda, shapes};
use crate::error::{Error, expect};
use crate::operations::{Activation, Rope};
use std::ops::Range;

/// Threads of a kernel that has one for each element.
const THREADS: usize = 256;

fn elements(operation: &'static str, count: usize) -> Result<Grid, Error> {
    Ok(Grid::new([shapes::blocks(operation, count, THREADS)?, 1, 1], THREADS as u32))
}

fn rows_of(operation: &'static str, rows: usize, columns: usize) -> Result<Grid, Error> {
    let tiles = shapes::few_blocks(operation, columns, THREADS)?;
    Ok(Grid::new([shapes::blocks(operation, rows, 1)?, tiles, 1], THREADS as u32))
}

impl Cuda {
    pub(super) fn normalise(&self, x: &Tensor, weight: &Tensor, epsilon: f32) -> Result<Tensor, Error> {
        let operation = "rms_norm";
        let c = weight.columns;
        expect(operation, weight.rows == 1 && c > 0 && x.columns.is_multiple_of(c), || {
            (shapes::in_words("a weight", weight), format!("[1, c], c a divisor of {}", x.columns))
        })?;
        let y = self.tensor(operation, x.rows, x.columns)?;
        let grid = Grid::new([shapes::blocks(operation, x.len() / c, 1)?, 1, 1], 128);
        // SAFETY: the arguments of `rms_norm`; a block for each run of c columns, the weight has c.
        unsafe {
            self.launch(
                operation,
                Kernel::RmsNorm,
                grid,
                &mut [
                    Argument::Address(x.address()),
                    Argument::Address(weight.address()),
                    Argument::U32(shapes::count(operation, c)?),
                    Argument::F32(epsilon),
                    Argument::Address(y.address()),
                ],
            )?;
        }
        Ok(y)
    }

    pub(super) fn turn(
        &self,
        x: &mut Tensor,
        head_dim: usize,
        window: usize,
        rope: &Rope,
    ) -> Result<(), Error> {
        let operation = "rotate";
        let pairs = rope.frequencies.len();
        let fits = head_dim > 0 && window > 0 && x.columns.is_multiple_of(head_dim) && 2 * pairs <= head_dim;
        expect(operation, fits, || {
            let x = shapes::in_words("x", x);
            let found = format!("{x} of {pairs} pairs in heads of {head_dim}, window {window}");
            (found, "whole heads with room for the pairs".into())
        })?;
        let frequencies = self.to_device(operation, &rope.frequencies)?;
        let grid = elements(operation, x.rows * pairs)?;
        // A window beyond what kernels count has every row in it.
        let window = u32::try_from(window).unwrap_or(u32::MAX);
        // SAFETY: the arguments of `rotate`; heads have room for the pairs, so all columns are the row's.
        unsafe {
            self.launch(
                operation,
                Kernel::Rotate,
                grid,
                &mut [
                    Argument::Address(x.address()),
                    Argument::U32(shapes::count(operation, x.rows)?),
                    Argument::U32(shapes::count(operation, x.columns)?),
                    Argument::U32(shapes::count(operation, head_dim)?),
                    Argument::U32(window),
                    Argument::Address(frequencies.address()),
                    Argument::U32(shapes::count(operation, pairs)?),
                    Argument::F32(rope.scale),
                ],
            )
        }
    }

    pub(super) fn gated(&self, gate: &Tensor, up: &Tensor, activation: Activation) -> Result<Tensor, Error> {
        let operation = "gate";
        shapes::expect_same(operation, gate, up)?;
        let y = self.tensor(operation, gate.rows, gate.columns)?;
        let number = match activation {
            Activation::Silu => 0,
            Activation::GeluTanh => 1,
            Activation::Gelu => 2,
        };
        // SAFETY: the arguments of `gate`; all three have as many elements.
        unsafe {
            self.launch(
                operation,
                Kernel::Gate,
                elements(operation, y.len())?,
                &mut [
                    Argument::Address(gate.address()),
                    Argument::Address(up.address()),
                    Argument::U64(y.len() as u64),
                    Argument::U32(number),
                    Argument::Address(y.address()),
                ],
            )?;
        }
        Ok(y)
    }

    pub(super) fn add_scaled(&self, x: &mut Tensor, y: &Tensor, scale: f32) -> Result<(), Error> {
        let operation = "add";
        shapes::expect_same(operation, x, y)?;
        // SAFETY: the arguments of `add`; both have as many elements.
        unsafe {
            self.launch(
                operation,
                Kernel::Add,
                elements(operation, x.len())?,
                &mut [
                    Argument::Address(x.address()),
                    Argument::Address(y.address()),
                    Argument::U64(x.len() as u64),
                    Argument::F32(scale),
                ],
            )
        }
    }

    pub(super) fn add_to_rows(
        &self,
        x: &mut Tensor,
        rows: &[u32],
        weights: &[f32],
        y: &Tensor,
    ) -> Result<(), Error> {
        let operation = "add_rows";
        shapes::expect_rows(operation, rows, x.rows)?;
        let fits = (y.shape(), weights.len()) == ([rows.len(), x.columns], rows.len());
        expect(operation, fits, || {
            let found = format!("{} and {} weights", shapes::in_words("y", y), weights.len());
            (found, format!("[{}, {}]", rows.len(), x.columns))
        })?;
        let (to, by) = (self.to_device(operation, rows)?, self.to_device(operation, weights)?);
        // SAFETY: the arguments of `add_rows`; `rows` are rows of x, one for each of y's, which has its columns.
        unsafe {
            self.launch(
                operation,
                Kernel::AddRows,
                rows_of(operation, y.rows, y.columns)?,
                &mut [
                    Argument::Address(x.address()),
                    Argument::Address(to.address()),
                    Argument::Address(by.address()),
                    Argument::Address(y.address()),
                    Argument::U32(shapes::count(operation, y.columns)?),
                ],
            )
        }
    }

    pub(super) fn cap(&self, x: &mut Tensor, cap: f32) -> Result<(), Error> {
        let operation = "soft_cap";
        // SAFETY: the arguments of `soft_cap`.
        unsafe {
            self.launch(
                operation,
                Kernel::SoftCap,
                elements(operation, x.len())?,
                &mut [Argument::Address(x.address()), Argument::U64(x.len() as u64), Argument::F32(cap)],
            )
        }
    }

    pub(super) fn rows_taken(&self, x: &Tensor, rows: &[u32]) -> Result<Tensor, Error> {
        let operation = "select_rows";
        shapes::expect_rows(operation, rows, x.rows)?;
        let from = self.to_device(operation, rows)?;
        self.taken(operation, x, from.address(), rows.len(), 0..x.columns)
    }

    pub(super) fn columns_taken(&self, x: &Tensor, columns: Range<usize>) -> Result<Tensor, Error> {
        let operation = "select_columns";
        expect(operation, columns.start < columns.end && columns.end <= x.columns, || {
            (format!("columns {columns:?}"), format!("some of {}", x.columns))
        })?;
        self.taken(operation, x, 0, x.rows, columns)
    }

    fn taken(
        &self,
        operation: &'static str,
        x: &Tensor,
        from: u64,
        rows: usize,
        columns: Range<usize>,
    ) -> Result<Tensor, Error> {
        let y = self.tensor(operation, rows, columns.len())?;
        // SAFETY: the arguments of `take`; the callers have checked rows and columns against x.
        unsafe {
            self.launch(
                operation,
                Kernel::Take,
                rows_of(operation, rows, columns.len())?,
                &mut [
                    Argument::Address(x.address()),
                    Argument::Address(from),
                    Argument::U32(shapes::count(operation, x.columns)?),
                    Argument::U32(shapes::count(operation, columns.start)?),
                    Argument::U32(shapes::count(operation, columns.len())?),
                    Argument::Address(y.address()),
                ],
            )?;
        }
        Ok(y)
    }
}
