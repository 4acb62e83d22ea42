//! Takes the words of `qweight`, `qzeros`, the scales and `g_idx`, gives a [`Matrix`] of integers and scales
//! or its decoded weights, and back. Must not decide which convention a file's zero points have: it shows
//! the evidence ([`survey_zeros`]), the caller knows the producer.
//!
#![doc = include_str!("SPEC.md")]

mod error;
mod g_idx;
mod matrix;
mod relayout;
mod zeros;

pub use error::Error;
pub use g_idx::{GIdx, GIdxKind};
pub use matrix::{Matrix, check_scales};
pub use zeros::{ZeroConvention, ZeroEncoding, ZeroSurvey, decode_zeros, encode_zeros, survey_zeros};

use crate::bitstream;
use serde::{Deserialize, Serialize};

/// Width of a code: 2, 3, 4 or 8 bits (SPEC G1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct Bits(u8);

impl Bits {
    /// Every width of the format.
    pub const ALL: [Bits; 4] = [Bits(2), Bits(3), Bits(4), Bits(8)];

    /// The width as a number of bits.
    pub const fn get(self) -> u32 {
        self.0 as u32
    }

    /// The largest code, `2^bits − 1`.
    pub const fn max_code(self) -> u32 {
        (1 << self.0) - 1
    }

    /// The zero point of a symmetric module, `2^(bits − 1)`.
    pub const fn symmetric_zero(self) -> u16 {
        1 << (self.0 - 1)
    }
}

impl TryFrom<u32> for Bits {
    type Error = Error;

    fn try_from(bits: u32) -> Result<Self, Error> {
        Bits::ALL.into_iter().find(|b| b.get() == bits).ok_or(Error::Bits { found: bits })
    }
}

impl From<Bits> for u32 {
    fn from(bits: Bits) -> u32 {
        bits.get()
    }
}

/// The sizes that all tensors of a module must agree on (SPEC G1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Shape {
    /// k, rows of the weight.
    pub in_features: usize,
    /// n, columns of the weight.
    pub out_features: usize,
    /// Width of a code.
    pub bits: Bits,
    /// Rows of `scales` and `qzeros`.
    pub groups: usize,
}

impl Shape {
    /// `[rows, columns]` of `qweight`, in words.
    pub fn qweight(&self) -> [usize; 2] {
        [bitstream::words_for(self.in_features, self.bits.get()), self.out_features]
    }

    /// `[rows, columns]` of `qzeros`, in words.
    pub fn qzeros(&self) -> [usize; 2] {
        [self.groups, bitstream::words_for(self.out_features, self.bits.get())]
    }

    /// `[rows, columns]` of `scales`.
    pub fn scales(&self) -> [usize; 2] {
        [self.groups, self.out_features]
    }

    /// The only shape that fits the tensors' dimensions (SPEC G1.3, G1.4).
    ///
    /// `qweight`, `qzeros` and `scales` are `[rows, columns]`; `in_features` is needed because the last
    /// word of a column can be partly filled.
    ///
    /// # Errors
    /// [`Error::Dimensions`] when the tensors disagree on columns or groups, [`Error::Size`] and
    /// [`Error::GroupCount`] for sizes that no weight has, [`Error::NoWidthFits`] when no width explains
    /// the word counts, [`Error::SeveralWidthsFit`] when more than one does.
    pub fn from_dimensions(
        in_features: usize,
        qweight: [usize; 2],
        qzeros: [usize; 2],
        scales: [usize; 2],
    ) -> Result<Self, Error> {
        let [groups, out_features] = scales;
        if qweight[1] != out_features {
            return Err(Error::Dimensions {
                tensor: "qweight",
                found: qweight,
                axis: 1,
                expected: out_features,
            });
        }
        if qzeros[0] != groups {
            return Err(Error::Dimensions { tensor: "qzeros", found: qzeros, axis: 0, expected: groups });
        }
        let mut fitting = Bits::ALL
            .into_iter()
            .map(|bits| Shape { in_features, out_features, bits, groups })
            .filter(|shape| shape.qweight() == qweight && shape.qzeros() == qzeros);
        let shape =
            fitting.next().ok_or(Error::NoWidthFits { in_features, out_features, qweight, qzeros })?;
        shape.check()?;
        match fitting.next() {
            None => Ok(shape),
            Some(other) => Err(Error::SeveralWidthsFit {
                in_features,
                out_features,
                first: shape.bits,
                second: other.bits,
            }),
        }
    }

    /// Checks the sizes that the fields can hold but no weight has.
    fn check(&self) -> Result<(), Error> {
        check_size("out_features", self.out_features)?;
        check_groups(self.in_features, self.groups)
    }
}

/// Unpacks `qweight` into codes `[k, n]` (SPEC §2).
///
/// # Errors
/// [`Error::Length`] when `qweight` does not have the words that `shape` asks for; [`Error::Size`] and
/// [`Error::GroupCount`] for a shape that no weight has.
pub fn unpack_codes(shape: &Shape, qweight: &[u32]) -> Result<Vec<u8>, Error> {
    shape.check()?;
    expect_len("qweight", qweight.len(), shape.qweight())?;
    let mut codes = vec![0; shape.in_features * shape.out_features];
    bitstream::unpack_rows(qweight, shape.out_features, shape.bits.get(), &mut codes);
    Ok(codes)
}

/// Packs codes `[k, n]` into `qweight` (SPEC §2), the inverse of [`unpack_codes`].
///
/// # Errors
/// [`Error::Length`] for a wrong number of codes, [`Error::Code`] for one that does not fit the width;
/// [`Error::Size`] and [`Error::GroupCount`] for a shape that no weight has.
pub fn pack_codes(shape: &Shape, codes: &[u8]) -> Result<Vec<u32>, Error> {
    shape.check()?;
    check_codes(shape, codes)?;
    let [rows, n] = shape.qweight();
    let mut words = vec![0; rows * n];
    bitstream::pack_rows(codes, n, shape.bits.get(), &mut words);
    Ok(words)
}

/// Checks that codes are `[k, n]` and fit the width.
fn check_codes(shape: &Shape, codes: &[u8]) -> Result<(), Error> {
    expect_len("codes", codes.len(), [shape.in_features, shape.out_features])?;
    let largest = codes.iter().fold(0, |largest, &code| code.max(largest));
    if u32::from(largest) > shape.bits.max_code() {
        let position = codes.iter().position(|&c| u32::from(c) > shape.bits.max_code()).unwrap_or(0);
        return Err(Error::Code { position, found: codes[position], bits: shape.bits });
    }
    Ok(())
}

fn check_size(axis: &'static str, found: usize) -> Result<(), Error> {
    if (1..=i32::MAX as usize).contains(&found) { Ok(()) } else { Err(Error::Size { axis, found }) }
}

fn check_groups(in_features: usize, groups: usize) -> Result<(), Error> {
    check_size("in_features", in_features)?;
    if (1..=in_features).contains(&groups) { Ok(()) } else { Err(Error::GroupCount { in_features, groups }) }
}

fn expect_len(tensor: &'static str, found: usize, shape: [usize; 2]) -> Result<(), Error> {
    // Saturated products match no length.
    let expected = shape[0].saturating_mul(shape[1]);
    if found == expected { Ok(()) } else { Err(Error::Length { tensor, found, expected }) }
}
