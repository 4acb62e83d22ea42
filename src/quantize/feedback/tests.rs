//! Against GPTQ's own formulation, by inverse and in fp64; and what any Hessian must give.

use super::*;
use crate::quantize::RowOrder;
use requant_formats::gptq::{self, GIdx, Shape};

/// splitmix64, as numbers around 0.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

/// Of inputs that depend on one another, `tokens` of them.
fn hessian(k: usize, tokens: usize, seed: u64) -> Hessian {
    let mut random = Random(seed);
    let mut lower = vec![0.0; k * (k + 1) / 2];
    for _ in 0..tokens {
        let mut last = 0.0;
        let x: Vec<f64> = (0..k)
            .map(|_| {
                last = 0.8 * last + random.next();
                last
            })
            .collect();
        for i in 0..k {
            for j in 0..=i {
                lower[i * (i + 1) / 2 + j] += x[i] * x[j];
            }
        }
    }
    Hessian::new(k, lower, tokens).unwrap()
}

/// A GPTQ module of 4 bits with act-order, groups of 32.
fn source(k: usize, n: usize) -> Source {
    let groups = k / 32;
    let shape = Shape { in_features: k, out_features: n, bits: gptq::Bits::try_from(4).unwrap(), groups };
    let mut random = Random(5);
    let codes =
        (0..k * n).map(|_| (7.5 + 3.0 * (random.next() + random.next())).clamp(0.0, 15.0) as u8).collect();
    let scales = (0..groups * n).map(|_| f16::from_f64(0.02 + 0.01 * random.next()).to_f32()).collect();
    let index: Vec<i64> = (0..k).map(|row| (row * 7 % k / 32) as i64).collect();
    let g_idx = GIdx::new(Some(&index), k, groups, Some(32)).unwrap();
    let matrix = gptq::Matrix::new(shape, codes, vec![8; groups * n], scales, g_idx).unwrap();
    Source::gptq(matrix, RowOrder::Grouped)
}

fn bits_of(k: usize, bits: u32) -> Vec<Bits> {
    vec![Bits::try_from(bits).unwrap(); k / 32]
}

/// tr(EᵀHE) in fp64, from the definition.
fn weighed(hessian: &Hessian, errors: &[f64], n: usize) -> f64 {
    let k = hessian.in_features();
    let mut sum = 0.0;
    for i in 0..k {
        for j in 0..k {
            let product: f64 = (0..n).map(|c| errors[i * n + c] * errors[j * n + c]).sum();
            sum += hessian.at(i, j) * product;
        }
    }
    sum
}

/// The inverse, by Gauss and Jordan.
fn inverse(mut a: Vec<Vec<f64>>) -> Vec<Vec<f64>> {
    let k = a.len();
    for (i, row) in a.iter_mut().enumerate() {
        row.extend((0..k).map(|j| f64::from(u8::from(i == j))));
    }
    for i in 0..k {
        let pivot = a[i][i];
        a[i].iter_mut().for_each(|x| *x /= pivot);
        let row = a[i].clone();
        for (_, other) in a.iter_mut().enumerate().filter(|(j, _)| *j != i) {
            let factor = other[i];
            other.iter_mut().zip(&row).for_each(|(x, y)| *x -= factor * y);
        }
    }
    a.into_iter().map(|row| row[k..].to_vec()).collect()
}

/// U, upper triangular, with A = UᵀU.
fn upper_factor(a: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let k = a.len();
    let mut u = vec![vec![0.0; k]; k];
    for i in 0..k {
        for j in i..k {
            let sum: f64 = (0..i).map(|l| u[l][i] * u[l][j]).sum();
            u[i][j] = if i == j { (a[i][i] - sum).sqrt() } else { (a[i][j] - sum) / u[i][i] };
        }
    }
    u
}

#[test]
fn codes_are_those_of_gptq_by_inverse() {
    let (k, damping) = (32, 0.3);
    let hessian = hessian(k, 200, 1);
    let order: Vec<u32> = (0..k as u32).map(|i| i * 5 % 32).collect();
    let factor = Factor::new(&hessian, &order, damping).unwrap();
    let at = |i: usize, j: usize| {
        hessian.at(order[i] as usize, order[j] as usize) + if i == j { damping } else { 0.0 }
    };
    let damped: Vec<Vec<f64>> = (0..k).map(|i| (0..k).map(|j| at(i, j)).collect()).collect();
    let u = upper_factor(&inverse(damped));
    let mut random = Random(2);
    let base: Vec<Lanes> = (0..k).map(|_| std::array::from_fn(|_| random.next() as f32)).collect();
    // A power of two, so that decoded weights need no rounding to fp16.
    let (scale, range) = ([0.25; LANES], code_range(Bits::try_from(3).unwrap()));
    let rows =
        Rows { targets: &base, base: &base, weights: &factor.weights, coefficients: &factor.coefficients };
    for path in SimdPath::available() {
        let (mut codes, mut errors) = (vec![[0; LANES]; k], vec![[0.0; LANES]; k]);
        let sums = path.encode_with_feedback(rows, &scale, range, &mut codes, &mut errors);
        for lane in 0..LANES {
            let mut weights: Vec<f64> = base.iter().map(|row| f64::from(row[lane])).collect();
            let mut sum = 0.0;
            for i in 0..k {
                let code = (weights[i] / 0.25).round_ties_even().clamp(-4.0, 3.0);
                assert_eq!(f64::from(codes[i][lane]) - 4.0, code, "row {i}, {path}");
                let error = (weights[i] - code * 0.25) / u[i][i];
                sum += error * error;
                weights.iter_mut().zip(&u[i]).skip(i + 1).for_each(|(w, u)| *w -= error * u);
            }
            assert!((sums[lane] - sum).abs() < 1e-4 * sum, "{} {sum}", sums[lane]);
        }
    }
}

#[test]
fn feedback_weighs_less_and_is_reported_as_it_is() {
    let (k, n) = (96, 64);
    let (source, hessian) = (source(k, n), hessian(k, 500, 3));
    for bits in [2, 3, 4, 6] {
        let (cut, widths) = (source.cut(32), bits_of(k, bits));
        let found = quantize_calibrated(&source, &cut, &widths, &hessian, &Feedback::default()).unwrap();
        let plain = quantize(&source, &cut, &widths).unwrap();
        let weights = source.decoded();
        let share = |matrix: &Matrix| {
            let decoded = matrix.dequantize();
            let pairs = weights.iter().zip(&decoded);
            let errors: Vec<f64> = pairs.map(|(&w, d)| f64::from(w) - d.to_f64()).collect();
            let weights: Vec<f64> = weights.iter().map(|&w| f64::from(w)).collect();
            weighed(&hessian, &errors, n) / weighed(&hessian, &weights, n)
        };
        let weighs = share(&found.quantized.matrix);
        assert!(found.damping.is_ok());
        assert!((found.output_error - weighs).abs() < 1e-3 * weighs, "{bits}: {weighs}");
        assert!((found.output_error_by_weights / share(&plain.matrix) - 1.0).abs() < 1e-3, "{bits}");
        assert!(found.output_error < 0.8 * share(&plain.matrix), "{bits}");
        let losses = group_losses(&source, &cut, &widths[..1], &hessian, &Feedback::default());
        let losses = losses.unwrap().unwrap();
        let expected = losses.losses.iter().flatten().sum::<f64>() / losses.norm;
        // Made of groups by themselves: it leaves out that errors make targets larger, and that they take them off the
        // source's grid, which counts where the width holds that grid.
        let lowest = if bits < 4 { 0.5 } else { 0.25 };
        assert!((lowest..2.0).contains(&(expected / weighs)), "{bits}: {expected} {weighs}");
    }
}

#[test]
fn mixed_widths_stand_in_the_order_of_the_uncalibrated_matrix() {
    let (source, hessian) = (source(96, 64), hessian(96, 300, 12));
    let bits = [3, 6, 4].map(|bits| Bits::try_from(bits).unwrap());
    let cut = source.cut(32);
    let plain = quantize(&source, &cut, &bits).unwrap().matrix.pack();
    let found = quantize_calibrated(&source, &cut, &bits, &hessian, &Feedback::default()).unwrap();
    assert!(found.damping.is_ok());
    let found = found.quantized.matrix.pack();
    assert_eq!((found.q_invperm, found.q_groups), (plain.q_invperm, plain.q_groups));
}

#[test]
fn same_bytes_for_any_number_of_threads() {
    let (source, hessian, bits) = (source(96, 64), hessian(96, 300, 4), bits_of(96, 4));
    let matrix = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let run =
            || quantize_calibrated(&source, &source.cut(32), &bits, &hessian, &Feedback::default()).unwrap();
        pool.install(run).quantized.matrix
    };
    let one = matrix(1);
    assert!([2, 4, 7].into_iter().all(|threads| matrix(threads) == one));
}

#[test]
fn singular_hessians_are_damped_and_useless_ones_left_out() {
    let (k, source, bits) = (64, source(64, 32), bits_of(64, 3));
    let run = |hessian: &Hessian| {
        quantize_calibrated(&source, &source.cut(32), &bits, hessian, &Feedback::default()).unwrap()
    };
    // One token, many times over.
    let mut same = hessian(k, 1, 6);
    same.tokens = 500;
    let found = run(&same);
    assert!(found.damping.is_ok() && found.output_error.is_finite(), "{:?}", found.damping);
    // An input that is always 0.
    let mut dead = hessian(k, 300, 7);
    for j in 0..k {
        let (i, j) = (j.max(9), j.min(9));
        dead.lower[i * (i + 1) / 2 + j] = 0.0;
    }
    assert!(run(&dead).damping == Ok(0.01));
    assert_eq!(run(&hessian(k, 100, 8)).damping, Err(Uncalibrated::FewTokens(100)));
    let zero = Hessian::new(k, vec![0.0; k * (k + 1) / 2], 500).unwrap();
    assert_eq!(run(&zero).damping, Err(Uncalibrated::Zero));
    let mut wrong = hessian(k, 300, 9);
    wrong.lower[k * (k + 1) / 2 - 1] = f64::NAN;
    assert_eq!(run(&wrong).damping, Err(Uncalibrated::NotPositive));
    // The largest entry off the diagonal: more damping is needed than the first.
    let mut skewed = hessian(k, 300, 10);
    skewed.lower[1] = 1.2 * skewed.lower[0].max(skewed.lower[2]);
    assert!(matches!(run(&skewed).damping, Ok(damping) if damping > 0.01));
}
