//! Where the compiler is looked for, and where compiled kernels are kept.

use std::env;
use std::path::PathBuf;

/// Where the compiler is looked for, and where compiled kernels are kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Setup {
    /// A library of NVRTC, or a folder that has one: nothing else is tried.
    pub cuda_path: Option<PathBuf>,
    /// Folders to look into, before and after the loader's own, in this order.
    pub folders: Vec<PathBuf>,
    /// Folder of compiled kernels; they are compiled each time where it is absent.
    pub cache: Option<PathBuf>,
}

/// Folders of NVRTC below a toolkit's.
const OF_TOOLKIT: [&str; 4] = ["lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"];
/// Folders of NVRTC in Python's packages: wheels of CUDA 13, of CUDA 12.
const OF_WHEELS: [&str; 3] = ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "nvidia/cu12/lib"];

impl Setup {
    /// From `REQUANT_CUDA_PATH` (a folder with NVRTC, nothing else is tried), `CUDA_HOME` and `CUDA_PATH`, the
    /// folders of toolkits and of the Pythons in sight; `REQUANT_CACHE`, or the user's cache folder.
    pub fn from_environment() -> Self {
        Self { cuda_path: variable("REQUANT_CUDA_PATH"), folders: folders(), cache: cache() }
    }
}

fn variable(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

fn cache() -> Option<PathBuf> {
    let of_user = || variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
    variable("REQUANT_CACHE").or_else(|| Some(of_user()?.join("requant")))
}

fn folders() -> Vec<PathBuf> {
    let mut toolkits: Vec<PathBuf> = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable).collect();
    toolkits.extend(["/usr/local/cuda", "/opt/cuda"].map(PathBuf::from));
    toolkits.extend(children("/usr/local".into(), "cuda-"));
    let mut folders: Vec<PathBuf> =
        toolkits.iter().flat_map(|toolkit| OF_TOOLKIT.map(|folder| toolkit.join(folder))).collect();

    // Where Pythons lie: an environment that is active, those of the programs in the path, the user's, the system's.
    let mut prefixes: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable).collect();
    let path = env::var_os("PATH").unwrap_or_default();
    for folder in env::split_paths(&path) {
        let python = folder.join("python3");
        if !python.exists() {
            continue;
        }
        prefixes.extend(folder.parent().map(PathBuf::from));
        // A link, as in /usr/bin, leads to where the packages are.
        let target = python.canonicalize().ok();
        prefixes.extend(target.and_then(|target| Some(target.parent()?.parent()?.into())));
    }
    prefixes.extend(variable("HOME").map(|home| home.join(".local")));
    prefixes.extend(["/usr/local", "/usr"].map(PathBuf::from));
    for prefix in prefixes {
        for library in children(prefix.join("lib"), "python3") {
            for packages in ["site-packages", "dist-packages"] {
                folders.extend(OF_WHEELS.map(|folder| library.join(packages).join(folder)));
            }
        }
        // Conda's own package.
        folders.push(prefix.join("lib"));
    }
    let mut unique: Vec<PathBuf> = Vec::new();
    for folder in folders {
        if folder.is_dir() && !unique.contains(&folder) {
            unique.push(folder);
        }
    }
    unique
}

/// Folders in one whose names begin so, the last name first: the newest version.
fn children(folder: PathBuf, prefix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let named = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix));
    let mut children: Vec<PathBuf> = named.map(|entry| entry.path()).collect();
    children.sort();
    children.reverse();
    children
}
