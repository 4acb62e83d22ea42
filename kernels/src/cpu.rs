//! The reference: scalar code that reads like the definition.

use super::error::expect_activations;
use super::{Error, Operations, Quantized};
use half::f16;

/// The operations on one thread of the CPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu;

impl Operations for Cpu {
    /// The matrix itself: it is decoded at each use.
    type Weight = Quantized;

    fn upload(&self, weight: Quantized) -> Result<Quantized, Error> {
        Ok(weight)
    }

    fn dequantize(&self, weight: &Quantized) -> Result<Vec<f16>, Error> {
        Ok(match weight {
            Quantized::Gptq(matrix) => matrix.dequantize(),
            Quantized::Exl2(matrix) => matrix.dequantize(),
        })
    }

    /// `y[r, j] = Σ x[r, i] · w[i, j]`, added in the order of i, each product and each sum rounded to fp32.
    fn matmul(&self, activations: &[f32], m: usize, weight: &Quantized) -> Result<Vec<f32>, Error> {
        let (k, n) = (weight.in_features(), weight.out_features());
        expect_activations(activations.len(), m, k)?;
        let decoded: Vec<f32> = self.dequantize(weight)?.into_iter().map(f16::to_f32).collect();
        let mut products = vec![0.0; m * n];
        for (x, y) in activations.chunks_exact(k).zip(products.chunks_exact_mut(n)) {
            for (&x, w) in x.iter().zip(decoded.chunks_exact(n)) {
                for (y, &w) in y.iter_mut().zip(w) {
                    *y += x * w;
                }
            }
        }
        Ok(products)
    }
}
