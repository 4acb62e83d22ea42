//! The tests of [`Operations`], written once and run for every device.
//!
//! Expected values are computed here from the definitions, in f64 and with none of the code under test.

mod compare;
mod forward;
pub(crate) mod packed;

use super::{Cpu, Operations};
use proptest::prelude::*;

/// Makes the tests of one device: of `Some` device, or of a reference to one; `None` skips them.
macro_rules! tests_of {
    ($device:ident, $operations:expr) => {
        mod $device {
            use super::*;

            proptest! {
                #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

                #[test]
                fn decodes_gptq_to_the_defined_bits(case in packed::gptq_case()) {
                    let device = $operations;
                    if let Some(operations) = device.as_ref() {
                        packed::decodes_to_the_defined_bits(operations, &case)?;
                    }
                }

                #[test]
                fn decodes_exl2_to_the_defined_bits(case in packed::exl2_case()) {
                    let device = $operations;
                    if let Some(operations) = device.as_ref() {
                        packed::decodes_to_the_defined_bits(operations, &case)?;
                    }
                }

                #[test]
                fn multiplies_gptq(case in packed::gptq_case(), m in 0usize..4, seed: u64) {
                    let device = $operations;
                    if let Some(operations) = device.as_ref() {
                        packed::multiplies(operations, &case, m, seed)?;
                    }
                }

                #[test]
                fn multiplies_exl2(case in packed::exl2_case(), m in 0usize..4, seed: u64) {
                    let device = $operations;
                    if let Some(operations) = device.as_ref() {
                        packed::multiplies(operations, &case, m, seed)?;
                    }
                }
            }

            tests_of!(@each $operations, forward:
                normalises, rotates, attends, attends_long_windows, sliding_1_gives_the_values, gates, embeds,
                selects, adds, caps, adds_biases, takes_no_rows, refuses_shapes);
            tests_of!(@each $operations, compare:
                finds_what_is_not_finite, measures_differences, scores_targets, compares_logits,
                equal_logits_diverge_by_exactly_0, ties_go_to_the_first, takes_no_rows_to_compare,
                refuses_other_shapes);
        }
    };
    (@each $operations:expr, $module:ident: $($test:ident),+) => {
        $(#[test]
        fn $test() {
            let device = $operations;
            if let Some(operations) = device.as_ref() {
                $module::$test(operations);
            }
        })+
    };
}

tests_of!(cpu, Some(Cpu::new(2)));
#[cfg(feature = "cuda")]
tests_of!(cuda, crate::cuda::tests::gpu());

/// Numbers without a pattern (xorshift).
pub(crate) struct Stream(pub(crate) u64);

impl Stream {
    pub(crate) fn below(&mut self, limit: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as u32 % limit
    }

    /// A value in −1..1.
    pub(crate) fn activation(&mut self) -> f32 {
        self.below(1 << 24) as f32 / (1 << 23) as f32 - 1.0
    }

    pub(crate) fn activations(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| self.activation() * scale).collect()
    }
}

fn tensor<O: Operations>(ops: &O, values: &[f32], columns: usize) -> O::Tensor {
    ops.upload(values, columns).expect("whole rows")
}

fn values<O: Operations>(ops: &O, tensor: &O::Tensor) -> Vec<f32> {
    ops.download(tensor).expect("activations")
}

/// Each within `relative` of the largest magnitude among `expected`.
#[track_caller]
fn assert_near(found: &[f32], expected: &[f64], relative: f64) {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0f64, |a, b| a.max(b.abs()));
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let off = (f64::from(found) - expected).abs();
        assert!(off <= relative * largest, "element {i}: {found} for {expected}");
    }
}
