//! How much memory a conversion takes at most.

use super::{Decision, Exl2Decision, Plan, PlannedModule};
use crate::checkpoint::{Checkpoint, Layout, Module};
use safetensors::Dtype;

/// What the program itself takes: code's data, names and headers, the buffers of hashing.
const BASE: u64 = 24 << 20;
/// A thread's stack and what its allocator keeps.
const A_THREAD: u64 = 4 << 20;
/// Bytes kept of each tensor's name, header and report.
const A_TENSOR: u64 = 4 << 10;

impl Plan {
    /// Bytes of memory that executing the plan takes at most, on as many threads as rayon has: those of the largest
    /// module, head or embedding in work. What is read and written passes through the system's cache, which isn't
    /// counted, since it gives way.
    pub fn peak_memory(&self, checkpoint: &Checkpoint) -> u64 {
        let threads = rayon::current_num_threads() as u64;
        let modules = self.modules.iter().map(|module| of_module(checkpoint, module, threads));
        // Read as fp32, rounded, and copied as bytes.
        let changed = |name: &str, dtype: Dtype| {
            let tensor = checkpoint.tensor(name)?;
            (tensor.dtype() != dtype).then(|| 8 * tensor.info().elements() as u64)
        };
        let mut dense: Vec<u64> = (self.dense_tensors.iter())
            .filter_map(|tensor| changed(&tensor.source, tensor.dtype))
            .chain(self.modules.iter().filter_map(|m| changed(&format!("{}.weight", m.source), Dtype::F16)))
            .collect();
        // All are looked at before the first is converted, one on each thread.
        dense.sort_unstable_by(|a, b| b.cmp(a));
        let looked_at: u64 = dense.iter().take(threads as usize).sum();
        let tensors =
            checkpoint.files().len() as u64 + 8 * self.modules.len() as u64 + self.dense_tensors.len() as u64;
        BASE + A_THREAD * threads + A_TENSOR * tensors + modules.max().unwrap_or(0).max(looked_at)
    }
}

fn of_module(checkpoint: &Checkpoint, planned: &PlannedModule, threads: u64) -> u64 {
    let module = checkpoint.module(&planned.source);
    let weights = planned.in_features as u64 * planned.stored_out_features() as u64;
    // Of a fused linear all is read.
    let whole = module.map_or(weights, Module::weights).max(weights);
    let groups = match module.map(Module::layout) {
        // Zero points and scales, as stored and as numbers, twice.
        Some(Layout::Gptq(gptq)) => {
            24 * gptq.shape.groups as u64 * (whole / planned.in_features.max(1) as u64)
        }
        _ => 0,
    };
    let is_gptq = matches!(module.map(Module::layout), Some(Layout::Gptq(_)));
    groups
        + match &planned.decision {
            Decision::Kept => 0,
            Decision::Exl2(decision) => {
                let padded = planned.stored_out_features() != planned.out_features;
                let source = match is_gptq && !padded {
                    true => whole,
                    false if planned.columns.is_some() => 4 * whole,
                    false => 4 * weights,
                };
                // Codes as searched and in order; then the packed bytes, what they unpack to and decode to.
                source + 4 * weights + in_search(planned, decision, threads)
            }
            // As read, changed and read back, and two of these decoded; with other weights, the wanted ones.
            Decision::Gptq(decision) if decision.requantized => 11 * whole,
            Decision::Gptq(_) => 9 * whole,
            // Unpacked and decoded, or decoded and transposed.
            Decision::Dense(dtype) => match module.map(Module::layout) {
                Some(Layout::Dense { dtype: stored })
                    if *stored == dtype.dtype() && planned.columns.is_none() =>
                {
                    0
                }
                Some(Layout::Dense { .. }) | None => 8 * whole,
                Some(_) => 5 * whole,
            },
        }
}

/// Values and weights of the groups in work, a thread each, and their codes.
fn in_search(planned: &PlannedModule, decision: &Exl2Decision, threads: u64) -> u64 {
    let groups = threads.min(decision.bits.len() as u64);
    10 * groups
        * (decision.group_size as u64).min(planned.in_features as u64)
        * planned.stored_out_features() as u64
}
