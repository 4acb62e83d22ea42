//! Products with a weight, with fp32's accuracy (`product.cu`).

use super::cubins::Kernel;
use super::decode::{Layout, PackedWeight, Stored, UNIT, Weight};
use super::launch::{Argument, Grid};
use super::memory::{Buffer, Tensor};
use super::{Cuda, shapes};
use crate::error::{Error, expect};
use crate::weight::DenseType;

/// Shared memory that the kernels take beyond what they declare: two stages of tiles of 128 rows, of all parts,
/// each row of a step and 8 more elements of 2 bytes.
pub(super) const SHARED_MEMORY: [(Kernel, u32); 3] = [
    (Kernel::MultiplyF16Weight, 2 * (2 + 1) * 128 * (32 + 8) * 2),
    (Kernel::MultiplyBf16Weight, 2 * (3 + 1) * 128 * (32 + 8) * 2),
    (Kernel::MultiplyF32Weight, 2 * (3 + 3) * 128 * (16 + 8) * 2),
];

/// Rows up to which codes are decoded inside the product.
const FEW_ROWS: usize = 64;
/// Bytes of a decoded panel.
pub(super) const PANEL: usize = 64 << 20;
/// Rows of a chunk, as `product.cu` has it.
const CHUNK: usize = 256;
/// Columns of a block.
const COLUMNS: usize = 128;

/// Activations in parts of 16 bits.
struct SplitRows {
    rows: usize,
    parts: Buffer,
    /// Undoes the scaling of each row; 0 for none.
    inverse: Option<Buffer>,
}

/// What all products end with.
#[derive(Clone, Copy)]
struct Finish<'a> {
    bias: u64,
    y: &'a Tensor,
}

impl Cuda {
    pub(super) fn product(
        &self,
        x: &Tensor,
        weight: &Weight,
        bias: Option<&Tensor>,
    ) -> Result<Tensor, Error> {
        let operation = "matmul";
        let (k, n) = (weight.in_features, weight.out_features);
        expect(operation, x.columns == k, || (shapes::in_words("activations", x), format!("[m, {k}]")))?;
        if let Some(bias) = bias {
            expect(operation, bias.shape() == [1, n], || {
                (shapes::in_words("a bias", bias), format!("[1, {n}]"))
            })?;
        }
        let y = self.tensor(operation, x.rows, n)?;
        if x.rows == 0 || n == 0 {
            return Ok(y);
        }
        let finish = Finish { bias: bias.map_or(0, Tensor::address), y: &y };
        match &weight.stored {
            Stored::Packed(packed) => {
                let stride = packed.units * UNIT;
                let source = packed.source();
                let split =
                    self.split(operation, Kernel::SplitF16, 2, x.address(), source, x.rows, k, stride)?;
                if x.rows <= FEW_ROWS {
                    self.multiply_packed(packed, &split, finish)?;
                } else {
                    self.multiply_panels(stride, size_of::<u16>(), n, |first, count, panel| {
                        self.decode_panel(operation, packed, first, count, panel)?;
                        let kernel = Kernel::MultiplyF16Weight;
                        self.multiply(kernel, &split, panel.address(), count, stride, first, finish)
                    })?;
                }
            }
            Stored::Dense { dtype, stride, elements } => {
                let stride = *stride;
                let (splitting, parts, kernel) = match dtype {
                    DenseType::F16 => (Kernel::SplitF16, 2, Kernel::MultiplyF16Weight),
                    DenseType::Bf16 => (Kernel::SplitBf16, 3, Kernel::MultiplyBf16Weight),
                    DenseType::F32 => (Kernel::SplitBf16, 3, Kernel::MultiplyF32Weight),
                };
                let split = self.split(operation, splitting, parts, x.address(), 0, x.rows, k, stride)?;
                if *dtype == DenseType::F32 {
                    self.multiply_panels(stride, 3 * size_of::<u16>(), n, |first, count, panel| {
                        let from = elements.address() + (first * stride * size_of::<f32>()) as u64;
                        self.split_into(
                            operation,
                            splitting,
                            panel.address(),
                            0,
                            from,
                            0,
                            count,
                            stride,
                            stride,
                        )?;
                        self.multiply(kernel, &split, panel.address(), count, stride, first, finish)
                    })?;
                } else {
                    self.multiply(kernel, &split, elements.address(), n, stride, 0, finish)?;
                }
            }
        }
        Ok(y)
    }

    /// Activations `[rows, k]` in parts `[parts, rows, stride]`.
    #[allow(clippy::too_many_arguments, reason = "sizes and addresses of one kernel")]
    fn split(
        &self,
        operation: &'static str,
        kernel: Kernel,
        parts: usize,
        x: u64,
        source: u64,
        rows: usize,
        k: usize,
        stride: usize,
    ) -> Result<SplitRows, Error> {
        let elements = shapes::bytes(operation, parts * rows, stride, size_of::<u16>())?;
        let parts = self.allocate(operation, elements)?;
        let scaled = kernel == Kernel::SplitF16;
        let inverse = scaled.then(|| self.allocate(operation, rows * size_of::<f32>())).transpose()?;
        let to = inverse.as_ref().map_or(0, Buffer::address);
        self.split_into(operation, kernel, parts.address(), to, x, source, rows, k, stride)?;
        Ok(SplitRows { rows, parts, inverse })
    }

    #[allow(clippy::too_many_arguments, reason = "sizes and addresses of one kernel")]
    fn split_into(
        &self,
        operation: &'static str,
        kernel: Kernel,
        parts: u64,
        inverse: u64,
        x: u64,
        source: u64,
        rows: usize,
        k: usize,
        stride: usize,
    ) -> Result<(), Error> {
        let grid = Grid::new([shapes::blocks(operation, rows, 1)?, 1, 1], 256);
        // SAFETY: the arguments of `split_*`; the callers give `x` [rows, k], `parts` as many as the kernel makes of
        // [rows, stride], `source` of `stride` rows below k or none, and `inverse` [rows] where the kernel scales.
        unsafe {
            self.launch(
                operation,
                kernel,
                grid,
                &mut [
                    Argument::Address(x),
                    Argument::Address(source),
                    Argument::U32(shapes::count(operation, rows)?),
                    Argument::U32(shapes::count(operation, k)?),
                    Argument::U32(shapes::count(operation, stride)?),
                    Argument::Address(parts),
                    Argument::Address(inverse),
                ],
            )
        }
    }

    /// Gives runs of columns and a panel for them, of `element` bytes an element: as large as there is room for.
    fn multiply_panels(
        &self,
        stride: usize,
        element: usize,
        n: usize,
        mut work: impl FnMut(usize, usize, &Buffer) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let operation = "matmul";
        let column = (stride * element).max(1);
        let mut width = (self.panel / column).clamp(1, n).next_multiple_of(COLUMNS);
        let panel = loop {
            match self.allocate(operation, shapes::bytes(operation, width, column, 1)?) {
                // Columns don't depend on each other: the result is the same.
                Err(Error::OutOfMemory { .. }) if width > COLUMNS => {
                    width = (width / 2).next_multiple_of(COLUMNS);
                }
                panel => break panel?,
            }
        };
        (0..n).step_by(width).try_for_each(|first| work(first, width.min(n - first), &panel))
    }

    /// Columns `first..` of the product with `b` `[parts, count, stride]`.
    #[allow(clippy::too_many_arguments, reason = "sizes and addresses of one kernel")]
    fn multiply(
        &self,
        kernel: Kernel,
        x: &SplitRows,
        b: u64,
        count: usize,
        stride: usize,
        first: usize,
        finish: Finish<'_>,
    ) -> Result<(), Error> {
        let operation = "matmul";
        let shared = SHARED_MEMORY.iter().find(|entry| entry.0 == kernel).map_or(0, |entry| entry.1);
        let blocks =
            [shapes::blocks(operation, count, COLUMNS)?, shapes::few_blocks(operation, x.rows, 128)?, 1];
        let grid = Grid { blocks, threads: 256, shared };
        // SAFETY: the arguments of `multiply_*_weight`; `x` and `b` are in as many parts as the kernel's, of rows of
        // `stride`, a multiple of 32; `y` has `n` columns, `first + count` at most; the bias has as many.
        unsafe {
            self.launch(
                operation,
                kernel,
                grid,
                &mut [
                    Argument::Address(x.parts.address()),
                    Argument::Address(b),
                    Argument::U32(shapes::count(operation, x.rows)?),
                    Argument::U32(shapes::count(operation, count)?),
                    Argument::U32(shapes::count(operation, stride)?),
                    Argument::Address(x.inverse.as_ref().map_or(0, Buffer::address)),
                    Argument::Address(finish.bias),
                    Argument::Address(finish.y.address()),
                    Argument::U32(shapes::count(operation, finish.y.columns)?),
                    Argument::U32(shapes::count(operation, first)?),
                ],
            )
        }
    }

    /// The product of few rows, decoding inside: one pass over the packed words for each 16 rows.
    fn multiply_packed(&self, packed: &PackedWeight, x: &SplitRows, finish: Finish<'_>) -> Result<(), Error> {
        let operation = "matmul";
        let kernel = match packed.layout {
            Layout::GptqHalf => Kernel::MultiplyGptqHalf,
            Layout::GptqFloat => Kernel::MultiplyGptqFloat,
            Layout::Exl2 => Kernel::MultiplyExl2,
        };
        let (m, n) = (x.rows, finish.y.columns);
        let chunks = (packed.units * UNIT).div_ceil(CHUNK);
        let partial = self.allocate(operation, shapes::bytes(operation, chunks * m, n, size_of::<f32>())?)?;
        let blocks = [
            shapes::blocks(operation, n, COLUMNS)?,
            shapes::few_blocks(operation, chunks, 1)?,
            shapes::few_blocks(operation, m, 16)?,
        ];
        let (rows, columns) = (shapes::count(operation, m)?, shapes::count(operation, n)?);
        // SAFETY: the arguments of `multiply_*`; `x` is in two parts of rows of 32 · units, `partial` is
        // [chunks, m, n].
        unsafe {
            self.launch(
                operation,
                kernel,
                Grid::new(blocks, 128),
                &mut [
                    packed.argument(),
                    Argument::Address(x.parts.address()),
                    Argument::U32(rows),
                    Argument::U32(columns),
                    Argument::U32(shapes::count(operation, packed.units)?),
                    Argument::Address(partial.address()),
                ],
            )?;
        }
        let tiles = shapes::few_blocks(operation, n, 256)?;
        // SAFETY: the arguments of `add_chunks`; `partial` is [chunks, m, n], `y` [m, n], the bias [n].
        unsafe {
            self.launch(
                operation,
                Kernel::AddChunks,
                Grid::new([rows, tiles, 1], 256),
                &mut [
                    Argument::Address(partial.address()),
                    Argument::U32(shapes::count(operation, chunks)?),
                    Argument::U32(rows),
                    Argument::U32(columns),
                    Argument::Address(x.inverse.as_ref().map_or(0, Buffer::address)),
                    Argument::Address(finish.bias),
                    Argument::Address(finish.y.address()),
                ],
            )
        }
    }
}
