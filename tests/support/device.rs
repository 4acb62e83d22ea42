//! A device with as little memory as a test wants: the CPU's results, and errors on demand.

use half::f16;
use requant::kernels::{
    Activation, Attention, Cpu, Difference, Error, Loaded, Operations, Rope, Tensor, TokenScore, Weight,
};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};

/// A device of its own memory.
pub(crate) struct Pretended {
    cpu: Cpu,
    free: Arc<AtomicI64>,
    /// Weights and activations that were brought there.
    pub(crate) uploads: AtomicUsize,
    /// Weights of these.
    pub(crate) weights: AtomicUsize,
    /// Uploads, counted from 0, for which there is no memory.
    pub(crate) refused: Range<usize>,
    /// The upload at which the device dies.
    pub(crate) dies_at: usize,
}

/// Something in the device's memory.
pub(crate) struct Held<T> {
    value: T,
    bytes: i64,
    free: Arc<AtomicI64>,
}

impl<T> Drop for Held<T> {
    fn drop(&mut self) {
        self.free.fetch_add(self.bytes, Ordering::Relaxed);
    }
}

impl Pretended {
    pub(crate) fn new(bytes: i64) -> Self {
        Self {
            cpu: Cpu::new(1),
            free: Arc::new(AtomicI64::new(bytes)),
            uploads: AtomicUsize::new(0),
            weights: AtomicUsize::new(0),
            refused: 0..0,
            dies_at: usize::MAX,
        }
    }

    fn lacks(&self, operation: &'static str, needed: i64) -> Error {
        Error::OutOfMemory { device: self.name(), operation, needed: needed as u64 }
    }

    fn hold<T>(&self, operation: &'static str, value: T, bytes: usize) -> Result<Held<T>, Error> {
        let bytes = bytes as i64;
        let before = self.free.fetch_sub(bytes, Ordering::Relaxed);
        let held = Held { value, bytes, free: self.free.clone() };
        if before < bytes { Err(self.lacks(operation, bytes - before)) } else { Ok(held) }
    }

    fn tensor(&self, operation: &'static str, x: Tensor) -> Result<Held<Tensor>, Error> {
        let (rows, columns) = self.cpu.shape(&x);
        self.hold(operation, x, 4 * rows * columns)
    }

    fn count_upload(&self, operation: &'static str) -> Result<(), Error> {
        let number = self.uploads.fetch_add(1, Ordering::Relaxed);
        if number >= self.dies_at {
            return Err(Error::Device { device: self.name(), operation, message: "it died".into() });
        }
        if self.refused.contains(&number) { Err(self.lacks(operation, 1)) } else { Ok(()) }
    }
}

type Held32 = Held<Tensor>;

impl Operations for Pretended {
    type Weight = Held<Loaded>;
    type Tensor = Held32;

    fn name(&self) -> String {
        "pretended".into()
    }

    fn free_memory(&self) -> Result<Option<u64>, Error> {
        Ok(Some(self.free.load(Ordering::Relaxed).max(0) as u64))
    }

    fn upload_weight(&self, weight: &Weight) -> Result<Held<Loaded>, Error> {
        self.count_upload("upload_weight")?;
        self.weights.fetch_add(1, Ordering::Relaxed);
        let elements = weight.in_features() * weight.out_features();
        let bytes = match weight {
            Weight::Gptq(matrix) => elements * matrix.shape().bits.get() as usize / 8,
            Weight::Exl2 { .. } => elements / 2,
            Weight::Dense(dense) => elements * dense.dtype.size(),
        };
        self.hold("upload_weight", self.cpu.upload_weight(weight)?, bytes)
    }

    fn dequantize(&self, weight: &Self::Weight) -> Result<Vec<f16>, Error> {
        self.cpu.dequantize(&weight.value)
    }

    fn upload(&self, values: &[f32], columns: usize) -> Result<Held32, Error> {
        self.count_upload("upload")?;
        self.tensor("upload", self.cpu.upload(values, columns)?)
    }

    fn download(&self, x: &Held32) -> Result<Vec<f32>, Error> {
        self.cpu.download(&x.value)
    }

    fn shape(&self, x: &Held32) -> (usize, usize) {
        self.cpu.shape(&x.value)
    }

    fn copy(&self, x: &Held32) -> Result<Held32, Error> {
        self.tensor("copy", self.cpu.copy(&x.value)?)
    }

    fn select_rows(&self, x: &Held32, rows: &[u32]) -> Result<Held32, Error> {
        self.tensor("select_rows", self.cpu.select_rows(&x.value, rows)?)
    }

    fn select_columns(&self, x: &Held32, columns: Range<usize>) -> Result<Held32, Error> {
        self.tensor("select_columns", self.cpu.select_columns(&x.value, columns)?)
    }

    fn embed(&self, table: &Self::Weight, tokens: &[u32], scale: f32) -> Result<Held32, Error> {
        self.tensor("embed", self.cpu.embed(&table.value, tokens, scale)?)
    }

    fn matmul(&self, x: &Held32, weight: &Self::Weight, bias: Option<&Held32>) -> Result<Held32, Error> {
        self.tensor("matmul", self.cpu.matmul(&x.value, &weight.value, bias.map(|bias| &bias.value))?)
    }

    fn rms_norm(&self, x: &Held32, weight: &Held32, epsilon: f32) -> Result<Held32, Error> {
        self.tensor("rms_norm", self.cpu.rms_norm(&x.value, &weight.value, epsilon)?)
    }

    fn rotate(&self, x: &mut Held32, head_dim: usize, window: usize, rope: &Rope) -> Result<(), Error> {
        self.cpu.rotate(&mut x.value, head_dim, window, rope)
    }

    fn attention(&self, q: &Held32, k: &Held32, v: &Held32, shape: &Attention) -> Result<Held32, Error> {
        self.tensor("attention", self.cpu.attention(&q.value, &k.value, &v.value, shape)?)
    }

    fn gate(&self, gate: &Held32, up: &Held32, activation: Activation) -> Result<Held32, Error> {
        self.tensor("gate", self.cpu.gate(&gate.value, &up.value, activation)?)
    }

    fn add(&self, x: &mut Held32, y: &Held32, scale: f32) -> Result<(), Error> {
        self.cpu.add(&mut x.value, &y.value, scale)
    }

    fn add_rows(&self, x: &mut Held32, rows: &[u32], weights: &[f32], y: &Held32) -> Result<(), Error> {
        self.cpu.add_rows(&mut x.value, rows, weights, &y.value)
    }

    fn soft_cap(&self, x: &mut Held32, cap: f32) -> Result<(), Error> {
        self.cpu.soft_cap(&mut x.value, cap)
    }

    fn first_non_finite(&self, x: &Held32) -> Result<Option<usize>, Error> {
        self.cpu.first_non_finite(&x.value)
    }

    fn difference(&self, source: &Held32, converted: &Held32) -> Result<Difference, Error> {
        self.cpu.difference(&source.value, &converted.value)
    }

    fn negative_log_likelihood(&self, logits: &Held32, targets: &[u32]) -> Result<Vec<f32>, Error> {
        self.cpu.negative_log_likelihood(&logits.value, targets)
    }

    fn compare_logits(
        &self,
        source: &Held32,
        converted: &Held32,
        targets: &[u32],
    ) -> Result<Vec<TokenScore>, Error> {
        self.cpu.compare_logits(&source.value, &converted.value, targets)
    }
}
