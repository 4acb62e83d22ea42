//! The forward pass: perplexities that transformers measured in fp32, on the same tokens.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use requant::kernels::Cpu;
use requant::progress::Silent;
use requant::validate::{Text, Windows, perplexity};
use serde_json::Value;
use std::path::Path;
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
