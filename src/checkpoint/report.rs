//! Where tensors and configuration contradict each other: one warning a kind, not one a module.

use super::config::{CONFIG, QuantConfig};
use super::examine::{Found, Stored, Wanted};
use super::zeros::some_of;
use crate::warning::{Warning, WarningCode};
use requant_formats::gptq::{Bits, GIdx};
use std::collections::BTreeSet;

/// Compares what was found with what was stated.
pub(super) fn contradictions(
    wanted: &[Wanted],
    found: &[Found],
    quant: Option<&QuantConfig>,
    warnings: &mut Vec<Warning>,
) {
    let gptq: Vec<_> = wanted
        .iter()
        .zip(found)
        .filter_map(|(wanted, found)| match &found.stored {
            Stored::Gptq(stored) => Some((wanted.name.as_str(), stored, found.stated)),
            _ => None,
        })
        .collect();
    let any_exl2 = found.iter().any(|found| matches!(found.stored, Stored::Exl2 { .. }));
    let mut push = |code, subject: String, message: &str, more: &str| {
        warnings.push(Warning { code, subject, message: format!("{message}{more}") });
    };
    let padded = gptq.iter().filter(|(_, stored, _)| stored.stored_out_features > stored.shape.out_features);
    if let Some((subject, more)) = some_of(padded.map(|(name, ..)| *name)) {
        let message = "Stored with more columns than the model has. Their scales are 0, so they are padding and left \
             out.";
        push(WarningCode::PaddingIgnored, subject, message, &more);
    }
    let Some(quant) = quant else {
        if !gptq.is_empty() {
            let bits: BTreeSet<Bits> = gptq.iter().map(|(_, stored, _)| stored.shape.bits).collect();
            let sizes: BTreeSet<usize> =
                gptq.iter().map(|(_, stored, _)| stored.g_idx.group_size()).collect();
            let message = format!(
                "No file configures the quantization. Read from the tensors: {} modules of {} bits in groups of \
                 {} rows.",
                gptq.len(),
                list(bits.iter().map(|b| b.get() as usize)),
                list(sizes)
            );
            push(WarningCode::NoQuantizationConfig, CONFIG.into(), &message, "");
        }
        return;
    };
    if gptq.is_empty() && !any_exl2 && !found.is_empty() {
        let message = format!(
            "The configuration says {}, but no module is quantized. The model is read as it is stored, dense.",
            quant.method
        );
        push(WarningCode::NothingQuantized, CONFIG.into(), &message, "");
    }
    let conflicts =
        |keep: &dyn Fn(usize) -> bool| some_of((0..gptq.len()).filter(|&i| keep(i)).map(|i| gptq[i].0));
    let other_bits = |i: usize| {
        let (_, stored, stated) = gptq[i];
        stated.bits.filter(|&bits| bits != stored.shape.bits)
    };
    if let Some((subject, more)) = conflicts(&|i| other_bits(i).is_some()) {
        let bits = |bits: Option<Bits>| bits.map_or(0, Bits::get);
        let first = (0..gptq.len()).find(|&i| other_bits(i).is_some()).unwrap_or(0);
        let message = format!(
            "{} bits by the configuration, {} by the tensors (.qweight), which count.",
            bits(other_bits(first)),
            gptq[first].1.shape.bits.get()
        );
        push(WarningCode::ConfigTensorConflict, subject, &message, &more);
    }
    let other_size = |i: usize| {
        let (_, stored, stated) = gptq[i];
        let k = stored.shape.in_features;
        stated.group_size.filter(|size| k.div_ceil(size.rows(k)) != stored.shape.groups)
    };
    if let Some((subject, more)) = conflicts(&|i| other_size(i).is_some()) {
        let first = (0..gptq.len()).find(|&i| other_size(i).is_some()).unwrap_or(0);
        let message = format!(
            "Group size {} by the configuration, {} by the tensors (.scales), which count.",
            other_size(first).map_or_else(String::new, |size| size.to_string()),
            groups_in_words(&gptq[first].1.g_idx, gptq[first].1.shape.groups)
        );
        push(WarningCode::ConfigTensorConflict, subject, &message, &more);
    }
    let denied = |i: usize| gptq[i].2.desc_act == Some(false) && gptq[i].1.g_idx.is_act_order();
    if let Some((subject, more)) = conflicts(&denied) {
        let message = "`desc_act` is false, but g_idx orders the rows. The tensor counts; engines that obey the \
             configuration, such as vLLM, compute garbage.";
        push(WarningCode::ActOrderDenied, subject, message, &more);
    }
    let listed = |name: &str| {
        quant.listed_modules.as_ref().is_none_or(|list| list.iter().any(|end| name.ends_with(end.as_str())))
    };
    if let Some((subject, more)) = conflicts(&|i| !listed(gptq[i].0)) {
        let message = "Quantized, but not in `modules_in_block_to_quantize`. The tensors count; engines that obey the \
             list find no weight.";
        push(WarningCode::ModuleListIncomplete, subject, message, &more);
    }
    let by_auto_round = quant.producer.as_ref().is_some_and(|producer| producer.name == "auto-round");
    if let Some((subject, more)) = conflicts(&|i| by_auto_round && gptq[i].1.repeated_zeros) {
        let message = "The 3-bit zero points of every 32 columns repeat as a fault of auto-round repeats them. They \
             are read as stored, which is what any engine computes, but not what was quantized.";
        push(WarningCode::ZerosRepeated, subject, message, &more);
    }
    if let Some((subject, more)) = conflicts(&|i| gptq[i].2.dense) {
        let message = "Left dense by a rule of `dynamic`, but stored quantized. The tensors count; engines that obey \
             the rule find no weight.";
        push(WarningCode::DynamicConflict, subject, message, &more);
    }
    let reordered = wanted.iter().zip(found).filter(|(_, f)| f.stated.order_matters);
    if let Some((subject, more)) = some_of(reordered.map(|(w, _)| w.name.as_str())) {
        let message = "Several rules of `dynamic` match. GPTQModel tries those with `-:` first, which is followed \
             here; vLLM and SGLang try them in the file's order and choose another.";
        push(WarningCode::DynamicOrder, subject, message, &more);
    }
}

/// The size of the groups, or where they have none in common how many there are, and how large.
fn groups_in_words(g_idx: &GIdx, groups: usize) -> String {
    if g_idx.equal_groups() {
        return g_idx.group_size().to_string();
    }
    let mut rows = vec![0; groups];
    g_idx.groups().iter().for_each(|&group| rows[group as usize] += 1);
    let empty = match rows.iter().filter(|&&rows| rows == 0).count() {
        0 => String::new(),
        1 => ", one of them empty".into(),
        empty => format!(", {empty} of them empty"),
    };
    format!("{groups} groups of up to {} rows{empty}", g_idx.group_size())
}

fn list(numbers: impl IntoIterator<Item = usize>) -> String {
    let texts: Vec<String> = numbers.into_iter().map(|n| n.to_string()).collect();
    texts.join(", ")
}
