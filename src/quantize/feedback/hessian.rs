//! What weighs errors, and its factors.
//!
//! With H = R Rᵀ, R upper triangular, and errors E, tr(EᵀHE) is the sum over rows j of
//! R[j][j]² · (E[j] + Σ R[i][j] / R[j][j] · E[i])² over i < j. So if rows are settled from the first to the last,
//! row j should decode to its weight plus Σ R[i][j] / R[j][j] · E[i], E the weight minus what it decodes to, and
//! R[j][j]² weighs what it misses of that by. This is GPTQ's feedback without an inverse.

use requant_kernels::cholesky;

/// Σ xxᵀ over the inputs x of a linear, `[k, k]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Hessian {
    k: usize,
    /// How many x.
    pub(super) tokens: usize,
    /// Entry (i, j ≤ i) at `i · (i + 1) / 2 + j`.
    pub(super) lower: Vec<f64>,
}

/// A [`Hessian`] needs `k · (k + 1) / 2` numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{found} entries of a Hessian of {k} inputs, expected {expected}")]
pub struct NotTriangular {
    /// Inputs.
    pub k: usize,
    /// Entries.
    pub found: usize,
    /// What fits.
    pub expected: usize,
}

impl Hessian {
    /// Of a lower triangle with its diagonal, row by row, over so many tokens.
    ///
    /// # Errors
    /// [`NotTriangular`].
    pub fn new(k: usize, lower: Vec<f64>, tokens: usize) -> Result<Self, NotTriangular> {
        let expected = k * (k + 1) / 2;
        match lower.len() == expected {
            true => Ok(Self { k, tokens, lower }),
            false => Err(NotTriangular { k, found: lower.len(), expected }),
        }
    }

    /// k.
    pub fn in_features(&self) -> usize {
        self.k
    }

    /// How many tokens it is of.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// An entry.
    pub fn at(&self, i: usize, j: usize) -> f64 {
        let (i, j) = (i.max(j), i.min(j));
        self.lower[i * (i + 1) / 2 + j]
    }

    /// Mean of the diagonal.
    pub(super) fn mean(&self) -> f64 {
        (0..self.k).map(|i| self.at(i, i)).sum::<f64>() / self.k.max(1) as f64
    }
}

/// The factor of a damped Hessian for rows in some order.
pub(super) struct Factor {
    /// R[j][j]².
    pub(super) weights: Vec<f32>,
    /// `[k, k]`: entry (j, i < j) is R[i][j] / R[j][j]; zero elsewhere.
    pub(super) coefficients: Vec<f32>,
    /// The damped Hessian's diagonal.
    pub(super) diagonal: Vec<f32>,
}

impl Factor {
    /// Of `of + damping · 1` with rows and columns in the order of `rows`; `None` if that isn't positive definite.
    pub(super) fn new(of: &Hessian, rows: &[u32], damping: f64) -> Option<Self> {
        let k = rows.len();
        // From the last to the first, so that the lower factor is R turned around.
        let row = |i: usize| rows[k - 1 - i] as usize;
        let mut matrix = vec![0.0; k * k];
        for column in 0..k {
            for i in column..k {
                matrix[column * k + i] = of.at(row(i), row(column));
            }
            matrix[column * k + column] += damping;
        }
        let diagonal = (0..k).rev().map(|i| matrix[i * k + i] as f32).collect();
        if !cholesky(&mut matrix, k) {
            return None;
        }
        let mut coefficients = vec![0.0f32; k * k];
        let mut weights = vec![0.0f32; k];
        for j in 0..k {
            let column = &matrix[(k - 1 - j) * k..][..k];
            let diagonal = column[k - 1 - j];
            weights[j] = (diagonal * diagonal) as f32;
            for i in 0..j {
                coefficients[j * k + i] = (column[k - 1 - i] / diagonal) as f32;
            }
        }
        Some(Self { weights, coefficients, diagonal })
    }
}
