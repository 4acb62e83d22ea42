//! The outcome in sentences: the same ones for the page and the terminal.

use super::report::{GateKind, LayerScores, LayoutFault, ModelSide, NonFinite, Validation, Verdict};

/// The verdict in one plain sentence.
pub fn headline(validation: &Validation) -> String {
    let model = validation.model.as_ref();
    match validation.verdict {
        Verdict::Exact => "Exact: every weight of the converted model decodes to the source's value.".into(),
        Verdict::Passed => match model {
            Some(m) => {
                // Whether an increase is too much is for the user's limits to say.
                let limits = match validation.gates.is_empty() {
                    true => "no layer is broken; no limit was set",
                    false => "all limits are met",
                };
                format!("Passed ({limits}): {}", perplexities(m.source_perplexity, m.converted_perplexity))
            }
            None => "Passed the layer check only: the models' perplexities were not measured.".into(),
        },
        Verdict::GateMissed => {
            let missed: Vec<String> = validation.gates.iter().filter(|g| !g.met).map(gate).collect();
            format!("Rejected: {}.", missed.join("; "))
        }
        Verdict::Broken => match validation.layers.iter().filter(|l| l.fault.is_some()).count() {
            1 => "Broken: 1 layer does not hold what the conversion promised.".into(),
            n => format!("Broken: {n} layers do not hold what the conversion promised."),
        },
        Verdict::NonFinite => match &validation.non_finite {
            Some(found) => format!("Failed: a NaN or an infinity in {}.", place(found)),
            None => "Failed: a NaN or an infinity turned up.".into(),
        },
    }
}

fn place(found: &NonFinite) -> String {
    let block = found.layer.map_or("the logits".into(), |layer| format!("block {layer}"));
    let block = match &found.module {
        Some(module) => format!("the output of {module}, {block}"),
        None => block,
    };
    match found.model {
        ModelSide::Source => format!("{block} of the source, at token {}", found.token),
        ModelSide::Converted => format!("{block} of the converted model, at token {}", found.token),
        ModelSide::Variant => format!("{block} of the source with one converted layer"),
    }
}

fn perplexities(source: f64, converted: f64) -> String {
    let change = 100.0 * (converted / source - 1.0);
    let relation = match converted.total_cmp(&source) {
        std::cmp::Ordering::Equal => "the same as the source's".to_string(),
        _ if change.abs() < 0.005 => format!("the source's {} to 0.01 %", number(source)),
        std::cmp::Ordering::Greater => format!("{change:.2} % above the source's {}", number(source)),
        std::cmp::Ordering::Less => format!("{:.2} % below the source's {}", -change, number(source)),
    };
    format!("the converted model's perplexity is {}, {relation}.", number(converted))
}

/// What the verdict means for who wants to use the model.
pub fn meaning(validation: &Validation) -> String {
    match (validation.verdict, &validation.model) {
        (Verdict::Exact, Some(m)) if m.kl.mean != 0.0 => format!(
            "Nothing was lost: the weights are the same numbers. Their products are summed in another order, which \
             rounds differently; that, and nothing else, is the mean KL divergence of {} nats a token.",
            kl(m.kl.mean)
        ),
        (Verdict::Exact, Some(_)) => {
            "Nothing was lost. On the text that was measured, every logit is the same: the KL divergence is 0 (exact)."
                .into()
        }
        (Verdict::Exact, None) => {
            "Nothing was lost. Both models give the same answers up to rounding in the engine.".into()
        }
        (Verdict::Broken, _) => {
            "This is not the loss that quantization costs: the stored bytes are laid out wrongly or damaged. \
             Do not use this model."
                .into()
        }
        (Verdict::NonFinite, _) => "Do not use this model: its figures mean nothing.".into(),
        (_, None) => "Each layer was compared, the model as a whole was not; see what was not run.".into(),
        (_, Some(m)) => format!(
            "On {} predictions both models find the same token most likely {} % of the time; the mean KL \
             divergence from the source is {} nats a token (of the same model it is 0).",
            m.predictions,
            number(100.0 * m.top1_agreement.mean),
            kl(m.kl.mean),
        ),
    }
}

/// The layer that did the most harm: a broken one, else by swap-in KL, else by output error, else by weight
/// error. `None` where no layer differs.
pub fn worst(validation: &Validation) -> Option<&LayerScores> {
    let layers = &validation.layers;
    let most = |figure: fn(&LayerScores) -> Option<f64>| {
        let found = layers.iter().filter_map(|l| Some((figure(l).filter(|v| *v > 0.0)?, l)));
        // The first of equal ones.
        found.reduce(|a, b| if b.0 > a.0 { b } else { a }).map(|(_, layer)| layer)
    };
    (layers.iter().find(|l| l.fault.is_some()))
        .or_else(|| {
            let worst = most(|l| l.swap_in.map(|s| s.kl))?;
            // Experts share the score of their projection: of these, the one with the largest error.
            let same = layers.iter().filter(|l| l.layer == worst.layer && l.role == worst.role);
            same.reduce(|a, b| if harm(b) > harm(a) { b } else { a })
        })
        .or_else(|| most(|l| l.output.map(|o| o.relative_error)))
        .or_else(|| most(|l| Some(l.weight_error)))
}

fn harm(layer: &LayerScores) -> f64 {
    layer.output.map_or(layer.weight_error, |o| o.relative_error)
}

/// What the worst layer costs, in words.
pub fn cost(validation: &Validation, layer: &LayerScores) -> String {
    if let Some(found) = &layer.fault {
        return fault(found);
    }
    let error = error(layer);
    match layer.swap_in {
        Some(s) => {
            let unit = if unit(validation, layer).0 { "this projection of all experts" } else { "it" };
            let (kl, perplexity) = (kl(s.kl), number(s.perplexity));
            let of_source = (validation.conditions.layer_perplexity)
                .map_or(String::new(), |source| format!(" where the source has {}", number(source)));
            format!(
                "{unit} alone gives KL {kl} and perplexity {perplexity}{of_source}, the most harm of all that were \
                 measured alone; {error}"
            )
        }
        None => error,
    }
}

/// How far off a layer is, in words.
pub fn error(layer: &LayerScores) -> String {
    match layer.output {
        Some(o) => format!("its output is off by {} %", number(100.0 * o.relative_error)),
        None => format!("its weights are off by {} %", number(100.0 * layer.weight_error)),
    }
}

/// What to do next.
pub fn advice(validation: &Validation) -> String {
    match (validation.verdict, worst(validation)) {
        (Verdict::Broken, _) => {
            "Download the source again and convert again. If the same layer fails, it is a bug in requant: \
             report it with report.json."
                .into()
        }
        (Verdict::NonFinite, _) => {
            "Validate the source against itself: if that fails as well, the source is damaged; else report a \
             bug with report.json."
                .into()
        }
        (Verdict::GateMissed, None) => {
            "No layer differs, so that no conversion can come closer: look at the limit, and at what was not run."
                .into()
        }
        (Verdict::Exact, _) | (_, None) => "Nothing needs doing.".into(),
        (verdict, Some(layer)) => {
            let when = if verdict == Verdict::Passed { "If you want it closer" } else { "To get closer" };
            format!("{when}, {}.", closer(validation, layer))
        }
    }
}

/// How to convert again so that the worst layer comes closer to the source's: its layout has flags of its own.
fn closer(validation: &Validation, layer: &LayerScores) -> String {
    let head = layer.role == "head";
    match (layer.format.as_str(), wider(layer.bpw)) {
        ("exl2", Some(bits)) if head => {
            format!(
                "convert again with more bits for the head, --head-bits {bits}, or without that flag: fp16"
            )
        }
        ("exl2", None) if head => "convert again without --head-bits: the head is then fp16".into(),
        ("exl2", Some(bits)) => {
            let (together, pattern) = unit(validation, layer);
            let what = if together { "projection of all experts" } else { "layer" };
            format!(
                "convert again with more bits for the worst {what}, --set '{pattern}={bits}', or for all layers, \
                 a higher --bpw"
            )
        }
        ("exl2", None) => "convert again with a higher --bpw; the worst layer has 8 bits already".into(),
        // One width for all modules; the widest is 8.
        ("gptq", _) if layer.bpw < 8.0 => {
            "convert again with --bits 8 or a smaller --group-size, which all layers of a GPTQ output share"
                .into()
        }
        ("gptq", _) => "convert again with a smaller --group-size; the worst layer has 8 bits already".into(),
        _ => "convert again with --to fp16, which holds every value that GPTQ and EXL2 decode to".into(),
    }
}

/// Whether a linear is measured together with others, which are the same projection of all experts, and the pattern
/// that all of their names match, but no other's.
fn unit(validation: &Validation, layer: &LayerScores) -> (bool, String) {
    let same = |other: &&LayerScores| (other.layer, &other.role) == (layer.layer, &layer.role);
    let parts: Vec<&str> = layer.converted.split('.').collect();
    let block = layer.layer.map(|block| block.to_string());
    let place = parts.iter().position(|part| Some(*part) == block.as_deref());
    match (place, parts.last()) {
        (Some(place), Some(last)) if validation.layers.iter().filter(same).count() > 1 => {
            (true, format!(r"{}\..*\.{last}$", parts[..=place].join(r"\.")))
        }
        _ => (false, parts.join(r"\.")),
    }
}

/// The next width of EXL2 above these stored bits a weight.
fn wider(bpw: f64) -> Option<u32> {
    // Scales and permutations add up to half a bit to the width.
    [3, 4, 5, 6, 8].into_iter().find(|&bits| f64::from(bits) > bpw + 0.5)
}

/// A fault in words.
pub fn fault(fault: &LayoutFault) -> String {
    match fault {
        LayoutFault::NotAsPromised { promised, found } => {
            format!("relative error {} where {} was promised", number(*found), number(*promised))
        }
        LayoutFault::PermutationInverted => "its permutation is stored inverted".into(),
        LayoutFault::GroupsSwapped { first, second } => format!("groups {first} and {second} changed places"),
        LayoutFault::ScaleIndexOff { by } => {
            format!("its scale indices (q_scale in EXL2, g_idx in GPTQ) are off by {by:+}")
        }
        LayoutFault::ZeroOff { by } => format!("its zero points are off by {by:+}"),
    }
}

/// A gate and what came of it.
pub fn gate(gate: &super::report::Gate) -> String {
    let percent = |v: f64| format!("{} %", number(100.0 * v));
    let (what, found, limit) = match gate.kind {
        GateKind::MaxKl => ("KL", kl(gate.found), format!("at most {}", number(gate.limit))),
        GateKind::MaxPplIncrease => {
            ("perplexity increase", percent(gate.found), format!("at most {}", percent(gate.limit)))
        }
        GateKind::MinTop1 => {
            ("top-1 agreement", percent(gate.found), format!("at least {}", percent(gate.limit)))
        }
    };
    match gate.found.is_nan() {
        true => format!("{what} was not measured, {limit} was asked"),
        false => format!("{what} is {found}, {limit} was asked"),
    }
}

/// Below this, a divergence can't be told from the rounding of logits in fp32.
const ROUNDING: f64 = 1e-9;

/// A KL divergence; only 0 itself is called exact.
pub fn kl(value: f64) -> String {
    match value {
        0.0 => "0 (exact)".into(),
        _ if value < ROUNDING => "0 up to rounding".into(),
        _ => number(value),
    }
}

/// Up to four significant digits, without zeros at the end of a fraction.
pub fn number(value: f64) -> String {
    significant(value, 4)
}

/// An error's size: up to two.
pub fn rough(value: f64) -> String {
    significant(value, 2)
}

fn significant(value: f64, wanted: i32) -> String {
    let size = value.abs();
    if !value.is_finite() {
        return "not finite".into();
    }
    if value == 0.0 {
        return "0".into();
    }
    if !(1e-4..1e6).contains(&size) {
        let text = format!("{value:.2e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        return format!("{}e{exponent}", trimmed(digits));
    }
    let digits = wanted - 1 - size.log10().floor() as i32;
    trimmed(&format!("{value:.*}", digits.clamp(0, 7) as usize)).into()
}

fn trimmed(digits: &str) -> &str {
    if digits.contains('.') { digits.trim_end_matches('0').trim_end_matches('.') } else { digits }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_four_digits_and_no_zeros_behind() {
        let all = [0.0, 0.05, 37.0, 35.5585, 100.0, 1200.0, 123_456.7, 2e6, 1.234e-5, f64::NAN].map(number);
        let expected = ["0", "0.05", "37", "35.56", "100", "1200", "123457", "2e6", "1.23e-5", "not finite"];
        assert_eq!(all, expected);
        assert_eq!([0.3906, 0.006798, 12.3].map(rough), ["0.39", "0.0068", "12"]);
    }
}
