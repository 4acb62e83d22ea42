//! Tensor parallelism: at which numbers of GPUs a checkpoint can be cut, and what stands in the way at others.
//!
//! GPTQ engines give each GPU an equal share of the columns of q, k, v, gate and up, and of the rows of o and down
//! (vLLM, SGLang and TGI alike). exllamav2 cuts EXL2 along the columns only. Cutting a module that isn't safe gives
//! an error in some engines and garbage in others.

use super::Counted;
use crate::arch::{Dims, Linear, Role};
use crate::checkpoint::{CONFIG, Checkpoint, Gptq, Layout};
use requant_formats::gptq::GIdxKind;
use serde::Serialize;

/// The largest number of GPUs looked at.
const MOST: usize = 64;

/// Columns and rows that the kernels of every engine take: a share must be a multiple of it.
const SHARE_UNIT: usize = 32;

/// Programs that cut GPTQ, all in the same way. What is safe here is safe in each; where rows are in act-order, vLLM
/// of before 2026 and TGI's Triton kernel have slow ways of their own, which not every GPU runs rightly.
const GPTQ_PROGRAMS: &[&str] = &["vllm", "vllm-0.10", "sglang", "tgi"];

/// TGI and Aphrodite load EXL2 whole on each GPU, or don't.
const EXL2_PROGRAMS: &[&str] = &["exllamav2"];

/// Architectures that exllamav2 0.3.2 cuts (its architecture.py, `supports_tp`).
const EXLLAMAV2_CUTS: [&str; 5] =
    ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Glm4ForCausalLM"];

/// What exllamav2 asserts of `intermediate_size`.
const EXLLAMAV2_INTERMEDIATE: usize = 128;

/// Whether a checkpoint can be cut into so many parts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Parallel {
    /// GPUs.
    pub size: usize,
    /// The programs whose way of cutting it is judged by, by their names in [`crate::plan::readers::READERS`].
    pub programs: &'static [&'static str],
    /// Whether it can.
    pub works: bool,
    /// Why not.
    pub reasons: Vec<Counted>,
    /// The numbers of GPUs up to 64 that work.
    pub sizes: Vec<usize>,
}

impl Parallel {
    /// Looks at every module. `None` where the architecture is unknown: which linears are cut how isn't, then.
    pub fn new(checkpoint: &Checkpoint, size: usize) -> Option<Self> {
        let dims = checkpoint.dims()?;
        let reasons = reasons(checkpoint, dims, size);
        let sizes = (1..=MOST).filter(|&size| self::reasons(checkpoint, dims, size).is_empty()).collect();
        let programs = if is_exl2(checkpoint) { EXL2_PROGRAMS } else { GPTQ_PROGRAMS };
        Some(Self { size, programs, works: reasons.is_empty(), reasons, sizes })
    }
}

fn is_exl2(checkpoint: &Checkpoint) -> bool {
    checkpoint.modules().iter().any(|module| matches!(module.layout(), Layout::Exl2(_)))
}

fn reasons(checkpoint: &Checkpoint, dims: &Dims, size: usize) -> Vec<Counted> {
    let mut reasons = Vec::new();
    if size == 1 {
        return reasons;
    }
    if is_exl2(checkpoint) {
        exllamav2(checkpoint, dims, size, &mut reasons);
        return reasons;
    }
    if !dims.heads.is_multiple_of(size) {
        let message = format!("{} attention heads can't be shared among {size} GPUs", dims.heads);
        Counted::add(&mut reasons, CONFIG, message);
    }
    // With fewer heads of keys and values than GPUs, engines give several GPUs the same.
    if !dims.kv_heads.is_multiple_of(size) && !size.is_multiple_of(dims.kv_heads) {
        let message = format!("{} heads of keys and values can't be shared among {size} GPUs", dims.kv_heads);
        Counted::add(&mut reasons, CONFIG, message);
    }
    for module in checkpoint.modules() {
        let Layout::Gptq(gptq) = module.layout() else { continue };
        // Each part of a fused module is cut by itself.
        for linear in module.linears() {
            if let Some(message) = uncut(linear, gptq, dims, size) {
                Counted::add(&mut reasons, module.name(), message);
            }
        }
    }
    reasons
}

/// Why a linear that is stored as GPTQ can't be cut.
fn uncut(linear: &Linear, gptq: &Gptq, dims: &Dims, size: usize) -> Option<String> {
    let (k, n) = (linear.in_features, linear.out_features);
    match linear.role {
        Role::Q | Role::K | Role::V | Role::Gate | Role::Up => {
            // Columns that several GPUs share aren't cut any further.
            let parts = match linear.role {
                Role::K | Role::V => size.min(dims.kv_heads),
                _ => size,
            };
            (!n.is_multiple_of(parts * SHARE_UNIT))
                .then(|| format!("{n} columns make no {parts} shares of a multiple of {SHARE_UNIT}"))
        }
        Role::O | Role::Down => {
            let share = k / size;
            if gptq.g_idx == GIdxKind::ActOrder {
                Some("its rows are in act-order: the rows of one GPU belong to the groups of all".into())
            } else if !k.is_multiple_of(size * SHARE_UNIT) {
                Some(format!("{k} rows make no {size} shares of a multiple of {SHARE_UNIT}"))
            } else if gptq.shape.groups > 1 && !share.is_multiple_of(gptq.group_size) {
                Some(format!("a share of {share} rows ends inside a group of {}", gptq.group_size))
            } else {
                None
            }
        }
    }
}

fn exllamav2(checkpoint: &Checkpoint, dims: &Dims, size: usize, reasons: &mut Vec<Counted>) {
    let arch = checkpoint.architecture().map_or("", |arch| arch.name);
    if !EXLLAMAV2_CUTS.contains(&arch) {
        Counted::add(reasons, CONFIG, format!("exllamav2, which alone cuts EXL2, doesn't cut {arch}"));
    }
    if !dims.intermediate.is_multiple_of(EXLLAMAV2_INTERMEDIATE) {
        let message =
            format!("intermediate_size is {}: exllamav2 asserts a multiple of 128", dims.intermediate);
        Counted::add(reasons, CONFIG, message);
    }
    if dims.heads * dims.head_dim != dims.hidden {
        Counted::add(
            reasons,
            CONFIG,
            "exllamav2 cuts o_proj as if the heads were as wide as the model".into(),
        );
    }
    if dims.kv_heads < size {
        let message = format!("{} heads of keys and values for {size} GPUs", dims.kv_heads);
        Counted::add(reasons, CONFIG, message);
    }
    for module in checkpoint.modules() {
        if !matches!(module.layout(), Layout::Exl2(_)) {
            let message = format!("exllamav2 cuts EXL2 only, and this is {}", module.layout().name());
            Counted::add(reasons, module.name(), message);
        }
    }
    let head = checkpoint.naming().head;
    if checkpoint.module(head).is_none() {
        Counted::add(reasons, head, "exllamav2 cuts EXL2 only, and this is the embedding".into());
    }
}
