//! A source that benchmarks and `examples/simd_paths.rs` search on.

use requant::formats::gptq::{self, GIdx, Shape};
use requant::quantize::{RowOrder, Source};

/// Rows and columns.
pub(crate) const SIZE: usize = 4096;

/// A 4-bit act-order module of nearly normal codes, under scales that differ by column.
pub(crate) fn source(group_size: usize) -> Source {
    let bits = gptq::Bits::try_from(4).expect("a width of the format");
    let groups = SIZE / group_size;
    let shape = Shape { in_features: SIZE, out_features: SIZE, bits, groups };
    let words = |len: usize| (0..len as u32).map(|i| i.wrapping_mul(0x9E37_79B9).rotate_left(i % 31) ^ i);
    // A sum of four is nearly normal, as the codes of real weights are.
    let code =
        |word: u32| (((word & 15) + (word >> 4 & 15) + (word >> 8 & 15) + (word >> 12 & 15)) / 4) as u8;
    let codes = words(SIZE * SIZE).map(code).collect();
    let scales = words(groups * SIZE).map(|word| 2e-3 + (word & 1023) as f32 * 4e-6).collect();
    let index: Vec<i64> = (0..SIZE as i64).map(|row| row % groups as i64).collect();
    let g_idx = GIdx::new(Some(&index), SIZE, groups, None).expect("groups in range");
    let matrix = gptq::Matrix::new(shape, codes, vec![8; groups * SIZE], scales, g_idx).expect("a matrix");
    Source::gptq(matrix, RowOrder::Grouped)
}
