//! Attention (`attention.cu`).

use super::cubins::Kernel;
use super::launch::{Argument, Grid};
use super::memory::Tensor;
use super::{Cuda, shapes};
use crate::error::{Error, expect};
use crate::operations::Attention;

/// `Shape` of `attention.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Shape {
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    window: u32,
    sliding: u32,
    scale: f32,
    soft_cap: f32,
}

/// Columns of a head that the largest kernel has room for.
const MAX_HEAD_DIM: usize = 256;
/// Queries of a block.
const QUERIES: usize = 16;

impl Cuda {
    pub(super) fn attend(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        shape: &Attention,
    ) -> Result<Tensor, Error> {
        let operation = "attention";
        let Attention { heads, kv_heads, head_dim, window, .. } = *shape;
        let sane = kv_heads > 0 && heads.is_multiple_of(kv_heads) && window > 0 && shape.sliding != Some(0);
        expect(operation, sane, || (format!("{shape:?}"), "heads in groups, and windows".into()))?;
        expect(operation, head_dim <= MAX_HEAD_DIM, || {
            (format!("heads of {head_dim} columns"), format!("at most {MAX_HEAD_DIM}"))
        })?;
        expect(operation, q.columns == heads * head_dim, || {
            (shapes::in_words("q", q), format!("[m, {}]", heads * head_dim))
        })?;
        for (name, x) in [("k", k), ("v", v)] {
            expect(operation, x.shape() == [q.rows, kv_heads * head_dim], || {
                (shapes::in_words(name, x), format!("[{}, {}]", q.rows, kv_heads * head_dim))
            })?;
        }
        let y = self.tensor(operation, q.rows, q.columns)?;
        // All rows are in the first of windows that are longer.
        let window = window.min(q.rows.max(1));
        let kernel = match head_dim {
            0..=64 => Kernel::Attend64,
            65..=128 => Kernel::Attend128,
            _ => Kernel::Attend256,
        };
        let blocks = [
            shapes::blocks(operation, window, QUERIES)?,
            shapes::few_blocks(operation, heads, 1)?,
            shapes::few_blocks(operation, q.rows, window)?,
        ];
        let argument = Shape {
            heads: shapes::count(operation, heads)?,
            kv_heads: shapes::count(operation, kv_heads)?,
            head_dim: head_dim as u32,
            window: shapes::count(operation, window)?,
            sliding: shape.sliding.map_or(u32::MAX, |sliding| u32::try_from(sliding).unwrap_or(u32::MAX)),
            scale: shape.scale,
            soft_cap: shape.soft_cap.unwrap_or(0.0),
        };
        // SAFETY: the arguments of `attend_*`; sizes of q, k, v and y are checked above, the grid has each window's
        // queries and each head, and the kernel room for the head's columns.
        unsafe {
            self.launch(
                operation,
                kernel,
                Grid::new(blocks, 128),
                &mut [
                    Argument::Address(q.address()),
                    Argument::Address(k.address()),
                    Argument::Address(v.address()),
                    Argument::U32(shapes::count(operation, q.rows)?),
                    Argument::Attention(argument),
                    Argument::Address(y.address()),
                ],
            )?;
        }
        Ok(y)
    }
}
