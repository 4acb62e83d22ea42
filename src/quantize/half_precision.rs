//! Storing dense tensors as fp16, and counting what that loses.

use half::{f16, slice::HalfFloatSliceExt};
use serde::Serialize;

/// What rounding to fp16 did to a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Rounding {
    /// Values that fp16 doesn't have.
    pub rounded: u64,
    /// Of these, how many lie below 2⁻¹⁴, where fp16 loses precision and, in the end, the value.
    pub below_normal: u64,
    /// The largest absolute difference.
    pub largest_error: f32,
}

impl Rounding {
    /// Whether every value is kept.
    pub fn is_exact(&self) -> bool {
        self.rounded == 0
    }
}

/// A value that fp16 can't hold: NaN, infinite, or of a magnitude of 65520 and more.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NotFinite {
    /// Index of the element.
    pub position: usize,
    /// Its value.
    pub value: f32,
}

/// The smallest normal fp16.
const SMALLEST_NORMAL: f32 = 6.103_515_6e-5;

/// Rounds to fp16, to nearest even.
///
/// # Errors
/// The first value that fp16 can't hold.
pub fn to_half(values: &[f32]) -> Result<(Vec<f16>, Rounding), NotFinite> {
    let mut halves = vec![f16::ZERO; values.len()];
    halves.convert_from_f32_slice(values);
    let mut rounding = Rounding::default();
    let mut back = [0.0f32; 1024];
    for (chunk, (halves, values)) in halves.chunks(1024).zip(values.chunks(1024)).enumerate() {
        let back = &mut back[..halves.len()];
        halves.convert_to_f32_slice(back);
        for (i, (&stored, &value)) in back.iter().zip(values).enumerate() {
            if !stored.is_finite() {
                return Err(NotFinite { position: chunk * 1024 + i, value });
            }
            if stored != value {
                rounding.rounded += 1;
                rounding.below_normal += u64::from(value.abs() < SMALLEST_NORMAL);
                rounding.largest_error = rounding.largest_error.max((stored - value).abs());
            }
        }
    }
    Ok((halves, rounding))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_are_counted() {
        let (halves, rounding) = to_half(&[1.0, -0.5, 1e-9, 3e-5, 1.0 + 1e-4]).unwrap();
        assert_eq!(halves[0], f16::ONE);
        // 1e-9 vanishes, 3e-5 and 1.0001 are rounded.
        assert_eq!((rounding.rounded, rounding.below_normal), (3, 2));
        assert_eq!(rounding.largest_error, (1.0 + 1e-4f32) - 1.0);
        assert!(to_half(&[65504.0, 6.103_515_6e-5]).unwrap().1.is_exact());
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let mut values = vec![0.0; 3000];
        values[2047] = 65520.0;
        assert_eq!(to_half(&values), Err(NotFinite { position: 2047, value: 65520.0 }));
        assert_eq!(to_half(&[f32::INFINITY]).unwrap_err().position, 0);
        assert!(to_half(&[f32::NAN]).unwrap_err().value.is_nan());
    }
}
