//! Operations on packed GPTQ and EXL2 weights, and what a model's forward pass needs besides.
//!
//! Takes matrices of `requant-formats` and activations, gives decoded weights, products, and comparisons of
//! what two models say. [`Operations`] is what every device implements; [`Cpu`] is the reference, which is
//! never removed, and is what other devices are compared with; `cuda`, a feature, has NVIDIA's GPUs. Must not
//! read files, know of models, or choose a device for the caller.
//!
//! Each test is written once, over the trait (`tests/`), and runs for every device there is.
//!
//! ```
//! use requant_formats::gptq::{GIdx, Matrix, Shape};
//! use requant_kernels::{Cpu, Operations, Weight};
//!
//! let shape = Shape { in_features: 2, out_features: 1, bits: 4.try_into()?, groups: 1 };
//! let matrix = Matrix::new(shape, vec![9, 5], vec![8], vec![0.5], GIdx::new(None, 2, 1, None)?)?;
//! let cpu = Cpu::new(1);
//! let weight = cpu.upload_weight(&Weight::from(matrix))?;
//! // 0.5 and −1.5 are the weights.
//! let x = cpu.upload(&[4.0, 1.0], 2)?;
//! assert_eq!(cpu.download(&cpu.matmul(&x, &weight, None)?)?, [0.5]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod calibration;
mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
mod operations;
#[cfg(test)]
mod tests;
mod weight;

pub use calibration::Calibration;
pub use cpu::{Cpu, Loaded, Sums, Tensor, cholesky};
pub use error::Error;
pub use operations::{Activation, Attention, Difference, Operations, Rope, TokenScore};
pub use weight::{Dense, DenseType, Weight};
