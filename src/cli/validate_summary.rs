//! What people read of a validation: the sentences of [`summary`], and the figures.

use super::print;
use requant::validate::{Validation, summary};

/// The verdict, what it means, the figures, the worst layer, what to do, gates, what was not run.
pub(super) fn text(validation: &Validation) -> String {
    let mut lines = vec![summary::headline(validation), summary::meaning(validation)];
    lines.extend(figures(validation));
    if let Some(layer) = summary::worst(validation) {
        lines.push(format!("worst layer: {}: {}", layer.source, summary::cost(validation, layer)));
    }
    let broken = validation.layers.iter().filter_map(|layer| Some((layer, layer.fault.as_ref()?)));
    lines.extend(
        broken.map(|(layer, fault)| format!("broken: {}: {}", layer.converted, summary::fault(fault))),
    );
    lines.push(format!("what to do: {}", summary::advice(validation)));
    for gate in &validation.gates {
        let met = if gate.met { "met" } else { "missed" };
        lines.push(format!("gate {met}: {}", summary::gate(gate)));
    }
    lines.extend(validation.not_run.iter().map(|reason| format!("not run: {reason}")));
    lines.join("\n") + "\n" + &print::warnings(&validation.warnings)
}

/// With more digits than the sentences have.
fn figures(validation: &Validation) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(model) = &validation.model {
        let growth = (model.converted_perplexity / model.source_perplexity - 1.0) * 100.0;
        lines.push(format!(
            "  perplexity     {:.4} → {:.4} ({growth:+.2} %)",
            model.source_perplexity, model.converted_perplexity
        ));
        lines.push(format!(
            "  KL divergence  {:.6} ± {:.6} nats a token (reverse {:.6}, 99 % of tokens below {:.4}, largest {:.4})",
            model.kl.mean, model.kl.standard_error, model.reverse_kl.mean, model.kl_p99, model.kl_max
        ));
        lines.push(format!(
            "  same top token {:.2} % ± {:.2} %",
            model.top1_agreement.mean * 100.0,
            model.top1_agreement.standard_error * 100.0
        ));
        let conditions = &validation.conditions;
        let bos = if conditions.bos { "BOS" } else { "no BOS" };
        let of_layers = match conditions.layer_tokens {
            0 => String::new(),
            tokens => format!(" (single layers: {tokens})"),
        };
        lines.push(format!(
            "  measured on    {} tokens{of_layers} of {}, windows of {}, {bos}, {}",
            conditions.tokens, conditions.text, conditions.window, conditions.device
        ));
    }
    lines.push(format!("  bits a weight  {:.4} → {:.4}", validation.source.bpw, validation.converted.bpw));
    lines
}
