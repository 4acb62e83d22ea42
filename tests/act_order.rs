//! The act-order path against the same model with its rows sorted by group and its activations permuted first.
#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "the exception for tests leaves out what test functions share"
)]

use half::f16;
use requant::checkpoint::{Checkpoint, OpenOptions};
use requant::kernels::{Activation, Attention, Cpu, Difference, Error, Operations, Rope, TokenScore, Weight};
use requant::progress::Silent;
use requant::validate::{Text, Windows, perplexity};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A device that never sees an act-order weight: rows are sorted by group before they are uploaded, and the
/// columns of the activations before each product.
struct Sorting<O> {
    inner: O,
    sorted: AtomicUsize,
}

/// A weight, and which column of the activations each of its rows wants.
struct Sorted<W> {
    weight: W,
    columns: Option<Vec<u32>>,
}

impl<O: Operations> Operations for Sorting<O> {
    type Weight = Sorted<O::Weight>;
    type Tensor = O::Tensor;

    fn name(&self) -> String {
        self.inner.name()
    }
    fn free_memory(&self) -> Result<Option<u64>, Error> {
        self.inner.free_memory()
    }
    fn upload_weight(&self, weight: &Weight) -> Result<Self::Weight, Error> {
        let Weight::Gptq(matrix) = weight else {
            return Ok(Sorted { weight: self.inner.upload_weight(weight)?, columns: None });
        };
        let (sorted, order) = matrix.sorted().unwrap();
        assert!(!sorted.g_idx().is_act_order());
        self.sorted.fetch_add(usize::from(matrix.g_idx().is_act_order()), Ordering::Relaxed);
        let weight = self.inner.upload_weight(&Weight::Gptq(Arc::new(sorted)))?;
        Ok(Sorted { weight, columns: Some(order.map().to_vec()) })
    }
    fn dequantize(&self, _: &Self::Weight) -> Result<Vec<f16>, Error> {
        unreachable!("a forward pass decodes nothing")
    }
    fn matmul(
        &self,
        x: &O::Tensor,
        weight: &Self::Weight,
        bias: Option<&O::Tensor>,
    ) -> Result<O::Tensor, Error> {
        let Some(columns) = &weight.columns else { return self.inner.matmul(x, &weight.weight, bias) };
        let values = self.inner.download(x)?;
        let (rows, width) = self.inner.shape(x);
        let permuted: Vec<f32> = (0..rows)
            .flat_map(|row| columns.iter().map(move |&c| (row, c)))
            .map(|(row, c)| values[row * width + c as usize])
            .collect();
        self.inner.matmul(&self.inner.upload(&permuted, width)?, &weight.weight, bias)
    }

    fn upload(&self, values: &[f32], columns: usize) -> Result<O::Tensor, Error> {
        self.inner.upload(values, columns)
    }
    fn download(&self, tensor: &O::Tensor) -> Result<Vec<f32>, Error> {
        self.inner.download(tensor)
    }
    fn shape(&self, tensor: &O::Tensor) -> (usize, usize) {
        self.inner.shape(tensor)
    }
    fn copy(&self, tensor: &O::Tensor) -> Result<O::Tensor, Error> {
        self.inner.copy(tensor)
    }
    fn select_rows(&self, x: &O::Tensor, rows: &[u32]) -> Result<O::Tensor, Error> {
        self.inner.select_rows(x, rows)
    }
    fn select_columns(&self, x: &O::Tensor, columns: Range<usize>) -> Result<O::Tensor, Error> {
        self.inner.select_columns(x, columns)
    }
    fn embed(&self, table: &Self::Weight, tokens: &[u32], scale: f32) -> Result<O::Tensor, Error> {
        self.inner.embed(&table.weight, tokens, scale)
    }
    fn rms_norm(&self, x: &O::Tensor, weight: &O::Tensor, epsilon: f32) -> Result<O::Tensor, Error> {
        self.inner.rms_norm(x, weight, epsilon)
    }
    fn rotate(&self, x: &mut O::Tensor, head_dim: usize, window: usize, rope: &Rope) -> Result<(), Error> {
        self.inner.rotate(x, head_dim, window, rope)
    }
    fn attention(
        &self,
        q: &O::Tensor,
        k: &O::Tensor,
        v: &O::Tensor,
        shape: &Attention,
    ) -> Result<O::Tensor, Error> {
        self.inner.attention(q, k, v, shape)
    }
    fn gate(&self, gate: &O::Tensor, up: &O::Tensor, activation: Activation) -> Result<O::Tensor, Error> {
        self.inner.gate(gate, up, activation)
    }
    fn add(&self, x: &mut O::Tensor, y: &O::Tensor, scale: f32) -> Result<(), Error> {
        self.inner.add(x, y, scale)
    }
    fn add_rows(&self, x: &mut O::Tensor, rows: &[u32], weights: &[f32], y: &O::Tensor) -> Result<(), Error> {
        self.inner.add_rows(x, rows, weights, y)
    }
    fn soft_cap(&self, x: &mut O::Tensor, cap: f32) -> Result<(), Error> {
        self.inner.soft_cap(x, cap)
    }
    fn first_non_finite(&self, x: &O::Tensor) -> Result<Option<usize>, Error> {
        self.inner.first_non_finite(x)
    }
    fn difference(&self, source: &O::Tensor, converted: &O::Tensor) -> Result<Difference, Error> {
        self.inner.difference(source, converted)
    }
    fn negative_log_likelihood(&self, logits: &O::Tensor, targets: &[u32]) -> Result<Vec<f32>, Error> {
        self.inner.negative_log_likelihood(logits, targets)
    }
    fn compare_logits(
        &self,
        source: &O::Tensor,
        converted: &O::Tensor,
        targets: &[u32],
    ) -> Result<Vec<TokenScore>, Error> {
        self.inner.compare_logits(source, converted, targets)
    }
}

/// Both paths give the same perplexity: within the 0.05 % that devices may differ by.
fn both_paths_agree<O: Operations>(model: &Path, device: impl Fn() -> O, tokens: usize) {
    let checkpoint = Checkpoint::open(model, &OpenOptions::default()).unwrap();
    let windows = Windows::new(&Text::Sample, &checkpoint, tokens, Some(256), false).unwrap();
    let direct = perplexity(&checkpoint, &windows, &device(), &Silent).unwrap().value();
    let sorting = Sorting { inner: device(), sorted: AtomicUsize::new(0) };
    let sorted = perplexity(&checkpoint, &windows, &sorting, &Silent).unwrap().value();
    let count = sorting.sorted.into_inner();
    eprintln!("{}: {direct} directly, {sorted} sorted, {count} act-order linears", sorting.inner.name());
    assert!(count > 0, "no act-order linear was met");
    assert!((direct / sorted - 1.0).abs() < 5e-4, "{direct} directly, {sorted} sorted");
}

#[test]
fn rows_sorted_beforehand_give_the_same_perplexity() {
    both_paths_agree("fixtures/tiny-llama-gptq".as_ref(), || Cpu::new(2), 1024);
}

#[test]
#[cfg(feature = "cuda")]
fn rows_sorted_beforehand_give_the_same_perplexity_on_a_gpu() {
    use requant::kernels::cuda::{Cuda, Setup};
    let open = || Cuda::new(0, &Setup::from_environment());
    if let Err(error) = open() {
        assert!(std::env::var_os("REQUIRE_GPU").is_none_or(|value| value != "1"), "{error}");
        return eprintln!("SKIPPED, no GPU: {error}");
    }
    let device = || open().unwrap();
    both_paths_agree("fixtures/tiny-llama-gptq".as_ref(), device, 1024);
    if let Some(model) = std::env::var_os("REQUANT_SMOLLM2") {
        both_paths_agree(model.as_ref(), device, 8192);
    }
}
