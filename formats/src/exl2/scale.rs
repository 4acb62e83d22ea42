//! From a ceiling and a scale index to the scale that the kernels multiply with (SPEC §4).

use half::f16;

/// `q_scale_max · prescale / 256` rounded to fp16 (SPEC E4.3). Below 2⁻¹⁴ the result is subnormal, a multiple of
/// 2⁻²⁴. The factor is rounded to fp32 and the product is one of fp32, as in exllamav2's loader; `prescale` is 1 but for
/// a few linears of a few architectures (SPEC E4.9).
pub fn decode_ceiling(q_scale_max: f16, prescale: f64) -> f16 {
    f16::from_f32(q_scale_max.to_f32() * (prescale / 256.0) as f32)
}

/// `(index + 1)²` times the decoded ceiling, rounded to fp16 (SPEC E4.4); `index` is 0 to 15.
pub fn decode_scale(ceiling: f16, index: u8) -> f16 {
    let step = f32::from(index) + 1.0;
    f16::from_f32(step * step * ceiling.to_f32())
}

/// The `q_scale_max` that decodes to `ceiling` under a positive `prescale`, or, where none does, to the nearest there
/// is: with a prescale of 1 it is 256 times the ceiling, exactly. What any `q_scale_max` decodes to is met exactly.
/// `None` where the result overflows fp16.
pub fn ceiling_for(ceiling: f16, prescale: f64) -> Option<f16> {
    let about = f16::from_f64(ceiling.to_f64() * 256.0 / prescale);
    // The quotient's own rounding can be off by a step or two.
    let near =
        |step: i32| u16::try_from(i32::from(about.min(f16::MAX).to_bits()) + step).ok().map(f16::from_bits);
    let miss = |stored: &f16| (decode_ceiling(*stored, prescale).to_f32() - ceiling.to_f32()).abs();
    let candidates = [0, -1, 1, -2, 2].into_iter().filter_map(near).filter(|stored| stored.is_finite());
    let nearest = candidates.min_by(|a, b| miss(a).total_cmp(&miss(b)));
    nearest.filter(|stored| about.is_finite() || miss(stored) == 0.0)
}
