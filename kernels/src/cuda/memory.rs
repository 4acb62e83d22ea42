//! Memory of a device, and activations in it.

use super::{Cuda, shapes};
use crate::Error;
use cudarc::driver::{CudaContext, CudaSlice, DevicePtr, DevicePtrMut, DeviceRepr, sys};

/// Bytes on the device, freed when dropped; a kernel launched before that has ended by then.
pub(super) struct Buffer {
    bytes: CudaSlice<u8>,
    address: u64,
}

impl Buffer {
    /// What kernels are given.
    pub(super) fn address(&self) -> u64 {
        self.address
    }
}

/// Activations on a device, fp32 `[rows, columns]`, row-major.
pub struct Tensor {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) buffer: Buffer,
}

impl Tensor {
    pub(super) fn len(&self) -> usize {
        self.rows * self.columns
    }

    pub(super) fn shape(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    pub(super) fn address(&self) -> u64 {
        self.buffer.address
    }
}

/// Each operation makes its result anew: the memory of dropped ones is kept for the next instead of given back
/// at each wait. Where a driver can't, it is only slower.
pub(super) fn keep_freed_memory(context: &CudaContext) {
    let Some(pool) = pool(context) else { return };
    let mut all = u64::MAX;
    let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the pool is the device's own, and the attribute is a u64.
    let _ = unsafe { sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut all).cast()) };
}

fn pool(context: &CudaContext) -> Option<sys::CUmemoryPool> {
    if !context.has_async_alloc() {
        return None;
    }
    let mut pool = std::ptr::null_mut();
    // SAFETY: the context's device exists, and its pool outlives the process's use of it.
    unsafe { sys::cuDeviceGetDefaultMemPool(&raw mut pool, context.cu_device()) }.result().ok()?;
    Some(pool)
}

impl Cuda {
    /// Bytes that can still be allocated.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn memory_left(&self) -> Result<u64, Error> {
        let failed = |error| self.failed("free_memory", &error);
        let (free, _) = self.context.mem_get_info().map_err(failed)?;
        let of_pool = |attribute| -> u64 {
            let Some(pool) = pool(&self.context) else { return 0 };
            let mut bytes = 0u64;
            // SAFETY: the pool is the device's own, and the attributes asked for below are u64.
            let asked = unsafe { sys::cuMemPoolGetAttribute(pool, attribute, (&raw mut bytes).cast()) };
            asked.result().map_or(0, |()| bytes)
        };
        use sys::CUmemPool_attribute::{
            CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
        };
        let kept = of_pool(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
        let used = of_pool(CU_MEMPOOL_ATTR_USED_MEM_CURRENT);
        Ok(free as u64 + kept.saturating_sub(used))
    }

    /// Fresh memory: whatever it held, or NaN under test.
    pub(super) fn allocate(&self, operation: &'static str, bytes: usize) -> Result<Buffer, Error> {
        // The driver has no allocations of nothing.
        let size = bytes.max(16);
        // SAFETY: nothing reads the memory before a copy or a kernel has written it.
        let allocated = unsafe { self.stream.alloc::<u8>(size) };
        let mut slice = allocated.map_err(|error| self.no_memory(operation, &error, size))?;
        let address = slice.device_ptr(&self.stream).0;
        if self.poison {
            self.fill(operation, &mut slice, 0xff)?;
        }
        Ok(Buffer { bytes: slice, address })
    }

    /// Memory with each byte set.
    pub(super) fn filled(&self, operation: &'static str, bytes: usize, value: u8) -> Result<Buffer, Error> {
        let mut buffer = self.allocate(operation, bytes)?;
        self.fill(operation, &mut buffer.bytes, value)?;
        Ok(buffer)
    }

    fn fill(&self, operation: &'static str, bytes: &mut CudaSlice<u8>, value: u8) -> Result<(), Error> {
        let count = bytes.len();
        let (address, _recorded) = bytes.device_ptr_mut(&self.stream);
        // SAFETY: the slice owns `count` bytes from its address on.
        unsafe { cudarc::driver::result::memset_d8_async(address, value, count, self.stream.cu_stream()) }
            .map_err(|error| self.failed(operation, &error))
    }

    /// The host's elements on the device.
    pub(super) fn to_device<T: DeviceRepr>(
        &self,
        operation: &'static str,
        values: &[T],
    ) -> Result<Buffer, Error> {
        let mut buffer = self.allocate(operation, size_of_val(values))?;
        if !values.is_empty() {
            self.bind(operation)?;
            let (address, _recorded) = buffer.bytes.device_ptr_mut(&self.stream);
            // SAFETY: the buffer has the bytes of `values`, which pageable memory's copy has left by its return.
            unsafe { cudarc::driver::result::memcpy_htod_async(address, values, self.stream.cu_stream()) }
                .map_err(|error| self.failed(operation, &error))?;
        }
        Ok(buffer)
    }

    /// The first elements of a buffer; waits for all that was asked for before.
    pub(super) fn to_host<T: DeviceRepr + bytemuck::Zeroable + Clone>(
        &self,
        operation: &'static str,
        buffer: &Buffer,
        count: usize,
    ) -> Result<Vec<T>, Error> {
        let mut values = vec![T::zeroed(); count];
        debug_assert!(size_of_val(values.as_slice()) <= buffer.bytes.len());
        if count > 0 {
            self.bind(operation)?;
            // SAFETY: the buffer holds at least `count` elements, and the wait below outlasts the copy.
            unsafe {
                cudarc::driver::result::memcpy_dtoh_async(
                    &mut values,
                    buffer.address,
                    self.stream.cu_stream(),
                )
            }
            .map_err(|error| self.failed(operation, &error))?;
            self.stream.synchronize().map_err(|error| self.failed(operation, &error))?;
        }
        Ok(values)
    }

    /// Makes the device the calling thread's.
    pub(super) fn bind(&self, operation: &'static str) -> Result<(), Error> {
        self.context.bind_to_thread().map_err(|error| self.failed(operation, &error))
    }

    /// Activations that a kernel is about to write.
    pub(super) fn tensor(
        &self,
        operation: &'static str,
        rows: usize,
        columns: usize,
    ) -> Result<Tensor, Error> {
        let bytes = shapes::bytes(operation, rows, columns, size_of::<f32>())?;
        Ok(Tensor { rows, columns, buffer: self.allocate(operation, bytes)? })
    }

    /// A copy on the device.
    pub(super) fn duplicate(&self, operation: &'static str, x: &Tensor) -> Result<Tensor, Error> {
        let copy = self.tensor(operation, x.rows, x.columns)?;
        let bytes = x.len() * size_of::<f32>();
        if bytes > 0 {
            self.bind(operation)?;
            // SAFETY: both buffers have room for the elements of the same shape.
            unsafe {
                cudarc::driver::result::memcpy_dtod_async(
                    copy.address(),
                    x.address(),
                    bytes,
                    self.stream.cu_stream(),
                )
            }
            .map_err(|error| self.failed(operation, &error))?;
        }
        Ok(copy)
    }
}
