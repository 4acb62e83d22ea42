//! NVIDIA GPUs from Ampere to Blackwell (compute capability 8.0 to 12.x).
//!
//! Takes a device's number, gives the [`Operations`](crate::Operations) on it; decodes the same bits as the CPU,
//! and multiplies with fp32's accuracy on tensor cores. Nothing is linked: the driver and NVRTC, the compiler of the
//! kernels (`*.cu`), are looked for when a device is asked for, and what can't be used is [`Unavailable`], never a
//! panic. Must not read environment variables except in [`Setup::from_environment`], nor choose a device.
//!
//! One file of kernels a stage, with its launches in the file of the same name: `decode` (packing, decoding,
//! embedding), `product`, `rows`, `attention`, `compare`.

#[allow(unsafe_code, reason = "launches")]
mod attention;
#[allow(unsafe_code, reason = "launches")]
mod compare;
#[allow(unsafe_code, reason = "functions of the driver")]
mod cubins;
#[allow(unsafe_code, reason = "launches")]
mod decode;
#[allow(unsafe_code, reason = "the launch")]
mod launch;
#[allow(unsafe_code, reason = "functions of the driver")]
mod memory;
#[allow(unsafe_code, reason = "functions of NVRTC")]
mod nvrtc;
mod operations;
#[allow(unsafe_code, reason = "functions of the driver")]
mod probe;
#[allow(unsafe_code, reason = "launches")]
mod product;
#[allow(unsafe_code, reason = "launches")]
mod rows;
mod setup;
mod shapes;
#[cfg(test)]
pub(crate) mod tests;
mod unavailable;

pub use decode::Weight;
pub use memory::Tensor;
pub use nvrtc::Compiler;
pub use probe::{DeviceInfo, Survey, device_count, survey};
pub use setup::Setup;
pub use unavailable::Unavailable;

use crate::Error;
use cubins::Kernels;
use cudarc::driver::{CudaContext, CudaStream, DriverError, sys::CUresult};
use std::fmt;
use std::sync::Arc;

/// A GPU.
pub struct Cuda {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    name: String,
    kernels: Kernels,
    /// Fresh memory is filled with NaN, so that a kernel that leaves any unwritten shows.
    poison: bool,
    /// Bytes of a decoded panel, if there is room.
    panel: usize,
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Cuda {
    /// Device `ordinal`, ready to work: its kernels are taken from the cache or compiled.
    ///
    /// # Errors
    /// [`Unavailable`], which says what to do.
    #[allow(unsafe_code, reason = "event tracking")]
    pub fn new(ordinal: usize, setup: &Setup) -> Result<Self, Unavailable> {
        let driver = probe::driver()?;
        let device = probe::device(driver, ordinal)?;
        let context = device.context;
        // One stream does all, in order: there is nothing to track.
        // SAFETY: no memory is shared with another stream.
        unsafe { context.disable_event_tracking() };
        let failed = |operation| move |error: DriverError| Unavailable::driver(operation, &error);
        let stream = context.new_stream().map_err(failed("a stream"))?;
        memory::keep_freed_memory(&context);
        let kernels = Kernels::load(&context, driver, device.info.compute_capability, setup)?;
        Ok(Self { context, stream, name: device.info.name, kernels, poison: false, panel: product::PANEL })
    }

    /// The same, filling all fresh memory with NaN: for tests.
    #[must_use]
    pub fn poisoned(mut self) -> Self {
        self.poison = true;
        self
    }

    /// Waits until all that was asked for is done. Operations return before: only a download waits.
    ///
    /// # Errors
    /// [`Error::Device`], for any operation since the last wait.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.stream.synchronize().map_err(|error| self.failed("synchronize", &error))
    }

    fn failed(&self, operation: &'static str, error: &DriverError) -> Error {
        Error::Device { device: self.name.clone(), operation, message: unavailable::in_words(error) }
    }

    /// The error of an allocation.
    fn no_memory(&self, operation: &'static str, error: &DriverError, bytes: usize) -> Error {
        if error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return self.out_of_memory(operation, bytes as u64);
        }
        self.failed(operation, error)
    }

    fn out_of_memory(&self, operation: &'static str, needed: u64) -> Error {
        Error::OutOfMemory { device: self.name.clone(), operation, needed }
    }
}
