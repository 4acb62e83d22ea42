//! The kernels: their sources, compiled once for a device and kept.

use super::Setup;
use super::nvrtc::{self, Compiler, Header};
use super::probe::Version;
use super::unavailable::Unavailable;
use cudarc::driver::{CudaContext, sys};
use std::ffi::CString;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

/// Each file of kernels, with its kernels by the names they have there.
macro_rules! kernels {
    ($($file:literal { $($kernel:ident $name:literal,)* })*) => {
        /// A kernel.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum Kernel { $($($kernel,)*)* }

        /// Files with their sources and the names of their kernels, in the order of [`Kernel`].
        pub(super) const FILES: &[(&str, &str, &[&str])] =
            &[$(($file, include_str!($file), &[$($name,)*]),)*];
    };
}

kernels! {
    "decode.cu" {
        Pack "pack",
        DecodePanelGptqHalf "decode_panel_gptq_half",
        DecodePanelGptqFloat "decode_panel_gptq_float",
        DecodePanelExl2 "decode_panel_exl2",
        DecodeAllGptqHalf "decode_all_gptq_half",
        DecodeAllGptqFloat "decode_all_gptq_float",
        DecodeAllExl2 "decode_all_exl2",
        DenseToHalf "dense_to_half",
        Embed "embed",
    }
    "product.cu" {
        SplitF16 "split_f16",
        SplitBf16 "split_bf16",
        MultiplyF16Weight "multiply_f16_weight",
        MultiplyBf16Weight "multiply_bf16_weight",
        MultiplyF32Weight "multiply_f32_weight",
        MultiplyGptqHalf "multiply_gptq_half",
        MultiplyGptqFloat "multiply_gptq_float",
        MultiplyExl2 "multiply_exl2",
        AddChunks "add_chunks",
    }
    "rows.cu" {
        RmsNorm "rms_norm",
        Rotate "rotate",
        Gate "gate",
        Add "add",
        AddRows "add_rows",
        SoftCap "soft_cap",
        Take "take",
    }
    "attention.cu" {
        Attend64 "attend_64",
        Attend128 "attend_128",
        Attend256 "attend_256",
    }
    "compare.cu" {
        FirstNonFinite "first_non_finite",
        Difference "difference",
        NegativeLogLikelihood "negative_log_likelihood",
        CompareLogits "compare_logits",
    }
}

/// What the sources include.
pub(super) const HEADERS: [Header; 2] =
    [("ptx.cuh", include_str!("ptx.cuh")), ("packed.cuh", include_str!("packed.cuh"))];

/// How a device's kernels are compiled. Never with approximate functions: results are compared.
pub(super) fn options(compute_capability: Version) -> Vec<String> {
    let (major, minor) = compute_capability;
    vec![format!("--gpu-architecture=sm_{major}{minor}"), "--std=c++17".into()]
}

/// The kernels of a device, loaded.
pub(super) struct Kernels {
    functions: Vec<sys::CUfunction>,
}

// SAFETY: handles of functions are valid in every thread; the modules are never unloaded.
unsafe impl Send for Kernels {}
// SAFETY: as above.
unsafe impl Sync for Kernels {}

impl Kernels {
    pub(super) fn function(&self, kernel: Kernel) -> sys::CUfunction {
        // As many as there are kernels, in their order.
        self.functions[kernel as usize]
    }

    /// Takes the kernels from the cache, or compiles them. Modules stay loaded for the life of the process: a
    /// program opens a device once.
    pub(super) fn load(
        context: &Arc<CudaContext>,
        driver: Version,
        compute_capability: Version,
        setup: &Setup,
    ) -> Result<Self, Unavailable> {
        let failed = |operation| move |error| Unavailable::driver(operation, &error);
        context.bind_to_thread().map_err(failed("binding the GPU"))?;
        let compiler = nvrtc::find(setup, Some(driver), Some(compute_capability))?;
        let mut functions = Vec::new();
        for (file, source, names) in FILES {
            let code =
                compiled(&compiler, setup.cache.as_deref(), file, source, &options(compute_capability))?;
            let mut module = std::ptr::null_mut();
            // SAFETY: `code` is a whole image of machine code, as the compiler or the checked cache gave it; the
            // driver copies it.
            let loaded = unsafe { sys::cuModuleLoadData(&raw mut module, code.as_ptr().cast()) };
            loaded.result().map_err(failed("loading kernels"))?;
            for name in *names {
                let mut function = std::ptr::null_mut();
                let text = CString::new(*name).unwrap_or_default();
                // SAFETY: the module was loaded above, the name is a C string.
                let found = unsafe { sys::cuModuleGetFunction(&raw mut function, module, text.as_ptr()) };
                found.result().map_err(failed("looking up a kernel"))?;
                functions.push(function);
            }
        }
        let kernels = Self { functions };
        for (kernel, bytes) in super::product::SHARED_MEMORY {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is loaded.
            let set = unsafe { sys::cuFuncSetAttribute(kernels.function(kernel), attribute, bytes as i32) };
            set.result().map_err(failed("reserving shared memory"))?;
        }
        Ok(kernels)
    }
}

/// Machine code of a file, from the cache where it has it whole.
pub(super) fn compiled(
    compiler: &Compiler,
    cache: Option<&Path>,
    file: &'static str,
    source: &str,
    options: &[String],
) -> Result<Vec<u8>, Unavailable> {
    let key = key(compiler, source, options);
    let path = cache.map(|cache| cache.join("kernels").join(format!("{file}-{key:032x}.cubin")));
    if let Some(code) = path.as_deref().and_then(read) {
        return Ok(code);
    }
    let code = compiler.compile(file, source, &HEADERS, options)?;
    if let Some(path) = &path {
        // A cache that can't be written only costs time.
        let _ = write(path, &code);
    }
    Ok(code)
}

/// All that machine code depends on.
fn key(compiler: &Compiler, source: &str, options: &[String]) -> u128 {
    let mut hash = Xxh3::new();
    let (major, minor) = compiler.version();
    let version = format!("{major}.{minor}");
    let headers = HEADERS.iter().map(|header| header.1);
    let parts = [source, &version].into_iter().chain(headers).chain(options.iter().map(String::as_str));
    for part in parts {
        // The length keeps parts apart.
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hash.digest128()
}

/// Bytes of the checksum that an entry begins with.
const CHECKSUM: usize = 16;

/// An entry's code, unless it is absent or damaged.
fn read(path: &Path) -> Option<Vec<u8>> {
    let bytes = std::fs::read(path).ok()?;
    let (sum, code) = bytes.split_first_chunk::<CHECKSUM>()?;
    (u128::from_le_bytes(*sum) == xxh3_128(code)).then(|| code.to_vec())
}

/// Writes an entry whole, or not at all.
fn write(path: &Path, code: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(&xxh3_128(code).to_le_bytes())?;
    file.write_all(code)?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    Ok(())
}
