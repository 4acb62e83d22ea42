//! Which act-order can be folded away: the rows of down_proj in the order of their groups, and the columns that
//! feed them in the same order. The activation between gate/up and down works element by element, so that
//! permuting its channels changes nothing.

use super::options::groups_of_rows;
use super::sets::{Member, Treatment};
use super::{Decision, Exl2Decision, PlannedModule};
use crate::arch::{Linear, Role};
use crate::checkpoint::{Checkpoint, Layout, Module};
use crate::quantize::{Cut, RowOrder, stored_places};
use crate::warning::{Warning, WarningCode};
use requant_formats::Permutation;
use requant_formats::gptq::GIdxKind;
use std::collections::BTreeMap;

/// How a module takes part in folding.
pub(super) enum Fold {
    /// down_proj: its rows are sorted by group.
    Rows,
    /// gate and up, or the module that both are: its columns follow the sorted rows of this module.
    ColumnsFollow(String),
}

/// Which modules are folded, by name.
pub(super) fn folds(checkpoint: &Checkpoint, warnings: &mut Vec<Warning>) -> BTreeMap<String, Fold> {
    let mut folds = BTreeMap::new();
    for module in checkpoint.modules() {
        let Some(down) = module.linear().filter(|linear| linear.role == Role::Down) else { continue };
        let (reorders, equal) = match module.layout() {
            Layout::Gptq(gptq) => (gptq.g_idx == GIdxKind::ActOrder, gptq.equal_groups),
            Layout::Exl2(_) => (true, true),
            Layout::Dense { .. } => (false, true),
        };
        if !reorders {
            continue;
        }
        let feeds = |module: &&Module| module.linears().iter().any(|linear| feeds(linear, down));
        let producers: Vec<&Module> = checkpoint.modules().iter().filter(feeds).collect();
        let reason = if !equal {
            Some("its groups differ in size, so that no order makes g_idx sequential")
        } else if producers.is_empty() {
            Some("no linear is known to feed it")
        } else if producers.iter().any(|producer| !producer.layout().is_quantized()) {
            Some("what feeds it, gate_proj or up_proj, is dense")
        } else if producers.iter().any(|producer| folds.contains_key(producer.name())) {
            Some("what feeds it follows the order of another module already")
        } else {
            None
        };
        match reason {
            Some(reason) => warnings.push(Warning {
                code: WarningCode::NotFolded,
                subject: module.name().into(),
                message: format!("its act-order is not folded: {reason}; it keeps its g_idx"),
            }),
            None => {
                for producer in producers {
                    folds.insert(producer.name().into(), Fold::ColumnsFollow(module.name().into()));
                }
                folds.insert(module.name().into(), Fold::Rows);
            }
        }
    }
    folds
}

/// Whether exllamav2 needs the rows of an EXL2 linear to be stored in the model's order: it permutes the columns of
/// gate and up to match the rows of down_proj, but not their biases.
pub(super) fn needs_identity(linear: &Linear) -> bool {
    linear.role == Role::Down && linear.bias
}

/// Whether the columns of all that feeds a down_proj can follow its rows.
pub(super) fn can_fold(down: &Member<'_>, members: &[Member<'_>]) -> bool {
    let mut producers = members.iter().filter(|member| feeds(&member.linear, &down.linear)).peekable();
    producers.peek().is_some() && producers.all(|producer| producer.treatment != Treatment::Dense)
}

/// Folds the order in which each down_proj that must be stored in the model's order was grouped. `modules` are
/// what `members` become. A down_proj that is EXL2 is fed by EXL2 only: others may stay GPTQ only with it.
pub(super) fn fold_biased(checkpoint: &Checkpoint, members: &[Member<'_>], modules: &mut [PlannedModule]) {
    for (i, down) in members.iter().enumerate().filter(|(_, member)| needs_identity(&member.linear)) {
        let Decision::Exl2(decision) = &mut modules[i].decision else { continue };
        if stored_rows(checkpoint, down.module, decision).is_identity() {
            continue;
        }
        decision.folded = true;
        for (member, planned) in members.iter().zip(&mut *modules) {
            if let Decision::Exl2(decision) = &mut planned.decision
                && feeds(&member.linear, &down.linear)
            {
                decision.columns_follow = Some(down.module.name().into());
            }
        }
    }
}

/// The rows of a module in the order in which EXL2 stores them: entry j is the row of the model at place j.
pub(crate) fn stored_rows(checkpoint: &Checkpoint, module: &Module, decision: &Exl2Decision) -> Permutation {
    let k = module.in_features();
    let rows = match (decision.order, groups_of_rows(checkpoint, module)) {
        (RowOrder::Grouped, Some(groups)) => {
            Permutation::stable_sort_by_key(k, |row| groups.get(row as usize).copied())
        }
        _ => Permutation::identity(k),
    };
    let cut = Cut::new(k, decision.group_size, None);
    let places = stored_places(&cut.groups, &decision.bits).into_iter();
    // The places of a cut are those of all rows, each once.
    Permutation::new(places.map(|place| rows.map()[place]).collect()).unwrap_or(rows)
}

/// Whether a linear's outputs are what `down` takes in.
fn feeds(linear: &Linear, down: &Linear) -> bool {
    matches!(linear.role, Role::Gate | Role::Up) && (linear.layer, linear.expert) == (down.layer, down.expert)
}

/// The order of a module's columns where the linears in it that feed `down` follow `order`, the sorted rows
/// of that module: in a fused gate_up both halves do, each within its own columns. `None` where the sizes don't fit.
pub(crate) fn columns_that_follow(
    checkpoint: &Checkpoint,
    module: &Module,
    down: &str,
    order: &Permutation,
) -> Option<Permutation> {
    let down = checkpoint.module(down)?.linear()?;
    let n = module.out_features();
    let mut columns: Vec<u32> = (0..u32::try_from(n).ok()?).collect();
    for linear in module.linears().iter().filter(|linear| feeds(linear, down)) {
        let own: Vec<usize> = match &linear.columns {
            // A part is its linear and nothing else.
            _ if module.columns().is_some() => (0..n).collect(),
            Some(part) if part.end() <= n => part.iter().collect(),
            Some(_) => return None,
            None => (0..n).collect(),
        };
        if own.len() != order.len() {
            return None;
        }
        for (&to, &from) in own.iter().zip(order.map()) {
            columns[to] = u32::try_from(own[from as usize]).ok()?;
        }
    }
    Permutation::new(columns).ok()
}
