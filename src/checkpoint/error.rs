//! Why a directory is no checkpoint that requant can read: the fault, where it is, and what to do.

use super::fault::Fault;
use crate::{Diagnose, Kind};
use requant_formats::gptq;
use std::fmt;
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

impl Fault {
    /// A stable name.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Io(_) => "checkpoint.io",
            Self::NotAFolder => "checkpoint.not_a_folder",
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
            Self::NotAFolder => "name the folder that it is in: all of a checkpoint's files are read",
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
            Fault::NotAFolder => Kind::Usage,
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
