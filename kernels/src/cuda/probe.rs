//! What there is: driver, devices, compiler. Nothing here panics, whatever is missing.

use super::nvrtc::Compiler;
use super::unavailable::Unavailable;
use super::{Setup, nvrtc};
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::{CudaContext, DriverError, result, sys};
use std::path::PathBuf;
use std::sync::Arc;

/// Version of CUDA, major and minor.
pub(super) type Version = (u32, u32);

/// The oldest driver: minor versions of CUDA 12 load each other's kernels.
const OLDEST_DRIVER: Version = (12, 0);
/// Ampere: asynchronous copies, tensor cores of fp16 and bf16 by this size.
const OLDEST_DEVICE: Version = (8, 0);

/// Functions of the driver that are used. The bindings panic where one is missing.
const SYMBOLS: [&str; 31] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorString",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDeviceTotalMem_v2",
    "cuDeviceGetDefaultMemPool",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemAllocAsync",
    "cuMemFreeAsync",
    "cuMemPoolSetAttribute",
    "cuMemPoolGetAttribute",
    "cuMemsetD8Async",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuFuncSetAttribute",
    "cuLaunchKernel",
];

/// Starts the driver; gives the newest CUDA that it knows.
pub(super) fn driver() -> Result<Version, Unavailable> {
    let names = cudarc::get_lib_name_candidates("cuda");
    // The first that loads is the one that the bindings take.
    // SAFETY: the driver's library runs nothing of note when it is loaded, and stays loaded by the bindings.
    let library = names.iter().find_map(|name| unsafe { libloading::Library::new(name) }.ok());
    let library = library.ok_or(Unavailable::NoDriver)?;
    for symbol in SYMBOLS {
        // SAFETY: only its presence is asked for.
        if unsafe { library.get::<*const ()>(symbol.as_bytes()) }.is_err() {
            return Err(Unavailable::MissingSymbol { symbol });
        }
    }
    result::init().map_err(|error| match error.0 {
        sys::CUresult::CUDA_ERROR_NO_DEVICE => Unavailable::NoDevice,
        _ => Unavailable::driver("starting the NVIDIA driver", &error),
    })?;
    let mut version = 0;
    // SAFETY: the address of an int.
    let asked = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    asked.result().map_err(failed("asking the NVIDIA driver's version"))?;
    let version = (version as u32 / 1000, version as u32 % 1000 / 10);
    if version < OLDEST_DRIVER {
        return Err(Unavailable::OldDriver { found: version });
    }
    Ok(version)
}

fn failed(operation: &'static str) -> impl Fn(DriverError) -> Unavailable {
    move |error| Unavailable::driver(operation, &error)
}

/// A device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its number.
    pub ordinal: usize,
    /// Its name.
    pub name: String,
    /// Compute capability: 9.0 is Hopper.
    pub compute_capability: Version,
    /// Bytes of memory.
    pub total_memory: u64,
    /// Bytes that are free.
    pub free_memory: u64,
}

/// A device and what it takes to use it.
pub(super) struct Device {
    pub(super) context: Arc<CudaContext>,
    pub(super) info: DeviceInfo,
}

/// How many devices a started driver has.
fn count() -> Result<usize, Unavailable> {
    let count = result::device::get_count().map_err(failed("counting GPUs"))?;
    match usize::try_from(count) {
        Ok(0) | Err(_) => Err(Unavailable::NoDevice),
        Ok(count) => Ok(count),
    }
}

/// A device of a started driver; `_driver` is the proof.
pub(super) fn device(_driver: Version, ordinal: usize) -> Result<Device, Unavailable> {
    let count = count()?;
    if ordinal >= count {
        return Err(Unavailable::NoSuchDevice { ordinal, count });
    }
    let handle = result::device::get(ordinal as i32).map_err(failed("opening the GPU"))?;
    let name = result::device::get_name(handle).map_err(failed("asking the GPU's name"))?;
    let attribute = |attribute| {
        // SAFETY: the handle is the driver's own.
        let value = unsafe { result::device::get_attribute(handle, attribute) };
        value.map(|value| value as u32).map_err(failed("asking the GPU's compute capability"))
    };
    let compute_capability = (
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    );
    if compute_capability < OLDEST_DEVICE {
        return Err(Unavailable::OldDevice { name, found: compute_capability });
    }
    let context = CudaContext::new(ordinal).map_err(failed("opening the GPU"))?;
    let (free, total) = context.mem_get_info().map_err(failed("asking the GPU's memory"))?;
    let info = DeviceInfo {
        ordinal,
        name,
        compute_capability,
        total_memory: total as u64,
        free_memory: free as u64,
    };
    Ok(Device { context, info })
}

/// All that was found, or why not.
#[derive(Debug)]
pub struct Survey {
    /// Newest CUDA that the driver knows.
    pub driver: Result<Version, Unavailable>,
    /// Each device; none without a driver.
    pub devices: Vec<Result<DeviceInfo, Unavailable>>,
    /// The compiler that the first usable device gets; any without one.
    pub compiler: Result<Compiler, Unavailable>,
    /// Folder of compiled kernels.
    pub cache: Option<PathBuf>,
}

impl Survey {
    /// Whether any device can be used.
    pub fn usable(&self) -> bool {
        self.compiler.is_ok() && self.devices.iter().any(Result::is_ok)
    }
}

/// How many GPUs there are, usable or not.
///
/// # Errors
/// No driver, or one that can't be used; no device.
pub fn device_count() -> Result<usize, Unavailable> {
    driver()?;
    count()
}

/// Looks for all that a GPU needs.
pub fn survey(setup: &Setup) -> Survey {
    let driver = driver();
    let devices: Vec<Result<DeviceInfo, Unavailable>> = match (&driver, driver.as_ref().map(|_| count())) {
        (Ok(version), Ok(Ok(count))) => {
            (0..count).map(|ordinal| device(*version, ordinal).map(|device| device.info)).collect()
        }
        (Ok(_), Ok(Err(unavailable))) => vec![Err(unavailable)],
        _ => Vec::new(),
    };
    let capability = devices.iter().flatten().next().map(|device| device.compute_capability);
    let compiler = nvrtc::find(setup, driver.as_ref().ok().copied(), capability);
    Survey { driver, devices, compiler, cache: setup.cache.clone() }
}
