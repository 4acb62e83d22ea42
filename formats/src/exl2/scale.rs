//! From a ceiling and a scale index to the scale that the kernels multiply with (SPEC §4).

use half::f16;

/// `q_scale_max / 256` rounded to fp16 (SPEC E4.3). Below 2⁻⁶ the result is subnormal, a multiple of 2⁻²⁴.
pub fn decode_ceiling(q_scale_max: f16) -> f16 {
    f16::from_f32(q_scale_max.to_f32() * (1.0 / 256.0))
}

/// `(index + 1)²` times the decoded ceiling, rounded to fp16 (SPEC E4.4); `index` is 0 to 15.
pub fn decode_scale(ceiling: f16, index: u8) -> f16 {
    let step = f32::from(index) + 1.0;
    f16::from_f32(step * step * ceiling.to_f32())
}

/// The `q_scale_max` that decodes to exactly `ceiling`: 256 times it. `None` where that overflows fp16.
pub fn ceiling_for(ceiling: f16) -> Option<f16> {
    let stored = f16::from_f32(ceiling.to_f32() * 256.0);
    stored.is_finite().then_some(stored)
}
