//! The quantization that a GPTQ output's configuration states, from what its modules are.

use crate::checkpoint::{Checkpoint, Layout};
use crate::plan::{Decision, Plan, PlannedModule};
use requant_formats::gptq::{GIdxKind, ZeroConvention};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// What the configuration says of a module.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Stated {
    bits: u32,
    /// −1: one group of all rows.
    group_size: i64,
    symmetric: bool,
}

/// A module and, if it is quantized, what is stated of it, whether it has act-order, and its zero points.
type OfModule<'a> = (&'a PlannedModule, Option<(Stated, bool, ZeroConvention)>);

/// `quantization_config`, with the keys that AutoGPTQ and GPTQModel write.
pub(super) fn gptq(checkpoint: &Checkpoint, plan: &Plan) -> Map<String, Value> {
    let stated: Vec<OfModule<'_>> =
        plan.modules.iter().map(|module| (module, state(checkpoint, module))).collect();
    let mut counts: BTreeMap<Stated, usize> = BTreeMap::new();
    for (_, stated) in &stated {
        if let Some((stated, ..)) = stated {
            *counts.entry(*stated).or_default() += 1;
        }
    }
    let base = counts.iter().max_by_key(|(_, count)| **count).map(|(stated, _)| *stated);
    let base = base.unwrap_or(Stated { bits: 4, group_size: 128, symmetric: true });
    let act_order = stated.iter().any(|(_, s)| matches!(s, Some((_, true, _))));
    let v2 = stated.iter().any(|(_, s)| matches!(s, Some((_, _, ZeroConvention::V2))));
    let label = if v2 { "gptq_v2" } else { "gptq" };
    let head = stated.iter().any(|(module, s)| module.is_head() && s.is_some());
    let mut config = json!({
        "bits": base.bits,
        "group_size": base.group_size,
        "desc_act": act_order,
        "sym": base.symmetric,
        "static_groups": false,
        "true_sequential": true,
        "lm_head": head,
        "quant_method": "gptq",
        "checkpoint_format": label,
        "pack_dtype": "int32",
    });
    let rules = rules(&stated, base);
    if let Some(config) = config.as_object_mut() {
        if !rules.is_empty() {
            config.insert("dynamic".into(), Value::Object(rules));
        }
        // GPTQModel reads an asymmetric v1 file only with its own name here, and reads its zero points by the
        // rule under which they were written; the source's mark stays.
        if let Some(meta) = source_meta(checkpoint) {
            config.insert("meta".into(), meta);
        }
    }
    config.as_object().cloned().unwrap_or_default()
}

fn source_meta(checkpoint: &Checkpoint) -> Option<Value> {
    let meta = checkpoint.config().get("quantization_config")?.get("meta")?;
    Some(json!({ "quantizer": meta.get("quantizer")? }))
}

/// Width, group size and symmetry of a quantized module; whether it has act-order; its zero points.
fn state(checkpoint: &Checkpoint, planned: &PlannedModule) -> Option<(Stated, bool, ZeroConvention)> {
    let k = planned.in_features;
    let of = |bits: u32, size: usize, symmetric, act_order, zeros| {
        let group_size = if size >= k { -1 } else { size as i64 };
        Some((Stated { bits, group_size, symmetric }, act_order, zeros))
    };
    match &planned.decision {
        Decision::Gptq(d) => of(d.bits.get(), d.stated_group_size(k), d.symmetric, d.act_order, d.zeros),
        Decision::Kept => match checkpoint.module(&planned.source)?.layout() {
            Layout::Gptq(g) => {
                let act_order = g.g_idx == GIdxKind::ActOrder;
                let size = if g.equal_groups { g.group_size } else { k.div_ceil(g.shape.groups) };
                of(g.shape.bits.get(), size, g.zeros.symmetric, act_order, g.zeros.convention)
            }
            _ => None,
        },
        Decision::Dense(_) | Decision::Exl2(_) => None,
    }
}

/// `dynamic`: what the base doesn't say. Modules left dense come first, as GPTQModel evaluates them.
fn rules(stated: &[OfModule<'_>], base: Stated) -> Map<String, Value> {
    let pattern = |sign: &str, name: &str| format!("{sign}^{}$", name.replace('.', "\\."));
    let mut rules = Map::new();
    for (module, stated) in stated {
        if stated.is_none() && !module.is_head() {
            rules.insert(pattern("-:", &module.source), json!({}));
        }
    }
    for (module, stated) in stated {
        if let Some((stated, ..)) = stated
            && *stated != base
        {
            let (bits, size, symmetric) = (stated.bits, stated.group_size, stated.symmetric);
            let rule = json!({ "bits": bits, "group_size": size, "sym": symmetric });
            rules.insert(pattern("+:", &module.source), rule);
        }
    }
    rules
}
