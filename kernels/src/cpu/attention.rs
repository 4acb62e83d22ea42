//! Causal attention inside windows, in blocks of queries.

use super::Tensor;
use super::rows::{self, exp};
use crate::operations::Attention;
use faer::{Accum, MatMut, MatRef, Par};
use rayon::prelude::*;

/// Queries of a block: their scores against all keys that they see are in memory at once.
const QUERIES: usize = 128;

/// `softmax(scale · q kᵀ) v` for each head, a token seeing itself and those before it.
pub(super) fn attend(q: &Tensor, k: &Tensor, v: &Tensor, shape: &Attention) -> Tensor {
    let mut result = Tensor::zeros(q.rows, q.columns);
    let columns = q.columns;
    if columns == 0 {
        return result;
    }
    result.values.par_chunks_mut(shape.window * columns).enumerate().for_each(|(window, rows)| {
        let first = window * shape.window;
        let length = rows.len() / columns;
        let heads: Vec<Vec<f32>> = (0..shape.heads)
            .into_par_iter()
            .map(|head| head_of_window(q, k, v, shape, first, length, head))
            .collect();
        for (head, values) in heads.iter().enumerate() {
            for (row, values) in rows.chunks_exact_mut(columns).zip(values.chunks_exact(shape.head_dim)) {
                row[head * shape.head_dim..][..shape.head_dim].copy_from_slice(values);
            }
        }
    });
    result
}

fn head_of_window(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    shape: &Attention,
    first: usize,
    length: usize,
    head: usize,
) -> Vec<f32> {
    let d = shape.head_dim;
    let kv_head = head / (shape.heads / shape.kv_heads);
    let part = |x: &'_ Tensor, head: usize, from: usize, rows: usize| {
        // A copy: the columns of a head are far apart in a row.
        let mut part = vec![0.0; rows * d];
        for (i, to) in part.chunks_exact_mut(d).enumerate() {
            to.copy_from_slice(&x.row(first + from + i)[head * d..][..d]);
        }
        part
    };
    let (keys, values) = (part(k, kv_head, 0, length), part(v, kv_head, 0, length));
    let mut result = vec![0.0; length * d];
    let mut scores = Vec::new();
    for (block, out) in result.chunks_mut(QUERIES * d).enumerate() {
        let (start, count) = (block * QUERIES, out.len() / d);
        // The first of these queries sees the furthest back.
        let oldest = shape.sliding.map_or(0, |sliding| (start + 1).saturating_sub(sliding));
        let seen = start + count - oldest;
        let queries = part(q, head, start, count);
        let rows =
            |x: &'_ [f32], from: usize, rows: usize| -> Vec<f32> { x[from * d..(from + rows) * d].to_vec() };
        let (keys, values) = (rows(&keys, oldest, seen), rows(&values, oldest, seen));
        scores.clear();
        scores.resize(count * seen, 0.0);
        faer::linalg::matmul::matmul(
            MatMut::from_row_major_slice_mut(&mut scores, count, seen),
            Accum::Replace,
            MatRef::from_row_major_slice(&queries, count, d),
            MatRef::from_row_major_slice(&keys, seen, d).transpose(),
            shape.scale,
            Par::Seq,
        );
        for (i, row) in scores.chunks_exact_mut(seen).enumerate() {
            let position = start + i - oldest;
            let from = shape.sliding.map_or(0, |sliding| (position + 1).saturating_sub(sliding));
            row[..from].fill(0.0);
            row[position + 1..].fill(0.0);
            if let Some(cap) = shape.soft_cap {
                rows::soft_cap(&mut row[from..=position], cap);
            }
            rows::wide(
                #[inline(always)]
                || softmax(&mut row[from..=position]),
            );
        }
        faer::linalg::matmul::matmul(
            MatMut::from_row_major_slice_mut(out, count, d),
            Accum::Replace,
            MatRef::from_row_major_slice(&scores, count, seen),
            MatRef::from_row_major_slice(&values, seen, d),
            1.0,
            Par::Seq,
        );
    }
    result
}

#[inline(always)]
fn softmax(scores: &mut [f32]) {
    let largest = rows::largest(scores);
    scores.iter_mut().for_each(|score| *score = exp(*score - largest));
    let sum = rows::sum(scores) as f32;
    scores.iter_mut().for_each(|score| *score /= sum);
}
