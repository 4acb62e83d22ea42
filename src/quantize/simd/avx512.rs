//! Sixteen columns, a whole panel, in a register of AVX-512F. No fused multiply-add.
#![allow(unsafe_code)]

use super::compile_for;
use crate::quantize::kernel::Vector;
use crate::quantize::panel::{LANES, Lanes};
use std::arch::x86_64::*;

/// Used in the functions of [`detected`] alone.
#[derive(Clone, Copy)]
struct F32x16(__m512);

/// Intrinsics of AVX-512F.
macro_rules! avx512 {
    ($e:expr) => {
        // SAFETY: the methods of F32x16 are inlined into the functions of `detected`, which are compiled for
        // AVX-512F and run only where it was detected. Pointers are those of arrays of sixteen.
        unsafe { $e }
    };
}

impl Vector for F32x16 {
    const WIDTH: usize = 16;
    type Index = __m512i;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        F32x16(avx512!(_mm512_set1_ps(x)))
    }
    #[inline(always)]
    fn load(from: &Lanes, at: usize) -> Self {
        debug_assert_eq!(at, 0);
        F32x16(avx512!(_mm512_loadu_ps(from.as_ptr())))
    }
    #[inline(always)]
    fn store(self, to: &mut Lanes, at: usize) {
        debug_assert_eq!(at, 0);
        avx512!(_mm512_storeu_ps(to.as_mut_ptr(), self.0));
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        F32x16(avx512!(_mm512_add_ps(self.0, other.0)))
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        F32x16(avx512!(_mm512_sub_ps(self.0, other.0)))
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        F32x16(avx512!(_mm512_mul_ps(self.0, other.0)))
    }
    #[inline(always)]
    fn mul_add(self, factor: Self, term: Self) -> Self {
        F32x16(avx512!(_mm512_fmadd_ps(self.0, factor.0, term.0)))
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        F32x16(avx512!(_mm512_max_ps(self.0, other.0)))
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        F32x16(avx512!(_mm512_min_ps(self.0, other.0)))
    }
    #[inline(always)]
    fn if_less(self, other: Self, yes: Self, no: Self) -> Self {
        F32x16(avx512!({
            let less = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, other.0);
            _mm512_mask_blend_ps(less, no.0, yes.0)
        }))
    }
    #[inline(always)]
    fn first(self, scales: &[f32; 16]) -> __m512i {
        // A search by halves: the scales ascend.
        let mut first = avx512!(_mm512_setzero_si512());
        for half in [8, 4, 2, 1] {
            let probe = avx512!(_mm512_add_epi32(first, _mm512_set1_epi32(half - 1)));
            let scale = Self::lookup(scales, probe).0;
            first = avx512!({
                let smaller = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(scale, self.0);
                _mm512_mask_add_epi32(first, smaller, first, _mm512_set1_epi32(half))
            });
        }
        first
    }
    #[inline(always)]
    fn moved(index: __m512i, offset: i32) -> __m512i {
        avx512!({
            let moved = _mm512_add_epi32(index, _mm512_set1_epi32(offset));
            _mm512_min_epi32(_mm512_max_epi32(moved, _mm512_setzero_si512()), _mm512_set1_epi32(15))
        })
    }
    #[inline(always)]
    fn lookup(table: &[f32; 16], index: __m512i) -> Self {
        F32x16(avx512!(_mm512_permutexvar_ps(index, _mm512_loadu_ps(table.as_ptr()))))
    }
}

compile_for!("avx512f", F32x16);
