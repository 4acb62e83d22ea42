//! Operations on packed GPTQ and EXL2 weights.
//!
//! Takes matrices of `requant-formats` and activations, gives decoded weights and products. [`Operations`]
//! is what every device implements; [`Cpu`] is the reference, which reads like the definition, is never
//! removed, and is what other devices are compared with. Must not read files, know of models, or choose a
//! device for the caller.
//!
//! Each test is written once, over the trait (`tests.rs`), and runs for every device there is.
//!
//! ```
//! use requant_formats::gptq::{GIdx, Matrix, Shape};
//! use requant_kernels::{Cpu, Operations, Quantized};
//!
//! let shape = Shape { in_features: 2, out_features: 1, bits: 4.try_into()?, groups: 1 };
//! let matrix = Matrix::new(shape, vec![9, 5], vec![8], vec![0.5], GIdx::new(None, 2, 1, None)?)?;
//! let weight = Cpu.upload(Quantized::from(matrix))?;
//! // 0.5 and −1.5 are the weights.
//! assert_eq!(Cpu.matmul(&[4.0, 1.0], 1, &weight)?, [0.5]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod cpu;
mod error;
#[cfg(test)]
mod tests;

pub use cpu::Cpu;
pub use error::Error;

use half::f16;
use requant_formats::{exl2, gptq};
use std::sync::Arc;

/// A quantized weight `[k, n]` of either format. Shared, so that a device may keep it without a copy.
#[derive(Clone, Debug)]
pub enum Quantized {
    /// A GPTQ weight.
    Gptq(Arc<gptq::Matrix>),
    /// An EXL2 weight, padding columns included.
    Exl2(Arc<exl2::Matrix>),
}

impl Quantized {
    /// k, rows of the weight.
    pub fn in_features(&self) -> usize {
        match self {
            Self::Gptq(matrix) => matrix.shape().in_features,
            Self::Exl2(matrix) => matrix.in_features(),
        }
    }

    /// n, columns of the weight as stored.
    pub fn out_features(&self) -> usize {
        match self {
            Self::Gptq(matrix) => matrix.shape().out_features,
            Self::Exl2(matrix) => matrix.out_features(),
        }
    }
}

impl From<gptq::Matrix> for Quantized {
    fn from(matrix: gptq::Matrix) -> Self {
        Self::Gptq(Arc::new(matrix))
    }
}

impl From<exl2::Matrix> for Quantized {
    fn from(matrix: exl2::Matrix) -> Self {
        Self::Exl2(Arc::new(matrix))
    }
}

/// What a device does with quantized weights.
pub trait Operations {
    /// A weight where the device can use it: its memory is the device's until it is dropped.
    type Weight;

    /// Brings a weight to the device, packed or in any other form of the same numbers.
    ///
    /// # Errors
    /// What the device refuses; [`Cpu`] nothing.
    fn upload(&self, weight: Quantized) -> Result<Self::Weight, Error>;

    /// The decoded weight `[k, n]`, rows in the model's order. The same bits on every device: those of
    /// [`gptq::Matrix::dequantize`] and [`exl2::Matrix::dequantize`].
    ///
    /// # Errors
    /// What the device fails at; [`Cpu`] nothing.
    fn dequantize(&self, weight: &Self::Weight) -> Result<Vec<f16>, Error>;

    /// The product `[m, n]` of `activations` `[m, k]` and the decoded weight, accumulated in fp32.
    ///
    /// A device adds in a fixed order: the same inputs give the same bits on every call, and a row of the
    /// product does not depend on the other rows. The order may differ from another device's.
    ///
    /// # Errors
    /// [`Error::Activations`] when `activations` isn't `[m, k]`.
    fn matmul(&self, activations: &[f32], m: usize, weight: &Self::Weight) -> Result<Vec<f32>, Error>;
}
