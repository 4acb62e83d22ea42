//! What the tests of reading share: where the large assets are, and small checkpoints written byte by byte.
#![allow(dead_code)] // Each test binary uses its own part.

pub(crate) mod writer;

use half::f16;
use sha2::{Digest, Sha256};
use std::path::PathBuf;

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
    eprintln!("SKIPPED: {why}");
}

/// sha256 of fp16 weights as little-endian bytes, in hexadecimal.
pub(crate) fn sha256(weights: &[f16]) -> String {
    let digest = Sha256::digest(bytemuck::cast_slice::<f16, u8>(weights));
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
