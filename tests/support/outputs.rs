//! Converts in process, and damages what came out.
#![allow(dead_code)] // Each test binary uses its own part.

use super::support::writer::{Tensor, Tensors, safetensors};
use requant::checkpoint::{Checkpoint, OpenOptions};
use requant::convert::{ConvertOptions, convert};
use requant::formats::exl2::Bits;
use requant::formats::gptq::ZeroConvention;
use requant::plan::readers::Reader;
use requant::plan::{DenseType, GptqOptions, Order, Plan, PlanOptions, Target};
use requant::progress::Silent;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A converted directory, removed in the end.
#[derive(Debug)]
pub(crate) struct Output {
    _parent: TempDir,
    pub(crate) dir: PathBuf,
}

/// Converts as a plan says.
pub(crate) fn output(checkpoint: &Checkpoint, plan: &Plan, shard_size: u64) -> Output {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("out");
    convert(checkpoint, plan, &dir, &ConvertOptions { shard_size }, &Silent)
        .unwrap_or_else(|e| panic!("{}: {e}", checkpoint.dir().display()));
    Output { _parent: parent, dir }
}

/// The size of shards that splits the small models.
pub(crate) const SMALL: u64 = 300_000;

/// GPTQ with these options.
pub(crate) fn gptq(checkpoint: &Checkpoint, options: &GptqOptions) -> Result<Output, requant::Error> {
    Ok(output(checkpoint, &Plan::to_gptq(checkpoint, options)?, SMALL))
}

/// EXL2 of one width.
pub(crate) fn exl2(checkpoint: &Checkpoint, bits: u32) -> Output {
    let target = Target::Uniform { bits: Bits::try_from(bits).unwrap(), group_size: 64 };
    output(checkpoint, &Plan::new(checkpoint, &PlanOptions::new(target), &Silent).unwrap(), SMALL)
}

/// Dense.
pub(crate) fn dense(checkpoint: &Checkpoint, dtype: DenseType) -> Output {
    output(checkpoint, &Plan::to_dense(checkpoint, dtype).unwrap(), SMALL)
}

/// Options of one kind.
pub(crate) fn zeros(zeros: ZeroConvention) -> GptqOptions {
    GptqOptions { zeros: Some(zeros), ..GptqOptions::default() }
}

/// Rows sorted where that can be folded.
pub(crate) fn sorted() -> GptqOptions {
    GptqOptions { order: Order::Sorted, ..GptqOptions::default() }
}

/// As `--for` asks: sorted for readers that ignore `g_idx`.
pub(crate) fn reader(name: &str) -> GptqOptions {
    let reader = Reader::named(name).unwrap();
    let order = if reader.act_order { Order::Keep } else { Order::Sorted };
    GptqOptions { reader: Some(reader), order, ..GptqOptions::default() }
}

/// Opens a checkpoint.
pub(crate) fn source(dir: impl AsRef<Path>) -> Checkpoint {
    Checkpoint::open(dir.as_ref(), &OpenOptions::default()).unwrap_or_else(|e| panic!("{e:#}"))
}

/// A JSON file.
pub(crate) fn json_of(path: impl AsRef<Path>) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

impl Output {
    /// `report.json`.
    pub(crate) fn report(&self) -> Value {
        json_of(self.dir.join("report.json"))
    }

    /// Changes a JSON file.
    pub(crate) fn edit_json(&self, file: &str, edit: impl FnOnce(&mut Value)) {
        let path = self.dir.join(file);
        let mut json = json_of(&path);
        edit(&mut json);
        std::fs::write(path, serde_json::to_vec_pretty(&json).unwrap()).unwrap();
    }

    /// The file of a tensor, by the index.
    pub(crate) fn file_of(&self, tensor: &str) -> PathBuf {
        let index = json_of(self.dir.join("model.safetensors.index.json"));
        self.dir.join(index["weight_map"][tensor].as_str().unwrap_or_else(|| panic!("{tensor}")))
    }

    /// Changes the bytes of a tensor where they lie.
    pub(crate) fn edit_tensor(&self, tensor: &str, edit: impl FnOnce(&mut [u8])) {
        let path = self.file_of(tensor);
        let mut file = std::fs::read(&path).unwrap();
        let head = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&file[8..head]).unwrap();
        let offset = |i: usize| head + header[tensor]["data_offsets"][i].as_u64().unwrap() as usize;
        edit(&mut file[offset(0)..offset(1)]);
        std::fs::write(path, file).unwrap();
    }

    /// Writes the file of a tensor again, its tensors changed.
    pub(crate) fn edit_tensors(&self, tensor: &str, edit: impl FnOnce(&mut Tensors)) {
        let path = self.file_of(tensor);
        let file = std::fs::read(&path).unwrap();
        let parsed = ::safetensors::SafeTensors::deserialize(&file).unwrap();
        let dtype = |d| match d {
            ::safetensors::Dtype::F16 => "F16",
            ::safetensors::Dtype::I32 => "I32",
            ::safetensors::Dtype::I16 => "I16",
            other => panic!("{other:?}"),
        };
        let tensors = parsed.tensors();
        let mut tensors: Tensors = tensors
            .iter()
            .map(|(name, view)| (name.clone(), Tensor::of(dtype(view.dtype()), view.shape(), view.data())))
            .collect();
        edit(&mut tensors);
        std::fs::write(path, safetensors(&tensors, |_| {})).unwrap();
    }

    /// Makes report and index agree with the files again: what remains is a lie that only reading finds.
    pub(crate) fn restate(&self) {
        let dir = self.dir.clone();
        let (mut map, mut total) = (serde_json::Map::new(), 0);
        self.edit_json("report.json", |report| {
            for shard in report["shards"].as_array_mut().unwrap() {
                let bytes = std::fs::read(dir.join(shard["file"].as_str().unwrap())).unwrap();
                shard["bytes"] = bytes.len().into();
                let digest = Sha256::digest(&bytes);
                shard["sha256"] = digest.iter().map(|b| format!("{b:02x}")).collect::<String>().into();
                for (name, view) in ::safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors() {
                    total += view.data().len();
                    map.insert(name, shard["file"].clone());
                }
            }
        });
        self.edit_json("model.safetensors.index.json", |index| {
            index["weight_map"] = map.into();
            index["metadata"]["total_size"] = total.into();
        });
    }
}
