//! Weights a second of the scale search, on a 4-bit act-order source of 4096 × 4096:
//! `cargo bench -p requant --bench quantize`. `examples/uniform_error.rs` measures a real checkpoint.

use divan::{Bencher, black_box, counter::ItemsCount};
use requant::formats::exl2::Bits;
use requant::formats::gptq::{self, GIdx, Shape};
use requant::quantize::{RowOrder, Samples, Search, Source, fit_group, fit_group_with, quantize};

const SIZE: usize = 4096;
const WIDTHS: [u32; 6] = [2, 3, 4, 5, 6, 8];

fn main() {
    divan::main();
}

fn source(group_size: usize) -> Source {
    let bits = gptq::Bits::try_from(4).expect("a width of the format");
    let groups = SIZE / group_size;
    let shape = Shape { in_features: SIZE, out_features: SIZE, bits, groups };
    let words = |len: usize| (0..len as u32).map(|i| i.wrapping_mul(0x9E37_79B9).rotate_left(i % 31) ^ i);
    // A sum of four is nearly normal, as the codes of real weights are.
    let code =
        |word: u32| (((word & 15) + (word >> 4 & 15) + (word >> 8 & 15) + (word >> 12 & 15)) / 4) as u8;
    let codes = words(SIZE * SIZE).map(code).collect();
    let scales = words(groups * SIZE).map(|word| 2e-3 + (word & 1023) as f32 * 4e-6).collect();
    let index: Vec<i64> = (0..SIZE as i64).map(|row| row % groups as i64).collect();
    let g_idx = GIdx::new(Some(&index), SIZE, groups, None).expect("groups in range");
    let matrix = gptq::Matrix::new(shape, codes, vec![8; groups * SIZE], scales, g_idx).expect("a matrix");
    Source::gptq(matrix, RowOrder::Grouped)
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
