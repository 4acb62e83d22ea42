//! The forward pass: logits and perplexities that transformers measured in fp32, on the same tokens.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use requant::checkpoint::Checkpoint;
use requant::kernels::{Cpu, Operations};
use requant::model::Model;
use requant::progress::Silent;
use requant::validate::{Text, Windows, perplexity};
use serde_json::Value;
use std::path::{Path, PathBuf};
use support::{folder, open};

/// How far a perplexity may be from transformers', relatively. The contract is 1e-3; the sums differ in their
/// order only, which moves the seventh digit in the tiny models and the fifth in SmolLM2's thirty blocks.
const TOLERANCE: f64 = 5e-5;

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Compares a model's mean negative log likelihood with the recorded one.
fn agrees(dir: &Path, text: &Path, window: usize, nll: f64, ids: Option<&str>) {
    let checkpoint = open(dir);
    let windows = Windows::new(&Text::File(text.into()), &checkpoint, 8192, Some(window), false).unwrap();
    if let Some(ids) = ids {
        assert_eq!(windows.sha256(), ids, "{}: other tokens", dir.display());
    }
    let found = perplexity(&checkpoint, &windows, &Cpu::new(0), &Silent).unwrap();
    assert_eq!(found.predictions, 8192 - 8192 / window);
    let ratio = (found.mean_nll - nll).exp() - 1.0;
    assert!(ratio.abs() < TOLERANCE, "{}: {} for {nll}, {ratio:e}", dir.display(), found.mean_nll);
}

#[test]
fn tiny_checkpoints_have_the_perplexity_that_transformers_finds() {
    let Some(assets) = folder("REQUANT_ASSETS") else { return };
    let text = assets.join("text/wikitext2-test.txt");
    let mut checked = 0;
    for parent in ["tiny", "tiny/dense"] {
        for entry in std::fs::read_dir(assets.join(parent)).unwrap() {
            let dir = entry.unwrap().path();
            if !dir.join("config.json").exists() {
                continue;
            }
            let expected = &json(&dir.join("expected.json"))["perplexity"];
            let nll = expected["mean_nll"].as_f64().unwrap();
            agrees(&dir, &text, 256, nll, expected["token_ids_sha256"].as_str());
            checked += 1;
        }
    }
    assert_eq!(checked, 19);
}

#[test]
fn smollm2_has_the_perplexity_that_transformers_finds() {
    let (Some(assets), Some(dir)) = (folder("REQUANT_ASSETS"), folder("REQUANT_SMOLLM2")) else { return };
    let expected = json(&assets.join("smollm2/expected.json"));
    for text in ["wikitext2-test.txt", "heldout.txt"] {
        let nll = expected["perplexity"]["gptq"][text]["nll"].as_f64().unwrap();
        agrees(&dir, &assets.join("text").join(text), 512, nll, None);
    }
}

/// How far a logit of a tiny random model may be from transformers'. Their standard deviation is above 1.
const LOGIT_TOLERANCE: f32 = 1e-4;

/// The models of `fixtures/models`; see `scripts/make_models.py`.
const MODELS: [&str; 16] = [
    "gemma",
    "gemma2",
    "llama-bias",
    "llama-rope-linear",
    "llama-rope-llama3",
    "llama-rope-yarn",
    "mistral-window",
    "mixtral",
    "phi3",
    "phi3-longrope",
    "qwen2-moe",
    "qwen2-moe-step",
    "qwen2-window",
    "qwen3-head-dim",
    "qwen3-moe",
    "qwen3-moe-unnormalised",
];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models").join(name)
}

/// Logits `[tokens, vocabulary]` of windows of `window` tokens.
fn logits(checkpoint: &Checkpoint, tokens: &[u32], window: usize, ops: &Cpu) -> Vec<f32> {
    let model = Model::new(checkpoint).unwrap();
    let mut hidden = model.embedding(ops).unwrap().forward(ops, tokens).unwrap();
    for layer in 0..model.layers() {
        let block = model.block(ops, layer).unwrap();
        hidden = block.forward(ops, &hidden, window, &mut |_, _, _| Ok(())).unwrap();
    }
    ops.download(&model.head(ops).unwrap().logits(ops, &hidden).unwrap()).unwrap()
}

/// Compares the rows that `expected.json` holds; gives the largest difference.
fn largest_difference(name: &str, checkpoint: &Checkpoint) -> f32 {
    let ops = Cpu::new(2);
    let mut largest = 0f32;
    let expected = json(&fixture(name).join("expected.json"));
    for case in expected["cases"].as_array().unwrap() {
        let tokens: Vec<u32> = serde_json::from_value(case["tokens"].clone()).unwrap();
        let rows: Vec<usize> = serde_json::from_value(case["rows"].clone()).unwrap();
        let values: Vec<Vec<f32>> = serde_json::from_value(case["logits"].clone()).unwrap();
        // The text, the text again, and its beginning: a window must not see another, and the last may be short.
        let window = tokens.len();
        let (short, thrice) = (window / 3, [&tokens[..], &tokens[..], &tokens[..window / 3]].concat());
        let found = logits(checkpoint, &thrice, window, &ops);
        assert_eq!(rows.len(), values.len());
        for (&row, expected) in rows.iter().zip(&values) {
            for start in [0, window, 2 * window] {
                if start == 2 * window && row >= short {
                    continue;
                }
                let found = &found[(start + row) * expected.len()..][..expected.len()];
                for (token, (&found, &expected)) in found.iter().zip(expected).enumerate() {
                    let off = (found - expected).abs();
                    assert!(
                        off <= LOGIT_TOLERANCE,
                        "{name}, row {row} from {start}, token {token}: {found} for {expected}"
                    );
                    largest = largest.max(off);
                }
            }
        }
    }
    largest
}

#[test]
fn random_models_have_the_logits_that_transformers_finds() {
    let folders = std::fs::read_dir(fixture("")).unwrap();
    let mut found: Vec<String> =
        folders.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    found.sort();
    assert_eq!(found, MODELS);
    for name in MODELS {
        println!("{name}: {:.1e}", largest_difference(name, &open(&fixture(name))));
    }
}

#[test]
fn configurations_of_transformers_4_give_the_same_logits() {
    for name in MODELS {
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(fixture(name).join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
        std::fs::copy(fixture(name).join("config_v4.json"), dir.path().join("config.json")).unwrap();
        println!("{name}: {:.1e}", largest_difference(name, &open(dir.path())));
    }
}

#[test]
fn logits_are_the_same_bits_for_any_number_of_threads() {
    for name in ["gemma2", "qwen2-moe"] {
        let checkpoint = open(&fixture(name));
        let tokens: Vec<u32> = (0..60).map(|i| i * 7 % 61).collect();
        let of = |threads| -> Vec<u32> {
            logits(&checkpoint, &tokens, 25, &Cpu::new(threads)).iter().map(|x| x.to_bits()).collect()
        };
        let one = of(1);
        assert_eq!(one, of(2), "{name}");
        assert_eq!(one, of(7), "{name}");
    }
}
