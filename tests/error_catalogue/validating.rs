//! Texts, models and limits of a validation; faults of a verification; flags.

use super::case::*;
use super::support::writer::DOWN;
use super::{EXL2, FIXTURE};
use serde_json::{Value, json};
use std::fs;

pub(super) fn validating() -> Vec<Given> {
    let other_model = || {
        let source = model().write();
        let path = text(source.path()).to_owned();
        validate_as(&path, vec![source], EXL2, &[])
    };
    vec![
        ("validate.read", validate(&["--text", "/nowhere/a.txt"])),
        ("validate.unknown_kind", on_text("--text", "a.json", b"[]")),
        ("validate.not_utf8", on_text("--text", "a.txt", b"text \xff")),
        ("validate.line", on_text("--text", "a.jsonl", b"{\"text\": 3}\n")),
        ("validate.parquet", on_text("--text", "a.parquet", b"PAR1")),
        (
            "validate.tokenizer",
            on_copies(|source, _| fs::write(source.join("tokenizer.json"), "{}").unwrap(), &[]),
        ),
        (
            "validate.no_tokenizer",
            on_copies(|source, _| fs::remove_file(source.join("tokenizer.json")).unwrap(), &[]),
        ),
        ("validate.token_ids", on_text("--token-ids", "a.json", b"{}")),
        ("validate.token_out_of_range", on_text("--token-ids", "a.json", b"[1, 2, 100000]")),
        ("validate.too_short", on_text("--token-ids", "a.json", b"[1]")),
        (
            "validate.no_bos",
            on_copies(
                |source, other| {
                    fs::remove_file(other.join("report.json")).unwrap();
                    for dir in [source, other] {
                        let forget =
                            |value: &mut Value| drop(value.as_object_mut().unwrap().remove("bos_token_id"));
                        edit_json(&dir.join("config.json"), forget);
                        let _ = fs::remove_file(dir.join("generation_config.json"));
                    }
                },
                &["--bos"],
            ),
        ),
        ("validate.window", validate_window()),
        ("validate.mismatch", other_model()),
        ("validate.nothing_in_common", {
            let unknown = changed(|m| {
                m.config["architectures"] = json!(["SomethingNew"]);
                m.rename(|name| name.replace("model.layers", "transformer.h").replace("lm_head", "output"));
            });
            let source = unknown.write();
            let path = text(source.path()).to_owned();
            validate_as(&path, vec![source], EXL2, &[])
        }),
        ("validate.report", on_copies(|_, other| fs::write(other.join("report.json"), "{}").unwrap(), &[])),
        ("validate.no_layers", validate_layers("no_such_layer")),
        ("validate.pattern", validate_layers("(")),
        ("validate.device", validate_device()),
        ("validate.gate_missed", validate(&["--max-kl", "0"])),
        (
            "validate.broken",
            on_copies(|_, other| overwrite(other, &format!("{DOWN}.q_scale"), |bytes| bytes.reverse()), &[]),
        ),
        (
            "validate.not_finite",
            on_copies(
                |source, other| {
                    // Each weight is finite, and what the norm makes of them isn't.
                    for dir in [source, other] {
                        overwrite(dir, "model.norm.weight", |bytes| {
                            bytes.chunks_exact_mut(2).for_each(|half| half.copy_from_slice(&[0xff, 0x7f]));
                        });
                    }
                },
                &[],
            ),
        ),
    ]
}

fn validate_layers(layers: &str) -> Case {
    let few = ["--tokens", "64", "--progress", "none", "--device", "cpu", "--layers", layers];
    Case::new(vec![], &[&["validate", FIXTURE, text(converted())], &few[..]].concat())
}

fn validate_window() -> Case {
    let few = ["--tokens", "64", "--progress", "none", "--device", "cpu", "--window", "1"];
    Case::new(vec![], &[&["validate", FIXTURE, text(converted())], &few[..]].concat())
}

/// The thousandth GPU, which no machine has.
fn validate_device() -> Case {
    let few = ["--tokens", "64", "--progress", "none", "--device", "cuda:999"];
    Case::new(vec![], &[&["validate", FIXTURE, text(converted())], &few[..]].concat())
}

pub(super) fn commands() -> Vec<Given> {
    let broken = copy_of(converted());
    fs::remove_file(broken.path().join("tokenizer.json")).unwrap();
    let path = text(broken.path()).to_owned();
    vec![
        ("verify.failed", Case::new(vec![broken], &["verify", &path, "--progress", "none"])),
        ("cli.usage", Case::new(vec![], &["convert", FIXTURE, "--to", "exl2", "--out", "x", "--bits", "7"])),
        ("cli.environment", Case::new(vec![], &["man", "/dev/null/no"])),
    ]
}
