//! Whether arguments fit together, before anything is launched.

use super::Tensor;
use crate::error::{Error, expect};

/// A size as kernels count.
pub(super) fn count(operation: &'static str, size: usize) -> Result<u32, Error> {
    u32::try_from(size).map_err(|_| Error::Shape {
        operation,
        found: format!("{size} rows or columns"),
        expected: "fewer than 2^32".into(),
    })
}

/// Blocks of `per_block` that cover `size`.
pub(super) fn blocks(operation: &'static str, size: usize, per_block: usize) -> Result<u32, Error> {
    // Grids have 2^31 − 1 blocks in their first direction.
    let blocks = size.div_ceil(per_block);
    match u32::try_from(blocks) {
        Ok(blocks) if blocks <= i32::MAX as u32 => Ok(blocks),
        _ => Err(Error::Shape { operation, found: format!("{size} elements"), expected: "fewer".into() }),
    }
}

/// The same in a direction that has only 2^16 − 1 blocks.
pub(super) fn few_blocks(operation: &'static str, size: usize, per_block: usize) -> Result<u32, Error> {
    let most = usize::from(u16::MAX);
    expect(operation, size.div_ceil(per_block) <= most, || {
        (format!("{size} rows or columns"), format!("at most {}", most * per_block))
    })?;
    blocks(operation, size, per_block)
}

/// Bytes of a matrix.
pub(super) fn bytes(
    operation: &'static str,
    rows: usize,
    columns: usize,
    element: usize,
) -> Result<usize, Error> {
    rows.checked_mul(columns).and_then(|elements| elements.checked_mul(element)).ok_or_else(|| Error::Shape {
        operation,
        found: format!("[{rows}, {columns}]"),
        expected: "a size that memory can have".into(),
    })
}

pub(super) fn in_words(name: &str, tensor: &Tensor) -> String {
    format!("{name} [{}, {}]", tensor.rows, tensor.columns)
}

pub(super) fn expect_same(operation: &'static str, a: &Tensor, b: &Tensor) -> Result<(), Error> {
    expect(operation, a.shape() == b.shape(), || (in_words("the second", b), in_words("the first's", a)))
}

pub(super) fn expect_rows(operation: &'static str, rows: &[u32], of: usize) -> Result<(), Error> {
    let outside = rows.iter().find(|&&row| row as usize >= of);
    expect(operation, outside.is_none(), || {
        (format!("row {}", outside.copied().unwrap_or_default()), format!("a row below {of}"))
    })
}

pub(super) fn expect_targets(operation: &'static str, logits: &Tensor, targets: &[u32]) -> Result<(), Error> {
    expect(operation, targets.len() == logits.rows, || {
        (format!("{} targets", targets.len()), format!("one for each row of {}", in_words("logits", logits)))
    })?;
    expect_rows(operation, targets, logits.columns)
}
