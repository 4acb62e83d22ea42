//! What the processor multiplies at best: a large square product in fp32 on all threads, the best of several. The
//! share that a forward pass reaches is stated against it.
//! `cargo run --release -p requant-kernels --example matmul_peak`
#![allow(clippy::print_stdout, reason = "a program")]

use faer::{Accum, Mat, Par};
use std::time::Instant;

/// Rows and columns.
const SIZE: usize = 4096;

fn main() {
    let a = Mat::from_fn(SIZE, SIZE, |i, j| ((i * 7 + j) % 13) as f32 - 6.0);
    let b = Mat::from_fn(SIZE, SIZE, |i, j| ((i + j * 5) % 11) as f32 - 5.0);
    let mut c = Mat::<f32>::zeros(SIZE, SIZE);
    let best = (0..5)
        .map(|_| {
            let started = Instant::now();
            faer::linalg::matmul::matmul(c.as_mut(), Accum::Replace, &a, &b, 1.0, Par::rayon(0));
            started.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min);
    println!("{:.1} GFLOP/s in fp32", 2.0 * (SIZE as f64).powi(3) / best / 1e9);
}
