use super::*;
use crate::checkpoint::{Checkpoint, OpenOptions};
use crate::validate::Text;
use requant_kernels::{Cpu, Operations};
use std::path::Path;

#[test]
fn hessians_are_sums_of_products_of_the_inputs_for_any_number_of_threads() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tiny-llama-gptq");
    let checkpoint = Checkpoint::open(&dir, &OpenOptions::default()).unwrap();
    let model = Model::new(&checkpoint).unwrap();
    let windows = Windows::new(&Text::Calibration, &checkpoint, 256, Some(64), false).unwrap();
    // In fp64, from what the block's linears are given.
    let ops = Cpu::new(1);
    let hidden = model.embedding(&ops).unwrap().forward(&ops, &windows.tokens).unwrap();
    let mut inputs: BTreeMap<LinearId, (Vec<f32>, usize)> = BTreeMap::new();
    let mut tap = |id, input: &_, _: &_| {
        inputs.insert(id, (ops.download(input)?, ops.shape(input).1));
        Ok(())
    };
    model.block(&ops, 0).unwrap().forward(&ops, &hidden, 64, &mut tap).unwrap();
    let mut first = None;
    for threads in [1, 2, 4] {
        let ops = Cpu::new(threads);
        let mut calibrator = Calibrator::new(&ops, &model, &windows).unwrap();
        let mut blocks = Vec::new();
        while let Some(block) = calibrator.next_block().unwrap() {
            blocks.push(block.hessians);
        }
        assert_eq!(blocks.len(), model.layers());
        for (&id, (x, k)) in &inputs {
            let hessian = &blocks[0][&input_of(id)];
            assert_eq!(hessian.tokens(), 256);
            let largest = (0..*k).map(|i| hessian.at(i, i)).fold(0.0, f64::max);
            for (i, j) in (0..*k).flat_map(|i| [(i, i / 2), (i, i), (i, (i * 7) % k)]) {
                let sum: f64 = x.chunks_exact(*k).map(|x| f64::from(x[i]) * f64::from(x[j])).sum();
                assert!((hessian.at(i, j) - sum).abs() < 1e-5 * largest, "{id:?} {i} {j}");
            }
        }
        let first = first.get_or_insert_with(|| blocks.clone());
        assert_eq!(*first, blocks, "{threads} threads");
    }
}
