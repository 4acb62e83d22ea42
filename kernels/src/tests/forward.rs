//! The operations of a forward pass, against their definitions in f64.

use super::{Stream, assert_near, tensor, values};
use crate::{Activation, Attention, Cpu, Dense, DenseType, Error, Operations, Rope, Weight};
use half::{bf16, f16};
use std::sync::Arc;

/// Of a few fp32 roundings, relative to the largest result.
const ROUNDINGS: f64 = 2e-6;

fn dense(values: &[f32], in_features: usize, dtype: DenseType) -> Weight {
    let bytes: Vec<u8> = match dtype {
        DenseType::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        DenseType::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        DenseType::Bf16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
    };
    let out_features = values.len() / in_features;
    Dense { dtype, out_features, in_features, bytes: Arc::new(bytes) }.into()
}

pub(super) fn normalises<O: Operations>(ops: &O) {
    // Of whole rows, and of each of three heads.
    for (c, heads) in [(70, 1), (24, 3)] {
        let mut random = Stream(3);
        let (x, weight) = (random.activations(5 * c * heads, 3.0), random.activations(c, 2.0));
        let expected: Vec<f64> = x
            .chunks(c)
            .flat_map(|x| {
                let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / c as f64;
                let factor = 1.0 / (mean + f64::from(0.25f32)).sqrt();
                x.iter()
                    .zip(&weight)
                    .map(move |(&x, &w)| f64::from(x) * factor * f64::from(w))
                    .collect::<Vec<_>>()
            })
            .collect();
        let y =
            ops.rms_norm(&tensor(ops, &x, c * heads), &tensor(ops, &weight, c), 0.25).expect("whole runs");
        assert_eq!(ops.shape(&y), (5, c * heads));
        assert_near(&values(ops, &y), &expected, ROUNDINGS);
    }
}

pub(super) fn rotates<O: Operations>(ops: &O) {
    // Two pairs of three are rotated; windows of 3 rows, the last of 1.
    let (head_dim, heads, window, rows) = (6, 2, 3, 7);
    let rope = Rope { frequencies: vec![1.0, 0.375], scale: 1.25 };
    let x = Stream(5).activations(rows * heads * head_dim, 1.0);
    let mut expected: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
    for (row, values) in expected.chunks_mut(heads * head_dim).enumerate() {
        for head in values.chunks_mut(head_dim) {
            for (j, &frequency) in rope.frequencies.iter().enumerate() {
                let (sin, cos) = ((row % window) as f64 * f64::from(frequency)).sin_cos();
                let (a, b) = (head[j], head[j + 2]);
                head[j] = 1.25 * (a * cos - b * sin);
                head[j + 2] = 1.25 * (a * sin + b * cos);
            }
        }
    }
    let mut y = tensor(ops, &x, heads * head_dim);
    ops.rotate(&mut y, head_dim, window, &rope).expect("whole heads");
    assert_near(&values(ops, &y), &expected, ROUNDINGS);
}

fn defined_attention(q: &[f32], k: &[f32], v: &[f32], shape: &Attention) -> Vec<f64> {
    let d = shape.head_dim;
    let (q_columns, kv_columns) = (shape.heads * d, shape.kv_heads * d);
    let rows = q.len() / q_columns;
    let mut result = Vec::new();
    for row in 0..rows {
        let start = row / shape.window * shape.window;
        let from = start.max((row + 1).saturating_sub(shape.sliding.unwrap_or(usize::MAX)));
        for head in 0..shape.heads {
            let kv = head / (shape.heads / shape.kv_heads) * d;
            let score = |other: usize| {
                let dot: f64 = (0..d)
                    .map(|i| {
                        f64::from(q[row * q_columns + head * d + i])
                            * f64::from(k[other * kv_columns + kv + i])
                    })
                    .sum();
                let score = dot * f64::from(shape.scale);
                shape.soft_cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh()).exp()
            };
            let weights: Vec<f64> = (from..=row).map(score).collect();
            let sum: f64 = weights.iter().sum();
            result.extend((0..d).map(|i| {
                let terms = (from..=row).zip(&weights);
                terms.map(|(other, w)| w * f64::from(v[other * kv_columns + kv + i])).sum::<f64>() / sum
            }));
        }
    }
    result
}

fn attend<O: Operations>(ops: &O, rows: usize, shape: &Attention, scale: f32) -> (Vec<f32>, Vec<f64>) {
    let mut random = Stream(17);
    let (columns, kv_columns) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let q = random.activations(rows * columns, scale);
    let (k, v) = (random.activations(rows * kv_columns, scale), random.activations(rows * kv_columns, 1.0));
    let [kt, vt] = [&k, &v].map(|x| tensor(ops, x, kv_columns));
    let y = ops.attention(&tensor(ops, &q, columns), &kt, &vt, shape).expect("shapes that fit");
    assert_eq!(ops.shape(&y), (rows, columns));
    (values(ops, &y), defined_attention(&q, &k, &v, shape))
}

const SHAPE: Attention =
    Attention { heads: 4, kv_heads: 2, head_dim: 8, scale: 0.35, window: 9, sliding: None, soft_cap: None };

pub(super) fn attends<O: Operations>(ops: &O) {
    // Grouped queries, one key for all, and each its own; the last window is shorter.
    for kv_heads in [1, 2, 4] {
        for sliding in [None, Some(2), Some(5), Some(9), Some(100)] {
            for soft_cap in [None, Some(1.5)] {
                let (found, expected) =
                    attend(ops, 22, &Attention { kv_heads, sliding, soft_cap, ..SHAPE }, 2.0);
                assert_near(&found, &expected, 4.0 * ROUNDINGS);
            }
        }
    }
}

pub(super) fn attends_long_windows<O: Operations>(ops: &O) {
    // Longer than the blocks that a device may cut a window into.
    for sliding in [None, Some(130), Some(17)] {
        let shape = Attention { heads: 2, kv_heads: 1, window: 300, sliding, ..SHAPE };
        let (found, expected) = attend(ops, 433, &shape, 2.0);
        assert_near(&found, &expected, 8.0 * ROUNDINGS);
    }
}

pub(super) fn sliding_1_gives_the_values<O: Operations>(ops: &O) {
    let v = Stream(23).activations(13 * 32, 1.0);
    let x = tensor(ops, &v, 32);
    let shape = Attention { kv_heads: 4, sliding: Some(1), ..SHAPE };
    assert_eq!(values(ops, &ops.attention(&x, &x, &x, &shape).expect("shapes that fit")), v);
}

pub(super) fn gates<O: Operations>(ops: &O) {
    let mut random = Stream(29);
    let (gate, up) = (random.activations(3 * 50, 8.0), random.activations(3 * 50, 2.0));
    for activation in [Activation::Silu, Activation::GeluTanh, Activation::Gelu] {
        let function = |x: f64| match activation {
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::GeluTanh => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
                0.5 * x * (1.0 + inner.tanh())
            }
            Activation::Gelu => 0.5 * x * (1.0 + libm::erf(x / std::f64::consts::SQRT_2)),
        };
        let expected: Vec<f64> =
            gate.iter().zip(&up).map(|(&g, &u)| function(g.into()) * f64::from(u)).collect();
        let y = ops.gate(&tensor(ops, &gate, 50), &tensor(ops, &up, 50), activation).expect("equal shapes");
        assert_near(&values(ops, &y), &expected, ROUNDINGS);
    }
}

pub(super) fn embeds<O: Operations>(ops: &O) {
    // Halves and quarters, which all types hold.
    let table: Vec<f32> = (0..5 * 6).map(|i| i as f32 * 0.25 - 3.0).collect();
    for dtype in [DenseType::F32, DenseType::F16, DenseType::Bf16] {
        let weight = ops.upload_weight(&dense(&table, 6, dtype)).expect("a table");
        let x = ops.embed(&weight, &[4, 0, 4], 1.5).expect("tokens below 5");
        assert_eq!(ops.shape(&x), (3, 6));
        let expected: Vec<f32> =
            [4, 0, 4].iter().flat_map(|&t| table[t * 6..][..6].iter().map(|x| x * 1.5)).collect();
        assert_eq!(values(ops, &x), expected);
        assert!(matches!(ops.embed(&weight, &[0, 5], 1.0), Err(Error::Shape { operation: "embed", .. })));
    }
}

pub(super) fn selects<O: Operations>(ops: &O) {
    let x = tensor(ops, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 3);
    let rows = ops.select_rows(&x, &[1, 0, 1]).expect("rows below 2");
    assert_eq!(values(ops, &rows), [4.0, 5.0, 6.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let columns = ops.select_columns(&x, 1..3).expect("columns below 3");
    assert_eq!((ops.shape(&columns), values(ops, &columns)), ((2, 2), vec![2.0, 3.0, 5.0, 6.0]));
    assert_eq!(values(ops, &ops.copy(&x).expect("room for a copy")), values(ops, &x));
}

pub(super) fn adds<O: Operations>(ops: &O) {
    let mut x = tensor(ops, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2);
    ops.add(&mut x, &tensor(ops, &[1.0, 0.0, -1.0, 2.0, 0.5, 4.0], 2), 0.5).expect("equal shapes");
    assert_eq!(values(ops, &x), [1.5, 2.0, 2.5, 5.0, 5.25, 8.0]);
    let y = tensor(ops, &[1.0, 2.0, 4.0, 8.0], 2);
    ops.add_rows(&mut x, &[2, 0], &[0.5, -1.0], &y).expect("rows below 3");
    assert_eq!(values(ops, &x), [-2.5, -6.0, 2.5, 5.0, 5.75, 9.0]);
}

pub(super) fn caps<O: Operations>(ops: &O) {
    let x = Stream(31).activations(4 * 33, 90.0);
    let expected: Vec<f64> = x.iter().map(|&x| 30.0 * (f64::from(x) / 30.0).tanh()).collect();
    let mut y = tensor(ops, &x, 33);
    ops.soft_cap(&mut y, 30.0).expect("any values");
    assert_near(&values(ops, &y), &expected, ROUNDINGS);
}

pub(super) fn adds_biases<O: Operations>(ops: &O) {
    // Small integers: exact in all types and any order.
    let mut random = Stream(37);
    let mut integers =
        |count: usize| -> Vec<f32> { (0..count).map(|_| random.below(9) as f32 - 4.0).collect() };
    let (k, n) = (37, 19);
    let (x, w, bias) = (integers(3 * k), integers(n * k), integers(n));
    let expected: Vec<f32> = (0..3 * n)
        .map(|i| bias[i % n] + (0..k).map(|t| x[i / n * k + t] * w[i % n * k + t]).sum::<f32>())
        .collect();
    for dtype in [DenseType::F32, DenseType::F16, DenseType::Bf16] {
        let weight = ops.upload_weight(&dense(&w, k, dtype)).expect("a weight");
        let y =
            ops.matmul(&tensor(ops, &x, k), &weight, Some(&tensor(ops, &bias, n))).expect("shapes that fit");
        assert_eq!(values(ops, &y), expected);
        let decoded: Vec<f32> = (0..k * n).map(|i| w[i % n * k + i / n]).collect();
        let found: Vec<f32> = ops.dequantize(&weight).expect("fp16").iter().map(|x| x.to_f32()).collect();
        assert_eq!(found, decoded);
    }
}

pub(super) fn takes_no_rows<O: Operations>(ops: &O) {
    let none = |columns| tensor(ops, &[], columns);
    let weight = ops.upload_weight(&dense(&[1.0; 32 * 3], 32, DenseType::F32)).expect("a weight");
    let norm = tensor(ops, &[1.0; 32], 32);
    let mut x = none(32);
    ops.rotate(&mut x, 8, 4, &Rope { frequencies: vec![1.0], scale: 1.0 }).expect("no rows");
    ops.soft_cap(&mut x, 2.0).expect("no rows");
    ops.add(&mut x, &none(32), 1.0).expect("no rows");
    ops.add_rows(&mut x, &[], &[], &none(32)).expect("no rows");
    let shape = Attention { kv_heads: 4, ..SHAPE };
    let results = [
        (ops.matmul(&x, &weight, None), 3),
        (ops.rms_norm(&x, &norm, 1e-6), 32),
        (ops.attention(&x, &x, &x, &shape), 32),
        (ops.gate(&x, &x, Activation::Silu), 32),
        (ops.embed(&weight, &[], 1.0), 32),
        (ops.select_rows(&norm, &[]), 32),
        (ops.select_columns(&x, 3..5), 2),
    ];
    for (i, (result, columns)) in results.into_iter().enumerate() {
        assert_eq!(ops.shape(&result.expect("no rows")), (0, columns), "result {i}");
    }
}

#[track_caller]
fn refused<T>(operation: &str, result: Result<T, Error>) {
    match result {
        Err(Error::Shape { operation: found, .. }) => assert_eq!(found, operation),
        Err(other) => panic!("{operation}: {other}"),
        Ok(_) => panic!("{operation} took it"),
    }
}

pub(super) fn refuses_shapes<O: Operations>(ops: &O) {
    let of = |rows: usize, columns: usize| tensor(ops, &vec![1.0; rows * columns], columns);
    let weight = ops.upload_weight(&dense(&[1.0; 4 * 3], 4, DenseType::F32)).expect("a weight");
    refused("upload", ops.upload(&[1.0; 5], 2));
    refused("upload", ops.upload(&[], 0));
    let short =
        Dense { dtype: DenseType::F16, out_features: 3, in_features: 4, bytes: Arc::new(vec![0u8; 23]) };
    refused("upload_weight", ops.upload_weight(&short.clone().into()));
    let huge = Dense { out_features: usize::MAX, ..short };
    refused("upload_weight", ops.upload_weight(&huge.into()));
    refused("matmul", ops.matmul(&of(2, 3), &weight, None));
    refused("matmul", ops.matmul(&of(2, 4), &weight, Some(&of(1, 4))));
    refused("matmul", ops.matmul(&of(2, 4), &weight, Some(&of(2, 3))));
    refused("rms_norm", ops.rms_norm(&of(2, 4), &of(1, 3), 0.1));
    refused("rms_norm", ops.rms_norm(&of(2, 4), &of(2, 4), 0.1));
    let rope = Rope { frequencies: vec![1.0; 2], scale: 1.0 };
    for (head_dim, window) in [(3, 1), (0, 1), (2, 1), (4, 0)] {
        refused("rotate", ops.rotate(&mut of(2, 4), head_dim, window, &rope));
    }
    let (q, kv) = (of(6, 32), of(6, 16));
    let mut bad = [SHAPE; 6];
    bad[0].kv_heads = 0;
    bad[1].kv_heads = 3;
    bad[2].window = 0;
    bad[3].sliding = Some(0);
    bad[4].heads = 2;
    bad[5].head_dim = 4;
    for shape in &bad {
        refused("attention", ops.attention(&q, &kv, &kv, shape));
    }
    refused("attention", ops.attention(&q, &of(5, 16), &kv, &SHAPE));
    refused("attention", ops.attention(&q, &kv, &of(6, 32), &SHAPE));
    refused("gate", ops.gate(&of(2, 3), &of(3, 2), Activation::Gelu));
    refused("add", ops.add(&mut of(2, 3), &of(2, 4), 1.0));
    refused("add_rows", ops.add_rows(&mut of(2, 3), &[2], &[1.0], &of(1, 3)));
    refused("add_rows", ops.add_rows(&mut of(2, 3), &[1], &[], &of(1, 3)));
    refused("add_rows", ops.add_rows(&mut of(2, 3), &[1], &[1.0], &of(1, 2)));
    refused("select_rows", ops.select_rows(&of(2, 3), &[2]));
    refused("select_columns", ops.select_columns(&of(2, 3), 1..4));
    refused("select_columns", ops.select_columns(&of(2, 3), 2..2));
}

/// Large enough for several tasks.
#[test]
fn the_cpu_gives_the_same_bits_for_any_number_of_threads() {
    let of = |threads: usize| {
        let ops = Cpu::new(threads);
        let mut random = Stream(41);
        let (rows, columns) = (700, 96);
        let mut x = tensor(&ops, &random.activations(rows * columns, 2.0), columns);
        let weight = dense(&random.activations(columns * columns, 0.3), columns, DenseType::F32);
        let norm = tensor(&ops, &random.activations(columns, 1.0), columns);
        ops.rotate(&mut x, 8, 256, &Rope { frequencies: vec![1.0, 0.3], scale: 1.0 }).expect("whole heads");
        let shape = Attention { heads: 12, kv_heads: 12, window: 256, sliding: Some(90), ..SHAPE };
        let mut y = ops.attention(&x, &x, &x, &shape).expect("shapes that fit");
        ops.add(&mut y, &x, 0.5).expect("equal shapes");
        let y = ops.rms_norm(&y, &norm, 1e-6).expect("whole rows");
        let weight = ops.upload_weight(&weight).expect("a weight");
        let z = ops.matmul(&y, &weight, None).expect("shapes that fit");
        let z = ops.gate(&z, &y, Activation::Silu).expect("equal shapes");
        let difference = ops.difference(&x, &z).expect("equal shapes");
        let targets: Vec<u32> = (0..rows as u32).map(|i| i % 96).collect();
        let scores = ops.compare_logits(&x, &z, &targets).expect("targets below 96");
        let bits: Vec<u32> = values(&ops, &z).iter().map(|x| x.to_bits()).collect();
        (bits, difference, scores)
    };
    let one = of(1);
    assert!(one == of(2));
    assert!(one == of(7));
}
