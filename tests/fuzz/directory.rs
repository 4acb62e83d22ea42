//! A directory with a few things wrong: read, or refused.

use super::cases;
use super::support::writer::{LINEARS, Model, Quantized, Tensor, Tensors, safetensors};
use super::support::{open, try_open};
use proptest::prelude::*;
use proptest::sample::Index;
use requant::formats::exl2;
use requant::formats::gptq::ZeroConvention;
use requant::inspect::{Inspection, Parallel, Summary, Verdict};
use requant::plan::readers::READERS;
use requant::plan::{GptqOptions, Order};
use requant::progress::Silent;
use requant::{ConvertOptions, Diagnose, Kind, Plan, PlanOptions, Target};
use safetensors::Dtype;
use serde_json::{Map, Value, json};
use std::path::Path;
use std::sync::OnceLock;

/// One thing that is wrong with a directory.
#[derive(Clone, Debug)]
enum Damage {
    /// Bytes of the length field or the header.
    Header(Vec<(Index, u8)>),
    /// A digit of the header.
    Digit(Index, u8),
    /// Bytes of the tensors.
    Data(Vec<(Index, u8)>),
    /// The file ends early.
    Cut(Index),
    /// Bytes after the end.
    More(u8),
    /// A value of config.json, at any depth.
    Config(Index, Index),
    /// A value of the quantization's configuration that wasn't there, or was another.
    Quant(Index, Index),
    /// A byte of config.json.
    ConfigByte(Index, u8),
    /// A value of the index.
    Shards(Index, Index),
    /// A tensor's shape.
    Shape(Index, Index, Index),
    /// A tensor's type.
    Type(Index, Index),
    /// No tensor of that name.
    Gone(Index),
    /// One tensor under the name of another.
    Renamed(Index, Index),
}

fn damage() -> impl Strategy<Value = Damage> {
    let index = any::<Index>;
    let bytes = || prop::collection::vec((any::<Index>(), any::<u8>()), 1..6);
    prop_oneof![
        bytes().prop_map(Damage::Header),
        (index(), b'0'..=b'9').prop_map(|(at, digit)| Damage::Digit(at, digit)),
        bytes().prop_map(Damage::Data),
        index().prop_map(Damage::Cut),
        any::<u8>().prop_map(Damage::More),
        (index(), index()).prop_map(|(at, value)| Damage::Config(at, value)),
        (index(), index()).prop_map(|(at, value)| Damage::Quant(at, value)),
        (index(), any::<u8>()).prop_map(|(at, byte)| Damage::ConfigByte(at, byte)),
        (index(), index()).prop_map(|(at, value)| Damage::Shards(at, value)),
        (index(), index(), index()).prop_map(|(at, axis, size)| Damage::Shape(at, axis, size)),
        (index(), index()).prop_map(|(at, dtype)| Damage::Type(at, dtype)),
        index().prop_map(Damage::Gone),
        (index(), index()).prop_map(|(from, to)| Damage::Renamed(from, to)),
    ]
}

/// Values that no configuration should have, and some that it may.
fn odd_values() -> Vec<Value> {
    let deep = (0..60).fold(json!(1), |value, _| json!([value]));
    vec![
        json!(null),
        json!(true),
        json!(0),
        json!(1),
        json!(2),
        json!(3),
        json!(8),
        json!(-1),
        json!(31),
        json!(33),
        json!(1u64 << 28),
        json!(1u64 << 53),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(0.5),
        json!(1e308),
        json!(-0.0),
        json!(""),
        json!("4"),
        json!("../model.safetensors"),
        json!("b.safetensors"),
        json!("gptq_v2"),
        json!("exl2"),
        json!([]),
        json!(["MixtralForCausalLM"]),
        json!(["Phi3ForCausalLM"]),
        json!(["GPT2LMHeadModel"]),
        json!([[]]),
        json!({}),
        json!({"-:.*q_proj": {}, "+:.*(a+)+$": {"bits": 8}}),
        json!({"rope_type": "yarn", "factor": 1e300}),
        deep,
    ]
}

/// The directories that are damaged, each with all its linears stored one way.
fn models() -> &'static [Model] {
    static MODELS: OnceLock<Vec<Model>> = OnceLock::new();
    MODELS.get_or_init(|| {
        let of = |bits, convention| {
            let zero = match bits {
                2 => |_, _| 2,
                3 => |_, _| 4,
                4 => |_, _| 8,
                _ => |_, _| 128,
            };
            Model::new(&Quantized { bits, convention, zero, ..Quantized::default() })
        };
        let mut models: Vec<Model> = [2, 3, 4, 8].map(|bits| of(bits, ZeroConvention::V1)).to_vec();
        let mut asymmetric = Model::new(&Quantized {
            zero: |group, column| 1 + ((group + column) % 16) as u16,
            ..Quantized::default()
        });
        asymmetric.set("sym", json!(false));
        models.extend([of(4, ZeroConvention::V2), asymmetric]);
        let mut dense = Model::new(&Quantized::default());
        for (name, k, n) in LINEARS {
            dense.make_dense(name, k, n);
        }
        models.extend([as_exl2(&models[2]), dense]);
        models
    })
}

/// A model as EXL2 of several widths.
fn as_exl2(model: &Model) -> Model {
    let (source, out) = (model.write(), tempfile::tempdir().unwrap());
    let checkpoint = open(source.path());
    let plan = Plan::new(&checkpoint, &PlanOptions::new(Target::Bpw(4.5)), &Silent).unwrap();
    let out = out.path().join("out");
    requant::convert(&checkpoint, &plan, &out, &ConvertOptions::default(), &Silent).unwrap();
    let converted = open(&out);
    let names = converted.modules().iter().flat_map(|m| m.tensor_names().collect::<Vec<_>>());
    let others = converted.other_tensors().map(|tensor| tensor.name().to_owned());
    let mut tensors = Tensors::new();
    for name in names.chain(others) {
        let Some(tensor) = converted.tensor(&name) else { continue };
        let dtype = match tensor.dtype() {
            Dtype::I32 => "I32",
            Dtype::I16 => "I16",
            _ => "F16",
        };
        tensors.insert(name, Tensor::of(dtype, tensor.shape(), tensor.bytes()));
    }
    Model { config: Value::Object(converted.config().clone()), quant: None, tensors }
}

/// Writes a directory with everything that is wrong with it.
fn write(model: &Model, sharded: bool, damage: &[Damage], dir: &Path) {
    const DTYPES: [&str; 9] = ["I32", "U32", "I64", "F16", "BF16", "F32", "I16", "F8_E4M3", "BOOL"];
    const SIZES: [usize; 9] = [0, 1, 31, 32, 64, 96, 1 << 20, 1 << 61, usize::MAX];
    let mut model = model.clone();
    let odd = odd_values();
    for damage in damage {
        let names: Vec<String> = model.tensors.keys().cloned().collect();
        if names.is_empty() {
            break;
        }
        let named = |at: &Index| at.get(&names).clone();
        match damage {
            Damage::Config(at, value) => replace(&mut model.config, at, value.get(&odd)),
            Damage::Quant(at, value) => {
                const KEYS: [&str; 12] = [
                    "bits",
                    "group_size",
                    "desc_act",
                    "sym",
                    "quant_method",
                    "checkpoint_format",
                    "dynamic",
                    "lm_head",
                    "meta",
                    "packing_format",
                    "modules_in_block_to_quantize",
                    "pack_dtype",
                ];
                if let Some(Value::Object(quant)) = &mut model.quant {
                    quant.insert((*at.get(&KEYS)).into(), value.get(&odd).clone());
                }
            }
            Damage::Shape(at, axis, size) => {
                let shape = &mut model.tensors.get_mut(&named(at)).unwrap().shape;
                if !shape.is_empty() {
                    let axis = axis.index(shape.len());
                    shape[axis] = *size.get(&SIZES);
                }
            }
            Damage::Type(at, dtype) => {
                model.tensors.get_mut(&named(at)).unwrap().dtype = DTYPES[dtype.index(DTYPES.len())];
            }
            Damage::Gone(at) => drop(model.tensors.remove(&named(at))),
            Damage::Renamed(from, to) => {
                let tensor = model.tensors.remove(&named(from)).unwrap();
                model.tensors.insert(named(to), tensor);
            }
            _ => {}
        }
    }
    let _ = std::fs::remove_file(dir.join("quantize_config.json"));
    match model.config.is_object() {
        true => model.write_config(dir),
        false => std::fs::write(dir.join("config.json"), model.config.to_string()).unwrap(),
    }
    let mut shards: [Tensors; 2] = Default::default();
    for (i, (name, tensor)) in model.tensors.iter().enumerate() {
        shards[usize::from(sharded && i % 2 == 1)].insert(name.clone(), tensor.clone());
    }
    let mut index: Map<String, Value> = Map::new();
    for (shard, file) in shards.iter().zip(["model.safetensors", "b.safetensors"]) {
        index.extend(shard.keys().map(|name| (name.clone(), file.into())));
    }
    let mut index = json!({"metadata": {"total_size": 1}, "weight_map": index});
    for damage in damage {
        if let Damage::Shards(at, value) = damage {
            replace(&mut index, at, value.get(&odd));
        }
    }
    let at_index = dir.join("model.safetensors.index.json");
    match sharded {
        true => {
            std::fs::write(&at_index, index.to_string()).unwrap();
            std::fs::write(dir.join("b.safetensors"), safetensors(&shards[1], |_| {})).unwrap();
        }
        false => {
            let _ = std::fs::remove_file(&at_index);
            let _ = std::fs::remove_file(dir.join("b.safetensors"));
        }
    }
    let mut bytes = safetensors(&shards[0], |_| {});
    let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    for damage in damage {
        match damage {
            Damage::Header(changes) => changes.iter().for_each(|(at, byte)| bytes[at.index(end)] = *byte),
            Damage::Digit(at, digit) => {
                let digits: Vec<usize> = (8..end).filter(|&i| bytes[i].is_ascii_digit()).collect();
                if !digits.is_empty() {
                    bytes[*at.get(&digits)] = *digit;
                }
            }
            Damage::Data(changes) if bytes.len() > end => {
                let data = bytes.len() - end;
                changes.iter().for_each(|(at, byte)| bytes[end + at.index(data)] = *byte);
            }
            _ => {}
        }
    }
    for damage in damage {
        match damage {
            Damage::Cut(at) if !bytes.is_empty() => bytes.truncate(at.index(bytes.len())),
            Damage::More(count) => bytes.extend(std::iter::repeat_n(0, usize::from(*count))),
            Damage::ConfigByte(at, byte) => {
                let path = dir.join("config.json");
                let mut text = std::fs::read(&path).unwrap();
                let at = at.index(text.len());
                text[at] = *byte;
                std::fs::write(&path, text).unwrap();
            }
            _ => {}
        }
    }
    std::fs::write(dir.join("model.safetensors"), bytes).unwrap();
}

/// Replaces one place of a JSON value, chosen among all.
fn replace(value: &mut Value, at: &Index, by: &Value) {
    let count = count_places(value);
    let mut left = at.index(count);
    replace_nth(value, &mut left, by);
}

fn count_places(value: &Value) -> usize {
    1 + match value {
        Value::Object(object) => object.values().map(count_places).sum(),
        Value::Array(list) => list.iter().map(count_places).sum::<usize>(),
        _ => 0,
    }
}

fn replace_nth(value: &mut Value, left: &mut usize, by: &Value) -> bool {
    if *left == 0 {
        *value = by.clone();
        return true;
    }
    *left -= 1;
    match value {
        Value::Object(object) => object.values_mut().any(|value| replace_nth(value, left, by)),
        Value::Array(list) => list.iter_mut().any(|value| replace_nth(value, left, by)),
        _ => false,
    }
}

/// Opens a directory and does all that reads but doesn't write. Whatever is wrong is the input's fault, in a file of
/// the directory.
fn read_all(dir: &Path) {
    let fine = |error: &dyn Diagnose| {
        assert_ne!(error.kind(), Kind::Bug, "{error}");
        assert!(error.file().is_none_or(|file| file.starts_with(dir)), "{error}");
        assert!(!error.to_string().is_empty() && !error.code().is_empty());
    };
    let checkpoint = match try_open(dir) {
        Ok(checkpoint) => checkpoint,
        Err(error) => return fine(&error),
    };
    for module in checkpoint.modules() {
        match checkpoint.dequantize(module) {
            Ok(weights) => assert_eq!(weights.len() as u64, module.weights()),
            Err(error) => fine(&error),
        }
    }
    Inspection::new(&checkpoint);
    Summary::new(&checkpoint);
    Parallel::new(&checkpoint, 2);
    for reader in READERS {
        Verdict::new(&checkpoint, reader).unwrap();
        let options = GptqOptions { reader: Some(reader), order: Order::Sorted, ..GptqOptions::default() };
        if let Err(error) = Plan::to_gptq(&checkpoint, &options) {
            fine(&error);
        }
    }
    let four = Target::Uniform { bits: exl2::Bits::ALL[2], group_size: 32 };
    if let Err(error) = Plan::new(&checkpoint, &PlanOptions::new(four), &Silent) {
        fine(&error);
    }
}

proptest! {
    #![proptest_config(cases(1500))]

    /// Up to four things wrong with a directory: it is read, or refused by file, and nothing panics.
    #[test]
    fn opening_a_directory(
        model in 0usize..8,
        sharded in any::<bool>(),
        damage in prop::collection::vec(damage(), 0..5),
    ) {
        thread_local! {
            static DIR: tempfile::TempDir = tempfile::tempdir().unwrap();
        }
        DIR.with(|dir| {
            write(&models()[model], sharded, &damage, dir.path());
            read_all(dir.path());
        });
    }
}
