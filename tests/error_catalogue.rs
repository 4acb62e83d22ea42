//! docs/errors.md, the program's codes and inputs that give them: all three are one list.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use requant::arch::{self, Dims};
use requant::formats::gptq::ZeroConvention;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use support::binary::FIXTURE;
use support::writer::{
    DOWN, HIDDEN, INTERMEDIATE, LINEARS, Model, Q, Quantized, Sizes, Tensor, Tensors, VOCAB, gptq_module,
    safetensors, write_json,
};
use tempfile::TempDir;

const EXL2: &str = "fixtures/tiny-llama-exl2-4.0bpw";

// The page and the program.

/// Rows of the page: code, exit code, whether a row says something in every cell.
fn page() -> (BTreeMap<String, i32>, BTreeSet<String>) {
    let text = fs::read_to_string("docs/errors.md").unwrap();
    let (codes, unprovoked) = text.split_once("\n## Codes that no input gives\n").unwrap();
    let rows = |text: &str| -> Vec<Vec<String>> {
        let lines = text.lines().filter(|line| line.starts_with("| `"));
        let cells = |line: &str| {
            let inner = line.trim_start_matches("| ").trim_end_matches('|');
            inner.split(" | ").map(|cell| cell.trim().trim_matches('`').to_owned()).collect()
        };
        lines.map(cells).collect()
    };
    let mut found = BTreeMap::new();
    // The table of exit codes has no code in its first cell.
    for row in rows(codes) {
        let [code, exit, meaning, what_to_do] = &row[..] else { panic!("{row:?}") };
        assert!(meaning.ends_with('.'), "{code}: {meaning}");
        assert!(what_to_do.ends_with('.') || what_to_do.is_empty(), "{code}: {what_to_do}");
        let twice = found.insert(code.clone(), exit.parse().unwrap());
        assert_eq!(twice, None, "{code} stands twice");
    }
    let unprovoked = rows(unprovoked);
    assert!(unprovoked.iter().all(|row| row.len() == 2 && !row[1].is_empty()));
    (found, unprovoked.into_iter().map(|row| row[0].clone()).collect())
}

/// Every string of the sources that is a code: `layer.name` in quotes, with a layer that has codes.
fn codes_of_the_program() -> BTreeSet<String> {
    const LAYERS: [&str; 8] =
        ["checkpoint", "plan", "simd", "convert", "output", "validate", "verify", "cli"];
    let mut codes = BTreeSet::from(["interrupted".to_owned()]);
    let mut folders = vec![PathBuf::from("src"), PathBuf::from("kernels/src"), PathBuf::from("formats/src")];
    let mut seen_diagnose = 0;
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let Some("rs") = path.extension().and_then(|extension| extension.to_str()) else { continue };
            let text = fs::read_to_string(&path).unwrap();
            seen_diagnose += usize::from(text.contains("impl Diagnose for"));
            for part in text.split('"') {
                let name = |part: &str| {
                    !part.is_empty()
                        && part.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
                };
                if part.split_once('.').is_some_and(|(layer, rest)| LAYERS.contains(&layer) && name(rest)) {
                    codes.insert(part.to_owned());
                }
            }
        }
    }
    assert!(seen_diagnose >= 6, "the sources weren't read");
    codes
}

#[test]
fn the_page_has_every_code_of_the_program_and_no_other() {
    let (page, unprovoked) = page();
    let page: BTreeSet<String> = page.into_keys().collect();
    let program = codes_of_the_program();
    let difference =
        |a: &BTreeSet<String>, b: &BTreeSet<String>| a.difference(b).cloned().collect::<Vec<_>>();
    assert_eq!(difference(&program, &page), [""; 0], "not in docs/errors.md");
    assert_eq!(difference(&page, &program), [""; 0], "in docs/errors.md only");
    assert_eq!(difference(&unprovoked, &page), [""; 0], "said to be given by no input, and not listed");
    assert!(fs::read_to_string("README.md").unwrap().contains("(docs/errors.md)"), "README.md has no link");
}

// Inputs.

/// A command line that must fail, and the folders that it needs.
struct Case {
    command: Command,
    /// Kept until it has run.
    _dirs: Vec<TempDir>,
}

impl Case {
    fn new(dirs: Vec<TempDir>, arguments: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_requant"));
        command.args(arguments).arg("--json").stdin(Stdio::null());
        Self { command, _dirs: dirs }
    }

    fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn model() -> Model {
    Model::new(&Quantized::default())
}

fn changed(change: impl FnOnce(&mut Model)) -> Model {
    let mut model = model();
    change(&mut model);
    model
}

fn inspect(dir: TempDir) -> Case {
    let path = text(dir.path()).to_owned();
    Case::new(vec![dir], &["inspect", &path])
}

fn inspect_model(change: impl FnOnce(&mut Model)) -> Case {
    inspect(changed(change).write())
}

/// The header of a valid file, edited.
fn header(edit: impl FnOnce(&mut serde_json::Map<String, Value>)) -> Case {
    inspect(model().write_edited(edit))
}

/// A file of weights of these bytes.
fn weights(bytes: &[u8]) -> Case {
    let dir = tempfile::tempdir().unwrap();
    model().write_config(dir.path());
    fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    inspect(dir)
}

/// A file with this header and so many bytes of data.
fn raw_header(header: &str, data: usize) -> Case {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(vec![0; data]);
    weights(&bytes)
}

/// Bytes of a valid file.
fn valid() -> Vec<u8> {
    safetensors(&model().tensors, |_| {})
}

/// A valid sharded model with another index.
fn index(index: &str) -> Case {
    let dir = model().write_shards(|_| "a.safetensors", false);
    fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
    inspect(dir)
}

/// Converts a model.
fn convert(model: &Model, flags: &[&str]) -> Case {
    let (source, out) = (model.write(), tempfile::tempdir().unwrap());
    let (from, to) = (text(source.path()).to_owned(), out.path().join("out"));
    let command = [&["convert", &from, "--progress", "none", "--out", text(&to)], flags].concat();
    Case::new(vec![source, out], &command)
}

fn to_exl2(model: &Model, flags: &[&str]) -> Case {
    convert(model, &[&["--to", "exl2", "--bits", "4"], flags].concat())
}

fn to_gptq(model: &Model, flags: &[&str]) -> Case {
    convert(model, &[&["--to", "gptq"], flags].concat())
}

/// Converts a model into a folder that `prepare` makes; the folder is given the name that it should get.
fn onto(prepare: impl FnOnce(&Path), flags: &[&str]) -> Case {
    let (source, dir) = (model().write(), tempfile::tempdir().unwrap());
    let (from, out) = (text(source.path()).to_owned(), dir.path().join("out"));
    prepare(&out);
    let command = ["convert", &from, "--to", "same", "--progress", "none", "--out", text(&out)];
    Case::new(vec![source, dir], &[&command, flags].concat())
}

/// What an unfinished job leaves, with this as its state.
fn unfinished(out: &Path, job: &str) {
    let state = out.with_file_name("out.partial").join(".job");
    fs::create_dir_all(&state).unwrap();
    fs::write(state.join("job.json"), job).unwrap();
}

/// The fixture as 4-bit EXL2, made once.
fn converted() -> &'static Path {
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
fn copy_of(dir: &Path) -> TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
    }
    copy
}

/// Validates the fixture's conversion, on few tokens.
fn validate(flags: &[&str]) -> Case {
    validate_as(FIXTURE, Vec::new(), text(converted()), flags)
}

fn validate_as(source: &str, dirs: Vec<TempDir>, converted: &str, flags: &[&str]) -> Case {
    let few =
        ["--tokens", "64", "--window", "32", "--swap-in", "off", "--progress", "none", "--device", "cpu"];
    Case::new(dirs, &[&["validate", source, converted], &few[..], flags].concat())
}

/// Validates on a text of this name and these bytes.
fn on_text(flag: &str, name: &str, bytes: &[u8]) -> Case {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    fs::write(&path, bytes).unwrap();
    let path = text(&path).to_owned();
    validate_as(FIXTURE, vec![dir], text(converted()), &[flag, &path])
}

/// Validates the fixture, with a change, against its conversion, with a change.
fn on_copies(change: impl FnOnce(&Path, &Path), flags: &[&str]) -> Case {
    let (source, other) = (copy_of(FIXTURE.as_ref()), copy_of(converted()));
    change(source.path(), other.path());
    let (from, to) = (text(source.path()).to_owned(), text(other.path()).to_owned());
    validate_as(&from, vec![source, other], &to, flags)
}

/// Overwrites the bytes of a tensor in the one file of a folder.
fn overwrite(dir: &Path, tensor: &str, change: impl FnOnce(&mut [u8])) {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let path = names.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).min().unwrap();
    let mut bytes = fs::read(&path).unwrap();
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let entries: Value = serde_json::from_slice(&bytes[8..data]).unwrap();
    let at = |i: usize| data + entries[tensor]["data_offsets"][i].as_u64().unwrap() as usize;
    change(&mut bytes[at(0)..at(1)]);
    fs::write(path, bytes).unwrap();
}

fn edit_json(path: &Path, edit: impl FnOnce(&mut Value)) {
    let mut value: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    edit(&mut value);
    write_json(path, &value);
}

fn asymmetric(bits: u32, convention: ZeroConvention, zero: fn(usize, usize) -> u16) -> Model {
    let mut model = Model::new(&Quantized { bits, convention, zero, ..Quantized::default() });
    model.set("sym", json!(false));
    model
}

fn dense(sizes: &Sizes) -> Model {
    let mut model = Model::sized(&Quantized { group_size: 8, ..Quantized::default() }, sizes);
    for (name, k, n) in sizes.linears() {
        model.make_dense(name, k, n);
    }
    model.quant = None;
    model
}

fn scales(values: f32) -> Tensor {
    let mut scales = vec![0.01; 2 * HIDDEN];
    scales[3] = values;
    Tensor::f32s(&[2, HIDDEN], &scales)
}

/// Run by a user to whom file modes mean something: the tests may run as root, to whom all are one.
fn as_nobody(mut case: Case, dirs: &[&Path]) -> Case {
    for dir in dirs {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).unwrap();
    }
    if fs::metadata("/proc/self").is_ok_and(|metadata| metadata.uid() == 0) {
        case.command.uid(65_534);
    }
    case
}

fn reading() -> Vec<(&'static str, Case)> {
    let q = |suffix: &str| format!("{Q}.{suffix}");
    vec![
        ("checkpoint.io", Case::new(vec![], &["inspect", "/nowhere/at/all"])),
        ("checkpoint.not_a_folder", Case::new(vec![], &["inspect", "Cargo.toml"])),
        ("checkpoint.missing", inspect(tempfile::tempdir().unwrap())),
        ("checkpoint.no_weights", {
            let dir = tempfile::tempdir().unwrap();
            model().write_config(dir.path());
            inspect(dir)
        }),
        ("checkpoint.pickle", weights(b"PK\x03\x04 and a zip archive")),
        (
            "checkpoint.lfs_pointer",
            weights(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"),
        ),
        ("checkpoint.empty_file", weights(b"")),
        ("checkpoint.no_length_field", weights(b"1234")),
        ("checkpoint.header_past_end", weights(b"\xff\0\0\0\0\0\0\0{}")),
        ("checkpoint.header_too_large", {
            let case = weights(&(200u64 << 20).to_le_bytes());
            let path = case._dirs[0].path().join("model.safetensors");
            fs::File::options().write(true).open(path).unwrap().set_len(201 << 20).unwrap();
            case
        }),
        ("checkpoint.header_not_json", raw_header("[]", 0)),
        ("checkpoint.tensor_entry", header(|h| h[&q("scales")]["shape"] = json!("64"))),
        (
            "checkpoint.repeated_tensor",
            raw_header(
                r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#,
                2,
            ),
        ),
        ("checkpoint.unknown_dtype", header(|h| h[&q("scales")]["dtype"] = json!("F9"))),
        ("checkpoint.shape_overflow", header(|h| h[&q("scales")]["shape"] = json!([1u64 << 62, 1u64 << 62]))),
        ("checkpoint.offsets_reversed", header(|h| h[&q("scales")]["data_offsets"] = json!([64, 32]))),
        ("checkpoint.byte_count", header(|h| h[&q("scales")]["shape"] = json!([1, 1]))),
        (
            "checkpoint.overlap",
            header(|h| {
                let first = h[&q("qzeros")].clone();
                h.insert("model.zzz".into(), first);
            }),
        ),
        ("checkpoint.gap", header(|h| drop(h.remove(&q("qzeros"))))),
        ("checkpoint.truncated", weights(&valid()[..valid().len() - 1])),
        ("checkpoint.trailing_bytes", weights(&[valid(), vec![0]].concat())),
        ("checkpoint.index_malformed", index("{}")),
        (
            "checkpoint.index_repeated",
            index(r#"{"weight_map": {"x": "a.safetensors", "x": "b.safetensors"}}"#),
        ),
        ("checkpoint.shard_outside", index(r#"{"weight_map": {"x": "../a.safetensors"}}"#)),
        (
            "checkpoint.shard_missing",
            index(r#"{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}"#),
        ),
        ("checkpoint.not_in_shard", index(r#"{"weight_map": {"x": "a.safetensors"}}"#)),
        ("checkpoint.in_two_files", {
            let dir = model().write();
            let copy: Tensors = [(q("scales"), model().tensors[&q("scales")].clone())].into();
            fs::write(dir.path().join("other.safetensors"), safetensors(&copy, |_| {})).unwrap();
            inspect(dir)
        }),
        ("checkpoint.config_not_json", {
            let dir = model().write();
            fs::write(dir.path().join("config.json"), "[]").unwrap();
            inspect(dir)
        }),
        (
            "checkpoint.config_value",
            inspect_model(|m| {
                m.set("bits", json!(5));
            }),
        ),
        (
            "checkpoint.foreign_layout",
            inspect_model(|m| {
                m.set("quant_method", json!("awq"));
            }),
        ),
        ("checkpoint.sizes", inspect_model(|m| m.config["hidden_size"] = json!(null))),
        (
            "checkpoint.dynamic_rule",
            inspect_model(|m| {
                m.set("dynamic", json!({"+:(": {"bits": 4}}));
            }),
        ),
        ("checkpoint.module_missing", inspect_model(|m| m.tensors.retain(|name, _| !name.starts_with(Q)))),
        ("checkpoint.dense_missing", inspect_model(|m| drop(m.tensors.remove("model.norm.weight")))),
        ("checkpoint.head_missing", inspect_model(|m| drop(m.tensors.remove("lm_head.weight")))),
        (
            "checkpoint.module_unexpected",
            inspect_model(|m| {
                gptq_module(&mut m.tensors, "model.layers.0.self_attn.x_proj", 64, 64, &Quantized::default())
            }),
        ),
        ("checkpoint.tensor_missing", inspect_model(|m| drop(m.tensors.remove(&q("scales"))))),
        (
            "checkpoint.two_layouts",
            inspect_model(|m| {
                m.put(Q, "weight", Tensor::f16s(&[HIDDEN, HIDDEN], &[0.0; HIDDEN * HIDDEN]));
            }),
        ),
        ("checkpoint.tensor_dtype", inspect_model(|m| m.tensor(Q, "qweight").dtype = "F32")),
        (
            "checkpoint.tensor_rank",
            inspect_model(|m| {
                let scales = m.tensor(Q, "scales");
                scales.shape = vec![scales.shape.iter().product()];
            }),
        ),
        (
            "checkpoint.tensor_shape",
            inspect_model(|m| {
                m.tensors.insert("model.norm.weight".into(), Tensor::f16s(&[1], &[1.0]));
            }),
        ),
        (
            "checkpoint.scale",
            inspect_model(|m| {
                m.put(Q, "scales", scales(f32::INFINITY));
            }),
        ),
        (
            "checkpoint.group_index",
            inspect_model(|m| {
                m.put(Q, "g_idx", Tensor::i32s(&[HIDDEN], &[-1; HIDDEN]));
            }),
        ),
        (
            "checkpoint.gptq",
            inspect_model(|m| {
                // Zero points of 8 bits beside codes of 4.
                m.put(Q, "qzeros", Tensor::u32s(&[2, 16], &[0; 32]));
            }),
        ),
        ("checkpoint.exl2", {
            let dir = copy_of(EXL2.as_ref());
            overwrite(dir.path(), &q("q_groups"), |bytes| bytes[0] = 7);
            inspect(dir)
        }),
        (
            "checkpoint.mixed_zeros",
            inspect_model(|m| {
                let other = Quantized { convention: ZeroConvention::V2, ..Quantized::default() };
                gptq_module(&mut m.tensors, DOWN, INTERMEDIATE, HIDDEN, &other);
            }),
        ),
        ("checkpoint.all_ones", to_exl2(&all_ones(0x7777_774F), &[])),
        ("checkpoint.smear", to_exl2(&all_ones(0xFFFF_FFFF), &[])),
    ]
}

/// An asymmetric v1 model whose first word of zero points is this.
fn all_ones(word: u32) -> Model {
    let mut model = asymmetric(4, ZeroConvention::V1, |_, column| 5 + column as u16 % 3);
    model.zero_words(Q, &[word]);
    model
}

fn planning() -> Vec<(&'static str, Case)> {
    let narrow = Sizes { hidden: 72, intermediate: 104, head_dim: 40, ..Sizes::default() };
    let bias = |module: &str, n: usize, value: f32| {
        changed(|m| {
            m.put(module, "bias", Tensor::f16s(&[n], &vec![value; n]));
        })
    };
    let architecture = |name: &str| changed(|m| m.config["architectures"] = json!([name]));
    let one_dense = changed(|m| {
        m.make_dense(LINEARS[1].0, HIDDEN, HIDDEN);
    });
    let infinite = changed(|m| {
        for (name, k, n) in LINEARS {
            m.make_dense(name, k, n);
        }
        m.quant = None;
        m.put(Q, "weight", Tensor::f32s(&[HIDDEN, HIDDEN], &[1e6; HIDDEN * HIDDEN]));
    });
    let overflow = changed(|m| {
        m.tensors.insert("model.norm.weight".into(), Tensor::f32s(&[HIDDEN], &[7e4; HIDDEN]));
    });
    vec![
        ("plan.architecture", to_exl2(&architecture("SomethingNew"), &[])),
        ("plan.nothing_to_quantize", to_exl2(&dense(&narrow), &[])),
        ("plan.infeasible", convert(&model(), &["--to", "exl2", "--bpw", "1"])),
        ("plan.already_exl2", {
            let out = tempfile::tempdir().unwrap();
            let to = out.path().join("out");
            let command = ["convert", EXL2, "--to", "exl2", "--bits", "4", "--out", text(&to)];
            Case::new(vec![], &command)
        }),
        ("plan.dense_member", to_exl2(&one_dense, &["--dense-members", "error"])),
        ("plan.unexpected_bias", to_exl2(&bias(Q, HIDDEN, 0.5), &[])),
        ("plan.missing_bias", to_exl2(&architecture("Qwen2ForCausalLM"), &[])),
        ("plan.transposed_dense", convert(&gpt2(), &["--to", "fp16"])),
        ("plan.head_bias", to_exl2(&bias("lm_head", VOCAB, 0.5), &[])),
        (
            "plan.not_finite",
            convert(
                &changed(|m| {
                    m.put(Q, "scales", scales(60_000.0));
                }),
                &["--to", "exl2", "--bpw", "4"],
            ),
        ),
        ("convert.not_finite", convert(&infinite, &["--to", "exl2", "--bpw", "4"])),
        ("plan.overflow", to_exl2(&overflow, &["--dry-run"])),
        ("plan.head_size", to_exl2(&dense(&narrow), &["--head-bits", "6"])),
        ("plan.group_size", to_exl2(&model(), &["--group-size", "48"])),
        ("plan.pattern", to_exl2(&model(), &["--set", "(=4"])),
        ("plan.unused_rule", to_exl2(&model(), &["--set", "q_prj=4"])),
        ("plan.rules_disagree", to_exl2(&model(), &["--set", "q_proj=3", "--min", "q_proj=4"])),
        ("plan.nothing_quantized", to_gptq(&dense(&Sizes::default()), &[])),
        ("plan.group_split", to_gptq(&model(), &["--group-size", "24"])),
        (
            "plan.cannot_recentre",
            to_gptq(&asymmetric(8, ZeroConvention::V1, |_, column| 100 + column as u16 % 5), &["--sym"]),
        ),
        (
            "plan.zero_not_storable",
            to_gptq(&asymmetric(4, ZeroConvention::V2, |_, column| column as u16 % 5), &["--zeros", "v1"]),
        ),
        (
            "plan.scale_overflow",
            to_gptq(
                &changed(|m| {
                    m.put(Q, "scales", scales(1e6));
                }),
                &["--for", "gptqmodel"],
            ),
        ),
        (
            "plan.scale_rounded",
            to_gptq(
                &changed(|m| {
                    m.put(Q, "scales", scales(0.1));
                }),
                &["--for", "gptqmodel"],
            ),
        ),
        ("plan.reader_refuses", {
            let order: Vec<i32> = (0..HIDDEN as i32).map(|row| row % 2).collect();
            to_gptq(
                &changed(|m| {
                    m.put(Q, "g_idx", Tensor::i32s(&[HIDDEN], &order));
                }),
                &["--for", "vllm"],
            )
        }),
        ("simd.unknown", to_exl2(&model(), &[]).env("REQUANT_SIMD", "mmx")),
        (
            "convert.weight_overflow",
            to_exl2(
                &changed(|m| {
                    m.put(Q, "scales", scales(60_000.0));
                }),
                &[],
            ),
        ),
        (
            "convert.not_a_float",
            to_exl2(
                &changed(|m| {
                    m.tensors.insert("model.norm.weight".into(), Tensor::i32s(&[HIDDEN], &[1; HIDDEN]));
                }),
                &[],
            ),
        ),
    ]
}

/// A GPT-2 of one block, whose dense linears would be stored transposed.
fn gpt2() -> Model {
    let config = json!({
        "architectures": ["GPT2LMHeadModel"], "n_embd": HIDDEN, "n_head": 2, "n_layer": 1, "n_positions": 32,
        "vocab_size": VOCAB
    });
    let arch = arch::find(config.as_object().unwrap()).unwrap();
    let dims = Dims::read(arch, config.as_object().unwrap()).unwrap();
    let mut tensors = Tensors::new();
    for linears in arch.linears(&dims, arch.exl2_names()).chunk_by(|a, b| a.name == b.name) {
        let columns = linears.iter().map(|linear| linear.out_features).sum();
        let name = &linears[0].name;
        gptq_module(&mut tensors, name, linears[0].in_features, columns, &Quantized::default());
        tensors.insert(format!("{name}.bias"), Tensor::f16s(&[columns], &vec![0.1; columns]));
    }
    for tensor in arch.dense_tensors(&dims, arch.exl2_names()) {
        let size = tensor.shape.iter().product();
        tensors.insert(tensor.name, Tensor::f16s(&tensor.shape, &vec![0.5; size]));
    }
    Model { config, quant: model().quant, tensors }
}

fn writing() -> Vec<(&'static str, Case)> {
    vec![
        ("output.no_name", {
            let dir = tempfile::tempdir().unwrap();
            let above = format!("{}/absent/..", text(dir.path()));
            Case::new(vec![dir], &["convert", FIXTURE, "--to", "same", "--out", &above])
        }),
        ("output.exists", onto(|out| fs::create_dir(out).unwrap(), &[])),
        (
            "output.partial_exists",
            onto(
                |out| {
                    let partial = out.with_file_name("out.partial");
                    fs::create_dir(&partial).unwrap();
                    fs::write(partial.join("mine"), "").unwrap();
                },
                &[],
            ),
        ),
        ("output.unfinished", onto(|out| unfinished(out, "{}"), &[])),
        (
            "output.other_job",
            onto(
                |out| {
                    let identity =
                        json!({"tool": "requant", "version": "0.0.0", "source": "none", "flags": {}});
                    unfinished(out, &job_of(&identity));
                },
                &["--resume"],
            ),
        ),
        ("output.state", onto(|out| unfinished(out, "nonsense"), &["--resume"])),
        (
            "output.not_ours",
            onto(
                |out| {
                    fs::create_dir(out).unwrap();
                    fs::write(out.join("mine"), "").unwrap();
                },
                &["--force"],
            ),
        ),
        ("output.holds_source", {
            let dir = model().write();
            let path = text(dir.path()).to_owned();
            Case::new(vec![dir], &["convert", &path, "--to", "same", "--force", "--out", &path])
        }),
        ("output.not_a_directory", {
            Case::new(vec![], &["convert", FIXTURE, "--to", "same", "--out", "Cargo.toml/out"])
        }),
        ("output.permission", {
            let (source, target) = (model().write(), tempfile::tempdir().unwrap());
            let (from, out) = (text(source.path()).to_owned(), target.path().join("out"));
            let command = ["convert", &from, "--to", "same", "--progress", "none", "--out", text(&out)];
            let dirs = [target.path().to_owned(), source.path().to_owned()];
            let case = Case::new(vec![source, target], &command);
            // Root's folder, and another user; or one's own, closed.
            let case = as_nobody(case, &[&dirs[0], &dirs[1]]);
            fs::set_permissions(&dirs[0], fs::Permissions::from_mode(0o555)).unwrap();
            case
        }),
        ("output.unreadable", {
            let source = model().write();
            let secret = source.path().join("vocab.json");
            fs::write(&secret, "{}").unwrap();
            fs::set_permissions(&secret, fs::Permissions::from_mode(0o000)).unwrap();
            let (path, from) = (source.path().to_owned(), text(source.path()).to_owned());
            let target = tempfile::tempdir().unwrap();
            let out = target.path().join("out");
            let case =
                Case::new(vec![source, target], &["convert", &from, "--to", "same", "--out", text(&out)]);
            as_nobody(case, &[&path])
        }),
        ("output.io", {
            // Files of at most 8 blocks of 512 or 1024 bytes, and an error instead of a signal for more.
            let (source, target) = (model().write(), tempfile::tempdir().unwrap());
            let (from, out) = (text(source.path()).to_owned(), target.path().join("out"));
            let mut command = Command::new("sh");
            command.args([
                "-c",
                "trap '' XFSZ; ulimit -f 8; exec \"$@\"",
                "sh",
                env!("CARGO_BIN_EXE_requant"),
            ]);
            command
                .args(["convert", &from, "--to", "same", "--json", "--progress", "none", "--out"])
                .arg(&out);
            Case { command, _dirs: vec![source, target] }
        }),
    ]
}

/// The state of a job with this identity.
fn job_of(identity: &Value) -> String {
    json!({"identity": identity, "source_files": [], "plan": {}}).to_string()
}

fn validating() -> Vec<(&'static str, Case)> {
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

fn commands() -> Vec<(&'static str, Case)> {
    let broken = copy_of(converted());
    fs::remove_file(broken.path().join("tokenizer.json")).unwrap();
    let path = text(broken.path()).to_owned();
    vec![
        ("verify.failed", Case::new(vec![broken], &["verify", &path, "--progress", "none"])),
        ("cli.usage", Case::new(vec![], &["convert", FIXTURE, "--to", "exl2", "--out", "x", "--bits", "7"])),
        ("cli.environment", Case::new(vec![], &["man", "/dev/null/no"])),
    ]
}

/// What a case says, and its exit code; `None` where another user may not run the program.
fn outcome(mut case: Case) -> Option<(i32, Value)> {
    let ran = match case.command.output() {
        Ok(ran) => ran,
        Err(e) => {
            support::skip(&format!("{:?}: {e}", case.command));
            return None;
        }
    };
    let stderr = String::from_utf8_lossy(&ran.stderr);
    let last = stderr.lines().last().unwrap_or_default();
    let error =
        serde_json::from_str(last).unwrap_or_else(|_| json!({"message": format!("no error: {stderr}")}));
    Some((ran.status.code().unwrap_or(-1), error))
}

#[test]
fn each_code_has_an_input_that_gives_it() {
    let (page, unprovoked) = page();
    let mut provoked = BTreeSet::new();
    let mut wrong = Vec::new();
    let mut look = |code: &str, exit: i32, error: &Value| {
        provoked.insert(code.to_owned());
        let text = |key: &str| error[key].as_str().unwrap_or_default();
        if text("code") != code || page.get(code) != Some(&exit) {
            wrong.push(format!("{code}: {exit} {error}"));
        }
        assert!(!text("message").is_empty(), "{code}");
    };
    for cases in [reading, planning, writing, validating, commands] {
        for (code, case) in cases() {
            let excused = page.get(code).map(|exit| (*exit, json!({"code": code, "message": "not run"})));
            let (exit, error) = outcome(case).or(excused).unwrap();
            look(code, exit, &error);
        }
    }
    match of_a_missing_instruction_set() {
        Some((exit, error)) => look("simd.missing", exit, &error),
        None => {
            look("simd.missing", 4, &json!({"code": "simd.missing", "message": "this machine has them all"}))
        }
    }
    let (exit, error) = while_another_run_writes();
    look("output.in_use", exit, &error);
    let (exit, error) = interrupted();
    look("interrupted", exit, &error);
    assert_eq!(wrong, [""; 0]);
    let page: BTreeSet<String> = page.into_keys().collect();
    let open: Vec<&String> = page.difference(&provoked).filter(|code| !unprovoked.contains(*code)).collect();
    assert_eq!(open, [""; 0], "without an input, and not excused in docs/errors.md");
    let both: Vec<&String> = provoked.intersection(&unprovoked).collect();
    assert_eq!(both, [""; 0], "excused in docs/errors.md, and given by an input");
}

/// Of an instruction set that this machine lacks; `None` where it lacks none.
fn of_a_missing_instruction_set() -> Option<(i32, Value)> {
    let ran = |set| to_exl2(&model(), &[]).env("REQUANT_SIMD", set);
    let missing =
        ["avx512", "avx2"].into_iter().find(|set| !ran(set).command.output().unwrap().status.success());
    missing.and_then(|set| outcome(ran(set)))
}

fn while_another_run_writes() -> (i32, Value) {
    let mut lock = None;
    let case = onto(
        |out| {
            let partial = out.with_file_name("out.partial");
            fs::create_dir(&partial).unwrap();
            let held = fs::File::open(&partial).unwrap();
            held.lock().unwrap();
            lock = Some(held);
        },
        &[],
    );
    let outcome = outcome(case).unwrap();
    drop(lock);
    outcome
}

fn interrupted() -> (i32, Value) {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let mut command = Command::new(env!("CARGO_BIN_EXE_requant"));
    command
        .args(["convert", FIXTURE, "--to", "exl2", "--bpw", "4", "--threads", "1", "--json", "--out"])
        .arg(&out);
    let child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    while !dir.path().join("out.partial").exists() {
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let ran = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(ran.stderr).unwrap();
    (ran.status.code().unwrap(), serde_json::from_str(stderr.lines().last().unwrap()).unwrap())
}
