//! Takes the five tensors of a linear, gives a [`Matrix`] of integers and scale indices or its decoded
//! weights, and back. Must not choose scales, codes or widths, and accepts nothing that exllamav2 would
//! misread.
//!
#![doc = include_str!("SPEC.md")]

mod error;
mod groups;
mod matrix;
mod scale;

pub use error::{Error, ExpectedOffset};
pub use groups::{Group, GroupTable};
pub use matrix::{Matrix, Packed, Tensors};
pub use scale::{ceiling_for, decode_ceiling, decode_scale};

use serde::{Deserialize, Serialize};

/// Rows of every group, and columns of every matrix, are multiples of this (SPEC E2.4, E7.2).
pub const ROW_UNIT: usize = 32;

/// The most rows a matrix can have: permutations are read as 16-bit integers (SPEC E7.10).
pub const MAX_ROWS: usize = 65_536;

/// The most rows a group can have: kernels count them in 16 bits, and groups have multiples of 32
/// (SPEC E2.5).
pub const MAX_GROUP_ROWS: usize = 65_504;

/// Width of a code: 2, 3, 4, 5, 6 or 8 bits (SPEC E2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct Bits(u8);

impl Bits {
    /// Every width of the format, ascending.
    pub const ALL: [Bits; 6] = [Bits(2), Bits(3), Bits(4), Bits(5), Bits(6), Bits(8)];

    /// The width as a number of bits.
    pub const fn get(self) -> u32 {
        self.0 as u32
    }

    /// The largest code, `2^bits − 1`.
    pub const fn max_code(self) -> u32 {
        (1 << self.0) - 1
    }

    /// The code that decodes to zero, `2^(bits − 1)`.
    pub const fn zero(self) -> u32 {
        1 << (self.0 - 1)
    }
}

impl TryFrom<u32> for Bits {
    type Error = Error;

    fn try_from(bits: u32) -> Result<Self, Error> {
        Bits::ALL.into_iter().find(|b| b.get() == bits).ok_or(Error::Bits { group: None, found: bits as i32 })
    }
}

impl From<Bits> for u32 {
    fn from(bits: Bits) -> u32 {
        bits.get()
    }
}
