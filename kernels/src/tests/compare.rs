//! Comparing, against the definitions in f64.

use super::{Stream, assert_near, tensor};
use crate::{Error, Operations};

/// Logits of a vocabulary that no power of two divides.
const VOCABULARY: usize = 1237;
const ROWS: usize = 6;
const TARGETS: [u32; ROWS] = [0, 1236, 17, 600, 601, 1000];

/// Absolute, of sums of about a thousand fp32 terms near 1.
const NATS: f64 = 3e-6;

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let largest = logits.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b.into()));
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - largest).exp()).sum();
    logits.iter().map(|&x| f64::from(x) - largest - sum.ln()).collect()
}

pub(super) fn finds_what_is_not_finite<O: Operations>(ops: &O) {
    let mut values = vec![0.5f32; 5 * 7];
    assert_eq!(ops.first_non_finite(&tensor(ops, &values, 7)), Ok(None));
    values[4 * 7] = f32::NAN;
    assert_eq!(ops.first_non_finite(&tensor(ops, &values, 7)), Ok(Some(4)));
    values[2 * 7 + 6] = f32::NEG_INFINITY;
    assert_eq!(ops.first_non_finite(&tensor(ops, &values, 7)), Ok(Some(2)));
}

pub(super) fn measures_differences<O: Operations>(ops: &O) {
    let mut random = Stream(43);
    let (s, c) = (random.activations(300 * 131, 3.0), random.activations(300 * 131, 3.0));
    let found = ops.difference(&tensor(ops, &s, 131), &tensor(ops, &c, 131)).expect("equal shapes");
    let sum =
        |f: &dyn Fn(f64, f64) -> f64| -> f64 { s.iter().zip(&c).map(|(&s, &c)| f(s.into(), c.into())).sum() };
    let near = |found: f64, expected: f64| assert!((found - expected).abs() < 1e-9, "{found} for {expected}");
    near(found.squared_error / sum(&|s, c| (s - c).powi(2)), 1.0);
    near(found.squared_source / sum(&|s, _| s * s), 1.0);
    near(found.squared_converted / sum(&|_, c| c * c), 1.0);
    near(found.product, sum(&|s, c| s * c));
    let largest = s.iter().zip(&c).map(|(&s, &c)| (f64::from(s) - f64::from(c)).abs()).fold(0.0, f64::max);
    assert_eq!(found.max_error, largest);
    let same = ops.difference(&tensor(ops, &s, 131), &tensor(ops, &s, 131)).expect("equal shapes");
    assert_eq!((same.squared_error, same.max_error), (0.0, 0.0));
    assert_eq!(same.product, same.squared_source);
}

pub(super) fn scores_targets<O: Operations>(ops: &O) {
    let mut logits = Stream(47).activations(ROWS * VOCABULARY, 9.0);
    // Far from 0: a softmax that doesn't subtract the largest overflows.
    logits[..VOCABULARY].iter_mut().for_each(|x| *x += 200.0);
    let expected: Vec<f64> =
        logits.chunks(VOCABULARY).zip(TARGETS).map(|(row, t)| -log_softmax(row)[t as usize]).collect();
    let found = ops.negative_log_likelihood(&tensor(ops, &logits, VOCABULARY), &TARGETS).expect("targets");
    assert_near(&found, &expected, NATS);
}

pub(super) fn compares_logits<O: Operations>(ops: &O) {
    for noise in [0.01, 0.3, 4.0] {
        let mut random = Stream(53);
        let source = random.activations(ROWS * VOCABULARY, 8.0);
        let converted: Vec<f32> = source.iter().map(|&x| x + noise * random.activation() + 0.5).collect();
        let [s, c] = [&source, &converted].map(|x| tensor(ops, x, VOCABULARY));
        let found = ops.compare_logits(&s, &c, &TARGETS).expect("equal shapes");
        assert_eq!(found.len(), ROWS);
        let rows = source.chunks(VOCABULARY).zip(converted.chunks(VOCABULARY));
        for ((score, (s, c)), target) in found.iter().zip(rows).zip(TARGETS) {
            let (p, q) = (log_softmax(s), log_softmax(c));
            let kl = |p: &[f64], q: &[f64]| -> f64 { p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).sum() };
            let top =
                |x: &[f32]| x.iter().enumerate().fold(0, |best, (i, v)| if *v > x[best] { i } else { best });
            let near = |found: f32, expected: f64| {
                assert!(
                    (f64::from(found) - expected).abs() <= NATS * expected.max(1.0),
                    "{found} for {expected}"
                );
            };
            near(score.source_nll, -p[target as usize]);
            near(score.converted_nll, -q[target as usize]);
            near(score.kl, kl(&p, &q));
            near(score.reverse_kl, kl(&q, &p));
            assert_eq!(score.top1_agrees, top(s) == top(c));
        }
    }
}

pub(super) fn equal_logits_diverge_by_exactly_0<O: Operations>(ops: &O) {
    let x = tensor(ops, &Stream(59).activations(ROWS * VOCABULARY, 20.0), VOCABULARY);
    for score in ops.compare_logits(&x, &x, &TARGETS).expect("equal shapes") {
        assert_eq!((score.kl, score.reverse_kl, score.top1_agrees), (0.0, 0.0, true));
        assert_eq!(score.source_nll, score.converted_nll);
    }
}

pub(super) fn ties_go_to_the_first<O: Operations>(ops: &O) {
    let agree = |s: &[f32], c: &[f32]| {
        let scores = ops.compare_logits(&tensor(ops, s, 3), &tensor(ops, c, 3), &[0]);
        scores.expect("equal shapes")[0].top1_agrees
    };
    assert!(agree(&[1.0, 2.0, 2.0], &[0.0, 5.0, 4.0]));
    assert!(!agree(&[1.0, 2.0, 2.0], &[0.0, 4.0, 5.0]));
}

pub(super) fn takes_no_rows_to_compare<O: Operations>(ops: &O) {
    let none = tensor(ops, &[], 5);
    assert_eq!(ops.first_non_finite(&none), Ok(None));
    assert_eq!(ops.difference(&none, &none), Ok(crate::Difference::default()));
    assert_eq!(ops.negative_log_likelihood(&none, &[]), Ok(vec![]));
    assert_eq!(ops.compare_logits(&none, &none, &[]), Ok(vec![]));
}

pub(super) fn refuses_other_shapes<O: Operations>(ops: &O) {
    let (x, y) = (tensor(ops, &[0.0; 6], 3), tensor(ops, &[0.0; 6], 2));
    let refused = |found: Option<Error>, name: &str| {
        assert!(
            matches!(&found, Some(Error::Shape { operation, .. }) if *operation == name),
            "{name}: {found:?}"
        );
    };
    refused(ops.difference(&x, &y).err(), "difference");
    refused(ops.compare_logits(&x, &y, &[0, 0]).err(), "compare_logits");
    for targets in [&[0u32][..], &[0, 3], &[0, 1, 2]] {
        refused(ops.compare_logits(&x, &x, targets).err(), "compare_logits");
        refused(ops.negative_log_likelihood(&x, targets).err(), "negative_log_likelihood");
    }
}
