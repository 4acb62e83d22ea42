//! The bit layouts of GPTQ and EXL2 checkpoints.
//!
//! Takes slices of the words that a checkpoint stores, gives codes, scales, permutations and decoded
//! weights, and back. Must not do I/O, start threads, use `unsafe`, or know of files, configurations and
//! models: errors say what is wrong with the numbers, the caller adds where they came from.
//!
//! Each format's folder holds its `SPEC.md`, shown as the documentation of its module; the tests cite the
//! numbers of its statements.
//!
//! Weights are `[k, n]` row-major (`k` = in_features, `n` = out_features), as both formats store them.

#![forbid(unsafe_code)]

mod bitstream;
pub mod exl2;
pub mod gptq;
mod permutation;

pub use permutation::{NotAPermutation, Permutation};
