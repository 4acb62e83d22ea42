//! A linear's weight on its way to a device.

use requant_formats::{exl2, gptq};
use std::fmt;
use std::sync::Arc;

/// The weight `[in_features, out_features]` of a linear, in any layout. Cheap to clone.
#[derive(Clone, Debug)]
pub enum Weight {
    /// GPTQ.
    Gptq(Arc<gptq::Matrix>),
    /// EXL2.
    Exl2 {
        /// As stored, padding columns included.
        matrix: Arc<exl2::Matrix>,
        /// n without the padding.
        out_features: usize,
    },
    /// Floats.
    Dense(Dense),
}

/// Floats as they lie in a file: `[out_features, in_features]`, row-major, little-endian, at any alignment.
#[derive(Clone)]
pub struct Dense {
    /// Type of the elements.
    pub dtype: DenseType,
    /// n, rows as stored.
    pub out_features: usize,
    /// k, columns as stored.
    pub in_features: usize,
    /// The elements; often a mapped file, so that nothing is copied.
    pub bytes: Arc<dyn AsRef<[u8]> + Send + Sync>,
}

/// Type of a dense weight's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DenseType {
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// fp32.
    F32,
}

impl DenseType {
    /// Bytes an element.
    pub const fn size(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }
}

impl fmt::Debug for Dense {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dense")
            .field("dtype", &self.dtype)
            .field("out_features", &self.out_features)
            .field("in_features", &self.in_features)
            .finish_non_exhaustive()
    }
}

impl Weight {
    /// k.
    pub fn in_features(&self) -> usize {
        match self {
            Self::Gptq(matrix) => matrix.shape().in_features,
            Self::Exl2 { matrix, .. } => matrix.in_features(),
            Self::Dense(dense) => dense.in_features,
        }
    }

    /// n, without padding.
    pub fn out_features(&self) -> usize {
        match self {
            Self::Gptq(matrix) => matrix.shape().out_features,
            Self::Exl2 { out_features, .. } => *out_features,
            Self::Dense(dense) => dense.out_features,
        }
    }
}

impl From<gptq::Matrix> for Weight {
    fn from(matrix: gptq::Matrix) -> Self {
        Self::Gptq(Arc::new(matrix))
    }
}

impl From<Dense> for Weight {
    fn from(dense: Dense) -> Self {
        Self::Dense(dense)
    }
}
