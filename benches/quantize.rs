//! Weights a second of the scale search, on a 4-bit act-order source of 4096 × 4096:
//! `cargo bench -p requant --bench quantize`. `examples/uniform_error.rs` measures a real checkpoint.

mod synthetic;

use divan::{Bencher, black_box, counter::ItemsCount};
use requant::formats::exl2::Bits;
use requant::quantize::{Samples, Search, fit_group, fit_group_with, quantize};
use synthetic::{SIZE, source};

const WIDTHS: [u32; 6] = [2, 3, 4, 5, 6, 8];

fn main() {
    divan::main();
}

fn width(bits: u32) -> Bits {
    Bits::try_from(bits).expect("a width of the format")
}

/// One group on one thread, its samples collected before.
#[divan::bench(args = WIDTHS, consts = [64, 128], sample_count = 20)]
fn fit<const GROUP_SIZE: usize>(bencher: Bencher, bits: u32) {
    let source = source(GROUP_SIZE);
    let samples = Samples::new(&source, 0..GROUP_SIZE);
    let bencher = bencher.counter(ItemsCount::new(GROUP_SIZE * SIZE));
    bencher.bench_local(|| fit_group(black_box(&samples), width(bits)));
}

/// The same without windows or refinement: all sixteen indices of 48 ceilings.
#[divan::bench(args = WIDTHS, consts = [128], sample_count = 5)]
fn fit_all_indices<const GROUP_SIZE: usize>(bencher: Bencher, bits: u32) {
    let source = source(GROUP_SIZE);
    let samples = Samples::new(&source, 0..GROUP_SIZE);
    let how = Search { ceilings: 48, refinements: 0, highest: 1.05, lowest: 0.61, window: (15, 15), cuts: 0 };
    let bencher = bencher.counter(ItemsCount::new(GROUP_SIZE * SIZE));
    bencher.bench_local(|| fit_group_with(black_box(&samples), width(bits), &how));
}

/// Collecting the samples of one group, on one thread.
#[divan::bench(consts = [64, 128], sample_count = 20)]
fn samples<const GROUP_SIZE: usize>(bencher: Bencher) {
    let source = source(GROUP_SIZE);
    let bencher = bencher.counter(ItemsCount::new(GROUP_SIZE * SIZE));
    bencher.bench_local(|| Samples::new(black_box(&source), 0..GROUP_SIZE));
}

/// A whole module on all threads, from codes to codes.
#[divan::bench(args = [4, 6], sample_count = 3, sample_size = 1)]
fn module(bencher: Bencher, bits: u32) {
    let source = source(128);
    let cut = source.cut(128);
    let widths = vec![width(bits); cut.groups.len()];
    let bencher = bencher.counter(ItemsCount::new(SIZE * SIZE));
    bencher.bench_local(|| quantize(black_box(&source), &cut, &widths));
}
