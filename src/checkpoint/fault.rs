//! The lies that a checkpoint can tell: one variant each.

use crate::arch;
use requant_formats::{exl2, gptq};
use safetensors::Dtype;
use serde_json::Value;
use std::io;

/// What is wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// The operating system refused.
    #[error("can't be read: {0}")]
    Io(#[from] io::Error),
    /// The path of a file where that of a folder is asked for.
    #[error("is a file, not a folder")]
    NotAFolder,
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
    /// The architecture's sizes. The file is named beside it.
    #[error("{} is {}: {}", .0.key, .0.found.as_ref().map_or("missing".into(), Value::to_string), .0.expected)]
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
