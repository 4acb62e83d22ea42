//! Fuzz targets: opening a directory, and each unpacker, on what no tool would write.
//!
//! They run under proptest, which needs no other toolchain than the stable one. By default each runs so many cases as
//! a test run can bear; `PROPTEST_CASES=1000000 cargo test --release --test fuzz TARGET` runs as many as one likes
//! (`TMPDIR=/dev/shm` helps the first target). An input that fails is shrunk, printed and kept in
//! `tests/fuzz.proptest-regressions`, which is committed and tried first from then on.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use half::f16;
use proptest::prelude::*;
use proptest::sample::Index;
use requant::formats::gptq::{self, GIdx, Shape, ZeroConvention, ZeroEncoding};
use requant::formats::{Permutation, exl2};
use requant::inspect::{Inspection, Parallel, Summary, Verdict};
use requant::plan::readers::READERS;
use requant::plan::{GptqOptions, Order};
use requant::progress::Silent;
use requant::{ConvertOptions, Diagnose, Kind, Plan, PlanOptions, Target};
use safetensors::Dtype;
use serde_json::{Map, Value, json};
use std::path::Path;
use std::sync::OnceLock;
use support::try_open;
use support::writer::{LINEARS, Model, Quantized, Tensor, Tensors, safetensors};

fn cases(usual: u32) -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(usual);
    ProptestConfig { cases, max_shrink_iters: 4096, ..ProptestConfig::default() }
}

// Opening a directory.

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
        models.extend([exl2(&models[2]), dense]);
        models
    })
}

/// A model as EXL2 of several widths.
fn exl2(model: &Model) -> Model {
    let (source, out) = (model.write(), tempfile::tempdir().unwrap());
    let checkpoint = support::open(source.path());
    let plan = Plan::new(&checkpoint, &PlanOptions::new(Target::Bpw(4.5)), &Silent).unwrap();
    let out = out.path().join("out");
    requant::convert(&checkpoint, &plan, &out, &ConvertOptions::default(), &Silent).unwrap();
    let converted = support::open(&out);
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

// The unpackers.

/// Numbers for large slices.
struct Stream(u64);

impl Stream {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as u32
    }

    fn words(&mut self, len: usize) -> Vec<u32> {
        (0..len).map(|_| self.next()).collect()
    }
}

/// What a GPTQ module may be said to be, and numbers to fill it with.
#[derive(Clone, Debug)]
struct AnyGptq {
    in_features: usize,
    out_features: usize,
    groups: usize,
    /// Words more than the sizes ask for, of `qweight` and `qzeros`.
    more: [usize; 2],
    stated: Option<usize>,
    /// How far g_idx may be out of range; `None`: absent.
    g_idx: Option<i64>,
    seed: u64,
}

fn any_gptq() -> impl Strategy<Value = AnyGptq> {
    let size = || prop_oneof![8 => 0usize..140, 1 => Just(usize::MAX), 1 => Just(1usize << 61)];
    // Mostly the words that the sizes ask for.
    let more = || prop_oneof![6 => Just(0usize), 1 => 0usize..3];
    let sizes = (size(), size(), 0usize..9, [more(), more()]);
    (sizes, prop::option::of(0usize..140), prop::option::of(0i64..3), any::<u64>()).prop_map(
        |((in_features, out_features, groups, more), stated, g_idx, seed)| AnyGptq {
            in_features,
            out_features,
            groups,
            more,
            stated,
            g_idx,
            seed: seed | 1,
        },
    )
}

/// Unpacks a module of any numbers: an error, or a matrix whose decoding, packing and re-laying hold together.
fn unpack_gptq(bits: gptq::Bits, any: &AnyGptq) {
    let AnyGptq { in_features, out_features, groups, more, stated, g_idx, seed } = *any;
    let shape = Shape { in_features, out_features, bits, groups };
    let mut stream = Stream(seed);
    let small = |[rows, columns]: [usize; 2]| rows.checked_mul(columns).filter(|&len| len < 1 << 20);
    let (Some(words), Some(zero_words)) = (small(shape.qweight()), small(shape.qzeros())) else {
        // No slice is so long; the shortest must be refused.
        assert!(gptq::unpack_codes(&shape, &[0]).is_err());
        assert!(gptq::survey_zeros(&shape, &[0]).is_err());
        return;
    };
    let qweight = stream.words(words + more[0]);
    let qzeros = stream.words(zero_words + more[1]);
    let index: Option<Vec<i64>> = g_idx.map(|beyond| {
        let range = groups as i64 + beyond;
        (0..in_features.min(1 << 12)).map(|_| i64::from(stream.next()) % range.max(1) - beyond / 2).collect()
    });
    let dimensions = |[rows, columns]: [usize; 2]| [rows + more[0], columns];
    let _ = Shape::from_dimensions(in_features, dimensions(shape.qweight()), shape.qzeros(), shape.scales());
    let codes = gptq::unpack_codes(&shape, &qweight);
    if let Ok(codes) = &codes {
        // Bits beyond the last row are lost, all others are not.
        let again = gptq::pack_codes(&shape, codes).unwrap();
        assert_eq!(gptq::unpack_codes(&shape, &again).as_ref(), Ok(codes));
        if in_features.is_multiple_of(32) {
            assert_eq!(again, qweight);
        }
    }
    let _ = gptq::survey_zeros(&shape, &qzeros);
    let encodings =
        [ZeroEncoding::V2, ZeroEncoding::V1PlusOne, ZeroEncoding::V1Wrap, ZeroEncoding::V1WordWise];
    let index = GIdx::new(index.as_deref(), in_features, groups, stated);
    for encoding in encodings {
        let zeros = gptq::decode_zeros(&shape, &qzeros, encoding);
        let (Ok(zeros), Ok(codes), Ok(index)) = (zeros, &codes, &index) else { continue };
        if let (Ok(words), true) =
            (gptq::encode_zeros(&shape, &zeros, encoding.convention()), encoding != ZeroEncoding::V1WordWise)
        {
            assert_eq!(gptq::decode_zeros(&shape, &words, encoding).as_ref(), Ok(&zeros));
        }
        let scales: Vec<f32> = (0..zeros.len()).map(|i| f32::from_bits(qzeros[i % qzeros.len()])).collect();
        let _ = gptq::check_scales(&shape, &scales);
        let scales: Vec<f32> = (0..zeros.len()).map(|i| 0.01 + (i % 7) as f32).collect();
        let matrix = gptq::Matrix::new(shape, codes.clone(), zeros, scales, index.clone()).unwrap();
        let weights = matrix.dequantize();
        assert_eq!(weights.len(), in_features * out_features);
        if let Ok((sorted, rows)) = matrix.sorted() {
            let sorted = sorted.dequantize();
            for (j, &row) in rows.map().iter().enumerate() {
                let [moved, stayed] =
                    [j, row as usize].map(|row| row * out_features..(row + 1) * out_features);
                assert_eq!(sorted[moved], weights[stayed]);
            }
        }
        for wider in gptq::Bits::ALL {
            if let Ok(widened) = matrix.widened(wider) {
                assert_eq!(widened.dequantize(), weights);
            }
            if let Ok(recentred) = matrix.recentred(wider) {
                assert_eq!(recentred.dequantize(), weights);
            }
        }
        if let Ok(split) = matrix.with_group_size(stated.unwrap_or(32)) {
            assert_eq!(split.dequantize(), weights);
        }
    }
}

macro_rules! gptq_unpackers {
    ($($name:ident $bits:literal)*) => { proptest! {
        #![proptest_config(cases(2000))]
        $(#[test]
        fn $name(any in any_gptq()) {
            unpack_gptq(gptq::Bits::try_from($bits).unwrap(), &any);
        })*
    } };
}

gptq_unpackers! { unpacking_gptq_2 2  unpacking_gptq_3 3  unpacking_gptq_4 4  unpacking_gptq_8 8 }

proptest! {
    #![proptest_config(cases(4000))]

    /// A table of groups of any numbers: an error, or a table that is written as it was read.
    #[test]
    fn unpacking_exl2_groups(
        q_groups in prop_oneof![
            prop::collection::vec(any::<i16>(), 0..12),
            prop::collection::vec(prop_oneof![-1i16..10, 0i16..64], 0..12),
        ],
        word_rows in prop_oneof![0usize..80, Just(usize::MAX), any::<usize>()],
    ) {
        if let Ok(table) = exl2::GroupTable::parse(&q_groups, word_rows) {
            prop_assert_eq!(table.to_q_groups(), q_groups);
            prop_assert_eq!(table.word_rows(), word_rows);
            prop_assert_eq!(table.rows_of_widths().iter().map(|(_, rows)| rows).sum::<usize>(), table.rows());
            prop_assert!(table.common_rows() >= 32);
        }
    }

    /// Groups of every width, whole or nearly so: an error, or a matrix that is packed as it was read.
    #[test]
    fn unpacking_exl2_matrices(
        widths in prop::collection::vec((0usize..6, 1usize..4), 1..7),
        in_order in prop::bool::weighted(0.9),
        columns in prop_oneof![8 => (1usize..4).prop_map(|n| 32 * n), 1 => 0usize..70],
        wrong in prop::option::weighted(0.3, (0usize..5, any::<u8>())),
        seed in any::<u64>(),
    ) {
        let mut stream = Stream(seed | 1);
        let mut widths = widths;
        if in_order {
            widths.sort_by_key(|(width, _)| std::cmp::Reverse(*width));
        }
        let (mut q_groups, mut word_rows, mut k): (Vec<i16>, usize, usize) = (Vec::new(), 0, 0);
        for &(width, units) in &widths {
            let bits = exl2::Bits::ALL[width].get() as usize;
            q_groups.extend([bits as i16, word_rows as i16]);
            word_rows += units * bits;
            k += 32 * units;
        }
        let mut q_weight = stream.words(word_rows * columns);
        let mut invperm: Vec<u32> = (0..k as u32).collect();
        for i in (1..k).rev() {
            invperm.swap(i, stream.next() as usize % (i + 1));
        }
        let mut q_scale = stream.words(widths.len() * columns / 8);
        let mut q_scale_max: Vec<f16> =
            stream.words(widths.len()).iter().map(|&bits| f16::from_bits(bits as u16 & 0x5fff)).collect();
        match wrong {
            Some((0, by)) => q_weight.truncate(q_weight.len().saturating_sub(usize::from(by))),
            Some((1, by)) => invperm[usize::from(by) % k] = u32::from(by),
            Some((2, by)) => q_scale.extend(std::iter::repeat_n(0, usize::from(by))),
            Some((3, by)) => q_scale_max[usize::from(by) % widths.len()] = f16::from_bits(u16::from(by) << 8),
            Some((_, by)) => {
                let at = usize::from(by) % q_groups.len();
                q_groups[at] = q_groups[at].wrapping_add(i16::from(by) - 128);
            }
            None => {}
        }
        let tensors = exl2::Tensors {
            q_weight: &q_weight,
            q_invperm: &invperm,
            q_scale: &q_scale,
            q_scale_max: &q_scale_max,
            q_groups: &q_groups,
        };
        if let Ok(matrix) = exl2::Matrix::unpack(tensors, columns) {
            let packed = matrix.pack();
            prop_assert_eq!(&packed.q_weight, &q_weight);
            prop_assert_eq!(&packed.q_scale, &q_scale);
            prop_assert_eq!(&packed.q_groups, &q_groups);
            prop_assert_eq!(&packed.q_invperm, &invperm);
            let weights = matrix.dequantize();
            prop_assert_eq!(weights.len(), k * columns);
            prop_assert!(weights.iter().all(|weight| weight.is_finite()));
            let _ = matrix.check_padding(columns - 1);
            for bits in gptq::Bits::ALL {
                // The same weights, in the order of the model's rows.
                if let Ok(gptq) = gptq::Matrix::from_exl2(&matrix, columns, bits) {
                    let same = gptq.dequantize().iter().zip(&weights).all(|(a, b)| a.to_f32() == b.to_f32());
                    prop_assert!(same);
                }
            }
        }
    }

    /// Numbers that should be a permutation.
    #[test]
    fn unpacking_permutations(map in prop::collection::vec(prop_oneof![0u32..9, any::<u32>()], 0..9)) {
        if let Ok(permutation) = Permutation::new(map.clone()) {
            let back = permutation.inverse();
            prop_assert!(map.iter().enumerate().all(|(i, &to)| back.map()[to as usize] as usize == i));
        }
    }
}
