//! One width for all of SmolLM2: the mean relative Frobenius error is at most that of an exhaustive search.

mod support;

use rayon::prelude::*;
use requant::checkpoint::{Checkpoint, OpenOptions};
use requant::formats::exl2::Bits;
use requant::quantize::{RowOrder, Samples, Source, fit_group};
use support::folder;

/// Mean over the 210 linears, groups of 64 rows, of a plain search in C over 48 ceilings from 1.05 down to 0.61
/// of the largest scale wanted and all sixteen indices.
const PLAIN_SEARCH: [(u32, f64); 6] =
    [(2, 0.3787), (3, 0.1944), (4, 0.0503), (5, 0.0311), (6, 0.0184), (8, 0.00478)];

#[test]
fn smollm2_errs_no_more_than_an_exhaustive_search() {
    let Some(dir) = folder("REQUANT_SMOLLM2") else { return };
    let checkpoint = Checkpoint::open(&dir, &OpenOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    let linears: Vec<_> = checkpoint.modules().iter().filter(|m| m.layout().is_quantized()).collect();
    assert_eq!(linears.len(), 210);
    let widths = PLAIN_SEARCH.map(|(bits, _)| Bits::try_from(bits).unwrap());
    let errors: Vec<Vec<f64>> = linears
        .par_iter()
        .map(|linear| {
            let source = Source::gptq(checkpoint.gptq(linear).unwrap(), RowOrder::Grouped);
            let samples = source.cut(64).groups.into_iter().map(|places| Samples::new(&source, places));
            let samples: Vec<Samples<'_>> = samples.collect();
            let norm: f64 = samples.iter().map(Samples::squared_norm).sum();
            let error = |bits| samples.iter().map(|s| fit_group(s, bits).squared_error).sum::<f64>();
            widths.iter().map(|&bits| (error(bits) / norm).sqrt()).collect()
        })
        .collect();
    for (i, (bits, most)) in PLAIN_SEARCH.into_iter().enumerate() {
        let mean = errors.iter().map(|e| e[i]).sum::<f64>() / errors.len() as f64;
        eprintln!("{bits} bits: mean relative error {mean:.6}, at most {most}");
        assert!(mean <= most, "{bits} bits: {mean}");
    }
}
