//! Fuzz targets: opening a directory, and each unpacker, on what no tool would write.
//!
//! They run under proptest, which needs no other toolchain than the stable one. By default each runs so many cases as
//! a test run can bear; `PROPTEST_CASES=1000000 cargo test --test fuzz TARGET` runs as many as one likes
//! (`TMPDIR=/dev/shm` helps the first target). An input that fails is shrunk, printed and kept beside the target's
//! source, in `directory.regressions` or `unpackers.regressions`, which is committed and tried first from then on.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod directory;
#[path = "../support/mod.rs"]
mod support;
mod unpackers;

use proptest::prelude::ProptestConfig;
use proptest::test_runner::FileFailurePersistence;

fn cases(usual: u32) -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(usual);
    let beside = FileFailurePersistence::WithSource("regressions");
    ProptestConfig {
        cases,
        max_shrink_iters: 4096,
        failure_persistence: Some(Box::new(beside)),
        ..ProptestConfig::default()
    }
}
