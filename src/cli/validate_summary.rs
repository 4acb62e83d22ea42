//! What people read of a validation.

use super::print;
use requant::validate::{Validation, summary};

/// The verdict, what it means, the worst layer, what to do, gates, what was not run; a line each.
pub(super) fn lines(validation: &Validation) -> String {
    let mut text = format!("{}\n{}\n", summary::headline(validation), summary::meaning(validation));
    if let Some(layer) = summary::worst(validation) {
        text.push_str(&format!("worst layer: {}: {}\n", layer.source, summary::cost(layer)));
    }
    text.push_str(&format!("what to do: {}\n", summary::advice(validation)));
    for gate in &validation.gates {
        let met = if gate.met { "met" } else { "missed" };
        text.push_str(&format!("gate {met}: {}\n", summary::gate(gate)));
    }
    for reason in &validation.not_run {
        text.push_str(&format!("not run: {reason}\n"));
    }
    text + &print::warnings(&validation.warnings)
}
