//! Real checkpoints decode to the hashes that their makers' tools gave, and what odd but valid ones mean.

mod support;

use half::f16;
use requant::checkpoint::{Checkpoint, OpenOptions};
use serde_json::Value;
use std::path::Path;
use support::{folder, sha256};

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn open(dir: &Path) -> Checkpoint {
    Checkpoint::open(dir, &OpenOptions::default()).unwrap_or_else(|e| panic!("{e:#}"))
}

/// Compares every module with `expected.json`, both ways.
fn assert_decodes(dir: &Path) {
    let expected = json(&dir.join("expected.json"));
    let modules = expected["modules"].as_object().unwrap();
    let checkpoint = open(dir);
    // The file lists routers as well, which are no modules.
    for (name, expected) in modules.iter().filter(|(name, _)| checkpoint.module(name).is_none()) {
        let tensor = checkpoint.tensor(&format!("{name}.weight")).unwrap();
        let (rows, columns) = (tensor.shape()[0], tensor.shape()[1]);
        let stored = tensor.f16s().unwrap();
        let transposed: Vec<f16> =
            (0..rows * columns).map(|i| stored[i % rows * columns + i / rows]).collect();
        assert_eq!(sha256(&transposed), expected["sha256"], "{} {name}", dir.display());
    }
    for module in checkpoint.modules() {
        let expected = &modules[module.name()]; // Panics for a module that the file doesn't list.
        let shape = serde_json::json!([module.in_features(), module.out_features()]);
        assert_eq!(shape, expected["shape"], "{}", module.name());
        let weights = checkpoint.dequantize(module).unwrap_or_else(|e| panic!("{e:#}"));
        assert_eq!(sha256(&weights), expected["sha256"], "{} {}", dir.display(), module.name());
    }
}

#[test]
fn tiny_checkpoints_decode_to_their_hashes() {
    let Some(assets) = folder("REQUANT_ASSETS") else { return };
    let mut count = 0;
    for family in ["tiny", "tiny/dense"] {
        for entry in std::fs::read_dir(assets.join(family)).unwrap() {
            let dir = entry.unwrap().path();
            if dir.join("expected.json").is_file() {
                assert_decodes(&dir);
                count += 1;
            }
        }
    }
    assert_eq!(count, 19);
}

#[test]
fn exllamav2s_own_files_decode_as_its_kernel_does() {
    let Some(assets) = folder("REQUANT_ASSETS") else { return };
    let expected = json(&assets.join("exl2/expected/tiny-decode.json"));
    println!("{}", serde_json::to_string(&expected["models"]).unwrap().chars().take(600).collect::<String>());
}
