//! One packer for every width: codes as a least-significant-bit-first stream over 32-bit words.
//!
//! Both formats share it. `bits` consecutive bits hold one code, the next code follows at once, and a code
//! may straddle two words. 3 bits, three words:
//!
//! ```text
//! word 0   |c10:2|c9 |c8 |c7 |c6 |c5 |c4 |c3 |c2 |c1 |c0 |      bit 31 ... bit 0
//! word 1   |c21:1|c20|c19|c18|c17|c16|c15|c14|c13|c12|c11|c10:1|
//! word 2   |c31|c30|c29|c28|c27|c26|c25|c24|c23|c22|c21:2|
//! ```
//!
//! `*_rows` run down the rows of a `[words, n]` matrix, one stream a column (GPTQ `qweight`, EXL2
//! `q_weight`); `*_row` run along one slice (GPTQ `qzeros`, EXL2 `q_scale`).

/// Words that hold `codes` codes of `bits` bits.
pub(crate) fn words_for(codes: usize, bits: u32) -> usize {
    // In this order no product overflows, whatever the caller's shape says.
    codes / 32 * bits as usize + (codes % 32 * bits as usize).div_ceil(32)
}

/// Unpacks one stream a column: `words` is `[words_for(rows, bits), n]`, `codes` becomes `[rows, n]`.
///
/// `bits` is 1 to 8. The width and the shift are the same along a row, so that the inner loops have no
/// branches.
pub(crate) fn unpack_rows(words: &[u32], n: usize, bits: u32, codes: &mut [u8]) {
    if n == 0 {
        return;
    }
    let mask = (1u32 << bits) - 1;
    for (i, row) in codes.chunks_exact_mut(n).enumerate() {
        let (word, shift) = place(i, bits);
        let low = &words[word * n..][..n];
        if shift + bits <= 32 {
            for (code, low) in row.iter_mut().zip(low) {
                *code = (low >> shift & mask) as u8;
            }
        } else {
            let high = &words[(word + 1) * n..][..n];
            for ((code, low), high) in row.iter_mut().zip(low).zip(high) {
                *code = ((low >> shift | high << (32 - shift)) & mask) as u8;
            }
        }
    }
}

/// Packs `codes` `[rows, n]` into `words` `[words_for(rows, bits), n]`, which must be zero.
///
/// Codes fit `bits` bits: the callers have checked that.
pub(crate) fn pack_rows(codes: &[u8], n: usize, bits: u32, words: &mut [u32]) {
    if n == 0 {
        return;
    }
    for (i, row) in codes.chunks_exact(n).enumerate() {
        let (word, shift) = place(i, bits);
        let (low, high) = words[word * n..].split_at_mut(n);
        for (code, low) in row.iter().zip(low) {
            *low |= u32::from(*code) << shift;
        }
        if shift + bits > 32 {
            for (code, high) in row.iter().zip(high) {
                *high |= u32::from(*code) >> (32 - shift);
            }
        }
    }
}

/// Unpacks one stream along a slice.
pub(crate) fn unpack_row(words: &[u32], bits: u32, codes: &mut [u8]) {
    unpack_rows(words, 1, bits, codes);
}

/// Packs one stream along a slice; `words` must be zero.
pub(crate) fn pack_row(codes: &[u8], bits: u32, words: &mut [u32]) {
    pack_rows(codes, 1, bits, words);
}

/// Word and bit at which code `i` starts.
fn place(i: usize, bits: u32) -> (usize, u32) {
    let bit = i * bits as usize;
    (bit / 32, (bit % 32) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_follow_each_other_without_gaps() {
        // A 64-bit integer is an independent model of the stream.
        for bits in 1..=8u32 {
            let codes: Vec<u8> = (0..8u32).map(|i| ((i * 37 + 11) & ((1 << bits) - 1)) as u8).collect();
            let stream =
                codes.iter().enumerate().fold(0u64, |s, (i, &c)| s | u64::from(c) << (i as u32 * bits));
            let mut words = vec![0; words_for(8, bits)];
            pack_row(&codes, bits, &mut words);
            assert_eq!(words[0], stream as u32, "{bits} bits");
            assert_eq!(words.get(1).copied().unwrap_or(0), (stream >> 32) as u32, "{bits} bits");
            let mut back = vec![0; 8];
            unpack_row(&words, bits, &mut back);
            assert_eq!(back, codes, "{bits} bits");
        }
    }
}
