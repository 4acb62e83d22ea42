//! `qzeros`: which integer is stored, and what it means (SPEC §4).

use super::{Error, Shape, expect_len};
use crate::bitstream;
use serde::{Deserialize, Serialize};
use std::fmt;

/// What a writer stores for a zero point z: v1 `z − 1`, v2 `z`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ZeroConvention {
    /// `checkpoint_format: gptq`.
    V1,
    /// `checkpoint_format: gptq_v2`.
    V2,
}

impl fmt::Display for ZeroConvention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V1 => "v1",
            Self::V2 => "v2",
        })
    }
}

/// How stored fields become zero points (SPEC G4.5 to G4.9). Where no field is all ones, as in symmetric
/// modules, all v1 encodings but the last agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ZeroEncoding {
    /// z = field.
    V2,
    /// z = field + 1, so that an all-ones field is `2^bits`: what most kernels compute.
    V1PlusOne,
    /// z = field + 1 modulo `2^bits`, so that an all-ones field is 0: what the quantizer meant.
    V1Wrap,
    /// GPTQModel at 2, 4 and 8 bits: the constant of all ones a field is added to each 32-bit word, which
    /// undoes the borrow that a zero point of 0 caused when the file was written.
    V1WordWise,
    /// GPTQModel before 7.0 at 3 bits: the constants of words 0 and 2 of each triple are exchanged.
    V1ThreeBitSwapped,
}

impl ZeroEncoding {
    /// The convention that a reader would call this.
    pub const fn convention(self) -> ZeroConvention {
        match self {
            Self::V2 => ZeroConvention::V2,
            Self::V1PlusOne | Self::V1Wrap | Self::V1WordWise | Self::V1ThreeBitSwapped => ZeroConvention::V1,
        }
    }
}

/// The constant that GPTQModel before 7.0 subtracted from the words of a 3-bit triple.
const SWAPPED_THREE_BIT: [u32; 3] = [0x2492_4924, 0x9249_2492, 0x4924_9249];

/// What the stored fields of a module say about its convention (SPEC G4.10 to G4.12).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ZeroSurvey {
    /// The one value that all fields have, if they have one.
    pub constant: Option<u8>,
    /// Whether the words are the symmetric 3-bit pattern of GPTQModel before 7.0.
    pub three_bit_swapped: bool,
    /// Fields of only ones. In a v1 file: a zero point of 0 that wrapped, or one that readers disagree on.
    pub all_ones: usize,
    /// Words that are ones from some field to their top, with other fields above it: AutoGPTQ's smear,
    /// whose zero points are lost. It means nothing where word-wise addition applies.
    pub smears: usize,
}

/// Looks at every stored field of `qzeros`, without deciding what it means.
///
/// # Errors
/// [`Error::Length`]; [`Error::Size`] and [`Error::GroupCount`] for a shape that no weight has.
pub fn survey_zeros(shape: &Shape, qzeros: &[u32]) -> Result<ZeroSurvey, Error> {
    shape.check()?;
    let [groups, words] = shape.qzeros();
    expect_len("qzeros", qzeros.len(), [groups, words])?;
    let ones = shape.bits.max_code() as u8;
    let mut fields = vec![0; shape.out_features];
    let mut first = None;
    let mut constant = true;
    let mut survey = ZeroSurvey { three_bit_swapped: shape.bits.get() == 3, ..ZeroSurvey::default() };
    for row in qzeros.chunks_exact(words) {
        bitstream::unpack_row(row, shape.bits.get(), &mut fields);
        let first = *first.get_or_insert(fields[0]);
        constant &= fields.iter().all(|&f| f == first);
        survey.all_ones += fields.iter().filter(|&&f| f == ones).count();
        survey.smears += (0..words).filter(|&i| is_smear(row[i], i, shape)).count();
        survey.three_bit_swapped = survey.three_bit_swapped && {
            let mut row = row.to_vec();
            add_swapped(&mut row);
            bitstream::unpack_row(&row, 3, &mut fields);
            fields.iter().all(|&z| u16::from(z) == shape.bits.symmetric_zero())
        };
    }
    survey.constant = first.filter(|_| constant);
    Ok(survey)
}

/// Whether `word`, the one at `index` of a row, is ones from the start of a field to its top, with at least
/// one bit of another field above that one.
fn is_smear(word: u32, index: usize, shape: &Shape) -> bool {
    let bits = shape.bits.get() as usize;
    let end = 32 * (index + 1);
    // The writer that smears has no padding; a padded word's top says nothing.
    let whole = end <= shape.out_features * bits;
    // Start of the last field that ends below the top of the word: of the 3-bit fields c9, c20 and c30.
    let start = (end.div_ceil(bits) - 2) * bits;
    whole && word.leading_ones() as usize >= end - start
}

fn add_swapped(words: &mut [u32]) {
    for (word, constant) in words.iter_mut().zip(SWAPPED_THREE_BIT.iter().cycle()) {
        *word = word.wrapping_add(*constant);
    }
}

/// Decodes `qzeros` into zero points `[groups, n]` (SPEC §4); values are 0 to `2^bits`.
///
/// # Errors
/// [`Error::Length`]; [`Error::Size`] and [`Error::GroupCount`] for a shape that no weight has;
/// [`Error::EncodingWidth`] for [`ZeroEncoding::V1ThreeBitSwapped`] at another width.
pub fn decode_zeros(shape: &Shape, qzeros: &[u32], encoding: ZeroEncoding) -> Result<Vec<u16>, Error> {
    shape.check()?;
    let [groups, words] = shape.qzeros();
    expect_len("qzeros", qzeros.len(), [groups, words])?;
    if encoding == ZeroEncoding::V1ThreeBitSwapped && shape.bits.get() != 3 {
        return Err(Error::EncodingWidth { bits: shape.bits });
    }
    let bits = shape.bits.get();
    let mut fields = vec![0; shape.out_features];
    let mut zeros = Vec::with_capacity(groups * shape.out_features);
    let mut row = vec![0; words];
    for stored in qzeros.chunks_exact(words) {
        row.copy_from_slice(stored);
        match encoding {
            ZeroEncoding::V1ThreeBitSwapped => add_swapped(&mut row),
            ZeroEncoding::V1WordWise if bits != 3 => {
                // A field of the value 1 in every place of the word: 0x11111111 for 4 bits.
                let one_each = u32::MAX / shape.bits.max_code();
                row.iter_mut().for_each(|word| *word = word.wrapping_add(one_each));
            }
            _ => {}
        }
        bitstream::unpack_row(&row, bits, &mut fields);
        zeros.extend(fields.iter().map(|&field| match encoding {
            ZeroEncoding::V2 | ZeroEncoding::V1ThreeBitSwapped => u16::from(field),
            ZeroEncoding::V1WordWise if bits != 3 => u16::from(field),
            ZeroEncoding::V1PlusOne => u16::from(field) + 1,
            // GPTQModel corrects 3 bits field by field.
            ZeroEncoding::V1Wrap | ZeroEncoding::V1WordWise => {
                (u16::from(field) + 1) & shape.bits.max_code() as u16
            }
        }));
    }
    Ok(zeros)
}

/// Encodes zero points `[groups, n]` into `qzeros`, field by field (SPEC G4.13, G4.14).
///
/// # Errors
/// [`Error::Length`]; [`Error::Size`] and [`Error::GroupCount`] for a shape that no weight has;
/// [`Error::ZeroNotRepresentable`] for z = 0 in v1, whose encodings readers disagree on,
/// and for z = `2^bits` in v2.
pub fn encode_zeros(shape: &Shape, zeros: &[u16], convention: ZeroConvention) -> Result<Vec<u32>, Error> {
    shape.check()?;
    expect_len("zeros", zeros.len(), shape.scales())?;
    let stored_less = match convention {
        ZeroConvention::V1 => 1,
        ZeroConvention::V2 => 0,
    };
    let fields = zeros
        .iter()
        .enumerate()
        .map(|(i, &z)| match z.checked_sub(stored_less) {
            Some(field) if u32::from(field) <= shape.bits.max_code() => Ok(field as u8),
            _ => Err(Error::ZeroNotRepresentable {
                group: i / shape.out_features,
                column: i % shape.out_features,
                found: z,
                convention,
            }),
        })
        .collect::<Result<Vec<u8>, Error>>()?;
    let [groups, words] = shape.qzeros();
    let mut qzeros = vec![0; groups * words];
    for (fields, row) in fields.chunks_exact(shape.out_features).zip(qzeros.chunks_exact_mut(words)) {
        bitstream::pack_row(fields, shape.bits.get(), row);
    }
    Ok(qzeros)
}
