//! Plans of a real checkpoint (the tiny Llama of `fixtures/`), and the options that they choose from.

use super::options::{MOST_MIXES, mixes, stored_bits, straddling, widths};
use super::*;
use crate::checkpoint::OpenOptions;
use crate::progress::Silent;
use crate::quantize::Source;
use crate::{Diagnose, Kind};
use proptest::prelude::*;
use requant_formats::exl2::{Group, GroupTable};

fn bits(width: u32) -> Bits {
    Bits::try_from(width).unwrap()
}

fn tiny() -> Checkpoint {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/tiny-llama-gptq");
    Checkpoint::open(dir.as_ref(), &OpenOptions::default()).unwrap_or_else(|e| panic!("{e}"))
}

fn plan(checkpoint: &Checkpoint, options: &PlanOptions) -> Result<Plan, Error> {
    Plan::new(checkpoint, options, &Silent).map_err(|e| match e {
        crate::Error::Plan(e) => e,
        other => panic!("{other}"),
    })
}

fn bpw(bpw: f64) -> PlanOptions {
    PlanOptions::new(Target::Bpw(bpw))
}

fn uniform(width: u32, group_size: usize) -> PlanOptions {
    PlanOptions::new(Target::Uniform { bits: bits(width), group_size })
}

fn rule(pattern: &str, width: u32) -> WidthRule {
    WidthRule::new(pattern, bits(width)).unwrap()
}

fn decisions(plan: &Plan) -> impl Iterator<Item = (&PlannedModule, &Exl2Decision)> {
    plan.modules.iter().filter_map(|module| match &module.decision {
        Decision::Exl2(decision) => Some((module, decision)),
        _ => None,
    })
}

#[test]
fn a_budget_is_kept_and_mixes_are_no_worse_than_one_width() {
    let checkpoint = tiny();
    let mut before = f64::INFINITY;
    for target in [2.8, 3.5, 4.25, 6.1] {
        let plan = plan(&checkpoint, &bpw(target)).unwrap();
        let objective = plan.objective.unwrap();
        assert!(plan.totals.bpw <= target && plan.totals.bpw > target - 0.05, "{}", plan.totals.bpw);
        assert!(objective.value <= objective.one_width_a_module);
        assert!(objective.value < before);
        assert_eq!(objective.gap, 0.0);
        before = objective.value;
    }
}

#[test]
fn the_feasible_range_is_that_of_the_extreme_plans() {
    let checkpoint = tiny();
    let Err(Error::Infeasible { lowest, highest, asked, unruled: None }) = plan(&checkpoint, &bpw(1.0))
    else {
        panic!()
    };
    assert_eq!(asked, 1.0);
    // The cheapest groups are the longest, the dearest the shortest.
    let cheapest = plan(&checkpoint, &uniform(2, 128)).unwrap().totals.bpw;
    let dearest = plan(&checkpoint, &uniform(8, 32)).unwrap().totals.bpw;
    assert!((0.0..1e-4).contains(&(lowest - cheapest)), "{lowest}, {cheapest}");
    assert!((0.0..1e-4).contains(&(highest - dearest)), "{highest}, {dearest}");
    // What the message names is feasible as printed.
    for printed in [format!("{lowest:.4}"), format!("{highest:.4}")] {
        let target: f64 = printed.parse().unwrap();
        let plan = plan(&checkpoint, &bpw(target)).unwrap();
        assert!(plan.totals.bpw <= target, "{} at {target}", plan.totals.bpw);
    }
    for target in [lowest - 1e-4, highest + 1e-4, f64::NAN, f64::INFINITY, -4.0] {
        let error = plan(&checkpoint, &bpw(target)).unwrap_err();
        assert!(matches!(error, Error::Infeasible { .. }), "{target}: {error}");
        assert_eq!(error.kind(), Kind::Usage);
    }
}

#[test]
fn rules_fix_widths_and_set_floors() {
    let checkpoint = tiny();
    let mut options = bpw(4.25);
    // The first rule that matches counts.
    options.set = vec![rule(r"layers\.0\..*down_proj", 6), rule("down_proj", 3)];
    options.min = vec![rule("v_proj", 5)];
    let chosen = plan(&checkpoint, &options).unwrap();
    for (module, decision) in decisions(&chosen) {
        let widths: Vec<u32> = decision.widths(module.in_features).iter().map(|w| w.0.get()).collect();
        match module.name.as_str() {
            "model.layers.0.mlp.down_proj" => assert_eq!(widths, [6]),
            name if name.ends_with("down_proj") => assert_eq!(widths, [3]),
            name if name.ends_with("v_proj") => assert!(widths.iter().all(|&w| w >= 5), "{widths:?}"),
            _ => {}
        }
    }
    assert!(chosen.totals.bpw <= 4.25);
    // One width for all: a rule changes the modules that it names and no other.
    let mut options = uniform(4, 64);
    options.set = vec![rule("down_proj", 2)];
    options.min = vec![rule("q_proj", 8), rule("k_proj", 3)];
    for (module, decision) in decisions(&plan(&checkpoint, &options).unwrap()) {
        let expected = match module.name.rsplit('.').next().unwrap() {
            "down_proj" => 2,
            "q_proj" => 8,
            _ => 4,
        };
        assert_eq!(decision.bits, vec![bits(expected); module.in_features.div_ceil(64)], "{}", module.name);
    }
}

#[test]
fn rules_that_cannot_be_meant_are_refused() {
    let checkpoint = tiny();
    let mut options = uniform(4, 64);
    options.set = vec![rule("down_prj", 2)];
    assert!(
        matches!(plan(&checkpoint, &options), Err(Error::UnusedRule { pattern, head: false }) if pattern == "down_prj")
    );
    options.set = vec![rule("down_proj", 2)];
    options.min = vec![rule("layers.0", 3)];
    let Err(Error::RulesDisagree { module, set: 2, min: 3 }) = plan(&checkpoint, &options) else { panic!() };
    assert_eq!(module, "model.layers.0.mlp.down_proj");
    assert!(matches!(WidthRule::new("(", bits(4)), Err(Error::Pattern { .. })));
}

#[test]
fn group_sizes_outside_the_format_are_refused() {
    let checkpoint = tiny();
    for size in [0, 16, 48, 65536, usize::MAX] {
        // The head uses the size too.
        for head_bits in [None, Some(bits(6))] {
            let options = PlanOptions { head_bits, ..uniform(4, size) };
            let error = plan(&checkpoint, &options).unwrap_err();
            assert!(matches!(error, Error::GroupSize { found } if found == size), "{error}");
        }
    }
    // One group of the whole module.
    let one = plan(&checkpoint, &uniform(4, 65504)).unwrap();
    assert!(decisions(&one).all(|(_, decision)| decision.bits.len() == 1));
}

#[test]
fn stored_bits_are_those_of_the_group_table() {
    let checkpoint = tiny();
    let options = PlanOptions { head_bits: Some(bits(6)), ..bpw(3.7) };
    let plan = plan(&checkpoint, &options).unwrap();
    for (module, decision) in decisions(&plan) {
        let (k, size) = (module.in_features, decision.group_size);
        let starts = (0..k).step_by(size);
        let rows = starts.map(|start| size.min(k - start)).zip(&decision.bits);
        let mut groups: Vec<Group> = rows.map(|(rows, &bits)| Group { bits, rows }).collect();
        groups.sort_by_key(|group| std::cmp::Reverse(group.bits));
        let table = GroupTable::new(groups).unwrap();
        assert_eq!(decision.stored_bits, table.stored_bits(module.stored_out_features()), "{}", module.name);
        assert_eq!(decision.widths(k), table.rows_of_widths());
    }
    // A last group that is shorter.
    let table = GroupTable::new(vec![
        Group { bits: bits(8), rows: 32 },
        Group { bits: bits(3), rows: 64 },
        Group { bits: bits(3), rows: 64 },
    ]);
    let expected = table.unwrap().stored_bits(96);
    assert_eq!(stored_bits(160, 96, 64, &[bits(3), bits(3), bits(8)]), expected);
    assert_eq!(widths(&[bits(3), bits(3), bits(8)], 64, 160), [(bits(8), 32), (bits(3), 128)]);
}

#[test]
fn straddling_is_the_same_with_and_without_the_weights() {
    let checkpoint = tiny();
    for module in checkpoint.modules().iter().filter(|m| m.layout().is_quantized()) {
        for order in [RowOrder::Grouped, RowOrder::Natural] {
            let source = Source::gptq(checkpoint.gptq(module).unwrap(), order);
            for size in [32, 64, 96, 128, 65504] {
                let found = straddling(&checkpoint, module, order, size);
                assert_eq!(found, source.cut(size).straddling, "{} {order:?} {size}", module.name());
            }
        }
    }
}

#[test]
fn prices_and_options_are_in_order() {
    let plan = plan(&tiny(), &bpw(4.25)).unwrap();
    for (module, decision) in decisions(&plan) {
        let error = decision.relative_error.unwrap();
        // Each width at each group size.
        assert_eq!(module.options.len() % 6, 0);
        if let Some(up) = &module.step_up {
            assert!(up.bits > 0 && up.option.relative_error < error, "{}", module.name);
        }
        let down = module.step_down.as_ref().unwrap();
        assert!(down.bits < 0 && down.option.relative_error > error, "{}", module.name);
        assert_eq!(down.option.stored_bits as i64, decision.stored_bits as i64 + down.bits);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Errors of any shape: not convex, not even falling.
    #[test]
    fn mixes_lie_between_the_extremes_and_are_few(
        errors in prop::collection::vec(prop::collection::vec(0.0f64..1.0, 4), 1..150),
    ) {
        let widths = [2, 3, 4, 8].map(bits);
        let groups: Vec<_> = (0..errors.len()).map(|i| 32 * i..32 * (i + 1)).collect();
        let slices: Vec<&[f64]> = errors.iter().map(Vec::as_slice).collect();
        let mixes = mixes(&groups, &widths, &slices);
        prop_assert!(mixes.len() <= MOST_MIXES);
        let mut before = vec![0; errors.len()];
        for mix in mixes {
            prop_assert!(mix.iter().zip(&before).all(|(now, before)| now >= before));
            prop_assert_ne!(&mix, &before);
            before = mix;
        }
    }

    /// Along the hull of falling, convex errors each mix is the best of its size.
    #[test]
    fn mixes_are_the_best_of_their_size(
        factors in prop::collection::vec(0.1f64..10.0, 1..6),
    ) {
        let widths = [2, 3, 4].map(bits);
        let groups: Vec<_> = (0..factors.len()).map(|i| 32 * i..32 * (i + 1)).collect();
        let errors: Vec<Vec<f64>> = factors.iter().map(|f| vec![16.0 * f, 4.0 * f, *f]).collect();
        let slices: Vec<&[f64]> = errors.iter().map(Vec::as_slice).collect();
        let cost = |choice: &[usize]| choice.iter().sum::<usize>();
        let error = |choice: &[usize]| choice.iter().zip(&errors).map(|(&w, e)| e[w]).sum::<f64>();
        for mix in mixes(&groups, &widths, &slices) {
            let all = (0..3usize.pow(factors.len() as u32))
                .map(|code| (0..factors.len()).map(|g| code / 3usize.pow(g as u32) % 3).collect::<Vec<_>>());
            let best = all.filter(|c| cost(c) <= cost(&mix)).map(|c| error(&c)).fold(f64::INFINITY, f64::min);
            prop_assert!(error(&mix) <= best * (1.0 + 1e-12));
        }
    }
}
