//! Launching a kernel.

use super::Cuda;
use super::cubins::Kernel;
use crate::Error;
use cudarc::driver::sys;
use std::ffi::c_void;

/// An argument as a kernel takes it.
#[derive(Clone, Copy)]
pub(super) enum Argument {
    /// An address on the device, 0 for none.
    Address(u64),
    U32(u32),
    U64(u64),
    F32(f32),
    Packed(super::decode::Packed),
    Attention(super::attention::Shape),
}

impl Argument {
    fn value(&mut self) -> *mut c_void {
        match self {
            Self::Address(value) | Self::U64(value) => (&raw mut *value).cast(),
            Self::U32(value) => (&raw mut *value).cast(),
            Self::F32(value) => (&raw mut *value).cast(),
            Self::Packed(value) => (&raw mut *value).cast(),
            Self::Attention(value) => (&raw mut *value).cast(),
        }
    }
}

/// How many blocks and threads.
#[derive(Clone, Copy)]
pub(super) struct Grid {
    pub(super) blocks: [u32; 3],
    pub(super) threads: u32,
    /// Bytes of shared memory that the kernel doesn't declare itself.
    pub(super) shared: u32,
}

impl Grid {
    pub(super) fn new(blocks: [u32; 3], threads: u32) -> Self {
        Self { blocks, threads, shared: 0 }
    }
}

impl Cuda {
    /// Launches a kernel; nothing where the grid is empty. `operation` is for errors.
    ///
    /// # Safety
    /// `arguments` are those of the kernel's declaration, in order; each address has the elements that the kernel
    /// reads and writes for this grid, and nobody but this stream uses them.
    pub(super) unsafe fn launch(
        &self,
        operation: &'static str,
        kernel: Kernel,
        grid: Grid,
        arguments: &mut [Argument],
    ) -> Result<(), Error> {
        let [x, y, z] = grid.blocks;
        if x == 0 || y == 0 || z == 0 {
            return Ok(());
        }
        self.bind(operation)?;
        let function = self.kernels.function(kernel);
        let mut pointers: Vec<*mut c_void> = arguments.iter_mut().map(Argument::value).collect();
        // SAFETY: the caller's promise; `pointers` and what they point to outlive the call, which copies them.
        let result = unsafe {
            sys::cuLaunchKernel(
                function,
                x,
                y,
                z,
                grid.threads,
                1,
                1,
                grid.shared,
                self.stream.cu_stream(),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        result.result().map_err(|error| self.failed(operation, &error))
    }
}
