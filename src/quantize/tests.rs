//! The search against a slow reference written from the definition, and what a quantized module must be.

use super::fit::quantize_on;
use super::kernel::to_half;
use super::search::{Search, code_range, laps, steps};
use super::*;
use half::f16;
use proptest::prelude::*;
use requant_formats::exl2::{Bits, Error, Matrix, decode_ceiling, decode_scale};
use requant_formats::gptq::{self, GIdx, Shape};

/// A wide search that leaves nothing out: all indices for every ceiling.
const EVERY_INDEX: (i32, i32) = (15, 15);

/// How much larger the sum of squared errors over many groups may be with the default windows than with all
/// indices. They leave out scales that a column of few rows likes by chance only, so a single group of 32 × 32
/// was seen to lose up to a sixth.
const WINDOW_LOSS: f64 = 1.05;

/// Relative Frobenius error that no group of a grid-aligned source may exceed: about a third above that of
/// normally distributed weights, which is `2^-bits` times a small constant.
const MOST_ERROR: [(u32, f64); 6] = [(2, 0.5), (3, 0.3), (4, 0.13), (5, 0.08), (6, 0.04), (8, 0.012)];

/// splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Nearly normal, of variance 1.
    fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.unit()).sum::<f32>() - 6.0
    }
}

/// A GPTQ matrix as a quantizer would make it of normal weights; `scale` is its typical scale.
fn gptq_matrix(bits: u32, k: usize, n: usize, index: &[i64], scale: f32, seed: u64) -> gptq::Matrix {
    let groups = index.iter().max().map_or(1, |&g| g as usize + 1);
    let bits = gptq::Bits::try_from(bits).unwrap();
    let shape = Shape { in_features: k, out_features: n, bits, groups };
    let (mut random, middle) = (Random(seed), f32::from(bits.symmetric_zero()));
    let code = |random: &mut Random| {
        (random.normal() * middle / 2.5 + middle).round().clamp(0.0, bits.max_code() as f32) as u8
    };
    let codes = (0..k * n).map(|_| code(&mut random)).collect();
    let zeros = (0..groups * n).map(|_| bits.symmetric_zero() - random.below(2) as u16).collect();
    // As stored: fp16. Some writers give negative ones.
    let mut one_scale = || {
        let sign = if random.below(8) == 0 { -1.0 } else { 1.0 };
        f16::from_f32(sign * scale * (0.3 + random.unit())).to_f32()
    };
    let scales = (0..groups * n).map(|_| one_scale()).collect();
    let g_idx = GIdx::new(Some(index), k, groups, Some(k.div_ceil(groups))).unwrap();
    gptq::Matrix::new(shape, codes, zeros, scales, g_idx).unwrap()
}

/// Act-order: consecutive rows are in different groups of `size` rows.
fn act_order(k: usize, size: usize) -> Vec<i64> {
    let groups = k.div_ceil(size);
    let mut index: Vec<i64> = (0..k).map(|row| (row / size) as i64).collect();
    let mut random = Random(groups as u64);
    for i in (1..k).rev() {
        index.swap(i, random.below(i as u64 + 1) as usize);
    }
    index
}

fn dense(k: usize, n: usize, scale: f32, seed: u64) -> Source {
    let mut random = Random(seed);
    Source::dense((0..k * n).map(|_| random.normal() * scale).collect(), k, n)
}

fn bits(width: u32) -> Bits {
    Bits::try_from(width).unwrap()
}

/// The values of a group's columns, one vector a column, in fp32.
fn columns(source: &Source, places: std::ops::Range<usize>) -> Vec<Vec<f32>> {
    let (weights, n) = (source.decoded(), source.out_features());
    let rows: Vec<usize> = places.map(|place| source.rows.map()[place] as usize).collect();
    (0..n).map(|column| rows.iter().map(|row| weights[row * n + column]).collect()).collect()
}

/// The smallest squared error that any of the sixteen scales of a ceiling gives a column, before the decoded
/// weight is rounded to fp16. From the definition, in fp64.
fn column_error(values: &[f32], ceiling: f16, bits: Bits) -> f64 {
    let (low, high) = (-f64::from(bits.zero()), f64::from(bits.max_code() - bits.zero()));
    let error = |index: u8| -> f64 {
        let scale = decode_scale(ceiling, index).to_f64();
        if scale * f64::from(bits.zero()) > 65504.0 {
            return f64::INFINITY;
        }
        let miss =
            |v: &f32| f64::from(*v) - (f64::from(*v) / scale).round_ties_even().clamp(low, high) * scale;
        values.iter().map(|v| miss(v).powi(2)).sum()
    };
    (0..16).map(error).fold(f64::INFINITY, f64::min)
}

/// The error of the best of the evenly spaced ceilings of `how`.
fn reference(source: &Source, places: std::ops::Range<usize>, bits: Bits, how: &Search) -> f64 {
    let columns = columns(source, places);
    let (low, high) = (-(bits.zero() as f32), (bits.max_code() - bits.zero()) as f32);
    let wanted = columns.iter().flatten().map(|v| (v / low).max(v / high)).fold(0.0f32, f32::max);
    let step = (how.highest - how.lowest) / (how.ceilings - 1) as f32;
    let shares = (0..how.ceilings).map(|i| how.highest - step * i as f32);
    let ceilings = shares.map(|share| f16::from_f32(wanted * share / 256.0).max(f16::from_bits(1)));
    let errors = ceilings.map(|c| columns.iter().map(|v| column_error(v, c, bits)).sum::<f64>());
    errors.fold(f64::INFINITY, f64::min)
}

/// The squared error of a matrix, recomputed from its decoded weights.
fn squared_error(source: &Source, matrix: &Matrix) -> f64 {
    let decoded = matrix.dequantize();
    let pairs = source.decoded().into_iter().zip(decoded);
    pairs.map(|(wanted, found)| (f64::from(wanted) - found.to_f64()).powi(2)).sum()
}

fn assert_close(found: f64, expected: f64) {
    assert!((found - expected).abs() <= 1e-9 * expected, "found {found}, expected {expected}");
}

/// Sources of one group of 32 rows: every source width, dense, several grids in one group.
fn small_source() -> impl Strategy<Value = Source> {
    let scale = prop::sample::select(vec![0.004f32, 1e-6, 30.0]);
    (0..6, scale, any::<u64>()).prop_map(|(kind, scale, seed)| match kind {
        0..4 => {
            let bits = [2, 3, 4, 8][kind as usize];
            let scale = scale / (1 << bits) as f32;
            Source::gptq(gptq_matrix(bits, 32, 32, &[0; 32], scale, seed), RowOrder::Grouped)
        }
        4 => Source::gptq(gptq_matrix(4, 32, 32, &act_order(32, 8), scale, seed), RowOrder::Natural),
        _ => dense(32, 32, scale, seed),
    })
}

/// Groups of many shapes: counted or listed rows, grids of two source groups, columns of zeros or of another
/// magnitude down to subnormal ceilings; 2, 6 or 34 panels, of which the last need not fill a lap.
fn any_group() -> impl Strategy<Value = Source> {
    let n = prop::sample::select(vec![32usize, 96, 544]);
    let scale = prop::sample::select(vec![0.004f32, 6e-8, 1e-6, 3e-5, 30.0, 8000.0]);
    (0..5u32, prop::sample::select(vec![32usize, 64, 96, 128]), n, scale, any::<u64>()).prop_map(
        |(kind, k, n, scale, seed)| {
            if kind < 4 {
                let bits = [2, 3, 4, 8][kind as usize];
                let index: Vec<i64> = act_order(k, if seed % 2 == 0 { k } else { 32 });
                let matrix = gptq_matrix(bits, k, n, &index, scale / (1 << bits) as f32, seed);
                return Source::gptq(matrix, RowOrder::Grouped);
            }
            let mut random = Random(seed);
            let factors: Vec<f32> = (0..n)
                .map(|_| [0.0, 1.0, 1.0, 1.0, 1e-3, 0.25, 1.0, 6e-8][random.below(8) as usize])
                .collect();
            let normal = |i: usize, random: &mut Random| {
                (random.normal() * scale * factors[i % n]).clamp(-65504.0, 65504.0)
            };
            Source::dense((0..k * n).map(|i| normal(i, &mut random)).collect(), k, n)
        },
    )
}

/// All of a fit; `==` would take −0 for 0.
fn bits_of(fit: &Fit) -> (u16, Vec<u8>, Vec<[u8; 16]>, u64) {
    (fit.ceiling.to_bits(), fit.index.clone(), fit.table.clone(), fit.squared_error.to_bits())
}

fn width() -> impl Strategy<Value = Bits> {
    prop::sample::select(Bits::ALL.to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_path_gives_the_same(group in any_group(), bits in width(), window in (0i32..9, 0i32..9)) {
        let samples = Samples::new(&group, 0..group.in_features());
        let defaults = Search::for_bits(bits, samples.grid());
        for how in [defaults, Search { window, ..defaults }] {
            let scalar = bits_of(&fit_group_on(&samples, bits, &how, SimdPath::SCALAR));
            for path in SimdPath::available() {
                prop_assert_eq!(&bits_of(&fit_group_on(&samples, bits, &how, path)), &scalar, "{}", path);
            }
        }
    }

    #[test]
    fn no_choice_is_better_than_the_one_found(source in small_source(), bits in width()) {
        let samples = Samples::new(&source, 0..32);
        let defaults = Search::for_bits(bits, samples.grid());
        let all = Search { window: EVERY_INDEX, refinements: 0, ceilings: 24, ..defaults };
        let columns = columns(&source, 0..32);
        let of = |fit: &Fit| columns.iter().map(|v| column_error(v, fit.ceiling, bits)).sum::<f64>();
        let expected = reference(&source, 0..32, bits, &all);
        let found = of(&fit_group_with(&samples, bits, &all));
        prop_assert!(found <= expected * (1.0 + 1e-4) + 1e-30, "found {found}, best {expected}");
    }

    #[test]
    fn codes_are_the_nearest_of_the_best_scale(source in small_source(), bits in width()) {
        let samples = Samples::new(&source, 0..32);
        let fit = fit_group(&samples, bits);
        let codes = samples.codes(&fit.table);
        let (scales, range) = (steps(fit.ceiling, bits).scale, code_range(bits));
        for (column, values) in columns(&source, 0..32).iter().enumerate() {
            let scale = f64::from(scales[usize::from(fit.index[column])]);
            let mut error = 0.0;
            for (row, &value) in values.iter().enumerate() {
                let miss = |code: f64| (f64::from(value) - code * scale).abs();
                let all = (0..=bits.max_code()).map(|c| miss(f64::from(c) + f64::from(range.low)));
                let found = miss(f64::from(codes[row * 32 + column]) + f64::from(range.low));
                let nearest = all.fold(f64::INFINITY, f64::min);
                // A tie between two codes is decided in fp32.
                prop_assert!(found <= nearest + 1e-5 * scale, "found {found}, nearest {nearest}");
                error += found * found;
            }
            let best = column_error(values, fit.ceiling, bits);
            prop_assert!(error <= best * (1.0 + 1e-4) + 1e-30, "column {column}: {error}, best {best}");
        }
    }

    #[test]
    fn a_module_survives_packing_and_costs_what_was_said(
        source_bits in prop::sample::select(vec![2u32, 3, 4, 8]),
        (k, size) in prop::sample::select(vec![(32, 32), (96, 32), (160, 64), (128, 128), (96, 16), (64, 128)]),
        source_size in prop::sample::select(vec![8usize, 16, 32, 64, 96]),
        natural in any::<bool>(),
        widths in prop::collection::vec(width(), 5),
        seed in any::<u64>(),
    ) {
        let size = usize::max(size, 32);
        let matrix = gptq_matrix(source_bits, k, 32, &act_order(k, source_size), 0.01, seed);
        let order = if natural { RowOrder::Natural } else { RowOrder::Grouped };
        let source = Source::gptq(matrix, order);
        let cut = source.cut(size);
        // Rows can keep their order only under one width.
        let widths: Vec<Bits> =
            (0..cut.groups.len()).map(|i| widths[if natural { 0 } else { i }]).collect();
        let quantized = quantize(&source, &cut, &widths).unwrap();
        let packed = quantized.matrix.pack();
        let unpacked = Matrix::unpack(packed.tensors(), 32).unwrap();
        prop_assert_eq!(&unpacked, &quantized.matrix);
        assert_close(squared_error(&source, &unpacked), quantized.squared_error);
        assert_close(quantized.squared_norm, source.decoded().iter().map(|w| f64::from(*w).powi(2)).sum());
        // Each row of the model ends in a group of the width that its place was given.
        let mut group_of_packed_row = Vec::new();
        for group in unpacked.groups().groups() {
            group_of_packed_row.extend(std::iter::repeat_n(group.bits, group.rows));
        }
        for (places, width) in cut.groups.iter().zip(&widths) {
            for place in places.clone() {
                let row = source.rows.map()[place] as usize;
                let packed_row = unpacked.invperm().map()[row] as usize;
                prop_assert_eq!(group_of_packed_row[packed_row], *width);
            }
        }
        prop_assert!(!natural || unpacked.invperm().is_identity());
    }

    #[test]
    fn straddling_groups_are_those_that_share_a_source_group(
        k in 1usize..9,
        size in 1usize..5,
        groups in 1i64..9,
        seed in any::<u64>(),
    ) {
        let (k, size) = (32 * k, 32 * size);
        let mut random = Random(seed);
        let of: Vec<u32> = (0..k).map(|_| random.below(groups as u64) as u32).collect();
        let cut = Cut::new(k, size, Some(&of));
        let expected = cut.groups.iter().filter(|places| {
            let here = &of[(*places).clone()];
            let elsewhere = (0..k).filter(|place| !places.contains(place));
            here.iter().any(|g| *g != here[0]) && elsewhere.clone().any(|place| here.contains(&of[place]))
        });
        prop_assert_eq!(cut.straddling, expected.count());
    }
}

#[test]
fn windows_lose_little() {
    for width in Bits::ALL {
        for source_bits in [Some(2), Some(3), Some(4), Some(8), None] {
            let (mut found, mut expected) = (0.0, 0.0);
            for seed in 0..24 {
                let source = match source_bits {
                    Some(b) => Source::gptq(gptq_matrix(b, 64, 32, &[0; 64], 0.01, seed), RowOrder::Grouped),
                    None => dense(64, 32, 0.02, seed),
                };
                let samples = Samples::new(&source, 0..64);
                let how = Search { refinements: 0, ..Search::for_bits(width, samples.grid()) };
                found += fit_group_with(&samples, width, &how).squared_error;
                expected +=
                    fit_group_with(&samples, width, &Search { window: EVERY_INDEX, ..how }).squared_error;
            }
            let loss = found / expected;
            assert!(loss <= WINDOW_LOSS, "{width:?} from {source_bits:?}: {loss}");
        }
    }
}

#[test]
fn straddling_of_aligned_and_odd_cuts() {
    let cut = |from: usize, order, size| {
        Source::gptq(gptq_matrix(4, 192, 32, &act_order(192, from), 0.01, 1), order).cut(size).straddling
    };
    assert_eq!(cut(64, RowOrder::Grouped, 32), 0);
    assert_eq!(cut(64, RowOrder::Grouped, 64), 0);
    // The second group of 128 is the third source group alone.
    assert_eq!(cut(64, RowOrder::Grouped, 128), 0);
    // 0..64 | 64..128 | 128..192 over source groups of 96 rows: only the second holds parts of two.
    assert_eq!(cut(96, RowOrder::Grouped, 64), 1);
    assert_eq!(cut(16, RowOrder::Grouped, 32), 0);
    // Rows of all source groups everywhere.
    assert_eq!(cut(64, RowOrder::Natural, 64), 3);
    assert_eq!(dense(64, 32, 1.0, 1).cut(32).straddling, 0);
}

#[test]
fn a_grid_that_is_representable_decodes_exactly() {
    // One scale for all columns of a group, and 256th of it is an fp16: met exactly with the largest index,
    // and 4-bit codes are the source's own.
    let (k, n) = (64, 32);
    let shape = Shape { in_features: k, out_features: n, bits: gptq::Bits::try_from(4).unwrap(), groups: 2 };
    let mut random = Random(3);
    let mut codes: Vec<u8> = (0..k * n).map(|_| random.below(16) as u8).collect();
    codes[..n].fill(0);
    codes[32 * n..][..n].fill(0);
    let scales = [vec![0.015625f32; n], vec![0.0625; n]].concat();
    let index: Vec<i64> = (0..64).map(|row| row / 32).collect();
    let g_idx = GIdx::new(Some(&index), k, 2, None).unwrap();
    let matrix = gptq::Matrix::new(shape, codes, vec![8; 2 * n], scales, g_idx).unwrap();
    let source = Source::gptq(matrix.clone(), RowOrder::Grouped);
    let quantized = quantize(&source, &source.cut(32), &[bits(4); 2]).unwrap();
    assert_eq!(quantized.squared_error, 0.0);
    assert_eq!(quantized.matrix.dequantize(), matrix.dequantize());
    // A wider code holds the same grid, a narrower one can't.
    assert_eq!(quantize(&source, &source.cut(32), &[bits(5); 2]).unwrap().squared_error, 0.0);
    assert!(quantize(&source, &source.cut(32), &[bits(3); 2]).unwrap().squared_error > 0.0);
}

#[test]
fn zeros_stay_zeros() {
    for width in Bits::ALL {
        let mut weights = vec![0.0f32; 64 * 32];
        // The second group has one column that isn't dead.
        (32..64).for_each(|row| weights[row * 32 + 5] = (row as f32 - 50.0) / 64.0);
        let source = Source::dense(weights, 64, 32);
        let quantized = quantize(&source, &source.cut(32), &[width; 2]).unwrap();
        let decoded = quantized.matrix.dequantize();
        for (i, value) in decoded.iter().enumerate().filter(|(i, _)| *i < 1024 || i % 32 != 5) {
            assert_eq!(value.to_bits(), 0, "{width:?}, element {i}");
        }
    }
    let source = Source::dense(vec![0.0; 1024], 32, 32);
    assert_eq!(quantize(&source, &source.cut(32), &[bits(4)]).unwrap().relative_error(), 0.0);
}

#[test]
fn the_smallest_and_the_largest_weights_are_in_range() {
    let smallest = f16::from_bits(1).to_f32();
    for (low, high) in [(-smallest, smallest), (-65504.0, 65504.0), (0.0, 65504.0), (-65504.0, smallest)] {
        for width in Bits::ALL {
            let weights = (0..1024).map(|i| if i % 3 == 0 { low } else { high }).collect();
            let source = Source::dense(weights, 32, 32);
            let quantized = quantize(&source, &source.cut(32), &[width]).unwrap();
            assert!(quantized.matrix.scale_max().iter().all(|c| decode_ceiling(*c, 1.0) > f16::ZERO));
            assert!(quantized.matrix.dequantize().iter().all(|w| w.is_finite()));
            // One code has to serve both signs, at worst two thirds of the largest weight off at 2 bits.
            assert!(quantized.relative_error() < 0.7, "{width:?}: {}", quantized.relative_error());
        }
    }
    // Multiples of the smallest scale are exact.
    let weights = (0..1024).map(|i| (i % 8) as f32 * smallest).collect();
    let source = Source::dense(weights, 32, 32);
    assert_eq!(quantize(&source, &source.cut(32), &[bits(4)]).unwrap().squared_error, 0.0);
}

#[test]
fn dense_weights_are_measured_as_they_are() {
    // fp16 has none of these; the error is against the fp32 value.
    let source = Source::dense((0..2048).map(|i| 1.0 + i as f32 * 1e-7).collect(), 64, 32);
    let quantized = quantize(&source, &source.cut(64), &[bits(8)]).unwrap();
    assert_close(squared_error(&source, &quantized.matrix), quantized.squared_error);
    assert!(quantized.squared_error > 0.0);
}

#[test]
fn wider_codes_err_less_and_stay_below_the_bounds() {
    let grid = Source::gptq(gptq_matrix(4, 256, 64, &act_order(256, 64), 0.01, 9), RowOrder::Grouped);
    for source in [grid, dense(256, 64, 0.02, 9)] {
        let mut before = f64::INFINITY;
        for (width, most) in MOST_ERROR {
            let quantized = quantize(&source, &source.cut(64), &[bits(width); 4]).unwrap();
            let error = quantized.relative_error();
            assert!(error < most && error < before, "{width} bits: {error}, at most {most}");
            before = error;
        }
    }
}

#[test]
fn every_path_gives_the_same_module() {
    // Wide enough that ceilings are given up twice before all columns have been looked at.
    let source = Source::gptq(gptq_matrix(4, 256, 1056, &act_order(256, 64), 0.01, 11), RowOrder::Grouped);
    let cut = source.cut(64);
    let widths: Vec<Bits> = (0..cut.groups.len()).map(|i| Bits::ALL[(i + 1) % 6]).collect();
    let on = |path| {
        let quantized = quantize_on(&source, &cut, &widths, path).unwrap();
        let errors = (quantized.squared_error.to_bits(), quantized.squared_norm.to_bits());
        (quantized.matrix.pack(), errors)
    };
    let scalar = on(SimdPath::SCALAR);
    for path in SimdPath::available() {
        assert_eq!(on(path), scalar, "{path}");
    }
}

#[test]
fn ceilings_given_up_early_lose_little() {
    // 2048 columns: three cuts. The loss was below 0.1 %.
    for width in Bits::ALL {
        let (mut found, mut expected) = (0.0, 0.0);
        for seed in 0..4 {
            let matrix = gptq_matrix(4, 64, 2048, &[0; 64], 0.01, seed);
            let source = Source::gptq(matrix, RowOrder::Grouped);
            let samples = Samples::new(&source, 0..64);
            let how = Search::for_bits(width, samples.grid());
            found += fit_group_with(&samples, width, &how).squared_error;
            expected += fit_group_with(&samples, width, &Search { cuts: 0, ..how }).squared_error;
        }
        assert!(found <= 1.005 * expected, "{width:?}: {}", found / expected);
    }
}

#[test]
fn each_panel_runs_in_one_lap() {
    for panels in 0..200 {
        for cuts in 0..6 {
            let mut all: Vec<usize> = laps(panels, cuts).concat();
            all.sort_unstable();
            assert_eq!(all, (0..panels).collect::<Vec<_>>());
        }
    }
    assert_eq!(laps(256, 4).iter().map(Vec::len).collect::<Vec<_>>(), [16, 16, 32, 64, 128]);
}

#[test]
fn rounding_to_fp16_is_that_of_the_format() {
    let mut random = Random(1);
    let any = (0..200_000).map(|_| f32::from_bits(random.next() as u32));
    let halves = (0..0x7c00u16).flat_map(|bits| {
        let (here, next) = (f16::from_bits(bits).to_f32(), f16::from_bits(bits + 1).to_f32());
        let middle = if next.is_finite() { (here + next) / 2.0 } else { here };
        // Ties, and their neighbours.
        [here, middle, middle.next_up(), middle.next_down().max(0.0)]
    });
    for x in any.chain(halves).filter(|x| x.abs() <= 65504.0) {
        for x in [x, -x] {
            assert_eq!(to_half(x), f16::from_f32(x).to_f32(), "{x:e}");
        }
    }
}

#[test]
fn a_path_is_asked_for_by_name() {
    let available = SimdPath::available();
    assert_eq!(available[0], SimdPath::SCALAR);
    assert_eq!(SimdPath::asked(None).as_ref(), Ok(available.last().unwrap()));
    assert_eq!(SimdPath::asked(Some("")), SimdPath::asked(None));
    for name in ["scalar", "avx2", "avx512"] {
        match available.iter().find(|path| path.name() == name) {
            Some(path) => assert_eq!(SimdPath::asked(Some(name)), Ok(*path)),
            None => {
                let error = SimdPath::asked(Some(name)).unwrap_err();
                assert!(matches!(error, SimdError::Missing { .. }), "{error}");
                assert!(error.to_string().contains("scalar"));
            }
        }
    }
    for name in ["AVX2", "sse2", "avx2 "] {
        let error = SimdPath::asked(Some(name)).unwrap_err();
        assert_eq!(error, SimdError::Unknown { found: name.into() });
        assert_eq!(error.to_string(), format!("REQUANT_SIMD is {name:?}; it can be scalar, avx2, avx512"));
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bytes() {
    let source = Source::gptq(gptq_matrix(4, 512, 96, &act_order(512, 64), 0.01, 5), RowOrder::Grouped);
    let cut = source.cut(64);
    let widths: Vec<Bits> = (0..cut.groups.len()).map(|i| Bits::ALL[i % 6]).collect();
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let quantized = pool.install(|| quantize(&source, &cut, &widths).unwrap());
        (quantized.matrix.pack(), quantized.squared_error.to_bits())
    };
    let one = run(1);
    assert_eq!(run(2), one);
    assert_eq!(run(7), one);
}

#[test]
fn a_width_for_each_group_is_asked_for() {
    let source = dense(64, 32, 1.0, 1);
    let found = quantize(&source, &source.cut(32), &[bits(4)]).unwrap_err();
    assert_eq!(found, Error::Length { tensor: "q_groups", found: 1, expected: 2 });
}
