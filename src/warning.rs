//! Warnings are data: what was odd about the user's model, what was assumed, what it changes.

use serde::{Deserialize, Serialize};

/// A stable name for each kind of warning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum WarningCode {
    /// An adapter lies beside the model or is named by its configuration. It is not applied.
    AdapterIgnored,
    /// A weights file that the index doesn't name. It is not read.
    FileIgnored,
    /// An index whose shards don't exist, or a second one. The weights that do exist are read.
    IndexIgnored,
    /// Tensors that the index doesn't list. They are read.
    NotInIndex,
    /// A tensor in a shard that isn't the one the index gives. The index's shard counts.
    CopyElsewhere,
    /// No configuration of the quantization. All is derived from the tensors.
    NoQuantizationConfig,
    /// A configuration of the quantization, but no quantized module. The model is read as dense.
    NothingQuantized,
    /// Two configuration files, or two keys of one, say different things.
    ConfigsDisagree,
    /// The configuration gives other bits or groups than the tensors have. The tensors count.
    ConfigTensorConflict,
    /// The configuration denies act-order, but `g_idx` has it. The tensor counts; some engines obey the
    /// configuration and compute garbage.
    ActOrderDenied,
    /// `dynamic` leaves a module dense that is quantized. The tensors count.
    DynamicConflict,
    /// The configuration's list of quantized modules lacks some that are. The tensors count.
    ModuleListIncomplete,
    /// `dynamic` rules mean something else to engines that try them in the file's order.
    DynamicOrder,
    /// A module with more columns than the model has, whose scales are 0. They are left out.
    PaddingIgnored,
    /// `config.json` names an architecture that requant doesn't know: sizes and completeness are unchecked.
    UnknownArchitecture,
    /// The label for zero points contradicts the stored values. The values count.
    ZeroLabelWrong,
    /// Nothing tells the convention of the zero points. v1 is assumed.
    ZerosAssumed,
    /// Read by label, but the values look like the other convention.
    ZerosSuspicious,
    /// 3-bit zero points that repeat as auto-round's faulty packing repeats them. They are read as stored.
    ZerosRepeated,
    /// Stated to be symmetric, but isn't. Read as asymmetric.
    SymConflict,
    /// Stored zero points of only ones, read by their writer's rule or the user's choice.
    ZeroPointsWrapped,
    /// Stored zero points of only ones that readers disagree on. Converting needs a choice.
    ZerosUndecided,
    /// Zero points that the writer destroyed. Converting is refused.
    ZerosLost,
    /// Embeddings are tied by the configuration, but the head is stored and differs. The stored head counts.
    TiedHeadDiffers,
    /// Embeddings are tied by the configuration, but the head is quantized. The stored head counts.
    TiedHeadQuantized,
    /// Tensors that the architecture has no use for. EXL2 outputs leave them out.
    TensorsUnused,
    /// A set of linears that is dense in the source stays so.
    DenseSetKept,
    /// Sizes that EXL2 can't hold. The set becomes fp16.
    OddSize,
    /// Dense linears among quantized ones made the whole set fp16.
    SetDequantized,
    /// Dense linears among quantized ones are quantized at the widest option.
    DenseMemberQuantized,
    /// A bias of zeros where the target expects none is left out.
    ZeroBiasDropped,
    /// exllamav2 multiplies the scales of modules that stay GPTQ at load, which rounds them once more.
    ScalesMultiplied,
    /// Groups that hold parts of several source groups.
    StraddlingGroups,
    /// Modules that don't fit the width asked for of a GPTQ output: their weights change.
    Requantized,
    /// Act-order of a down_proj that can't be folded into gate and up.
    NotFolded,
    /// A quantized head is stored as fp16.
    HeadDequantized,
    /// Values are rounded to fp16: those of a dense tensor, or weights of scales that are too small for it.
    RoundedToHalf,
    /// exllamav2 would fail on this EXL2 directory, or read it otherwise than meant.
    Exllamav2Misreads,
    /// A device had not the memory for a validation as planned. It was made in smaller pieces, or on the CPU.
    DeviceMemory,
    /// The target's engine reads something in the configuration differently.
    Config,
}

/// One warning. `subject` is a module, tensor or file; `message` says what was found, what requant assumes
/// and what that changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warning {
    /// Which kind.
    pub code: WarningCode,
    /// What it is about.
    pub subject: String,
    /// One or two sentences.
    pub message: String,
}
