//! What only shows while modules are converted.

use crate::{Diagnose, Kind};
use std::path::{Path, PathBuf};

/// What only shows while modules are converted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A value that fp16 can't hold.
    #[error("element {position:?} is {value}, which fp16 can't hold")]
    NotFinite {
        /// File of the source.
        file: PathBuf,
        /// Tensor of the source.
        tensor: String,
        /// Index of the element along each axis.
        position: Vec<usize>,
        /// Its value.
        value: f32,
    },
    /// A weight decodes to something that fp16 can't hold.
    #[error("the weight at row {row}, column {column} decodes to {value}, which fp16 can't hold")]
    WeightOverflow {
        /// File of the source.
        file: PathBuf,
        /// Tensor of the source: the module's scales.
        tensor: String,
        /// Row of the weight.
        row: usize,
        /// Column of the weight.
        column: usize,
        /// What it decodes to.
        value: f32,
    },
    /// A tensor that should hold floats doesn't.
    #[error("the tensor is {dtype:?}: F16, BF16 or F32 expected")]
    NotAFloat {
        /// File of the source.
        file: PathBuf,
        /// Tensor of the source.
        tensor: String,
        /// Its type.
        dtype: safetensors::Dtype,
    },
    /// Our own quantizer made a matrix that the format forbids.
    #[error("the quantized matrix breaks a rule of the format: {source}")]
    Matrix {
        /// Name in the source.
        module: String,
        /// The rule.
        #[source]
        source: requant_formats::exl2::Error,
    },
    /// Our own relayout made a matrix that the format forbids.
    #[error("the changed layout breaks a rule of the format: {source}")]
    GptqMatrix {
        /// Name in the source.
        module: String,
        /// The rule.
        #[source]
        source: requant_formats::gptq::Error,
    },
    /// The bytes about to be written don't decode to the source's weights, although they should.
    #[error(
        "the weight at row {row}, column {column} would come out differently, although the conversion is exact"
    )]
    NotExact {
        /// Name in the source.
        module: String,
        /// Row of the source.
        row: usize,
        /// Column of the output.
        column: usize,
    },
    /// The bytes about to be written don't decode to what the quantizer meant.
    #[error("the packed tensors decode with a squared error of {found:e}, the quantizer meant {expected:e}")]
    RoundTrip {
        /// Name in the source.
        module: String,
        /// Squared error of the decoded bytes.
        found: f64,
        /// Squared error that was promised.
        expected: f64,
    },
}

impl Diagnose for Error {
    fn code(&self) -> &'static str {
        match self {
            Self::NotFinite { .. } => "convert.not_finite",
            Self::WeightOverflow { .. } => "convert.weight_overflow",
            Self::NotAFloat { .. } => "convert.not_a_float",
            Self::Matrix { .. } => "convert.matrix",
            Self::GptqMatrix { .. } => "convert.gptq_matrix",
            Self::NotExact { .. } => "convert.not_exact",
            Self::RoundTrip { .. } => "convert.round_trip",
        }
    }

    fn kind(&self) -> Kind {
        match self {
            Self::NotFinite { .. } | Self::WeightOverflow { .. } | Self::NotAFloat { .. } => Kind::Input,
            Self::Matrix { .. }
            | Self::GptqMatrix { .. }
            | Self::NotExact { .. }
            | Self::RoundTrip { .. } => Kind::Bug,
        }
    }

    fn file(&self) -> Option<&Path> {
        match self {
            Self::NotFinite { file, .. }
            | Self::WeightOverflow { file, .. }
            | Self::NotAFloat { file, .. } => Some(file),
            Self::Matrix { .. }
            | Self::GptqMatrix { .. }
            | Self::NotExact { .. }
            | Self::RoundTrip { .. } => None,
        }
    }

    fn tensor(&self) -> Option<&str> {
        match self {
            Self::NotFinite { tensor, .. }
            | Self::WeightOverflow { tensor, .. }
            | Self::NotAFloat { tensor, .. } => Some(tensor),
            Self::Matrix { module, .. }
            | Self::GptqMatrix { module, .. }
            | Self::NotExact { module, .. }
            | Self::RoundTrip { module, .. } => Some(module),
        }
    }

    fn hint(&self) -> Option<String> {
        Some(match self {
            Self::NotFinite { .. } | Self::WeightOverflow { .. } | Self::NotAFloat { .. } => {
                "EXL2 stores fp16; the file may be damaged: compare its hash with the hub's".into()
            }
            Self::Matrix { .. }
            | Self::GptqMatrix { .. }
            | Self::NotExact { .. }
            | Self::RoundTrip { .. } => {
                "this is a bug of requant; nothing was written: please report it with the model's name".into()
            }
        })
    }
}
