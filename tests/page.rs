//! The page of a validation, in the states a user can meet. With `REQUANT_PAGES=DIR` the pages are written
//! there and scripts/screenshots.py shows them to a browser.
#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "the exception for tests leaves out what test functions share"
)]

use requant::validate::report::*;
use requant::validate::{Validation, page, summary};

fn layer(block: usize, role: &str, expert: Option<usize>) -> LayerScores {
    let seed = (block * 7 + role.len() * 3 + expert.unwrap_or(0)) % 11;
    let error = 0.03 + 0.004 * seed as f64;
    let part = if ["q", "k", "v", "o"].contains(&role) { "self_attn" } else { "mlp" };
    let experts = expert.map_or(String::new(), |e| format!(".experts.{e}"));
    let name = format!("model.layers.{block}.{part}{experts}.{role}_proj");
    LayerScores {
        source: name.clone(),
        converted: name,
        layer: Some(block),
        role: role.into(),
        expert,
        in_features: 576,
        out_features: 576,
        layout_before: "gptq 4-bit".into(),
        layout_after: "exl2 4/5-bit".into(),
        format: "exl2".into(),
        bpw: 4.1 + 0.1 * seed as f64,
        weight_error: error,
        promised_error: Some(error),
        output: Some(OutputScores { rows: 2048, relative_error: error, cosine: 0.998, max_error: 0.4 }),
        fault: None,
        swap_in: Some(SwapScores { perplexity: 35.5 + error, kl: error * error }),
    }
}

fn passed(blocks: usize, experts: usize) -> Validation {
    let side = |name: &str| Side {
        name: name.into(),
        fingerprint: "5f".repeat(32),
        architecture: Some("LlamaForCausalLM".into()),
        bpw: 4.5,
        bytes: 112_000_000,
    };
    let mut layers = Vec::new();
    for block in 0..blocks {
        layers.extend(["q", "k", "v", "o"].map(|role| layer(block, role, None)));
        for role in ["gate", "up", "down"] {
            layers.extend((0..experts.max(1)).map(|e| layer(block, role, (experts > 0).then_some(e))));
        }
    }
    let mean = |mean| Mean { mean, standard_error: mean / 20.0 };
    Validation {
        schema: SCHEMA,
        tool: "requant 0.1.0".into(),
        source: side("smollm2-135m-gptq"),
        converted: side("smollm2-135m-exl2-4.5bpw"),
        conditions: Conditions {
            text: "built-in".into(),
            token_ids_sha256: "a1".repeat(32),
            tokens: 8192,
            window: 512,
            bos: false,
            layer_tokens: 1024,
            layer_perplexity: Some(35.48),
            device: "CPU, 2 threads".into(),
        },
        verdict: Verdict::Passed,
        non_finite: None,
        model: Some(ModelScores {
            source_perplexity: 35.56,
            converted_perplexity: 37.66,
            nll_increase: mean(0.0574),
            kl: mean(0.0501),
            reverse_kl: mean(0.0512),
            top1_agreement: Mean { mean: 0.871, standard_error: 0.004 },
            kl_p99: 0.42,
            kl_max: 2.31,
            predictions: 8176,
        }),
        layers,
        cumulative: (0..blocks)
            .map(|layer| {
                let kl = 0.05 * (layer + 1) as f64 / blocks as f64;
                BlockScores { layer, perplexity: 35.56 * kl.exp(), kl }
            })
            .collect(),
        gates: vec![],
        not_run: vec![],
        warnings: vec![],
    }
}

fn missed() -> Validation {
    let gate = Gate { kind: GateKind::MaxKl, limit: 0.02, found: 0.0501, met: false };
    Validation { verdict: Verdict::GateMissed, gates: vec![gate], ..passed(32, 0) }
}

fn broken() -> Validation {
    let mut broken = passed(3, 0);
    broken.verdict = Verdict::Broken;
    broken.layers[6].fault = Some(LayoutFault::GroupsSwapped { first: 2, second: 5 });
    broken
}

fn exact() -> Validation {
    let mut exact = passed(4, 0);
    exact.verdict = Verdict::Exact;
    for layer in &mut exact.layers {
        layer.weight_error = 0.0;
        layer.output = Some(OutputScores { rows: 2048, relative_error: 0.0, cosine: 1.0, max_error: 0.0 });
        layer.swap_in = Some(SwapScores { perplexity: 35.56, kl: 0.0 });
    }
    for block in &mut exact.cumulative {
        (block.kl, block.perplexity) = (0.0, 35.56);
    }
    exact
}

fn unsupported() -> Validation {
    let mut unsupported = passed(6, 0);
    (unsupported.model, unsupported.cumulative) = (None, vec![]);
    for layer in &mut unsupported.layers {
        (layer.output, layer.swap_in) = (None, None);
    }
    unsupported.not_run = vec!["Perplexity: the forward pass of FooForCausalLM isn't supported.".into()];
    unsupported
}

fn non_finite() -> Validation {
    let mut failed = passed(6, 0);
    failed.verdict = Verdict::NonFinite;
    failed.non_finite =
        Some(NonFinite { model: ModelSide::Converted, layer: Some(3), module: None, token: 17 });
    (failed.model, failed.cumulative) = (None, vec![]);
    failed.layers.iter_mut().for_each(|layer| layer.swap_in = None);
    failed.not_run = vec!["Perplexity and KL: a hidden state is not finite.".into()];
    failed
}

/// Only the layers that are furthest off were measured alone, which is what happens unless more is asked for.
fn worst_only() -> Validation {
    let mut worst = passed(30, 0);
    worst.cumulative = vec![];
    for (i, layer) in worst.layers.iter_mut().enumerate() {
        layer.swap_in = layer.swap_in.filter(|_| i % 26 == 3);
    }
    worst
}

fn states() -> [(&'static str, Validation); 8] {
    [
        ("passed", passed(22, 0)),
        ("missed", missed()),
        ("broken", broken()),
        ("exact", exact()),
        ("unsupported", unsupported()),
        ("non-finite", non_finite()),
        ("worst-only", worst_only()),
        ("moe", passed(60, 8)),
    ]
}

#[test]
fn every_state_has_a_page_without_network_or_script() {
    for (name, state) in &states() {
        let html = page::html(state);
        assert!(html.contains(&summary::headline(state)), "{name}");
        assert!(!html.contains("<details"), "{name}: all of it is printed");
        assert!(!html.contains("http") && !html.contains("<script") && !html.contains("=\"NaN"), "{name}");
        if let Some(dir) = std::env::var_os("REQUANT_PAGES") {
            std::fs::write(std::path::Path::new(&dir).join(format!("{name}.html")), html).unwrap();
        }
    }
}

/// What scripts/screenshots.py says of some pages, and whether they pass.
fn screenshots(pages: &[(&str, String)]) -> Option<(bool, String)> {
    let dir = tempfile::tempdir().unwrap();
    for (name, html) in pages {
        std::fs::write(dir.path().join(format!("{name}.html")), html).unwrap();
    }
    let python = std::env::var_os("REQUANT_PYTHON").unwrap_or("python3".into());
    let ran = std::process::Command::new(python)
        .arg("scripts/screenshots.py")
        .args([dir.path(), &dir.path().join("out")])
        .output();
    let required = std::env::var_os("REQUIRE_CHROMIUM").is_some_and(|value| value == "1");
    let said = match &ran {
        Ok(ran) => String::from_utf8_lossy(&ran.stderr).into_owned(),
        Err(e) => format!("screenshots SKIPPED: no Python: {e}"),
    };
    if said.contains("SKIPPED") {
        assert!(!required, "{said}");
        eprintln!("{said}");
        return None;
    }
    Some((ran.unwrap().status.success(), said))
}

#[test]
fn a_browser_shows_every_state_whole() {
    let pages = states().map(|(name, state)| (name, page::html(&state)));
    if let Some((passed, said)) = screenshots(&pages) {
        assert!(passed, "{said}");
    }
}

#[test]
fn the_browsers_check_finds_what_is_wrong() {
    let bad = r#"<!doctype html><link rel="stylesheet" href="data:text/css,"><img src="http://127.0.0.1:9/x.png">
        <script>console.error("planted")</script><div style="width:2000px">wide</div>
        <svg viewBox="0 0 50 20" width="50"><text x="45" y="10">clipped</text><text x="45" y="10">over</text></svg>
        <svg width="0"></svg>"#;
    if let Some((passed, said)) = screenshots(&[("bad", bad.into())]) {
        assert!(!passed);
        for fault in ["wider than", "request: http", "console: ", "clipped: clipped", "overlap: "] {
            assert!(said.contains(fault), "{fault}: {said}");
        }
    }
}

#[test]
fn cells_of_experts_show_the_broken_one_and_the_score_that_all_share() {
    let mut state = passed(1, 4);
    let shared = SwapScores { perplexity: 41.25, kl: 0.125 };
    for layer in state.layers.iter_mut().filter(|layer| layer.role == "down") {
        layer.swap_in = Some(shared);
    }
    let victim = state.layers.iter().position(|l| l.role == "down" && l.expert == Some(2)).unwrap();
    // Its error is smaller than the others', so only the fault makes it the one that is shown.
    let found = &mut state.layers[victim];
    found.weight_error = 0.0123;
    found.output.as_mut().unwrap().relative_error = 0.0045;
    found.fault = Some(LayoutFault::PermutationInverted);
    state.verdict = Verdict::Broken;
    let html = page::html(&state);
    let row = html.split("<tr").find(|row| row.contains("errors of expert 2")).unwrap();
    for part in ["errors of expert 2", "✗ broken", ">1.23 %<", ">0.45 %<", ">0.125<", ">41.25<"] {
        assert!(row.contains(part), "{part}: {row}");
    }
    assert!(html.contains("its permutation is stored inverted; its output is off by 0.45 %."));
}

#[test]
fn the_summary_names_verdict_layer_and_remedy() {
    let state = passed(22, 0);
    assert_eq!(
        summary::headline(&state),
        "Passed (no layer is broken; no limit was set): the converted model's perplexity is 37.66, 5.91 % above the source's 35.56."
    );
    assert!(summary::advice(&state).contains(r"--set 'model\.layers\."), "{}", summary::advice(&state));
    assert_eq!(summary::headline(&missed()), "Rejected: KL is 0.0501, at most 0.02 was asked.");
    assert_eq!(summary::worst(&broken()).unwrap().source, "model.layers.0.mlp.down_proj");
    assert!(summary::advice(&broken()).contains("Download the source again"));
    assert_eq!(summary::advice(&exact()), "Nothing needs doing.");
    let gate = Gate { kind: GateKind::MaxKl, limit: 1.0, found: f64::NAN, met: false };
    assert_eq!(summary::gate(&gate), "KL was not measured, at most 1 was asked");
    let unmeasured = Validation { verdict: Verdict::GateMissed, layers: vec![], ..unsupported() };
    assert!(summary::advice(&unmeasured).contains("what was not run"));
    assert_eq!(
        [0.0, f64::from(f32::MIN_POSITIVE), 0.05].map(summary::kl),
        ["0 (exact)", "0 up to rounding", "0.05"]
    );
    let cost = summary::cost(&state, summary::worst(&state).unwrap());
    assert!(cost.contains("the most harm of all that were measured alone"), "{cost}");
}

#[test]
fn the_advice_names_flags_that_the_worst_layers_layout_has() {
    let of = |format: &str, role: &str, bpw: f64| {
        let mut state = passed(1, 0);
        let layer = LayerScores { format: format.into(), role: role.into(), bpw, ..layer(0, "q", None) };
        state.layers = vec![layer];
        summary::advice(&state)
    };
    for (format, role, bpw, flag, never) in [
        ("exl2", "q", 4.12, "q_proj=5'", "--bits"),
        ("exl2", "q", 8.12, "a higher --bpw", "--set"),
        ("exl2", "head", 4.12, "--head-bits 5", "--set"),
        ("exl2", "head", 8.12, "without --head-bits", "--set"),
        ("gptq", "q", 4.6, "--bits 8", "--set"),
        ("gptq", "q", 8.6, "a smaller --group-size", "--bits"),
        ("dense", "q", 16.0, "--to fp16", "--set"),
    ] {
        let advice = of(format, role, bpw);
        assert!(advice.contains(flag) && !advice.contains(never), "{advice}");
        assert!(format == "exl2" || !advice.contains("--bpw"), "{advice}");
    }
}
