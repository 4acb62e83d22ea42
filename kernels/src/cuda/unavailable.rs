//! Why a GPU can't be used, and what to do about it.

use cudarc::driver::DriverError;
use std::ffi::CStr;

/// Why a GPU can't be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unavailable {
    /// There is no driver's library.
    #[error("there is no NVIDIA driver: libcuda was not found")]
    NoDriver,
    /// The driver's library lacks something, as stubs and very old ones do.
    #[error("the NVIDIA driver lacks {symbol}")]
    MissingSymbol {
        /// The function.
        symbol: &'static str,
    },
    /// The driver can't be started, or failed.
    #[error("{operation} failed: {message}")]
    Driver {
        /// What was asked of it.
        operation: &'static str,
        /// What it says.
        message: String,
    },
    /// The driver is older than CUDA 12.
    #[error("the NVIDIA driver is for CUDA {}.{}, too old", found.0, found.1)]
    OldDriver {
        /// Newest CUDA that it knows.
        found: (u32, u32),
    },
    /// The driver finds no device.
    #[error("the NVIDIA driver finds no GPU")]
    NoDevice,
    /// There are fewer devices.
    #[error("there is no GPU {ordinal}, only {count}, counted from 0")]
    NoSuchDevice {
        /// The device asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// The device is older than Ampere.
    #[error("{name} has compute capability {}.{}, too old", found.0, found.1)]
    OldDevice {
        /// The device.
        name: String,
        /// Its compute capability.
        found: (u32, u32),
    },
    /// No compiler for the kernels was found.
    #[error("NVRTC, which compiles the kernels, was not found")]
    NoCompiler,
    /// None of the compilers found is fit.
    #[error("{path}: NVRTC {}.{} {reason}", version.0, version.1)]
    UnfitCompiler {
        /// The library.
        path: String,
        /// Its version.
        version: (u32, u32),
        /// What is wrong with it.
        reason: UnfitReason,
    },
    /// The compiler refused a kernel: a bug of requant, or of the compiler.
    #[error("{file} can't be compiled: {log}")]
    Compilation {
        /// Name of the kernels' file.
        file: &'static str,
        /// What the compiler says.
        log: String,
    },
}

/// What is wrong with a compiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnfitReason {
    /// It is older than the device.
    #[error("is too old for compute capability {}.{}", .0.0, .0.1)]
    OlderThanDevice((u32, u32)),
    /// It is of a later CUDA than the driver, which could not load what it compiles.
    #[error("is too new for a driver for CUDA {}.{}", .0.0, .0.1)]
    NewerThanDriver((u32, u32)),
}

impl Unavailable {
    /// What the user can do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::NoDriver => "install NVIDIA's driver; in a container, pass the GPU through",
            Self::MissingSymbol { .. } => {
                "install NVIDIA's driver of 525 or later; a toolkit's stub of libcuda must not come first in the \
                 library path"
            }
            Self::Driver { .. } => "see whether nvidia-smi works, and whether another program fills the GPU",
            Self::OldDriver { .. } => "install NVIDIA's driver of 525 or later",
            Self::NoDevice => {
                "see nvidia-smi, and CUDA_VISIBLE_DEVICES; in a container, pass the GPU through"
            }
            Self::NoSuchDevice { .. } => "see nvidia-smi, and CUDA_VISIBLE_DEVICES",
            Self::OldDevice { .. } => "GPUs from Ampere on (compute capability 8.0) can be used",
            Self::NoCompiler => {
                "pip install nvidia-cuda-nvrtc, or install the CUDA toolkit, or give the folder of libnvrtc in \
                 REQUANT_CUDA_PATH"
            }
            Self::UnfitCompiler { reason: UnfitReason::OlderThanDevice(_), .. } => {
                "pip install --upgrade nvidia-cuda-nvrtc, or give the folder of a newer one in REQUANT_CUDA_PATH"
            }
            Self::UnfitCompiler { reason: UnfitReason::NewerThanDriver(_), .. } => {
                "pip install nvidia-cuda-nvrtc-cu12, or update NVIDIA's driver"
            }
            Self::Compilation { .. } => "report this, with what requant doctor says",
        }
    }

    pub(super) fn driver(operation: &'static str, error: &DriverError) -> Self {
        Self::Driver { operation, message: in_words(error) }
    }
}

/// What the driver calls an error. Not `DriverError`'s own text, which panics where the driver has none.
pub(super) fn in_words(error: &DriverError) -> String {
    match error.error_string() {
        Ok(text) => CStr::to_string_lossy(text).into_owned(),
        Err(_) => format!("error {}", error.0 as u32),
    }
}
