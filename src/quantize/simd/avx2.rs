//! Eight columns in a register of AVX2. No fused multiply-add.
#![allow(unsafe_code)]

use super::compile_for;
use crate::quantize::kernel::Vector;
use crate::quantize::panel::{LANES, Lanes};
use std::arch::x86_64::*;

/// Used in the functions of [`detected`] alone.
#[derive(Clone, Copy)]
struct F32x8(__m256);

/// Intrinsics of AVX and AVX2.
macro_rules! avx2 {
    ($e:expr) => {
        // SAFETY: the methods of F32x8 are inlined into the functions of `detected`, which are compiled for
        // AVX2 and run only where it was detected. Pointers are those of arrays whose length was checked.
        unsafe { $e }
    };
}

impl Vector for F32x8 {
    const WIDTH: usize = 8;
    type Index = __m256i;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        F32x8(avx2!(_mm256_set1_ps(x)))
    }
    #[inline(always)]
    fn load(from: &Lanes, at: usize) -> Self {
        let from = &from[at..at + 8];
        F32x8(avx2!(_mm256_loadu_ps(from.as_ptr())))
    }
    #[inline(always)]
    fn store(self, to: &mut Lanes, at: usize) {
        let to = &mut to[at..at + 8];
        avx2!(_mm256_storeu_ps(to.as_mut_ptr(), self.0));
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        F32x8(avx2!(_mm256_add_ps(self.0, other.0)))
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        F32x8(avx2!(_mm256_sub_ps(self.0, other.0)))
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        F32x8(avx2!(_mm256_mul_ps(self.0, other.0)))
    }
    #[inline(always)]
    fn mul_add(self, factor: Self, term: Self) -> Self {
        F32x8(avx2!(_mm256_fmadd_ps(self.0, factor.0, term.0)))
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        F32x8(avx2!(_mm256_max_ps(self.0, other.0)))
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        F32x8(avx2!(_mm256_min_ps(self.0, other.0)))
    }
    #[inline(always)]
    fn if_less(self, other: Self, yes: Self, no: Self) -> Self {
        F32x8(avx2!(_mm256_blendv_ps(no.0, yes.0, _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, other.0))))
    }
    #[inline(always)]
    fn first(self, scales: &[f32; 16]) -> __m256i {
        // A search by halves: the scales ascend.
        let mut first = avx2!(_mm256_setzero_si256());
        for half in [8, 4, 2, 1] {
            let probe = avx2!(_mm256_add_epi32(first, _mm256_set1_epi32(half - 1)));
            let scale = Self::lookup(scales, probe).0;
            first = avx2!({
                let smaller = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_LT_OQ>(scale, self.0));
                _mm256_add_epi32(first, _mm256_and_si256(smaller, _mm256_set1_epi32(half)))
            });
        }
        first
    }
    #[inline(always)]
    fn moved(index: __m256i, offset: i32) -> __m256i {
        avx2!({
            let moved = _mm256_add_epi32(index, _mm256_set1_epi32(offset));
            _mm256_min_epi32(_mm256_max_epi32(moved, _mm256_setzero_si256()), _mm256_set1_epi32(15))
        })
    }
    #[inline(always)]
    fn lookup(table: &[f32; 16], index: __m256i) -> Self {
        let (low, high) = (&table[..8], &table[8..]);
        F32x8(avx2!({
            let low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(low.as_ptr()), index);
            let high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(high.as_ptr()), index);
            // Bit 3 of the index, moved to the sign, chooses the half.
            _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(index)))
        }))
    }
}

compile_for!("avx2,fma", F32x8);
