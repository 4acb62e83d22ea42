//! Sixteen columns at a time: the arithmetic of the search.
//!
//! One body, compiled for several instruction sets and chosen at run time. It uses only IEEE operations
//! that round once (no fused multiply-add, no reassociation), and sums in a fixed order, so every path
//! gives the same bits; `tests::every_path_gives_the_same` checks it.

/// Columns of a panel.
pub(super) const LANES: usize = 16;

/// One number a column.
pub(super) type Lanes = [f32; LANES];

/// What a group offers the columns of a panel: sixteen scales of one ceiling.
#[derive(Clone, Debug)]
pub(super) struct Steps {
    /// Scales as decoded, ascending. One whose lowest code overflows fp16 is NaN; the first never is.
    pub(super) scale: [f32; 16],
    /// Their reciprocals.
    pub(super) inverse: [f32; 16],
}

/// A panel's values and how often each occurs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Panel<'a> {
    pub(super) values: &'a [Lanes],
    pub(super) weights: &'a [Lanes],
}

/// Smallest and largest code, as signed integers around zero.
#[derive(Clone, Copy, Debug)]
pub(super) struct Range {
    pub(super) low: f32,
    pub(super) high: f32,
}

/// Adding and subtracting this rounds to the nearest integer, ties to even, for magnitudes below 2^22.
const ROUND: f32 = 12_582_912.0;

/// Rounds half to even.
#[inline(always)]
pub(super) fn round(x: f32) -> f32 {
    (x + ROUND) - ROUND
}

/// Weighted squared error of each column when it uses its own scale of `scale` (`inverse` is 1/scale).
#[inline(always)]
fn error_of(panel: Panel<'_>, scale: &Lanes, inverse: &Lanes, range: Range) -> Lanes {
    let mut sum = [0.0; LANES];
    for (value, weight) in panel.values.iter().zip(panel.weights) {
        for lane in 0..LANES {
            let wanted = value[lane] * inverse[lane];
            let code = round(wanted.max(range.low).min(range.high));
            let miss = wanted - code;
            sum[lane] += weight[lane] * (miss * miss);
        }
    }
    for lane in 0..LANES {
        sum[lane] *= scale[lane] * scale[lane];
    }
    sum
}

/// For each ceiling the sum over the panel's columns of the smallest error that an index around the wanted
/// one gives; added to `sums`. `wanted` is each column's smallest scale that clips nothing.
#[inline(always)]
fn add_best_errors(
    panel: Panel<'_>,
    wanted: &Lanes,
    ceilings: &[Steps],
    window: (i32, i32),
    range: Range,
    sums: &mut [f64],
) {
    for (steps, sum) in ceilings.iter().zip(sums) {
        let (best, _) = best_index(panel, wanted, steps, window, range);
        // A fixed tree, whatever the vector width.
        let mut total = [0.0f64; 4];
        for (lane, &best) in best.iter().enumerate() {
            total[lane % 4] += f64::from(best);
        }
        *sum += (total[0] + total[1]) + (total[2] + total[3]);
    }
}

/// The index of each column with the smallest error, and that error.
#[inline(always)]
fn best_index(
    panel: Panel<'_>,
    wanted: &Lanes,
    steps: &Steps,
    (below, above): (i32, i32),
    range: Range,
) -> (Lanes, [u8; LANES]) {
    // The smallest index whose scale is at least the wanted one; 15 where none is.
    let mut first = [0i32; LANES];
    for &scale in &steps.scale[..15] {
        for lane in 0..LANES {
            first[lane] += i32::from(scale < wanted[lane]);
        }
    }
    let mut best = [f32::INFINITY; LANES];
    let mut index = [0u8; LANES];
    for offset in -below..=above {
        let mut candidate = [0u8; LANES];
        let (mut scale, mut inverse) = ([0.0; LANES], [0.0; LANES]);
        for lane in 0..LANES {
            let i = (first[lane] + offset).clamp(0, 15);
            candidate[lane] = i as u8;
            scale[lane] = steps.scale[i as usize];
            inverse[lane] = steps.inverse[i as usize];
        }
        let error = error_of(panel, &scale, &inverse, range);
        for lane in 0..LANES {
            // An unusable scale gives NaN, which is never smaller.
            if error[lane] < best[lane] {
                best[lane] = error[lane];
                index[lane] = candidate[lane];
            }
        }
    }
    (best, index)
}

macro_rules! instruction_sets {
    ($($path:ident $detect:tt: $feature:literal),*) => {
        /// An instruction set that the search is compiled for.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum Path { Plain, $(#[cfg(target_arch = "x86_64")] $path),* }

        impl Path {
            /// All that this processor has, the best last.
            pub(super) fn available() -> Vec<Path> {
                #[allow(unused_mut)]
                let mut paths = vec![Path::Plain];
                $(#[cfg(target_arch = "x86_64")]
                if instruction_sets!(@detect $detect) {
                    paths.push(Path::$path);
                })*
                paths
            }

            pub(super) fn add_best_errors(
                self,
                panel: Panel<'_>,
                wanted: &Lanes,
                ceilings: &[Steps],
                window: (i32, i32),
                range: Range,
                sums: &mut [f64],
            ) {
                match self {
                    Path::Plain => add_best_errors(panel, wanted, ceilings, window, range, sums),
                    $(#[cfg(target_arch = "x86_64")]
                    Path::$path => {
                        #[target_feature(enable = $feature)]
                        fn compiled(
                            panel: Panel<'_>,
                            wanted: &Lanes,
                            ceilings: &[Steps],
                            window: (i32, i32),
                            range: Range,
                            sums: &mut [f64],
                        ) {
                            add_best_errors(panel, wanted, ceilings, window, range, sums);
                        }
                        // SAFETY: `available` is the only source of this variant and checked the features.
                        #[allow(unsafe_code)]
                        unsafe { compiled(panel, wanted, ceilings, window, range, sums) }
                    })*
                }
            }
        }
    };
    (@detect avx2) => { std::arch::is_x86_feature_detected!("avx2") };
    (@detect avx512) => {
        std::arch::is_x86_feature_detected!("avx512f")
            && std::arch::is_x86_feature_detected!("avx512vl")
            && std::arch::is_x86_feature_detected!("avx512dq")
            && std::arch::is_x86_feature_detected!("avx512bw")
    };
}

instruction_sets!(Avx2 avx2: "avx2", Avx512 avx512: "avx512f,avx512vl,avx512dq,avx512bw");

/// The index of each column with the smallest error under one ceiling.
pub(super) fn choose_index(
    panel: Panel<'_>,
    wanted: &Lanes,
    steps: &Steps,
    window: (i32, i32),
    range: Range,
) -> [u8; LANES] {
    best_index(panel, wanted, steps, window, range).1
}
