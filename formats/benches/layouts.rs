//! Weights a second of the layouts' loops, on a 4096 × 4096 matrix: `cargo bench -p requant-formats`.

use divan::{Bencher, black_box, counter::ItemsCount};
use half::f16;
use requant_formats::Permutation;
use requant_formats::exl2::{self, Group, GroupTable};
use requant_formats::gptq::{self, GIdx, Shape, ZeroEncoding};

const SIZE: usize = 4096;
const GROUP_SIZE: usize = 128;

fn main() {
    divan::main();
}

/// Counts the weights of the matrix.
fn weights() -> ItemsCount {
    ItemsCount::new(SIZE * SIZE)
}

/// Words without a pattern, the same on every run.
fn words(len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| i.wrapping_mul(0x9E37_79B9).rotate_left(i % 31) ^ i).collect()
}

fn gptq_shape(bits: u32) -> Shape {
    let bits = gptq::Bits::try_from(bits).expect("a width of the format");
    Shape { in_features: SIZE, out_features: SIZE, bits, groups: SIZE / GROUP_SIZE }
}

fn gptq_matrix(bits: u32) -> gptq::Matrix {
    let shape = gptq_shape(bits);
    let size = |[rows, columns]: [usize; 2]| rows * columns;
    let codes = gptq::unpack_codes(&shape, &words(size(shape.qweight()))).expect("fitting words");
    let zeros = gptq::decode_zeros(&shape, &words(size(shape.qzeros())), ZeroEncoding::V1PlusOne);
    let scales = (0..size(shape.scales())).map(|i| 1e-3 + i as f32 * 1e-8).collect();
    // Act-order: consecutive rows are in different groups.
    let index: Vec<i64> = (0..SIZE as i64).map(|row| row % shape.groups as i64).collect();
    let g_idx = GIdx::new(Some(&index), SIZE, shape.groups, None).expect("groups in range");
    gptq::Matrix::new(shape, codes, zeros.expect("fitting words"), scales, g_idx).expect("a matrix")
}

fn exl2_matrix(bits: u32) -> exl2::Matrix {
    let bits = exl2::Bits::try_from(bits).expect("a width of the format");
    let count = SIZE / GROUP_SIZE;
    let groups = GroupTable::new(vec![Group { bits, rows: GROUP_SIZE }; count]).expect("groups");
    let codes = words(SIZE * SIZE).into_iter().map(|word| (word & bits.max_code()) as u8).collect();
    let scale_index = words(count * SIZE).into_iter().map(|word| (word & 15) as u8).collect();
    // 2731 is odd: a permutation that scatters rows.
    let invperm = Permutation::new((0..SIZE as u32).map(|row| row * 2731 % SIZE as u32).collect());
    let scale_max = vec![f16::from_f32(0.0125); count];
    exl2::Matrix::new(groups, SIZE, codes, scale_index, scale_max, invperm.expect("a permutation"))
        .expect("a matrix")
}

#[divan::bench(args = [2, 3, 4, 8])]
fn gptq_unpack_codes(bencher: Bencher<'_, '_>, bits: u32) {
    let shape = gptq_shape(bits);
    let qweight = words(shape.qweight().iter().product());
    bencher.counter(weights()).bench_local(|| gptq::unpack_codes(&shape, black_box(&qweight)));
}

#[divan::bench(args = [2, 3, 4, 8])]
fn gptq_pack_codes(bencher: Bencher<'_, '_>, bits: u32) {
    let matrix = gptq_matrix(bits);
    bencher.counter(weights()).bench_local(|| gptq::pack_codes(matrix.shape(), black_box(matrix.codes())));
}

#[divan::bench]
fn gptq_dequantize(bencher: Bencher<'_, '_>) {
    let matrix = gptq_matrix(4);
    bencher.counter(weights()).bench_local(|| black_box(&matrix).dequantize());
}

#[divan::bench(args = [2, 3, 4, 5, 6, 8])]
fn exl2_unpack(bencher: Bencher<'_, '_>, bits: u32) {
    let packed = exl2_matrix(bits).pack();
    bencher.counter(weights()).bench_local(|| exl2::Matrix::unpack(black_box(packed.tensors()), SIZE));
}

#[divan::bench(args = [2, 3, 4, 5, 6, 8])]
fn exl2_pack(bencher: Bencher<'_, '_>, bits: u32) {
    let matrix = exl2_matrix(bits);
    bencher.counter(weights()).bench_local(|| black_box(&matrix).pack());
}

#[divan::bench]
fn exl2_dequantize(bencher: Bencher<'_, '_>) {
    let matrix = exl2_matrix(4);
    bencher.counter(weights()).bench_local(|| black_box(&matrix).dequantize());
}
