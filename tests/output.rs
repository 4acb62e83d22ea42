//! The output directory through the public API: staging, shards, index, side files.

#![allow(clippy::unwrap_used, reason = "the functions that tests share, too, fail the test")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use proptest::prelude::*;
use requant::output::{
    Action, Error, INDEX_FILE, ShardFile, ShardPlan, ShardWriter, SkipReason, Staging, TensorSpec,
    copy_side_files,
};
use requant::progress::{CancelFlag, Silent};
use requant::{Diagnose, Kind};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use sha2::{Digest, Sha256};

const GB: u64 = 1_000_000_000;

fn spec(name: &str, dtype: Dtype, shape: &[usize]) -> TensorSpec {
    TensorSpec { name: name.to_owned(), dtype, shape: shape.to_vec() }
}

/// Bytes that differ for each tensor and position.
fn bytes_of(spec: &TensorSpec) -> Vec<u8> {
    let seed = spec.name.bytes().fold(7u64, |h, b| h.wrapping_mul(31).wrapping_add(b.into()));
    let len = spec.bytes().unwrap();
    (0..len).map(|i| ((seed ^ i).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

/// The tensors of EXL2 linears and dense modules, odd sizes among them.
fn units() -> Vec<Vec<TensorSpec>> {
    let linear = |p: &str, k: usize, n: usize| {
        vec![
            spec(&format!("{p}.q_weight"), Dtype::I32, &[k / 8, n]),
            spec(&format!("{p}.q_invperm"), Dtype::I32, &[k]),
            spec(&format!("{p}.q_scale"), Dtype::I32, &[k / 32, n / 8]),
            spec(&format!("{p}.q_scale_max"), Dtype::F16, &[k / 32]),
            spec(&format!("{p}.q_groups"), Dtype::I16, &[2 * k / 32]),
        ]
    };
    vec![
        vec![spec("model.embed_tokens.weight", Dtype::F16, &[17, 64])],
        linear("model.layers.0.self_attn.q_proj", 64, 96),
        linear("model.layers.0.mlp.down_proj", 96, 32),
        vec![spec("model.layers.0.input_layernorm.weight", Dtype::F16, &[63])],
        vec![spec("odd.bytes", Dtype::U8, &[5]), spec("odd.empty", Dtype::F32, &[0, 4])],
        vec![spec("model.norm.weight", Dtype::F16, &[64]), spec("odd.scalar", Dtype::F64, &[])],
    ]
}

/// Writes the tensors from `threads` threads, in reverse order.
fn write(dir: &Path, units: &[Vec<TensorSpec>], limit: u64, threads: usize) -> Vec<ShardFile> {
    let plan = ShardPlan::new(units.to_vec(), limit).unwrap();
    let writer = ShardWriter::create(dir, plan).unwrap();
    let tensors: Vec<&TensorSpec> = units.iter().flatten().rev().collect();
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(tensor) = tensors.get(next.fetch_add(1, Ordering::Relaxed)) {
                    writer.write(&tensor.name, &bytes_of(tensor)).unwrap();
                }
            });
        }
    });
    writer.finish(&Silent).unwrap()
}

fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap()))
        .collect()
}

fn count(dir: &Path) -> usize {
    fs::read_dir(dir).unwrap().count()
}

/// What the safetensors crate writes for the same tensors.
fn serialized(specs: &[&TensorSpec]) -> Vec<u8> {
    let data: Vec<(String, Vec<u8>)> = specs.iter().map(|s| (s.name.clone(), bytes_of(s))).collect();
    let views = specs.iter().zip(&data).map(|(spec, (name, bytes))| {
        (name.clone(), TensorView::new(spec.dtype, spec.shape.clone(), bytes).unwrap())
    });
    let format = [("format".to_owned(), "pt".to_owned())].into_iter().collect();
    safetensors::serialize(views, Some(format)).unwrap()
}

#[test]
fn one_shard_is_what_the_safetensors_crate_writes() {
    let dir = tempfile::tempdir().unwrap();
    let units = units();
    let shards = write(dir.path(), &units, 5 * GB, 1);
    let all: Vec<&TensorSpec> = units.iter().flatten().collect();
    let bytes = fs::read(dir.path().join("model.safetensors")).unwrap();
    assert!(bytes == serialized(&all));
    let sha256 = Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect();
    let expected = ShardFile { file: "model.safetensors".to_owned(), bytes: bytes.len() as u64, sha256 };
    assert_eq!(shards, [expected]);
}

#[test]
fn every_tensor_reads_back_aligned_from_the_shard_that_the_index_names() {
    let dir = tempfile::tempdir().unwrap();
    let units = units();
    let shards = write(dir.path(), &units, 4500, 1);
    assert!(shards.len() >= 3, "{shards:?}");
    let files = contents(dir.path());
    assert_eq!(files.len(), shards.len() + 1);

    let index: serde_json::Value = serde_json::from_slice(&files[INDEX_FILE]).unwrap();
    let weight_map = index["weight_map"].as_object().unwrap();
    let names: Vec<&String> = weight_map.keys().collect();
    assert!(names.is_sorted());
    let tensors: Vec<&TensorSpec> = units.iter().flatten().collect();
    assert_eq!(names.len(), tensors.len());
    let total: u64 = tensors.iter().map(|t| t.bytes().unwrap()).sum();
    assert_eq!(index["metadata"], serde_json::json!({ "total_size": total }));

    for spec in tensors {
        let file = &files[weight_map[&spec.name].as_str().unwrap()];
        let (header, _) = SafeTensors::read_metadata(file).unwrap();
        assert_eq!(header % 8, 0);
        let shard = SafeTensors::deserialize(file).unwrap();
        let view = shard.tensor(&spec.name).unwrap();
        assert_eq!((view.dtype(), view.shape()), (spec.dtype, &spec.shape[..]));
        assert!(view.data() == bytes_of(spec), "{}", spec.name);
        let offset = view.data().as_ptr().addr() - file.as_ptr().addr();
        assert_eq!(offset % (spec.dtype.bitsize() / 8), 0, "{}", spec.name);
    }
    for (i, shard) in shards.iter().enumerate() {
        assert_eq!(shard.file, format!("model-{:05}-of-{:05}.safetensors", i + 1, shards.len()));
        assert_eq!(shard.bytes, files[&shard.file].len() as u64);
    }
}

#[test]
fn the_same_bytes_for_1_2_and_7_threads() {
    let one = tempfile::tempdir().unwrap();
    let shards = write(one.path(), &units(), 4500, 1);
    for threads in [2, 7] {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(write(dir.path(), &units(), 4500, threads), shards);
        assert!(contents(dir.path()) == contents(one.path()), "{threads} threads");
    }
}

#[test]
fn a_tensor_over_the_limit_gets_its_own_shard() {
    let units = vec![
        vec![spec("a", Dtype::F16, &[10])],
        vec![spec("b.small", Dtype::F16, &[10]), spec("b.large", Dtype::F16, &[1000])],
        vec![spec("c", Dtype::F16, &[10])],
    ];
    let plan = ShardPlan::new(units, 1000).unwrap();
    let shards: Vec<Vec<&str>> = plan.files().iter().map(|f| f.tensors().collect()).collect();
    assert_eq!(shards, [vec!["a", "b.small"], vec!["b.large"], vec!["c"]]);
    assert_eq!(plan.file_of("b.large"), Some("model-00002-of-00003.safetensors"));
    assert_eq!(plan.total_size(), 2060);
}

#[test]
fn a_unit_moves_to_the_next_shard_rather_than_being_cut() {
    let part = |name: &str| spec(name, Dtype::U8, &[600]);
    let units = vec![vec![part("a")], vec![part("b.0"), part("b.1")], vec![part("c")]];
    let plan = ShardPlan::new(units, 2000).unwrap();
    let shards: Vec<Vec<&str>> = plan.files().iter().map(|f| f.tensors().collect()).collect();
    assert_eq!(shards, [vec!["a"], vec!["b.0", "b.1"], vec!["c"]]);
}

fn dtype() -> impl Strategy<Value = Dtype> {
    use Dtype::*;
    prop::sample::select(vec![U8, I16, F16, BF16, I32, F32, I64])
}

/// Units of up to four tensors with unpleasant names, each unique.
fn any_units() -> impl Strategy<Value = Vec<Vec<TensorSpec>>> {
    let tensor = (dtype(), prop::collection::vec(0usize..12, 0..4), "[a-z\"\u{1}é\\\\]{0,9}");
    prop::collection::vec(prop::collection::vec(tensor, 1..5), 1..12).prop_map(|units| {
        let unit = |(u, unit): (usize, Vec<(Dtype, Vec<usize>, String)>)| {
            let tensors = unit.into_iter().enumerate();
            tensors.map(|(t, (dtype, shape, name))| spec(&format!("{u}.{t}{name}"), dtype, &shape)).collect()
        };
        units.into_iter().enumerate().map(unit).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn shards_keep_the_limit_the_order_and_the_units(units in any_units(), limit in 300u64..4000) {
        let plan = ShardPlan::new(units.clone(), limit).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let shards = write(dir.path(), &units, limit, 1);
        let all: Vec<&TensorSpec> = units.iter().flatten().collect();
        let mut order = Vec::new();
        for (planned, written) in plan.files().iter().zip(&shards) {
            let names: BTreeSet<&str> = planned.tensors().collect();
            let here: Vec<&TensorSpec> = all.iter().filter(|s| names.contains(&s.name[..])).copied().collect();
            prop_assert!(planned.bytes() <= limit || here.len() == 1);
            prop_assert_eq!(planned.bytes(), written.bytes);
            prop_assert!(fs::read(dir.path().join(planned.file())).unwrap() == serialized(&here));
            for unit in &units {
                let inside = unit.iter().filter(|s| names.contains(&s.name[..])).count();
                // The plan reckons with the longest header, some sixty bytes a tensor more than it takes.
                let alone = serialized(&unit.iter().collect::<Vec<_>>()).len() + 70 * unit.len();
                prop_assert!(inside == 0 || inside == unit.len() || alone as u64 > limit);
            }
            order.extend(here);
        }
        prop_assert_eq!(order, all);
    }
}

#[test]
fn what_cannot_be_planned() {
    let refused = |specs| ShardPlan::new(vec![specs], GB).unwrap_err();
    assert!(matches!(ShardPlan::new(vec![], GB), Err(Error::NoTensors)));
    assert!(matches!(ShardPlan::new(vec![vec![], vec![]], GB), Err(Error::NoTensors)));
    let twice = refused(vec![spec("a", Dtype::F16, &[1]), spec("a", Dtype::I32, &[1])]);
    assert!(matches!(&twice, Error::PlannedTwice { tensor } if tensor == "a"));
    let apart = vec![vec![spec("a", Dtype::U8, &[900])], vec![spec("a", Dtype::U8, &[900])]];
    assert!(matches!(ShardPlan::new(apart, 1200), Err(Error::PlannedTwice { .. })));
    assert!(matches!(refused(vec![spec("__metadata__", Dtype::F16, &[1])]), Error::ReservedName { .. }));
    for shape in [&[usize::MAX, 2][..], &[usize::MAX / 8][..]] {
        let error = refused(vec![spec("a", Dtype::F32, shape)]);
        assert!(matches!(error, Error::Size { .. }), "{error}");
        assert_eq!((error.kind(), error.tensor()), (Kind::Bug, Some("a")));
    }
    assert!(matches!(refused(vec![spec("a", Dtype::F4, &[3])]), Error::Size { .. }));
    // Each has a size, their sum has none.
    let huge = |i: usize| spec(&format!("t{i}"), Dtype::U8, &[usize::MAX / 8]);
    let together = ShardPlan::new(vec![(0..9).map(huge).collect()], u64::MAX);
    assert!(matches!(together, Err(Error::Size { .. })));
}

#[test]
fn each_tensor_is_written_once_and_whole() {
    let dir = tempfile::tempdir().unwrap();
    let specs = ["a", "b", "c"].map(|name| spec(name, Dtype::F16, &[4])).to_vec();
    let writer = ShardWriter::create(dir.path(), ShardPlan::new(vec![specs], GB).unwrap()).unwrap();
    assert!(matches!(
        writer.write("b", &[0; 7]),
        Err(Error::Length { tensor, found: 7, expected: 8 }) if tensor == "b"
    ));
    assert!(matches!(writer.write("b", &[0; 9]), Err(Error::Length { found: 9, .. })));
    assert!(matches!(writer.write("d", &[]), Err(Error::Unplanned { tensor }) if tensor == "d"));
    writer.write("b", &[1; 8]).unwrap();
    assert!(matches!(writer.write("b", &[2; 8]), Err(Error::WrittenTwice { tensor }) if tensor == "b"));
    let error = writer.finish(&Silent).unwrap_err();
    assert!(matches!(&error, Error::Missing { tensor, count: 2 } if tensor == "a"), "{error}");
    assert_eq!((error.kind(), error.tensor()), (Kind::Bug, Some("a")));
    assert!(!dir.path().join(INDEX_FILE).exists());
}

#[test]
fn hashing_notices_a_changed_shard_and_can_be_cancelled() {
    let plan = || ShardPlan::new(vec![vec![spec("a", Dtype::F16, &[4])]], GB).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let writer = ShardWriter::create(dir.path(), plan()).unwrap();
    writer.write("a", &[1; 8]).unwrap();
    let path = dir.path().join("model.safetensors");
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(20).unwrap();
    let error = writer.finish(&Silent).unwrap_err();
    assert!(matches!(&error, Error::ShardChanged { found: 20, .. }), "{error}");
    assert_eq!((error.kind(), error.file()), (Kind::Environment, Some(&*path)));

    let dir = tempfile::tempdir().unwrap();
    let writer = ShardWriter::create(dir.path(), plan()).unwrap();
    writer.write("a", &[1; 8]).unwrap();
    let cancel = CancelFlag::default();
    cancel.cancel();
    assert_eq!(writer.finish(&cancel).unwrap_err().kind(), Kind::Interrupted);
}

#[test]
fn hashes_that_follow_the_writing_are_those_of_the_files() {
    let units = units();
    let tensors: Vec<&TensorSpec> = units.iter().flatten().collect();
    for limit in [4500, 5 * GB] {
        // Backwards, nothing can be hashed before all is written; in the files' order, each tensor at once.
        for forwards in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let plan = ShardPlan::new(units.clone(), limit).unwrap();
            let mut order = tensors.clone();
            order.sort_by_key(|tensor| plan.position(&tensor.name).unwrap());
            if !forwards {
                order.reverse();
            }
            let writer = ShardWriter::create(dir.path(), plan).unwrap();
            for (i, tensor) in order.iter().enumerate() {
                writer.hash_written(&|| i % 3 == 0).unwrap();
                writer.write(&tensor.name, &bytes_of(tensor)).unwrap();
                writer.hash_written(&|| i % 2 == 0).unwrap();
            }
            for shard in writer.finish(&Silent).unwrap() {
                let bytes = fs::read(dir.path().join(&shard.file)).unwrap();
                let sha256: String = Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect();
                assert_eq!((shard.bytes, shard.sha256), (bytes.len() as u64, sha256), "{limit} {forwards}");
            }
        }
    }
}

#[test]
fn a_shard_that_is_cut_after_it_was_hashed_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let plan = ShardPlan::new(vec![vec![spec("a", Dtype::F16, &[4])]], GB).unwrap();
    let writer = ShardWriter::create(dir.path(), plan).unwrap();
    writer.write("a", &[1; 8]).unwrap();
    writer.hash_written(&|| false).unwrap();
    let path = dir.path().join("model.safetensors");
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(20).unwrap();
    let error = writer.finish(&Silent).unwrap_err();
    assert!(matches!(&error, Error::ShardChanged { found: 20, .. }), "{error}");
}

#[test]
fn nothing_stands_under_the_final_name_until_commit() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("a/b/model.v1");
    let staging = Staging::create(&out).unwrap();
    assert_eq!(staging.path(), dir.path().join("a/b/model.v1.partial"));
    write(staging.path(), &units(), 4500, 1);
    staging.write("config.json", b"{}\n").unwrap();
    let before = contents(staging.path());
    assert!(!out.exists());
    assert_eq!(staging.commit().unwrap(), out);
    assert!(contents(&out) == before);
    assert_eq!(count(&dir.path().join("a/b")), 1);
    for entry in fs::read_dir(&out).unwrap() {
        let mode = entry.unwrap().metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o711, 0o600);
    }
}

#[test]
fn an_existing_output_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("model");
    let refused = || {
        let error = Staging::create(&out).unwrap_err();
        assert!(matches!(&error, Error::Exists { path } if *path == out), "{error}");
        assert_eq!((error.kind(), error.file()), (Kind::Usage, Some(&*out)));
    };
    fs::create_dir(&out).unwrap();
    refused();
    fs::remove_dir(&out).unwrap();
    fs::write(&out, "").unwrap();
    refused();
    fs::remove_file(&out).unwrap();
    symlink("nowhere", &out).unwrap();
    refused();
    assert_eq!(count(dir.path()), 1);
    for nameless in ["/", "..", "a/.."] {
        assert!(matches!(Staging::create(Path::new(nameless)), Err(Error::NoName { .. })), "{nameless}");
    }
}

#[test]
fn a_partial_directory_is_reused_only_when_empty_and_free() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("model");
    let partial = dir.path().join("model.partial");
    let refused = || {
        let error = Staging::create(&out).unwrap_err();
        assert_eq!((error.kind(), error.file()), (Kind::Usage, Some(&*partial)), "{error}");
        error
    };
    fs::create_dir(&partial).unwrap();
    fs::write(partial.join("notes.txt"), "mine").unwrap();
    assert!(matches!(refused(), Error::PartialExists { .. }));
    assert_eq!(fs::read(partial.join("notes.txt")).unwrap(), b"mine");
    fs::remove_file(partial.join("notes.txt")).unwrap();

    let staging = Staging::create(&out).unwrap();
    assert!(matches!(refused(), Error::InUse { .. }));
    assert!(partial.is_dir());
    drop(staging);

    fs::write(&partial, "a file").unwrap();
    assert!(matches!(refused(), Error::PartialExists { .. }));
    assert_eq!(fs::read(&partial).unwrap(), b"a file");
}

#[test]
fn dropped_without_commit_it_leaves_nothing_unless_asked() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("model");
    let staging = Staging::create(&out).unwrap();
    write(staging.path(), &units(), GB, 1);
    fs::create_dir(staging.path().join("job")).unwrap();
    drop(staging);
    assert_eq!(count(dir.path()), 0);

    let mut staging = Staging::create(&out).unwrap();
    staging.keep_partial(true);
    staging.write("config.json", b"{}").unwrap();
    drop(staging);
    assert_eq!(fs::read(dir.path().join("model.partial/config.json")).unwrap(), b"{}");
    assert!(!out.exists());
}

#[test]
fn a_name_taken_meanwhile_costs_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("model");
    let staging = Staging::create(&out).unwrap();
    staging.write("config.json", b"{}").unwrap();
    fs::create_dir(&out).unwrap();
    let error = staging.commit().unwrap_err();
    assert!(matches!(&error, Error::NotRenamed { .. }), "{error}");
    assert_eq!((error.kind(), error.file()), (Kind::Environment, Some(&*out)));
    assert_eq!(count(&out), 0);
    assert_eq!(fs::read(dir.path().join("model.partial/config.json")).unwrap(), b"{}");
}

#[test]
fn a_file_in_the_way_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let error = Staging::create(&file.join("sub/model")).unwrap_err();
    assert_eq!((error.kind(), error.file()), (Kind::Environment, Some(&*file)), "{error}");

    let shard = dir.path().join("model.safetensors");
    fs::write(&shard, "old").unwrap();
    let plan = ShardPlan::new(vec![vec![spec("a", Dtype::F16, &[4])]], GB).unwrap();
    let error = ShardWriter::create(dir.path(), plan).unwrap_err();
    assert_eq!((error.kind(), error.file()), (Kind::Environment, Some(&*shard)), "{error}");
    assert!(error.to_string().contains("model.safetensors"), "{error}");
    assert_eq!(fs::read(&shard).unwrap(), b"old");
}

#[test]
fn a_directory_that_may_not_be_written_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let mut locked = dir.path().join("locked");
    fs::create_dir(&locked).unwrap();
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o555)).unwrap();
    if fs::write(locked.join("probe"), "").is_ok() {
        // To root all modes are one; the kernel's own directory is closed to root too.
        locked = "/sys".into();
    }
    let error = Staging::create(&locked.join("model")).unwrap_err();
    assert!(matches!(error.code(), "output.permission" | "output.read_only"), "{error}");
    assert_eq!((error.kind(), error.file()), (Kind::Environment, Some(&*locked.join("model.partial"))));
    assert!(error.hint().is_some());
}

#[test]
fn a_full_disk_has_a_code_of_its_own() {
    // ENOSPC, EDQUOT, EACCES, EROFS, EIO on Linux.
    for (errno, code) in [
        (28, "output.disk_full"),
        (122, "output.disk_full"),
        (13, "output.permission"),
        (30, "output.read_only"),
        (5, "output.io"),
    ] {
        let source = std::io::Error::from_raw_os_error(errno);
        let error = Error::Io { action: Action::Write, path: "/a/b".into(), source };
        assert_eq!((error.code(), error.kind()), (code, Kind::Environment));
        assert!(error.to_string().starts_with("cannot write /a/b: "), "{error}");
    }
}

#[test]
fn side_files_follow_and_what_the_conversion_replaces_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let (source, out, blobs) = (dir.path().join("source"), dir.path().join("out"), dir.path().join("blobs"));
    for d in [&source, &out, &blobs, &source.join("onnx"), &source.join("original")] {
        fs::create_dir(d).unwrap();
    }
    let tokenizer: Vec<u8> = (0..200_000u32).map(|i| (i % 251) as u8).collect();
    let kept: [(&str, &[u8]); 10] = [
        (".gitattributes", b"*.safetensors filter=lfs\n"),
        ("LICENSE", b"Apache\r\n"),
        ("README.md", b"# model\n"),
        ("chat_template.jinja", b"{{ x }}"),
        ("generation_config.json", b"{}"),
        ("modeling_x.py", b"pass"),
        ("preprocessor_config.json", b"{ }"),
        ("tokenizer.json", &tokenizer),
        ("tokenizer.model", &[0, 255, 10, 13]),
        ("vocab.index.json", b"{}"),
    ];
    for (name, bytes) in kept {
        match name {
            // As in a hub's cache.
            "tokenizer.json" => {
                let blob = blobs.join("0123abc");
                fs::write(&blob, bytes).unwrap();
                fs::set_permissions(&blob, fs::Permissions::from_mode(0o444)).unwrap();
                symlink("../blobs/0123abc", source.join(name)).unwrap();
            }
            _ => fs::write(source.join(name), bytes).unwrap(),
        }
    }
    symlink("../blobs/gone", source.join("added_tokens.json")).unwrap();
    symlink("../blobs", source.join("linked_folder")).unwrap();

    use SkipReason::*;
    let dropped = [
        ("MODEL.GGUF", Weights),
        ("added_tokens.json", BrokenLink),
        ("config.json", Config),
        ("consolidated.00.pth", Weights),
        ("linked_folder", Directory),
        ("model-00001-of-00002.safetensors", Weights),
        ("model.safetensors.index.fp16.json", WeightsIndex),
        ("model.safetensors.index.json", WeightsIndex),
        ("onnx", Directory),
        ("original", Directory),
        ("pytorch_model.bin", Weights),
        ("pytorch_model.bin.index.json", WeightsIndex),
        ("quant_config.json", QuantizationConfig),
        ("quantize_config.json", QuantizationConfig),
        ("report.html", Report),
        ("report.json", Report),
    ];
    for (name, reason) in dropped {
        if !matches!(reason, Directory | BrokenLink) {
            fs::write(source.join(name), "x").unwrap();
        }
    }

    let files = copy_side_files(&source, &out, &Silent).unwrap();
    assert_eq!(files.copied, kept.map(|(name, _)| name));
    let skipped: Vec<(&str, SkipReason)> = files.skipped.iter().map(|s| (&s.name[..], s.reason)).collect();
    assert_eq!(skipped, dropped);
    let expected = kept.iter().map(|(name, bytes)| (name.to_string(), bytes.to_vec())).collect();
    assert!(contents(&out) == expected);
    let copied = fs::symlink_metadata(out.join("tokenizer.json")).unwrap();
    assert!(copied.is_file() && copied.permissions().mode() & 0o200 != 0);

    let error = copy_side_files(&source, &out, &Silent).unwrap_err();
    assert_eq!((error.kind(), error.file()), (Kind::Environment, Some(&*out.join(".gitattributes"))));
    let error = copy_side_files(&dir.path().join("nowhere"), &out, &Silent).unwrap_err();
    assert_eq!(error.file(), Some(&*dir.path().join("nowhere")));
}
