//! Which files are read: shards, indexes whole, stale and partial, strays, and changes while open.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use requant::WarningCode;
use requant::checkpoint::{Checkpoint, Fault, OpenOptions};
use serde_json::{Value, json};
use support::writer::{DOWN, Model, Q, Quantized, safetensors, write_index};
use support::{codes, hashes, open};

#[test]
fn a_linear_whose_tensors_are_spread_over_two_shards_decodes_as_in_one() {
    let model = Model::new(&Quantized::default());
    let spread = |name: &str| if name.ends_with("scales") { "b.safetensors" } else { "a.safetensors" };
    let whole = hashes(&open(model.write().path()));
    for index in [true, false] {
        let dir = model.write_shards(spread, index);
        assert_eq!(hashes(&open(dir.path())), whole);
        assert_eq!(codes(&open(dir.path())), []);
    }
}

#[test]
fn bytes_at_odd_addresses_are_read() {
    let model = Model::new(&Quantized::default());
    let whole = hashes(&open(model.write().path()));
    for spaces in 0..8 {
        let dir = model.write_edited(|header| {
            header["__metadata__"]["pad"] = json!(" ".repeat(spaces));
        });
        assert_eq!(hashes(&open(dir.path())), whole);
    }
}

#[test]
fn the_shard_that_the_index_gives_counts_and_a_copy_elsewhere_is_told() {
    let model = Model::new(&Quantized::default());
    let dir =
        model.write_shards(|name| if name.contains("mlp") { "b.safetensors" } else { "a.safetensors" }, true);
    let whole = hashes(&open(dir.path()));
    let mut stale = model.clone();
    stale.tensors.retain(|name, _| name.contains("mlp") || name == &format!("{Q}.scales"));
    stale.tensor(Q, "scales").bytes.fill(0x3c);
    std::fs::write(dir.path().join("b.safetensors"), safetensors(&stale.tensors, |_| {})).unwrap();
    let checkpoint = open(dir.path());
    assert_eq!(hashes(&checkpoint), whole);
    let [warning] = checkpoint.warnings() else { panic!("{:?}", checkpoint.warnings()) };
    assert_eq!(
        (warning.code, warning.subject.as_str()),
        (WarningCode::CopyElsewhere, &*format!("{Q}.scales"))
    );
    assert!(warning.message.contains("a.safetensors") && warning.message.contains("b.safetensors"));
}

#[test]
fn an_index_whose_shards_do_not_exist_is_ignored() {
    let dir = Model::new(&Quantized::default()).write();
    write_index(
        dir.path(),
        &json!({"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}),
    );
    let checkpoint = open(dir.path());
    assert_eq!(codes(&checkpoint), [WarningCode::IndexIgnored]);
    assert_eq!(checkpoint.index(), None);
}

#[test]
fn tensors_that_the_index_does_not_list_are_read() {
    let model = Model::new(&Quantized::default());
    let dir = model.write_shards(|_| "a.safetensors", false);
    let names = model.tensors.keys().filter(|name| !name.starts_with(Q));
    let map: serde_json::Map<String, Value> =
        names.map(|name| (name.clone(), json!("a.safetensors"))).collect();
    write_index(dir.path(), &json!(map));
    let checkpoint = open(dir.path());
    assert_eq!(codes(&checkpoint), [WarningCode::NotInIndex]);
    assert_eq!(hashes(&checkpoint), hashes(&open(model.write().path())));
}

#[test]
fn adapters_and_files_outside_the_index_are_not_read() {
    let model = Model::new(&Quantized::default());
    let dir = model.write_shards(|_| "a.safetensors", true);
    for stray in ["eora.safetensors", "adapter_model.safetensors", "old.safetensors"] {
        std::fs::write(dir.path().join(stray), b"no safetensors at all").unwrap();
    }
    let expected = [WarningCode::AdapterIgnored, WarningCode::AdapterIgnored, WarningCode::FileIgnored];
    assert_eq!(codes(&open(dir.path())), expected);
}

#[test]
fn an_old_shard_that_the_index_does_not_name_is_told_with_what_it_holds() {
    let model = Model::new(&Quantized::default());
    let dir = model.write_shards(|_| "a.safetensors", true);
    let mut old = model.clone();
    old.tensors.retain(|name, _| name == &format!("{Q}.scales"));
    std::fs::write(dir.path().join("old.safetensors"), safetensors(&old.tensors, |_| {})).unwrap();
    let checkpoint = open(dir.path());
    let [warning] = checkpoint.warnings() else { panic!("{:?}", checkpoint.warnings()) };
    assert_eq!((warning.code, warning.subject.as_str()), (WarningCode::FileIgnored, "old.safetensors"));
    assert!(
        warning.message.contains(&format!("{Q}.scales, which is read from a.safetensors")),
        "{}",
        warning.message
    );
}

#[test]
fn of_two_indexes_the_one_of_the_usual_name_counts() {
    let model = Model::new(&Quantized::default());
    let dir = model.write_shards(|_| "a.safetensors", true);
    let other = dir.path().join("fp16.safetensors.index.json");
    std::fs::copy(dir.path().join("model.safetensors.index.json"), other).unwrap();
    let checkpoint = open(dir.path());
    assert_eq!(codes(&checkpoint), [WarningCode::IndexIgnored]);
    assert_eq!(checkpoint.warnings()[0].subject, "fp16.safetensors.index.json");
}

#[test]
fn the_weights_own_header_stands_in_for_a_lost_configuration() {
    let mut model =
        Model::new(&Quantized { zero: |_, column| (column % 15 + 1) as u16, ..Quantized::default() });
    model.quant = None;
    assert_eq!(
        codes(&open(model.write().path())),
        [WarningCode::NoQuantizationConfig, WarningCode::ZerosAssumed]
    );
    let dir = model.write_edited(|header| header["__metadata__"]["auto_gptq_version"] = json!("0.7.1"));
    assert_eq!(codes(&open(dir.path())), [WarningCode::NoQuantizationConfig]);
}

#[test]
fn any_number_of_threads_finds_the_same() {
    let mut model = Model::new(&Quantized::default());
    model.set("bits", json!(8));
    let dir = model.write();
    // The first of two faults, in the modules' order.
    let (broken, names) = (&mut model, ["model.layers.0.self_attn.v_proj", DOWN]);
    for name in names {
        broken.tensor(name, "scales").bytes[..2].fill(0xff);
    }
    let broken = broken.write();
    for threads in [1, 2, 7] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let checkpoint = open(dir.path());
            assert_eq!(codes(&checkpoint), [WarningCode::ConfigTensorConflict]);
            assert_eq!(checkpoint.fingerprint(), open(dir.path()).fingerprint());
            let error = Checkpoint::open(broken.path(), &OpenOptions::default()).unwrap_err();
            assert_eq!(error.tensor, Some(format!("{}.scales", names[0])));
        });
    }
}

#[test]
fn a_change_of_the_file_is_detected() {
    let model = Model::new(&Quantized::default());
    let dir = model.write();
    let checkpoint = open(dir.path());
    let (before, path) = (checkpoint.fingerprint(), dir.path().join("model.safetensors"));
    checkpoint.check_unchanged().unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    bytes.push(0);
    std::fs::remove_file(&path).unwrap(); // The map keeps the old file.
    std::fs::write(&path, bytes).unwrap();
    let error = checkpoint.check_unchanged().unwrap_err();
    assert!(matches!(*error.fault, Fault::Changed), "{error:#}");
    assert_eq!(checkpoint.fingerprint(), before);
    let other = Model::new(&Quantized { bits: 8, zero: |_, _| 128, ..Quantized::default() }).write();
    assert_ne!(open(other.path()).fingerprint(), before);
}
