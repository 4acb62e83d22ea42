//! A command line that must fail, and how one is made.

use super::FIXTURE;
use super::support::writer::{HIDDEN, Model, Quantized, Sizes, Tensor, safetensors, write_json};
use requant::formats::gptq::ZeroConvention;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use tempfile::TempDir;

/// A code, and an input that gives it.
pub(super) type Given = (&'static str, Case);

/// A command line that must fail, and the folders that it needs.
pub(super) struct Case {
    pub(super) command: Command,
    /// Kept until it has run.
    pub(super) dirs: Vec<TempDir>,
}

impl Case {
    pub(super) fn new(dirs: Vec<TempDir>, arguments: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_requant"));
        command.args(arguments).arg("--json").stdin(Stdio::null());
        Self { command, dirs }
    }

    pub(super) fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }
}

pub(super) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

pub(super) fn model() -> Model {
    Model::new(&Quantized::default())
}

pub(super) fn changed(change: impl FnOnce(&mut Model)) -> Model {
    let mut model = model();
    change(&mut model);
    model
}

pub(super) fn inspect(dir: TempDir) -> Case {
    let path = text(dir.path()).to_owned();
    Case::new(vec![dir], &["inspect", &path])
}

pub(super) fn inspect_model(change: impl FnOnce(&mut Model)) -> Case {
    inspect(changed(change).write())
}

/// The header of a valid file, edited.
pub(super) fn header(edit: impl FnOnce(&mut serde_json::Map<String, Value>)) -> Case {
    inspect(model().write_edited(edit))
}

/// A file of weights of these bytes.
pub(super) fn weights(bytes: &[u8]) -> Case {
    let dir = tempfile::tempdir().unwrap();
    model().write_config(dir.path());
    fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    inspect(dir)
}

/// A file with this header and so many bytes of data.
pub(super) fn raw_header(header: &str, data: usize) -> Case {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(vec![0; data]);
    weights(&bytes)
}

/// Bytes of a valid file.
pub(super) fn valid() -> Vec<u8> {
    safetensors(&model().tensors, |_| {})
}

/// A valid sharded model with another index.
pub(super) fn index(index: &str) -> Case {
    let dir = model().write_shards(|_| "a.safetensors", false);
    fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
    inspect(dir)
}

/// Converts a model.
pub(super) fn convert(model: &Model, flags: &[&str]) -> Case {
    let (source, out) = (model.write(), tempfile::tempdir().unwrap());
    let (from, to) = (text(source.path()).to_owned(), out.path().join("out"));
    let command = [&["convert", &from, "--progress", "none", "--out", text(&to)], flags].concat();
    Case::new(vec![source, out], &command)
}

pub(super) fn to_exl2(model: &Model, flags: &[&str]) -> Case {
    convert(model, &[&["--to", "exl2", "--bits", "4"], flags].concat())
}

pub(super) fn to_gptq(model: &Model, flags: &[&str]) -> Case {
    convert(model, &[&["--to", "gptq"], flags].concat())
}

/// Converts a model into a folder that `prepare` makes; the folder is given the name that it should get.
pub(super) fn onto(prepare: impl FnOnce(&Path), flags: &[&str]) -> Case {
    let (source, dir) = (model().write(), tempfile::tempdir().unwrap());
    let (from, out) = (text(source.path()).to_owned(), dir.path().join("out"));
    prepare(&out);
    let command = ["convert", &from, "--to", "same", "--progress", "none", "--out", text(&out)];
    Case::new(vec![source, dir], &[&command, flags].concat())
}

/// What an unfinished job leaves, with this as its state.
pub(super) fn unfinished(out: &Path, job: &str) {
    let state = out.with_file_name("out.partial").join(".job");
    fs::create_dir_all(&state).unwrap();
    fs::write(state.join("job.json"), job).unwrap();
}

/// The fixture as 4-bit EXL2, made once.
pub(super) fn converted() -> &'static Path {
    static DIR: OnceLock<(TempDir, PathBuf)> = OnceLock::new();
    let (_, out) = DIR.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        let mut command = Command::new(env!("CARGO_BIN_EXE_requant"));
        command
            .args(["convert", FIXTURE, "--to", "exl2", "--bits", "4", "--progress", "none", "--out"])
            .arg(&out);
        assert!(command.stdout(Stdio::null()).status().unwrap().success());
        (dir, out)
    });
    out
}

/// A copy of a folder.
pub(super) fn copy_of(dir: &Path) -> TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
    }
    copy
}

/// Validates the fixture's conversion, on few tokens.
pub(super) fn validate(flags: &[&str]) -> Case {
    validate_as(FIXTURE, Vec::new(), text(converted()), flags)
}

pub(super) fn validate_as(source: &str, dirs: Vec<TempDir>, converted: &str, flags: &[&str]) -> Case {
    let few =
        ["--tokens", "64", "--window", "32", "--swap-in", "off", "--progress", "none", "--device", "cpu"];
    Case::new(dirs, &[&["validate", source, converted], &few[..], flags].concat())
}

/// Validates on a text of this name and these bytes.
pub(super) fn on_text(flag: &str, name: &str, bytes: &[u8]) -> Case {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    fs::write(&path, bytes).unwrap();
    let path = text(&path).to_owned();
    validate_as(FIXTURE, vec![dir], text(converted()), &[flag, &path])
}

/// Validates the fixture, with a change, against its conversion, with a change.
pub(super) fn on_copies(change: impl FnOnce(&Path, &Path), flags: &[&str]) -> Case {
    let (source, other) = (copy_of(FIXTURE.as_ref()), copy_of(converted()));
    change(source.path(), other.path());
    let (from, to) = (text(source.path()).to_owned(), text(other.path()).to_owned());
    validate_as(&from, vec![source, other], &to, flags)
}

/// Overwrites the bytes of a tensor in the one file of a folder.
pub(super) fn overwrite(dir: &Path, tensor: &str, change: impl FnOnce(&mut [u8])) {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let path = names.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).min().unwrap();
    let mut bytes = fs::read(&path).unwrap();
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let entries: Value = serde_json::from_slice(&bytes[8..data]).unwrap();
    let at = |i: usize| data + entries[tensor]["data_offsets"][i].as_u64().unwrap() as usize;
    change(&mut bytes[at(0)..at(1)]);
    fs::write(path, bytes).unwrap();
}

pub(super) fn edit_json(path: &Path, edit: impl FnOnce(&mut Value)) {
    let mut value: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    edit(&mut value);
    write_json(path, &value);
}

pub(super) fn asymmetric(bits: u32, convention: ZeroConvention, zero: fn(usize, usize) -> u16) -> Model {
    let mut model = Model::new(&Quantized { bits, convention, zero, ..Quantized::default() });
    model.set("sym", json!(false));
    model
}

pub(super) fn dense(sizes: &Sizes) -> Model {
    let mut model = Model::sized(&Quantized { group_size: 8, ..Quantized::default() }, sizes);
    for (name, k, n) in sizes.linears() {
        model.make_dense(name, k, n);
    }
    model.quant = None;
    model
}

pub(super) fn scales(values: f32) -> Tensor {
    let mut scales = vec![0.01; 2 * HIDDEN];
    scales[3] = values;
    Tensor::f32s(&[2, HIDDEN], &scales)
}

/// Run by a user to whom file modes mean something: the tests may run as root, to whom all are one.
pub(super) fn as_nobody(mut case: Case, dirs: &[&Path]) -> Case {
    for dir in dirs {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).unwrap();
    }
    if fs::metadata("/proc/self").is_ok_and(|metadata| metadata.uid() == 0) {
        case.command.uid(65_534);
    }
    case
}
