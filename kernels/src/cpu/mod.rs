//! The CPU: the reference of every other device.
//!
//! Products are `faer`'s, on fp32 panels of weights that were decoded once; all else is written here. Work is cut into
//! fixed pieces whatever the number of threads, so results don't depend on it.

mod attention;
mod logits;
mod product;
mod rows;

use super::error::{Error, expect};
use super::operations::{Activation, Attention, Difference, Operations, Rope, TokenScore};
use super::weight::{Dense, Weight};
use half::f16;
pub use product::Loaded;
use rayon::ThreadPool;
use rayon::prelude::*;
use std::ops::Range;

/// The operations on threads of the CPU.
#[derive(Debug)]
pub struct Cpu {
    /// `None`: the caller's pool.
    pool: Option<ThreadPool>,
}

/// Activations in memory, fp32 `[rows, columns]`, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    rows: usize,
    columns: usize,
    values: Vec<f32>,
}

impl Tensor {
    fn zeros(rows: usize, columns: usize) -> Self {
        Self { rows, columns, values: vec![0.0; rows * columns] }
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.columns..][..self.columns]
    }

    fn in_words(&self, name: &str) -> String {
        format!("{name} [{}, {}]", self.rows, self.columns)
    }
}

/// Elements that a task handles at a time, where nothing else sets the size.
const TASK: usize = 1 << 14;

impl Cpu {
    /// With a pool of so many threads; of the caller's rayon pool with 0, or where threads can't be started.
    pub fn new(threads: usize) -> Self {
        let pool = (threads > 0).then(|| rayon::ThreadPoolBuilder::new().num_threads(threads).build().ok());
        Self { pool: pool.flatten() }
    }

    fn threads(&self) -> usize {
        self.pool.as_ref().map_or_else(rayon::current_num_threads, ThreadPool::current_num_threads)
    }

    fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        match &self.pool {
            Some(pool) => pool.install(work),
            None => work(),
        }
    }

    /// Row by row: `work` fills a row of the result from its number.
    fn rows(&self, rows: usize, columns: usize, work: impl Fn(usize, &mut [f32]) + Sync) -> Tensor {
        let mut result = Tensor::zeros(rows, columns);
        let rows_of_task = (TASK / columns.max(1)).max(1);
        self.run(|| {
            let tasks = result.values.par_chunks_mut(rows_of_task * columns.max(1)).enumerate();
            tasks.for_each(|(task, chunk)| {
                for (i, row) in chunk.chunks_mut(columns.max(1)).enumerate() {
                    work(task * rows_of_task + i, row);
                }
            });
        });
        result
    }

    fn gated(&self, gate: &Tensor, up: &Tensor, function: impl Fn(f32) -> f32 + Sync) -> Tensor {
        self.rows(gate.rows, gate.columns, |i, row| {
            rows::wide(
                #[inline(always)]
                || {
                    for ((y, &g), &u) in row.iter_mut().zip(gate.row(i)).zip(up.row(i)) {
                        *y = function(g) * u;
                    }
                },
            );
        })
    }

    /// In place, in pieces of whole runs of `unit` elements; `work` gets the number of the first element.
    fn in_place(&self, values: &mut [f32], unit: usize, work: impl Fn(usize, &mut [f32]) + Sync) {
        let piece = (TASK / unit.max(1)).max(1) * unit.max(1);
        self.run(|| values.par_chunks_mut(piece).enumerate().for_each(|(i, chunk)| work(i * piece, chunk)));
    }
}

impl Operations for Cpu {
    type Weight = Loaded;
    type Tensor = Tensor;

    fn name(&self) -> String {
        let threads = self.threads();
        format!("CPU, {threads} thread{}", if threads == 1 { "" } else { "s" })
    }

    fn free_memory(&self) -> Result<Option<u64>, Error> {
        Ok(None)
    }

    fn upload_weight(&self, weight: &Weight) -> Result<Loaded, Error> {
        if let Weight::Dense(dense) = weight {
            dense.check("upload_weight")?;
        }
        Ok(Loaded::new(weight))
    }

    fn dequantize(&self, weight: &Loaded) -> Result<Vec<f16>, Error> {
        Ok(weight.decoded())
    }

    fn upload(&self, values: &[f32], columns: usize) -> Result<Tensor, Error> {
        expect("upload", columns > 0 && values.len().is_multiple_of(columns), || {
            (format!("{} values", values.len()), format!("a multiple of {columns} columns"))
        })?;
        Ok(Tensor { rows: values.len() / columns, columns, values: values.to_vec() })
    }

    fn download(&self, tensor: &Tensor) -> Result<Vec<f32>, Error> {
        Ok(tensor.values.clone())
    }

    fn shape(&self, tensor: &Tensor) -> (usize, usize) {
        (tensor.rows, tensor.columns)
    }

    fn copy(&self, tensor: &Tensor) -> Result<Tensor, Error> {
        Ok(tensor.clone())
    }

    fn select_rows(&self, x: &Tensor, rows: &[u32]) -> Result<Tensor, Error> {
        expect_rows("select_rows", rows, x.rows)?;
        Ok(self.rows(rows.len(), x.columns, |i, row| row.copy_from_slice(x.row(rows[i] as usize))))
    }

    fn select_columns(&self, x: &Tensor, columns: Range<usize>) -> Result<Tensor, Error> {
        expect("select_columns", columns.start < columns.end && columns.end <= x.columns, || {
            (format!("columns {columns:?}"), format!("some of {}", x.columns))
        })?;
        Ok(self.rows(x.rows, columns.len(), |i, row| row.copy_from_slice(&x.row(i)[columns.clone()])))
    }

    fn embed(&self, table: &Loaded, tokens: &[u32], scale: f32) -> Result<Tensor, Error> {
        let Loaded::Dense(table) = table else {
            let (found, expected) = ("a quantized table".into(), "a dense one".into());
            return Err(Error::Shape { operation: "embed", found, expected });
        };
        expect_rows("embed", tokens, table.out_features)?;
        Ok(self.rows(tokens.len(), table.in_features, |i, row| {
            let token = tokens[i] as usize;
            table.widen_rows(token..token + 1, row);
            row.iter_mut().for_each(|value| *value *= scale);
        }))
    }

    fn matmul(&self, x: &Tensor, weight: &Loaded, bias: Option<&Tensor>) -> Result<Tensor, Error> {
        let (k, n) = weight.shape();
        expect("matmul", x.columns == k, || (x.in_words("activations"), format!("[m, {k}]")))?;
        if let Some(bias) = bias {
            expect("matmul", (bias.rows, bias.columns) == (1, n), || {
                (bias.in_words("a bias"), format!("[1, {n}]"))
            })?;
        }
        let mut y = Tensor::zeros(x.rows, n);
        self.run(|| product::multiply(x, weight, &mut y));
        if let Some(bias) = bias {
            self.in_place(&mut y.values, n, |_, rows| {
                for row in rows.chunks_mut(n) {
                    row.iter_mut().zip(&bias.values).for_each(|(y, b)| *y += b);
                }
            });
        }
        Ok(y)
    }

    fn rms_norm(&self, x: &Tensor, weight: &Tensor, epsilon: f32) -> Result<Tensor, Error> {
        let c = weight.columns;
        expect("rms_norm", weight.rows == 1 && c > 0 && x.columns.is_multiple_of(c), || {
            (weight.in_words("a weight"), format!("[1, c], c a divisor of {}", x.columns))
        })?;
        Ok(self.rows(x.rows, x.columns, |i, row| {
            rows::wide(
                #[inline(always)]
                || {
                    for (x, y) in x.row(i).chunks_exact(c).zip(row.chunks_exact_mut(c)) {
                        rows::rms_norm(x, &weight.values, epsilon, y);
                    }
                },
            );
        }))
    }

    fn rotate(&self, x: &mut Tensor, head_dim: usize, window: usize, rope: &Rope) -> Result<(), Error> {
        let pairs = rope.frequencies.len();
        let fits = head_dim > 0 && window > 0 && x.columns.is_multiple_of(head_dim) && 2 * pairs <= head_dim;
        expect("rotate", fits, || {
            let found =
                format!("{} of {pairs} pairs in heads of {head_dim}, window {window}", x.in_words("x"));
            (found, "whole heads with room for the pairs".into())
        })?;
        let (columns, window) = (x.columns, window.min(x.rows));
        let angles = self.run(|| rows::angles(window, rope));
        self.in_place(&mut x.values, columns, |first, chunk| {
            for (i, row) in chunk.chunks_mut(columns).enumerate() {
                let position = (first / columns + i) % window;
                rows::rotate(row, head_dim, &angles[position * pairs..][..pairs]);
            }
        });
        Ok(())
    }

    fn attention(&self, q: &Tensor, k: &Tensor, v: &Tensor, shape: &Attention) -> Result<Tensor, Error> {
        let Attention { heads, kv_heads, head_dim, window, .. } = *shape;
        let sane = kv_heads > 0 && heads.is_multiple_of(kv_heads) && window > 0 && shape.sliding != Some(0);
        expect("attention", sane, || (format!("{shape:?}"), "heads in groups, and windows".into()))?;
        expect("attention", q.columns == heads * head_dim, || {
            (q.in_words("q"), format!("[m, {}]", heads * head_dim))
        })?;
        for (name, x) in [("k", k), ("v", v)] {
            expect("attention", (x.rows, x.columns) == (q.rows, kv_heads * head_dim), || {
                (x.in_words(name), format!("[{}, {}]", q.rows, kv_heads * head_dim))
            })?;
        }
        Ok(self.run(|| attention::attend(q, k, v, shape)))
    }

    fn gate(&self, gate: &Tensor, up: &Tensor, activation: Activation) -> Result<Tensor, Error> {
        expect_same("gate", gate, up)?;
        Ok(match activation {
            Activation::Silu => self.gated(gate, up, rows::silu),
            Activation::GeluTanh => self.gated(gate, up, rows::gelu_tanh),
            Activation::Gelu => self.gated(gate, up, rows::gelu),
        })
    }

    fn add(&self, x: &mut Tensor, y: &Tensor, scale: f32) -> Result<(), Error> {
        expect_same("add", x, y)?;
        self.in_place(&mut x.values, 1, |first, chunk| {
            chunk.iter_mut().zip(&y.values[first..]).for_each(|(x, y)| *x += scale * y);
        });
        Ok(())
    }

    fn add_rows(&self, x: &mut Tensor, rows: &[u32], weights: &[f32], y: &Tensor) -> Result<(), Error> {
        expect_rows("add_rows", rows, x.rows)?;
        let fits = (y.rows, y.columns, weights.len()) == (rows.len(), x.columns, rows.len());
        expect("add_rows", fits, || {
            let found = format!("{} and {} weights", y.in_words("y"), weights.len());
            (found, format!("[{}, {}]", rows.len(), x.columns))
        })?;
        for (i, (&row, &weight)) in rows.iter().zip(weights).enumerate() {
            let to = &mut x.values[row as usize * x.columns..][..x.columns];
            to.iter_mut().zip(y.row(i)).for_each(|(x, y)| *x += weight * y);
        }
        Ok(())
    }

    fn soft_cap(&self, x: &mut Tensor, cap: f32) -> Result<(), Error> {
        self.in_place(&mut x.values, 1, |_, chunk| rows::soft_cap(chunk, cap));
        Ok(())
    }

    fn first_non_finite(&self, x: &Tensor) -> Result<Option<usize>, Error> {
        // A whole piece is looked at without a branch, which is many times faster.
        let all_finite = |piece: &[f32]| piece.iter().fold(true, |all, value| all & value.is_finite());
        let in_piece = |(i, piece): (usize, &[f32])| {
            let at = || piece.iter().position(|value| !value.is_finite());
            (!all_finite(piece)).then(at).flatten().map(|at| i * TASK + at)
        };
        let bad = || x.values.par_chunks(TASK).enumerate().find_map_first(in_piece);
        Ok(self.run(bad).map(|at| at / x.columns))
    }

    fn difference(&self, source: &Tensor, converted: &Tensor) -> Result<Difference, Error> {
        expect_same("difference", source, converted)?;
        Ok(self.run(|| rows::difference(&source.values, &converted.values, TASK)))
    }

    fn negative_log_likelihood(&self, logits: &Tensor, targets: &[u32]) -> Result<Vec<f32>, Error> {
        expect_targets("negative_log_likelihood", logits, targets)?;
        let score = |(row, &target): (usize, &u32)| logits::nll(logits.row(row), target as usize);
        Ok(self.run(|| targets.par_iter().enumerate().map(score).collect()))
    }

    fn compare_logits(
        &self,
        source: &Tensor,
        converted: &Tensor,
        targets: &[u32],
    ) -> Result<Vec<TokenScore>, Error> {
        expect_same("compare_logits", source, converted)?;
        expect_targets("compare_logits", source, targets)?;
        let score = |(row, &target): (usize, &u32)| {
            logits::compare(source.row(row), converted.row(row), target as usize)
        };
        Ok(self.run(|| targets.par_iter().enumerate().map(score).collect()))
    }
}

fn expect_same(operation: &'static str, a: &Tensor, b: &Tensor) -> Result<(), Error> {
    expect(operation, (a.rows, a.columns) == (b.rows, b.columns), || {
        (b.in_words("the second"), a.in_words("the first's"))
    })
}

fn expect_rows(operation: &'static str, rows: &[u32], of: usize) -> Result<(), Error> {
    let outside = rows.iter().find(|&&row| row as usize >= of);
    expect(operation, outside.is_none(), || {
        (format!("row {}", outside.copied().unwrap_or_default()), format!("a row below {of}"))
    })
}

fn expect_targets(operation: &'static str, logits: &Tensor, targets: &[u32]) -> Result<(), Error> {
    expect(operation, targets.len() == logits.rows, || {
        (format!("{} targets", targets.len()), format!("one for each row of {}", logits.in_words("logits")))
    })?;
    expect_rows(operation, targets, logits.columns)
}

impl Dense {
    /// Elements `rows` of the table as stored, widened into `to`.
    fn widen_rows(&self, rows: Range<usize>, to: &mut [f32]) {
        let size = self.dtype.size();
        let bytes = (*self.bytes).as_ref();
        let bytes = &bytes[rows.start * self.in_features * size..rows.end * self.in_features * size];
        product::widen(self.dtype, bytes, to);
    }

    pub(crate) fn check(&self, operation: &'static str) -> Result<(), Error> {
        let needed =
            self.in_features.checked_mul(self.out_features).and_then(|n| n.checked_mul(self.dtype.size()));
        let found = (*self.bytes).as_ref().len();
        expect(operation, needed == Some(found), || {
            (format!("{found} bytes"), format!("{} × {} elements", self.out_features, self.in_features))
        })
    }
}
