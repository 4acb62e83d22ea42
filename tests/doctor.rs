//! `requant doctor` and `--device`, on machines with and without a GPU.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use serde_json::Value;
use std::path::PathBuf;
use support::binary::requant;

#[test]
fn says_what_is_missing_and_what_to_do() {
    let doctor = || {
        let mut command = requant();
        command.arg("doctor").env("REQUANT_CUDA_PATH", "/nonexistent").env("REQUANT_CACHE", "/the/cache");
        command
    };
    let text = doctor().output().unwrap();
    assert_eq!((text.status.code(), text.stderr.as_slice()), (Some(0), &b""[..]));
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("NVRTC     NVRTC, which compiles the kernels, was not found\n"), "{text}");
    assert!(text.contains("hint: pip install nvidia-cuda-nvrtc"), "{text}");
    assert!(text.ends_with("cache     /the/cache\n--device  auto takes the CPU\n"), "{text}");

    let json = doctor().arg("--json").output().unwrap();
    assert_eq!(json.status.code(), Some(0));
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert!(json["nvrtc"]["hint"].as_str().unwrap().contains("REQUANT_CUDA_PATH"));
    assert_eq!(json["cache"], "/the/cache");
    assert_eq!(json["auto"], "cpu");
    assert!(json["devices"].is_array());
}

/// Toolkits have a stub of the driver's library to link with; here it is another library altogether.
#[test]
#[cfg(target_os = "linux")]
fn a_library_that_is_no_driver_is_told() {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let libc =
        maps.lines().find_map(|line| line.split_whitespace().last().filter(|path| path.contains("/libc.so")));
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(PathBuf::from(libc.unwrap()), dir.path().join("libcuda.so")).unwrap();
    let output = requant().args(["doctor", "--json"]).env("LD_LIBRARY_PATH", dir.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["driver"]["problem"], "the NVIDIA driver lacks cuInit");
    assert_eq!((json["devices"].as_array().unwrap().len(), &json["auto"]), (0, &Value::from("cpu")));
}

#[test]
fn a_device_that_cannot_be_used_fails_unless_it_was_left_open() {
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures");
    for word in ["gpu", "cuda:x", "cuda0"] {
        let output = requant().args(["validate", fixture, fixture, "--device", word]).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{word}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains("`auto`, `cpu`, `cuda`, or `cuda:N`"), "{text}");
    }
}
