//! The trait, each operation in its file.

use super::memory::Tensor;
use super::{Cuda, Weight};
use crate::error::{Error, expect};
use crate::operations::{Activation, Attention, Difference, Operations, Rope, TokenScore};
use crate::weight;
use half::f16;
use std::ops::Range;

impl Operations for Cuda {
    type Weight = Weight;
    type Tensor = Tensor;

    fn name(&self) -> String {
        self.name.clone()
    }

    fn free_memory(&self) -> Result<Option<u64>, Error> {
        self.memory_left().map(Some)
    }

    fn upload_weight(&self, weight: &weight::Weight) -> Result<Weight, Error> {
        self.place_weight(weight)
    }

    fn dequantize(&self, weight: &Weight) -> Result<Vec<f16>, Error> {
        self.decode_all(weight)
    }

    fn upload(&self, values: &[f32], columns: usize) -> Result<Tensor, Error> {
        expect("upload", columns > 0 && values.len().is_multiple_of(columns), || {
            (format!("{} values", values.len()), format!("a multiple of {columns} columns"))
        })?;
        Ok(Tensor { rows: values.len() / columns, columns, buffer: self.to_device("upload", values)? })
    }

    fn download(&self, tensor: &Tensor) -> Result<Vec<f32>, Error> {
        self.to_host("download", &tensor.buffer, tensor.len())
    }

    fn shape(&self, tensor: &Tensor) -> (usize, usize) {
        (tensor.rows, tensor.columns)
    }

    fn copy(&self, tensor: &Tensor) -> Result<Tensor, Error> {
        self.duplicate("copy", tensor)
    }

    fn select_rows(&self, x: &Tensor, rows: &[u32]) -> Result<Tensor, Error> {
        self.rows_taken(x, rows)
    }

    fn select_columns(&self, x: &Tensor, columns: Range<usize>) -> Result<Tensor, Error> {
        self.columns_taken(x, columns)
    }

    fn embed(&self, table: &Weight, tokens: &[u32], scale: f32) -> Result<Tensor, Error> {
        self.look_up(table, tokens, scale)
    }

    fn matmul(&self, x: &Tensor, weight: &Weight, bias: Option<&Tensor>) -> Result<Tensor, Error> {
        self.product(x, weight, bias)
    }

    fn rms_norm(&self, x: &Tensor, weight: &Tensor, epsilon: f32) -> Result<Tensor, Error> {
        self.normalise(x, weight, epsilon)
    }

    fn rotate(&self, x: &mut Tensor, head_dim: usize, window: usize, rope: &Rope) -> Result<(), Error> {
        self.turn(x, head_dim, window, rope)
    }

    fn attention(&self, q: &Tensor, k: &Tensor, v: &Tensor, shape: &Attention) -> Result<Tensor, Error> {
        self.attend(q, k, v, shape)
    }

    fn gate(&self, gate: &Tensor, up: &Tensor, activation: Activation) -> Result<Tensor, Error> {
        self.gated(gate, up, activation)
    }

    fn add(&self, x: &mut Tensor, y: &Tensor, scale: f32) -> Result<(), Error> {
        self.add_scaled(x, y, scale)
    }

    fn add_rows(&self, x: &mut Tensor, rows: &[u32], weights: &[f32], y: &Tensor) -> Result<(), Error> {
        self.add_to_rows(x, rows, weights, y)
    }

    fn soft_cap(&self, x: &mut Tensor, cap: f32) -> Result<(), Error> {
        self.cap(x, cap)
    }

    fn first_non_finite(&self, x: &Tensor) -> Result<Option<usize>, Error> {
        self.not_finite(x)
    }

    fn difference(&self, source: &Tensor, converted: &Tensor) -> Result<Difference, Error> {
        self.distance(source, converted)
    }

    fn negative_log_likelihood(&self, logits: &Tensor, targets: &[u32]) -> Result<Vec<f32>, Error> {
        self.likelihoods(logits, targets)
    }

    fn compare_logits(
        &self,
        source: &Tensor,
        converted: &Tensor,
        targets: &[u32],
    ) -> Result<Vec<TokenScore>, Error> {
        self.scores(source, converted, targets)
    }
}
