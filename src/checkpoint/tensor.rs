//! A tensor of a checkpoint: what the header says, and its bytes as numbers.

use safetensors::Dtype;
use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;

// Files are little-endian; casting their bytes to numbers relies on the machine being so too.
const _: () = assert!(cfg!(target_endian = "little"), "requant needs a little-endian machine");

/// What a header says of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) file: usize,
    pub(super) bytes: Range<usize>,
}

impl TensorInfo {
    /// Full name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Type of its elements.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Its shape, row-major.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Bytes it takes in its file.
    pub fn byte_len(&self) -> usize {
        self.bytes.len()
    }

    /// Its file, as an index into [`Checkpoint::files`](super::Checkpoint::files).
    pub fn file(&self) -> usize {
        self.file
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// A tensor and its bytes, which lie in the mapped file.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    pub(super) info: &'a TensorInfo,
    pub(super) file: &'a Path,
    pub(super) bytes: &'a [u8],
}

impl<'a> TensorView<'a> {
    /// What the header says of it.
    pub fn info(&self) -> &'a TensorInfo {
        self.info
    }

    /// Full name.
    pub fn name(&self) -> &'a str {
        &self.info.name
    }

    /// Type of its elements.
    pub fn dtype(&self) -> Dtype {
        self.info.dtype
    }

    /// Its shape, row-major.
    pub fn shape(&self) -> &'a [usize] {
        &self.info.shape
    }

    /// The place of element `at` in its shape.
    pub fn position(&self, at: usize) -> Vec<usize> {
        let mut rest = at;
        let mut position: Vec<usize> = Vec::new();
        for &size in self.shape().iter().rev() {
            position.insert(0, rest % size.max(1));
            rest /= size.max(1);
        }
        position
    }

    /// Path of its file.
    pub fn file(&self) -> &'a Path {
        self.file
    }

    /// Its bytes, row-major, little-endian, at any alignment.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The elements as 32-bit words, if they are `I32` or `U32`.
    pub fn words(&self) -> Option<Cow<'a, [u32]>> {
        matches!(self.info.dtype, Dtype::I32 | Dtype::U32).then(|| cast(self.bytes))
    }

    /// The elements, if they are `I16`.
    pub fn i16s(&self) -> Option<Cow<'a, [i16]>> {
        (self.info.dtype == Dtype::I16).then(|| cast(self.bytes))
    }

    /// The elements, if they are `F16`.
    pub fn f16s(&self) -> Option<Cow<'a, [half::f16]>> {
        (self.info.dtype == Dtype::F16).then(|| cast(self.bytes))
    }

    /// The elements widened, if they are `I32` or `I64`.
    pub fn integers(&self) -> Option<Vec<i64>> {
        match self.info.dtype {
            Dtype::I32 => Some(cast::<i32>(self.bytes).iter().map(|&i| i64::from(i)).collect()),
            Dtype::I64 => Some(cast::<i64>(self.bytes).into_owned()),
            _ => None,
        }
    }

    /// The elements as fp32, which is exact, if they are `F16`, `BF16` or `F32`.
    pub fn floats(&self) -> Option<Vec<f32>> {
        use half::slice::HalfFloatSliceExt;
        match self.info.dtype {
            Dtype::F16 => {
                let halves = cast::<half::f16>(self.bytes);
                let mut floats = vec![0.0; halves.len()];
                halves.convert_to_f32_slice(&mut floats);
                Some(floats)
            }
            Dtype::BF16 => {
                let halves = cast::<half::bf16>(self.bytes);
                let mut floats = vec![0.0; halves.len()];
                halves.convert_to_f32_slice(&mut floats);
                Some(floats)
            }
            Dtype::F32 => Some(cast::<f32>(self.bytes).into_owned()),
            _ => None,
        }
    }

    /// A matrix `[rows, columns]` of floats as `[columns, width]` in fp32, columns of 0 added. Made a few rows at a
    /// time: a head can have hundreds of millions of elements.
    ///
    /// # Panics
    /// If it is no matrix, or `width` is less than its rows.
    pub(crate) fn transposed_floats(&self, width: usize) -> Option<Vec<f32>> {
        const ROWS: usize = 32;
        let [rows, columns] = self.shape()[..] else { panic!("{:?} is no matrix", self.shape()) };
        assert!(rows <= width, "{rows} rows in a width of {width}");
        let mut transposed = vec![0.0; columns * width];
        let bytes = ROWS * columns * (self.info.dtype.bitsize() / 8);
        for (panel, bytes) in self.bytes.chunks(bytes.max(1)).enumerate() {
            let floats = TensorView { bytes, ..*self }.floats()?;
            let first = panel * ROWS;
            let rows = floats.len() / columns;
            for (column, to) in transposed.chunks_exact_mut(width).enumerate() {
                for (row, to) in to[first..first + rows].iter_mut().enumerate() {
                    *to = floats[row * columns + column];
                }
            }
        }
        Some(transposed)
    }
}

/// The first `kept` of each row's `stored` elements; borrowed where that is all of them.
pub(super) fn first_columns<T: Copy>(rows: Cow<'_, [T]>, stored: usize, kept: usize) -> Cow<'_, [T]> {
    if stored == kept {
        return rows;
    }
    Cow::Owned(rows.chunks_exact(stored).flat_map(|row| &row[..kept]).copied().collect())
}

/// Bytes as numbers, copied where they aren't aligned: files need not pad their headers.
fn cast<T: bytemuck::Pod>(bytes: &[u8]) -> Cow<'_, [T]> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(numbers) => Cow::Borrowed(numbers),
        Err(_) => {
            let mut numbers = vec![T::zeroed(); bytes.len() / size_of::<T>()];
            bytemuck::cast_slice_mut(&mut numbers).copy_from_slice(bytes);
            Cow::Owned(numbers)
        }
    }
}
