//! Why a directory is no checkpoint that requant can read: one variant for each lie it can tell.

use crate::{Diagnose, Kind, arch};
use requant_formats::{exl2, gptq};
use safetensors::Dtype;
use serde_json::Value;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// What is wrong with a checkpoint, and where.
///
/// `Display` is what was found and expected; the alternate form (`{:#}`) puts file and tensor before it.
#[derive(Debug)]
pub struct Error {
    /// The file at fault.
    pub file: PathBuf,
    /// The tensor at fault, by its full name.
    pub tensor: Option<String>,
    /// What is wrong.
    pub fault: Box<Fault>,
}

impl Error {
    pub(super) fn new(file: impl Into<PathBuf>, fault: impl Into<Fault>) -> Self {
        Self { file: file.into(), tensor: None, fault: Box::new(fault.into()) }
    }

    pub(super) fn tensor(
        file: impl Into<PathBuf>,
        tensor: impl Into<String>,
        fault: impl Into<Fault>,
    ) -> Self {
        Self { file: file.into(), tensor: Some(tensor.into()), fault: Box::new(fault.into()) }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if f.alternate() {
            write!(f, "{}: ", self.file.display())?;
            if let Some(tensor) = &self.tensor {
                write!(f, "{tensor}: ")?;
            }
        }
        self.fault.fmt(f)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&*self.fault)
    }
}

/// What is wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// The operating system refused.
    #[error("can't be read: {0}")]
    Io(#[from] io::Error),
    /// Size or time of modification changed since the checkpoint was opened.
    #[error("changed while it was being read")]
    Changed,

    // The directory.
    /// There is no `config.json`.
    #[error("is missing")]
    Missing,
    /// No weights at all.
    #[error("holds no .safetensors file")]
    NoWeights,
    /// Only pickles, which can run code when loaded, and are never opened.
    #[error("is a pickle: only .safetensors files are read")]
    Pickle,
    /// A file that Git LFS has not fetched.
    #[error("is a Git LFS pointer, not the file itself")]
    LfsPointer,

    // The header of a safetensors file.
    /// 0 bytes.
    #[error("has 0 bytes")]
    EmptyFile,
    /// Too short for the length field.
    #[error("has {found} bytes, fewer than the 8 of a safetensors length field")]
    NoLengthField {
        /// Bytes of the file.
        found: u64,
    },
    /// The header would end after the file.
    #[error("has {found} bytes, but its header alone takes {header}")]
    HeaderPastEnd {
        /// Stated length of the header.
        header: u64,
        /// Bytes of the file.
        found: u64,
    },
    /// No real header is that large.
    #[error("has a header of {header} bytes, at most {allowed} are allowed")]
    HeaderTooLarge {
        /// Stated length of the header.
        header: u64,
        /// The limit.
        allowed: u64,
    },
    /// The header is not a JSON object.
    #[error("has a header that is no JSON: {message}")]
    HeaderNotJson {
        /// The parser's words.
        message: String,
    },
    /// A tensor's entry has not the three fields with their types.
    #[error("has a malformed header entry: {message}")]
    TensorEntry {
        /// The parser's words.
        message: String,
    },
    /// Two entries of one name.
    #[error("stands twice in the header")]
    RepeatedTensor,
    /// A dtype that safetensors doesn't have.
    #[error("has dtype {found:?}, which safetensors does not have")]
    UnknownDtype {
        /// The dtype.
        found: String,
    },
    /// The number of bytes doesn't fit 64 bits.
    #[error("has shape {shape:?}, whose size overflows")]
    ShapeOverflow {
        /// The shape.
        shape: Vec<u64>,
    },
    /// Begins after its end.
    #[error("begins at byte {begin} and ends before it at {end}")]
    OffsetsReversed {
        /// First byte.
        begin: u64,
        /// End.
        end: u64,
    },
    /// Shape and dtype ask for another number of bytes.
    #[error("has {found} bytes, but shape {shape:?} of {dtype} takes {expected}")]
    ByteCount {
        /// Bytes by its offsets.
        found: u64,
        /// Bytes by its shape.
        expected: u64,
        /// The shape.
        shape: Vec<u64>,
        /// The type.
        dtype: Dtype,
    },
    /// Shares bytes with another tensor.
    #[error("shares {shared} bytes with {with}")]
    Overlap {
        /// The other tensor.
        with: String,
        /// Bytes in common.
        shared: u64,
    },
    /// Unused bytes before it.
    #[error("is preceded by {unused} bytes that belong to no tensor")]
    Gap {
        /// How many.
        unused: u64,
    },
    /// The file ends before the tensor does. The tensor is the first that lacks bytes.
    #[error(
        "ends past the file, which has {found} bytes of {expected}: {} are missing",
        expected - found
    )]
    Truncated {
        /// Bytes of the file.
        found: u64,
        /// Bytes that the header asks for.
        expected: u64,
    },
    /// Bytes after the last tensor.
    #[error("has {found} bytes, but its tensors end at {expected}")]
    TrailingBytes {
        /// Bytes of the file.
        found: u64,
        /// Where the tensors end.
        expected: u64,
    },

    // The index and the shards.
    /// The index is not an object with a `weight_map` of file names.
    #[error("is no index: {message}")]
    IndexMalformed {
        /// The parser's words.
        message: String,
    },
    /// The index gives one tensor two shards.
    #[error("is given two shards by the index, {first} and {second}")]
    IndexRepeated {
        /// The first.
        first: String,
        /// The other.
        second: String,
    },
    /// The index names a file outside the directory.
    #[error("names the shard {shard:?}, which is not a file of this folder")]
    ShardOutside {
        /// The name.
        shard: String,
    },
    /// The index names a file that isn't there.
    #[error("is missing, but {index} names it")]
    ShardMissing {
        /// The index.
        index: String,
    },
    /// The index promises a tensor to a shard that doesn't hold it.
    #[error("is not in this shard, where {index} places it")]
    NotInShard {
        /// The index.
        index: String,
    },
    /// One tensor in two files, and no index to tell which counts.
    #[error("stands in {other} too, and there is no index to tell which of them counts")]
    InTwoFiles {
        /// The other file.
        other: String,
    },

    // The configuration.
    /// Not a JSON object.
    #[error("is no JSON object: {message}")]
    ConfigNotJson {
        /// The parser's words.
        message: String,
    },
    /// A value that makes no sense.
    #[error("has {key} = {found}: {expected}")]
    ConfigValue {
        /// The key.
        key: String,
        /// Its value.
        found: Value,
        /// In words: what it should be.
        expected: &'static str,
    },
    /// A layout that requant does not read.
    #[error("is quantized as {method} (says {key}), a layout that requant does not read")]
    Foreign {
        /// The layout.
        method: String,
        /// What says so: a key of the configuration, or the shape of a tensor.
        key: String,
    },
    /// The architecture's sizes.
    #[error(transparent)]
    Sizes(#[from] arch::Error),
    /// A pattern of `dynamic` that can't be compiled or evaluated.
    #[error("has a dynamic rule {rule:?} that can't be evaluated: {message}")]
    DynamicRule {
        /// The rule.
        rule: String,
        /// The regex engine's words.
        message: String,
    },

    // Modules.
    /// A linear of the architecture is in no file.
    #[error("is missing: {architecture} with {layers} layers needs it (as .qweight, .q_weight or .weight)")]
    ModuleMissing {
        /// The architecture.
        architecture: &'static str,
        /// `num_hidden_layers`.
        layers: usize,
    },
    /// A tensor that the architecture has beside its linears is in no file.
    #[error("is missing: every {architecture} has it")]
    DenseMissing {
        /// The architecture.
        architecture: &'static str,
    },
    /// Neither a head nor tied embeddings.
    #[error("is missing, and config.json does not tie the head to the embedding")]
    HeadMissing,
    /// A quantized module that the architecture has no place for.
    #[error("is quantized, but {architecture} with {layers} layers has no such linear")]
    ModuleUnexpected {
        /// The architecture.
        architecture: &'static str,
        /// `num_hidden_layers`.
        layers: usize,
    },
    /// A quantized module lacks one of its tensors.
    #[error("is missing, but the module has {beside}")]
    TensorMissing {
        /// A tensor that it has.
        beside: String,
    },
    /// One module in two layouts.
    #[error("stands beside {other}: two layouts of one module")]
    TwoLayouts {
        /// The other tensor.
        other: String,
    },
    /// A tensor has a type that its role doesn't allow.
    #[error("is {found}, expected {expected}")]
    TensorDtype {
        /// Its type.
        found: Dtype,
        /// In words: what is allowed.
        expected: &'static str,
    },
    /// A tensor has a wrong number of dimensions.
    #[error("has shape {found:?}, {expected} dimensions expected")]
    TensorRank {
        /// Its shape.
        found: Vec<usize>,
        /// How many dimensions.
        expected: usize,
    },
    /// A tensor's shape isn't what the other tensors or the architecture's sizes make it.
    #[error("has shape {found:?}, expected {expected:?}")]
    TensorShape {
        /// Its shape.
        found: Vec<usize>,
        /// What it should be.
        expected: Vec<usize>,
    },
    /// The numbers of a GPTQ module.
    #[error(transparent)]
    Gptq(#[from] gptq::Error),
    /// The numbers of an EXL2 module.
    #[error(transparent)]
    Exl2(#[from] exl2::Error),
    /// The module is stored in another layout than was asked for.
    #[error("is stored as {found}, not as {asked}")]
    OtherLayout {
        /// Its layout.
        found: &'static str,
        /// The layout asked for.
        asked: &'static str,
    },

    // Zero points.
    /// The stored zero points of symmetric modules contradict each other.
    #[error(transparent)]
    MixedZeros(Box<MixedZeros>),
    /// Readers disagree on all-ones fields: 0 or `2^bits`.
    #[error(
        "{count} zero points of {} modules are stored as all ones, which readers take for 0 or for 2^bits",
        .modules.len()
    )]
    AllOnes {
        /// Fields.
        count: usize,
        /// Modules that have some.
        modules: Vec<String>,
    },
    /// AutoGPTQ overwrote zero points with ones.
    #[error(
        "{count} words of {} modules hold zero points that their writer overwrote with ones: they are lost",
        .modules.len()
    )]
    Smear {
        /// Runs.
        count: usize,
        /// Modules that have some.
        modules: Vec<String>,
    },
}

/// Symmetric modules that contradict each other on how zero points are stored.
#[derive(Debug, thiserror::Error)]
#[error(
    "the zero points of {} modules are stored as {one_kind} (such as {}) and of {} as {other_kind} (such as {}): \
     one file has one convention. The label says {}, the producer is {}",
    .one.len(), .one.first().map_or("", String::as_str),
    .other.len(), .other.first().map_or("", String::as_str),
    .label.as_deref().unwrap_or("nothing"), .producer.as_deref().unwrap_or("unknown")
)]
pub struct MixedZeros {
    /// The convention of `one`.
    pub one_kind: &'static str,
    /// Modules.
    pub one: Vec<String>,
    /// The convention of `other`.
    pub other_kind: &'static str,
    /// Modules that contradict them.
    pub other: Vec<String>,
    /// `checkpoint_format`.
    pub label: Option<String>,
    /// What wrote the file.
    pub producer: Option<String>,
}

impl Fault {
    /// A stable name.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Io(_) => "checkpoint.io",
            Self::Changed => "checkpoint.changed",
            Self::Missing => "checkpoint.missing",
            Self::NoWeights => "checkpoint.no_weights",
            Self::Pickle => "checkpoint.pickle",
            Self::LfsPointer => "checkpoint.lfs_pointer",
            Self::EmptyFile => "checkpoint.empty_file",
            Self::NoLengthField { .. } => "checkpoint.no_length_field",
            Self::HeaderPastEnd { .. } => "checkpoint.header_past_end",
            Self::HeaderTooLarge { .. } => "checkpoint.header_too_large",
            Self::HeaderNotJson { .. } => "checkpoint.header_not_json",
            Self::TensorEntry { .. } => "checkpoint.tensor_entry",
            Self::RepeatedTensor => "checkpoint.repeated_tensor",
            Self::UnknownDtype { .. } => "checkpoint.unknown_dtype",
            Self::ShapeOverflow { .. } => "checkpoint.shape_overflow",
            Self::OffsetsReversed { .. } => "checkpoint.offsets_reversed",
            Self::ByteCount { .. } => "checkpoint.byte_count",
            Self::Overlap { .. } => "checkpoint.overlap",
            Self::Gap { .. } => "checkpoint.gap",
            Self::Truncated { .. } => "checkpoint.truncated",
            Self::TrailingBytes { .. } => "checkpoint.trailing_bytes",
            Self::IndexMalformed { .. } => "checkpoint.index_malformed",
            Self::IndexRepeated { .. } => "checkpoint.index_repeated",
            Self::ShardOutside { .. } => "checkpoint.shard_outside",
            Self::ShardMissing { .. } => "checkpoint.shard_missing",
            Self::NotInShard { .. } => "checkpoint.not_in_shard",
            Self::InTwoFiles { .. } => "checkpoint.in_two_files",
            Self::ConfigNotJson { .. } => "checkpoint.config_not_json",
            Self::ConfigValue { .. } => "checkpoint.config_value",
            Self::Foreign { .. } => "checkpoint.foreign_layout",
            Self::Sizes(_) => "checkpoint.sizes",
            Self::DynamicRule { .. } => "checkpoint.dynamic_rule",
            Self::ModuleMissing { .. } => "checkpoint.module_missing",
            Self::DenseMissing { .. } => "checkpoint.dense_missing",
            Self::HeadMissing => "checkpoint.head_missing",
            Self::ModuleUnexpected { .. } => "checkpoint.module_unexpected",
            Self::TensorMissing { .. } => "checkpoint.tensor_missing",
            Self::TwoLayouts { .. } => "checkpoint.two_layouts",
            Self::TensorDtype { .. } => "checkpoint.tensor_dtype",
            Self::TensorRank { .. } => "checkpoint.tensor_rank",
            Self::TensorShape { .. } => "checkpoint.tensor_shape",
            Self::Gptq(gptq::Error::Scale { .. }) => "checkpoint.scale",
            Self::Gptq(gptq::Error::GroupIndex { .. } | gptq::Error::GIdxLength { .. }) => {
                "checkpoint.group_index"
            }
            Self::Gptq(_) => "checkpoint.gptq",
            Self::Exl2(_) => "checkpoint.exl2",
            Self::OtherLayout { .. } => "checkpoint.other_layout",
            Self::MixedZeros(_) => "checkpoint.mixed_zeros",
            Self::AllOnes { .. } => "checkpoint.all_ones",
            Self::Smear { .. } => "checkpoint.smear",
        }
    }

    /// What to do.
    fn hint(&self) -> &'static str {
        match self {
            Self::Io(_) => "check that it exists and may be read",
            Self::Changed => "start again when nothing writes to the checkpoint",
            Self::Missing => "name the folder that holds config.json and the .safetensors files",
            Self::LfsPointer => "fetch the file itself, for example with `git lfs pull`",
            Self::Pickle | Self::NoWeights => {
                "convert the model to safetensors with the tool that made it; requant never runs pickles"
            }
            Self::EmptyFile
            | Self::NoLengthField { .. }
            | Self::HeaderPastEnd { .. }
            | Self::Truncated { .. }
            | Self::TrailingBytes { .. }
            | Self::ShardMissing { .. } => "the download is incomplete or damaged: download the file again",
            Self::HeaderTooLarge { .. }
            | Self::HeaderNotJson { .. }
            | Self::TensorEntry { .. }
            | Self::RepeatedTensor
            | Self::UnknownDtype { .. }
            | Self::ShapeOverflow { .. }
            | Self::OffsetsReversed { .. }
            | Self::ByteCount { .. }
            | Self::Overlap { .. }
            | Self::Gap { .. } => {
                "the file is damaged, or its writer is faulty: download it again, or save it again elsewhere"
            }
            Self::IndexMalformed { .. } | Self::IndexRepeated { .. } | Self::ShardOutside { .. } => {
                "download the index again; remove it if one file holds all weights"
            }
            Self::NotInShard { .. } => {
                "the index is that of another version of the model: remove it, or download it again"
            }
            Self::InTwoFiles { .. } => "remove the file that is not part of this model",
            Self::ConfigNotJson { .. } => "download the file again",
            Self::ConfigValue { .. } | Self::Sizes(_) | Self::DynamicRule { .. } => {
                "correct the value; bits and group size may also be left out, the tensors tell them"
            }
            Self::Foreign { .. } => "GPTQ of 2, 3, 4 and 8 bits, EXL2, fp16 and bf16 are read",
            Self::ModuleMissing { .. }
            | Self::DenseMissing { .. }
            | Self::HeadMissing
            | Self::ModuleUnexpected { .. }
            | Self::TensorMissing { .. }
            | Self::TensorDtype { .. }
            | Self::TensorRank { .. }
            | Self::TensorShape { .. } => {
                "weights and config.json don't belong together, or a file is missing: download all of one revision"
            }
            Self::TwoLayouts { .. } => "remove the tensor that is not part of this model",
            Self::Gptq(_) | Self::Exl2(_) => {
                "the file is damaged or was quantized badly: download it again, or quantize again"
            }
            Self::AllOnes { .. } => {
                "--all-ones wrap reads them as 0, what the quantizer meant; --all-ones plus-one as 2^bits, what \
                 exllama, exllamav2 and vLLM compute"
            }
            Self::Smear { .. } => "quantize the model again: no reader can tell these zero points",
            Self::MixedZeros(_) => "--source-zeros v1 or v2 says which convention holds for the file",
            Self::OtherLayout { .. } => "please report this",
        }
    }
}

impl Diagnose for Error {
    fn code(&self) -> &'static str {
        self.fault.code()
    }

    fn kind(&self) -> Kind {
        match *self.fault {
            Fault::Io(_) | Fault::Changed => Kind::Environment,
            Fault::OtherLayout { .. } => Kind::Bug,
            _ => Kind::Input,
        }
    }

    fn file(&self) -> Option<&Path> {
        Some(&self.file)
    }

    fn tensor(&self) -> Option<&str> {
        self.tensor.as_deref()
    }

    fn hint(&self) -> Option<String> {
        Some(self.fault.hint().to_owned())
    }
}
