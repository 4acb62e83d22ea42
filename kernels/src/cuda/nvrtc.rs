//! The compiler: NVRTC, loaded from where it is found.

use super::Setup;
use super::probe::Version;
use super::unavailable::{Unavailable, UnfitReason};
use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

/// NVRTC, loaded.
#[derive(Debug)]
pub struct Compiler {
    library: Library,
    path: PathBuf,
    version: Version,
    /// Compute capabilities that it compiles for, 90 for 9.0.
    architectures: Vec<c_int>,
}

/// A text that a source may include, with its name.
pub(super) type Header = (&'static str, &'static str);

type Program = *mut c_void;
type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Bytes = unsafe extern "C" fn(Program, *mut c_char) -> c_int;

/// Names of the library, the newest first.
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

impl Compiler {
    /// The library: its file, or its name where the loader found it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Loads a library that is one of NVRTC.
    fn load(path: &Path) -> Option<Self> {
        // SAFETY: NVRTC runs nothing of note when it is loaded; another library of its name is the user's to answer
        // for.
        let library = unsafe { Library::new(path) }.ok()?;
        type Pair = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
        type Ints = unsafe extern "C" fn(*mut c_int) -> c_int;
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: the types are those of nvrtc.h; the addresses are of ints, of as many as were counted.
        let architectures = unsafe {
            let version = library.get::<Pair>(b"nvrtcVersion").ok()?;
            let counted = library.get::<Ints>(b"nvrtcGetNumSupportedArchs").ok()?;
            let listed = library.get::<Ints>(b"nvrtcGetSupportedArchs").ok()?;
            if version(&raw mut major, &raw mut minor) != 0 || counted(&raw mut count) != 0 {
                return None;
            }
            let mut architectures = vec![0; usize::try_from(count).ok()?];
            if listed(architectures.as_mut_ptr()) != 0 {
                return None;
            }
            architectures
        };
        let path = if path.is_absolute() { path.into() } else { loaded_from(path).unwrap_or(path.into()) };
        Some(Self { library, path, version: (major as u32, minor as u32), architectures })
    }

    /// Why it can't serve this driver or device.
    fn unfit(&self, driver: Option<Version>, device: Option<Version>) -> Option<UnfitReason> {
        // Within a major version, drivers load what any minor one compiles.
        if let Some(driver) = driver.filter(|driver| self.version.0 > driver.0) {
            return Some(UnfitReason::NewerThanDriver(driver));
        }
        let device = device.filter(|(major, minor)| {
            !self.architectures.iter().any(|&architecture| architecture as u32 == major * 10 + minor)
        });
        device.map(UnfitReason::OlderThanDevice)
    }

    /// Compiles a source to machine code.
    pub(super) fn compile(
        &self,
        file: &'static str,
        source: &str,
        headers: &[Header],
        options: &[String],
    ) -> Result<Vec<u8>, Unavailable> {
        let failed = |log: String| Unavailable::Compilation { file, log };
        // None of our texts holds a NUL.
        let text = |text: &str| CString::new(text).map_err(|error| failed(error.to_string()));
        let (source, name) = (text(source)?, text(file)?);
        let bodies = headers.iter().map(|header| text(header.1)).collect::<Result<Vec<_>, _>>()?;
        let names = headers.iter().map(|header| text(header.0)).collect::<Result<Vec<_>, _>>()?;
        let options = options.iter().map(|option| text(option)).collect::<Result<Vec<_>, _>>()?;
        let pointers = |texts: &[CString]| texts.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
        let (bodies, names, options) = (pointers(&bodies), pointers(&names), pointers(&options));
        type Texts = *const *const c_char;
        type Create =
            unsafe extern "C" fn(*mut Program, *const c_char, *const c_char, c_int, Texts, Texts) -> c_int;
        type Compile = unsafe extern "C" fn(Program, c_int, Texts) -> c_int;
        type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;
        let missing = |error: libloading::Error| failed(error.to_string());
        let mut program: Program = std::ptr::null_mut();
        // SAFETY: the types are those of nvrtc.h; every pointer is to a text or a list that lives to the end of this
        // function, lengths are the lists'; buffers have the sizes asked for just before.
        unsafe {
            let create = self.library.get::<Create>(b"nvrtcCreateProgram").map_err(missing)?;
            let compile = self.library.get::<Compile>(b"nvrtcCompileProgram").map_err(missing)?;
            let destroy = self.library.get::<Destroy>(b"nvrtcDestroyProgram").map_err(missing)?;
            let log_size = self.library.get::<Size>(b"nvrtcGetProgramLogSize").map_err(missing)?;
            let log = self.library.get::<Bytes>(b"nvrtcGetProgramLog").map_err(missing)?;
            let code_size = self.library.get::<Size>(b"nvrtcGetCUBINSize").map_err(missing)?;
            let code = self.library.get::<Bytes>(b"nvrtcGetCUBIN").map_err(missing)?;
            let count = headers.len() as c_int;
            let created = create(
                &raw mut program,
                source.as_ptr(),
                name.as_ptr(),
                count,
                bodies.as_ptr(),
                names.as_ptr(),
            );
            if created != 0 {
                return Err(failed(format!("NVRTC's error {created}")));
            }
            let compiled = compile(program, options.len() as c_int, options.as_ptr());
            let (size, bytes) = if compiled == 0 { (&code_size, &code) } else { (&log_size, &log) };
            let mut length = 0;
            let mut buffer = Vec::new();
            let mut got = size(program, &raw mut length);
            if got == 0 {
                buffer = vec![0u8; length];
                got = bytes(program, buffer.as_mut_ptr().cast());
            }
            destroy(&raw mut program);
            match (compiled, got) {
                (0, 0) => Ok(buffer),
                (0, error) | (error, 1..) => Err(failed(format!("NVRTC's error {error}"))),
                _ => Err(failed(CStr::from_bytes_until_nul(&buffer).map_or_else(
                    |_| String::from_utf8_lossy(&buffer).into_owned(),
                    |log| log.to_string_lossy().trim().to_owned(),
                ))),
            }
        }
    }
}

/// The first compiler that serves this driver and device.
///
/// # Errors
/// [`Unavailable::NoCompiler`]; [`Unavailable::UnfitCompiler`] of the first found where none is fit.
pub(super) fn find(
    setup: &Setup,
    driver: Option<Version>,
    device: Option<Version>,
) -> Result<Compiler, Unavailable> {
    let mut unfit = None;
    for path in candidates(setup) {
        let Some(compiler) = Compiler::load(&path) else { continue };
        match compiler.unfit(driver, device) {
            None => return Ok(compiler),
            Some(reason) => {
                let (path, version) = (compiler.path.display().to_string(), compiler.version);
                unfit.get_or_insert(Unavailable::UnfitCompiler { path, version, reason });
            }
        }
    }
    Err(unfit.unwrap_or(Unavailable::NoCompiler))
}

fn candidates(setup: &Setup) -> Vec<PathBuf> {
    let in_folder = |folder: &PathBuf| {
        NAMES.map(|name| folder.join(name)).into_iter().filter(|path| path.exists()).collect::<Vec<_>>()
    };
    match &setup.cuda_path {
        Some(path) if path.is_file() => vec![path.clone()],
        Some(path) => {
            let below = ["", "lib64", "lib", "targets/x86_64-linux/lib", "nvidia/cu13/lib"];
            below.map(|folder| path.join(folder)).iter().flat_map(in_folder).collect()
        }
        // The loader's own come first: what a system is set up for.
        None => {
            NAMES.map(PathBuf::from).into_iter().chain(setup.folders.iter().flat_map(in_folder)).collect()
        }
    }
}

/// The file that a library found by its name was loaded from.
fn loaded_from(name: &Path) -> Option<PathBuf> {
    let name = name.to_str()?;
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let path =
        maps.lines().find_map(|line| Some(&line[line.find('/')?..]).filter(|path| path.contains(name)));
    path.map(PathBuf::from)
}
