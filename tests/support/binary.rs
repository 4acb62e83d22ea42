//! Runs the binary, and reads the directory that it wrote.

use super::{open, writer::Model};
use assert_cmd::Command;
use half::f16;
use requant::checkpoint::{Checkpoint, Layout};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// The checkpoint that every machine has.
pub(crate) const FIXTURE: &str = "fixtures/tiny-llama-gptq";

/// The binary, with an environment that doesn't change what it prints.
pub(crate) fn requant() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_requant"));
    command.env("COLUMNS", "100").env("NO_COLOR", "1");
    command
}

/// A finished conversion.
pub(crate) struct Converted {
    /// Keeps the directory.
    _dir: TempDir,
    pub(crate) out: PathBuf,
    pub(crate) report: Value,
    pub(crate) config: Value,
    pub(crate) checkpoint: Checkpoint,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// What an error says in JSON, and the exit code.
pub(crate) struct Refused {
    pub(crate) exit: i32,
    pub(crate) error: Value,
}

/// Runs `requant convert SOURCE --to exl2 --out …`, which must succeed.
pub(crate) fn convert(source: &Path, flags: &[&str]) -> Converted {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let mut command = requant();
    command.arg("convert").arg(source).args(["--to", "exl2", "--out"]).arg(&out).args(flags);
    let ran = command.output().unwrap();
    let stderr = String::from_utf8(ran.stderr).unwrap();
    assert!(ran.status.success(), "{} {flags:?}: {stderr}", source.display());
    let (report, config) = (json_of(&out.join("report.json")), json_of(&out.join("config.json")));
    let (checkpoint, stdout) = (open(&out), String::from_utf8(ran.stdout).unwrap());
    assert_eq!(checkpoint.warnings(), [], "the output is odd");
    assert_eq!(names_in(dir.path()), ["out"]);
    Converted { _dir: dir, out, report, config, checkpoint, stdout, stderr }
}

/// The same for a checkpoint that is written first.
pub(crate) fn convert_model(model: &Model, flags: &[&str]) -> Converted {
    convert(model.write().path(), flags)
}

/// Runs a conversion that must fail, and checks that it writes nothing, on stdout neither.
pub(crate) fn refuse(source: &Path, flags: &[&str]) -> Refused {
    let dir = tempfile::tempdir().unwrap();
    let mut command = requant();
    command.arg("convert").arg(source).args(["--to", "exl2", "--json", "--progress", "none", "--out"]);
    let ran = command.arg(dir.path().join("out")).args(flags).output().unwrap();
    let stderr = String::from_utf8(ran.stderr).unwrap();
    assert!(!ran.status.success(), "{} {flags:?} was accepted", source.display());
    assert_eq!(ran.stdout, b"", "{flags:?}");
    assert_eq!(names_in(dir.path()), [""; 0], "{flags:?}: something was written");
    let exit = ran.status.code().unwrap_or_else(|| panic!("{flags:?}: {stderr}"));
    let error =
        serde_json::from_str(stderr.trim_end()).unwrap_or_else(|e| panic!("{flags:?}: {e}: {stderr}"));
    Refused { exit, error }
}

/// The same for a checkpoint that is written first.
pub(crate) fn refuse_model(model: &Model, flags: &[&str]) -> Refused {
    refuse(model.write().path(), flags)
}

impl Refused {
    /// A field of the error; "" where it is null.
    pub(crate) fn text(&self, key: &str) -> &str {
        self.error[key].as_str().unwrap_or_default()
    }
}

impl Converted {
    /// The report's entry of a module, by its name in the output.
    pub(crate) fn module(&self, name: &str) -> &Value {
        let mut modules = self.report["modules"].as_array().unwrap().iter();
        modules.find(|m| m["name"] == name).unwrap_or_else(|| panic!("no {name} in the report"))
    }

    /// Messages of the warnings of a kind, with their subjects.
    pub(crate) fn warnings(&self, code: &str) -> Vec<(String, String)> {
        let all = self.report["warnings"].as_array().unwrap().iter().filter(|w| w["code"] == code);
        let text = |w: &Value, key: &str| w[key].as_str().unwrap().to_owned();
        all.map(|w| (text(w, "subject"), text(w, "message"))).collect()
    }

    /// The kinds of all warnings, each once, sorted.
    pub(crate) fn warning_codes(&self) -> Vec<String> {
        let all = self.report["warnings"].as_array().unwrap().iter();
        let mut codes: Vec<String> = all.map(|w| w["code"].as_str().unwrap().to_owned()).collect();
        codes.sort();
        codes.dedup();
        codes
    }

    /// Bits of each width that the report gives for a module, the widest first.
    pub(crate) fn widths(&self, name: &str) -> Vec<u64> {
        let widths = self.module(name)["widths"].as_array().unwrap();
        widths.iter().map(|pair| pair[0].as_u64().unwrap()).collect()
    }

    /// Recomputes each module's relative Frobenius error from the source and the output, as both decode, and
    /// compares it with the report's. Gives the number of modules that are EXL2.
    pub(crate) fn assert_errors(&self, source: &Checkpoint) -> usize {
        let mut count = 0;
        let entries = self.report["modules"].as_array().unwrap();
        let order = |source: Option<&str>| -> Option<Vec<usize>> {
            let entry = entries.iter().find(|entry| entry["source"].as_str() == source)?;
            serde_json::from_value(entry["row_order"].clone()).ok()
        };
        for entry in entries {
            let name = entry["name"].as_str().unwrap();
            let module = self.checkpoint.module(name).unwrap();
            let is_exl2 = matches!(module.layout(), Layout::Exl2(_));
            assert_eq!(entry["layout_after"], if is_exl2 { "exl2" } else { "dense" }, "{name}");
            count += usize::from(is_exl2);
            let wanted = match source.module(entry["source"].as_str().unwrap()) {
                Some(module) => source.dequantize(module).unwrap(),
                None => transposed_embedding(source),
            };
            let n = module.out_features();
            let rows = order(entry["source"].as_str());
            let columns = entry["decision"]["columns_follow"].as_str().and_then(|down| order(Some(down)));
            let place = |at: usize| {
                let row = rows.as_ref().map_or(at / n, |order| order[at / n]);
                row * n + columns.as_ref().map_or(at % n, |order| order[at % n])
            };
            let wanted: Vec<f16> = (0..wanted.len()).map(|at| wanted[place(at)]).collect();
            let found = relative_error(&wanted, &self.checkpoint.dequantize(module).unwrap());
            let stated = entry["relative_error"].as_f64().unwrap();
            let close = (found - stated).abs() <= 1e-6 * stated;
            assert!(close, "{name}: {found} by the files, {stated} by the report");
        }
        count
    }
}

/// Checks a written checkpoint's conversion against its files and recomputes its errors: see
/// [`Converted::assert_consistent`] and [`Converted::assert_errors`], whose count this gives.
pub(crate) fn quantized(converted: &Converted, source: &Model) -> usize {
    let dir = source.write();
    let source = open(dir.path());
    converted.assert_consistent(&source);
    converted.assert_errors(&source)
}

/// The embedding as a head `[hidden, vocabulary]` in fp16.
fn transposed_embedding(source: &Checkpoint) -> Vec<f16> {
    let tensor = source.tensor("model.embed_tokens.weight").unwrap();
    let (floats, columns) = (tensor.floats().unwrap(), tensor.shape()[0]);
    let rows = tensor.shape()[1];
    (0..rows * columns).map(|i| f16::from_f32(floats[i % columns * rows + i / columns])).collect()
}

/// Frobenius norm of the difference over that of `wanted`.
pub(crate) fn relative_error(wanted: &[f16], found: &[f16]) -> f64 {
    assert_eq!(wanted.len(), found.len());
    let (mut error, mut norm) = (0.0, 0.0);
    for (wanted, found) in wanted.iter().zip(found).map(|(w, f)| (w.to_f64(), f.to_f64())) {
        error += (wanted - found).powi(2);
        norm += wanted.powi(2);
    }
    if error == 0.0 { 0.0 } else { f64::sqrt(error / norm) }
}

/// A JSON file.
pub(crate) fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap())
        .unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Names in a directory, sorted.
pub(crate) fn names_in(dir: &Path) -> Vec<String> {
    files_in(dir).into_keys().collect()
}

/// Every file of a directory with its bytes; directories with none.
pub(crate) fn files_in(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let named = entries.map(|path| {
        let bytes = if path.is_file() { std::fs::read(&path).unwrap() } else { Vec::new() };
        (path.file_name().unwrap().to_str().unwrap().to_owned(), bytes)
    });
    named.collect()
}
