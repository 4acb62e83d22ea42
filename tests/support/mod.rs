//! What the tests share: where the large assets are, small checkpoints written byte by byte, and the binary.
#![allow(dead_code)] // Each test binary uses its own part.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

pub(crate) mod binary;
pub(crate) mod consistency;
pub(crate) mod device;
pub(crate) mod writer;

use half::f16;
use requant::WarningCode;
use requant::checkpoint::{Checkpoint, Error, Fault, OpenOptions};
use sha2::{Digest, Sha256};
use std::io::Write;
use std::path::{Path, PathBuf};
use writer::Model;

/// The folder that an environment variable names. `None` skips the test, loudly, unless `REQUIRE_ASSETS=1`.
pub(crate) fn folder(variable: &str) -> Option<PathBuf> {
    let found = std::env::var_os(variable).map(PathBuf::from).filter(|folder| folder.is_dir());
    if found.is_none() {
        skip(&format!("{variable} names no folder"));
    }
    found
}

/// Says that a test doesn't run, or fails it where nothing may be skipped.
pub(crate) fn skip(why: &str) {
    assert!(std::env::var("REQUIRE_ASSETS").as_deref() != Ok("1"), "{why}, and REQUIRE_ASSETS=1");
    // Past the test harness, which would show nothing of a test that passes.
    std::io::stderr().write_all(format!("SKIPPED: {why}\n").as_bytes()).unwrap();
}

/// sha256 of fp16 weights as little-endian bytes, in hexadecimal.
pub(crate) fn sha256(weights: &[f16]) -> String {
    let digest = Sha256::digest(bytemuck::cast_slice::<f16, u8>(weights));
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Opens a directory without options.
pub(crate) fn try_open(dir: &Path) -> Result<Checkpoint, Error> {
    Checkpoint::open(dir, &OpenOptions::default())
}

/// Opens a directory that must be accepted.
pub(crate) fn open(dir: &Path) -> Checkpoint {
    try_open(dir).unwrap_or_else(|e| panic!("{e:#}"))
}

/// The kinds of its warnings.
pub(crate) fn codes(checkpoint: &Checkpoint) -> Vec<WarningCode> {
    checkpoint.warnings().iter().map(|warning| warning.code).collect()
}

/// sha256 of all decoded modules, in order.
pub(crate) fn hashes(checkpoint: &Checkpoint) -> Vec<String> {
    let modules = checkpoint.modules().iter();
    modules.map(|module| sha256(&checkpoint.dequantize(module).unwrap_or_else(|e| panic!("{e:#}")))).collect()
}

/// The error of a directory: its file by name, its tensor, its fault.
pub(crate) fn refused(dir: &Path) -> (String, Option<String>, Fault) {
    let error = try_open(dir).expect_err("was accepted");
    assert!(!error.to_string().is_empty());
    let file = error.file.file_name().unwrap().to_str().unwrap().to_owned();
    (file, error.tensor, *error.fault)
}

/// Checks that a model is refused with `model.safetensors` and this tensor named, and gives the fault.
pub(crate) fn refused_tensor(model: &Model, tensor: &str) -> Fault {
    let dir = model.write();
    let (file, found, fault) = refused(dir.path());
    assert_eq!((file.as_str(), found.as_deref()), ("model.safetensors", Some(tensor)), "{fault}");
    fault
}
