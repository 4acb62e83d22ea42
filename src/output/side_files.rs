//! The source's other files, byte for byte.

use std::ffi::OsString;
use std::fs::{self, File, FileType};
use std::io::{self, Read, Write};
use std::path::Path;

use serde::Serialize;

use super::{Action, Error};
use crate::progress::Observer;

/// What became of the entries at the top level of a source.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SideFiles {
    /// Files copied, sorted by name.
    pub copied: Vec<String>,
    /// Entries left behind, sorted by name.
    pub skipped: Vec<Skipped>,
}

/// An entry that was not copied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Skipped {
    /// Its name.
    pub name: String,
    /// Why.
    pub reason: SkipReason,
}

/// Why an entry of the source was not copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SkipReason {
    /// Weights in whatever container: a loader would take a stray one for the model's.
    Weights,
    /// The index of weights that aren't there any more.
    WeightsIndex,
    /// `config.json`, which is written anew.
    Config,
    /// What quantized the source, which isn't how the output is quantized.
    QuantizationConfig,
    /// The report of an earlier conversion.
    Report,
    /// A directory; none is copied.
    Directory,
    /// A link to nothing.
    BrokenLink,
    /// A socket, pipe or device.
    Special,
}

/// Copies every file at the top level of `source` to `out`, except weights, their indices, configurations
/// that the conversion replaces, and reports of ours. Links are followed: in a hub's cache every file is one.
///
/// # Errors
/// [`Error::Io`] for a file that can't be read or written, or that exists in `out`; [`Error::Cancelled`].
pub fn copy_side_files(source: &Path, out: &Path, observer: &dyn Observer) -> Result<SideFiles, Error> {
    let mut files = SideFiles::default();
    for os_name in names_in(source)? {
        let name = os_name.to_string_lossy().into_owned();
        let from = source.join(&os_name);
        match skip_reason(&from, &name)? {
            Some(reason) => files.skipped.push(Skipped { name, reason }),
            None => {
                copy(&from, &out.join(&os_name), observer)?;
                files.copied.push(name);
            }
        }
    }
    Ok(files)
}

/// Checks that every file that [`copy_side_files`] copies may be read: at the end of a long job would be late.
///
/// # Errors
/// [`Error::Io`] for the first, by name, that can't be opened.
pub fn check_side_files(source: &Path) -> Result<(), Error> {
    for name in names_in(source)? {
        let path = source.join(&name);
        if skip_reason(&path, &name.to_string_lossy())?.is_none() {
            File::open(&path).map_err(Action::Read.failed(&path))?;
        }
    }
    Ok(())
}

/// Names in a directory, sorted.
fn names_in(dir: &Path) -> Result<Vec<OsString>, Error> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(Action::List.failed(dir))? {
        names.push(entry.map_err(Action::List.failed(dir))?.file_name());
    }
    names.sort();
    Ok(names)
}

/// Bytes of the files that [`copy_side_files`] copies; those that can't be looked at are left to it.
pub fn side_file_bytes(source: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(source) else { return 0 };
    let size = |path: &Path, name: &str| match skip_reason(path, name) {
        Ok(None) => fs::metadata(path).map_or(0, |metadata| metadata.len()),
        _ => 0,
    };
    entries.flatten().map(|entry| size(&entry.path(), &entry.file_name().to_string_lossy())).sum()
}

fn skip_reason(path: &Path, name: &str) -> Result<Option<SkipReason>, Error> {
    let kind: FileType = match fs::metadata(path) {
        Ok(metadata) => metadata.file_type(),
        // Absent, in a loop, or through something that is no directory.
        Err(e) if e.kind() != io::ErrorKind::PermissionDenied && path.is_symlink() => {
            return Ok(Some(SkipReason::BrokenLink));
        }
        Err(e) => return Err(Action::Read.failed(path)(e)),
    };
    Ok(match name {
        _ if kind.is_dir() => Some(SkipReason::Directory),
        _ if !kind.is_file() => Some(SkipReason::Special),
        "config.json" => Some(SkipReason::Config),
        "quantize_config.json" | "quant_config.json" | "quantization_config.json" => {
            Some(SkipReason::QuantizationConfig)
        }
        "report.json" | "report.html" => Some(SkipReason::Report),
        _ if holds_weights(name) => Some(SkipReason::Weights),
        _ if indexes_weights(name) => Some(SkipReason::WeightsIndex),
        _ => None,
    })
}

/// Extensions of containers of weights, in lower case.
const WEIGHTS: [&str; 15] = [
    "safetensors",
    "bin",
    "pt",
    "pth",
    "ckpt",
    "gguf",
    "ggml",
    "h5",
    "msgpack",
    "onnx",
    "onnx_data",
    "ot",
    "npz",
    "tflite",
    "pdparams",
];

fn holds_weights(name: &str) -> bool {
    name.rsplit_once('.')
        .is_some_and(|(_, extension)| WEIGHTS.iter().any(|weights| extension.eq_ignore_ascii_case(weights)))
}

/// `model.safetensors.index.json`, and with a variant `model.safetensors.index.fp16.json`.
fn indexes_weights(name: &str) -> bool {
    name.ends_with(".json") && name.split_once(".index.").is_some_and(|(stem, _)| holds_weights(stem))
}

/// Copies bytes only: a hub's cache is read-only, and the output shouldn't be.
fn copy(from: &Path, to: &Path, observer: &dyn Observer) -> Result<(), Error> {
    let mut source = File::open(from).map_err(Action::Read.failed(from))?;
    let mut out = File::create_new(to).map_err(Action::Create.failed(to))?;
    let mut chunk = vec![0; 1 << 16];
    loop {
        if observer.cancelled() {
            return Err(Error::Cancelled);
        }
        match source.read(&mut chunk) {
            Ok(0) => return Ok(()),
            Ok(n) => out.write_all(&chunk[..n]).map_err(Action::Write.failed(to))?,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(Action::Read.failed(from)(e)),
        }
    }
}
