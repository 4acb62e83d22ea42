//! What people read of a plan and of a finished conversion.

use super::print;
use requant::convert::Report;
use requant::convert::report::Exactness;
use requant::formats::exl2::Bits;
use requant::plan::{Decision, DenseType, Plan, PlannedModule, Price, Target};

pub(super) fn plan_table(plan: &Plan) -> String {
    let header = ["module", "in", "out", "layout", "group", "bpw", "error", "one step up", "one step down"];
    let mut rows = vec![header.map(String::from).to_vec()];
    rows.extend(plan.modules.iter().map(row));
    print::table(&rows)
}

fn row(module: &PlannedModule) -> Vec<String> {
    let exact = || "0".to_string();
    let bits = module.stored_bits;
    let (layout, group, error) = match &module.decision {
        Decision::Dense(DenseType::Fp16) => ("fp16".to_string(), String::new(), String::new()),
        Decision::Dense(DenseType::Bf16) => ("bf16".to_string(), String::new(), String::new()),
        Decision::Kept => ("kept".to_string(), String::new(), exact()),
        Decision::Gptq(decision) => (
            format!(
                "gptq {}-bit{}{}",
                decision.bits.get(),
                if decision.act_order { " act-order" } else { "" },
                if decision.requantized { " requantized" } else { "" }
            ),
            decision.group_size.to_string(),
            if decision.requantized { String::new() } else { exact() },
        ),
        Decision::Exl2(decision) => (
            widths(&decision.widths(module.in_features)),
            decision.group_size.to_string(),
            decision.relative_error.map_or(String::new(), |e| format!("{e:.5}")),
        ),
    };
    let price = |price: &Option<Price>| {
        price.as_ref().map_or(String::new(), |p| {
            let bpw = p.bits as f64 / module.weights() as f64;
            format!("{bpw:+.3} bpw: {:.5}", p.option.relative_error)
        })
    };
    vec![
        module.name.clone(),
        module.in_features.to_string(),
        module.out_features.to_string(),
        layout,
        group,
        format!("{:.4}", bits as f64 / module.weights() as f64),
        error,
        price(&module.step_up),
        price(&module.step_down),
    ]
}

/// `4`, or `5:64 4:512` where widths are mixed.
fn widths(widths: &[(Bits, usize)]) -> String {
    match widths {
        [(bits, _)] => format!("{}-bit", bits.get()),
        _ => {
            let parts: Vec<String> = widths.iter().map(|(b, rows)| format!("{}:{rows}", b.get())).collect();
            parts.join(" ")
        }
    }
}

pub(super) fn totals_line(plan: &Plan) -> String {
    let totals = &plan.totals;
    let by_exllamav2 = match totals.exllamav2_bpw == totals.bpw {
        true => String::new(),
        false => format!(" ({:.4} as exllamav2 counts, without biases)", totals.exllamav2_bpw),
    };
    let mut text = format!(
        "{} of tensors; {} weights at {:.4} bpw{by_exllamav2}; whole file {:.4} bits a weight\n",
        print::bytes(totals.tensor_bytes),
        print::count(totals.quantized_weights),
        totals.bpw,
        totals.file_bpw,
    );
    if let Some(objective) = &plan.objective {
        let proof = match objective.gap == 0.0 {
            true => "proven to be the least".to_string(),
            false => format!("at most {:e} above the least", objective.gap),
        };
        if objective.calibrated {
            text.push_str(&format!(
                "chosen for the least expected KL divergence: {:.5} nats a token, {proof}; the best plan of one width a \
                 module has {:.5}\n",
                objective.value, objective.one_width_a_module,
            ));
            return text;
        }
        text.push_str(&format!(
            "chosen for the smallest sum of squared relative errors, weighted by the outputs' sizes: {:.4}, {proof}; \
             the best plan of one width a module has {:.4}\n\
             mean relative error {:.5}; that plan has {:.5}\n",
            objective.value,
            objective.one_width_a_module,
            objective.mean_relative_error,
            objective.mean_relative_error_one_width,
        ));
    }
    text
}

pub(super) fn success(out: &str, report: &Report) -> String {
    let bytes: u64 = report.shards.iter().map(|s| s.bytes).sum();
    let worst = report.modules.iter().map(|module| module.exactness).max();
    let done = match worst {
        Some(Exactness::Requantized) => {
            let worst = report.modules.iter().max_by(|a, b| a.relative_error.total_cmp(&b.relative_error));
            let worst =
                worst.map_or(String::new(), |m| format!(" (worst {:.5}: {})", m.relative_error, m.name));
            let all = report.modules.len();
            let lossy = report.modules.iter().filter(|m| m.exactness == Exactness::Requantized).count();
            let of_gptq = match report.target {
                Target::Gptq => format!("{lossy} of {all} modules requantized to fit --bits, "),
                _ => String::new(),
            };
            format!(
                "{of_gptq}{:.4} bpw, mean relative error {:.5}{worst}; whole file {:.4} bits a weight",
                report.totals.bpw, report.mean_relative_error, report.totals.file_bpw
            )
        }
        _ if report.target.is_exl2() => {
            format!(
                "{:.4} bpw, every module stays GPTQ, exactly: exllamav2 loads it as it is",
                report.totals.bpw
            )
        }
        Some(Exactness::Rounded) => "weights rounded once".into(),
        Some(Exactness::Exact) => "exact: every weight as decoded".into(),
        Some(Exactness::Identical) | None => "identical tensors".into(),
    };
    let files = match report.shards.len() {
        1 => "1 file".to_string(),
        n => format!("{n} files"),
    };
    format!("{out}: {} in {files} of weights, {done}\n", print::bytes(bytes))
}
