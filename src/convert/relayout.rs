//! The same weights in another GPTQ layout, proven on the bytes before they are written; and other weights where
//! the plan says that a width doesn't hold them, measured on these bytes.

use super::Error;
use super::report::Exactness;
use crate::checkpoint::{Checkpoint, Layout, Module};
use crate::output::ShardWriter;
use crate::plan::{GptqDecision, PlannedModule, columns_that_follow};
use crate::quantize::{self, Grid, regrid, squares};
use half::{bf16, f16};
use requant_formats::gptq::{self, GIdx, Matrix, Shape, ZeroEncoding};
use requant_formats::{Permutation, exl2};
use safetensors::Dtype;

/// What became of a module's weight.
pub(super) struct Outcome {
    /// The order of its rows, if they are sorted: entry j is the row of the source that stands at place j.
    pub(super) rows: Option<Vec<u32>>,
    /// Whether the weights are the source's to the bit.
    pub(super) exactness: Exactness,
    /// Frobenius norm of the difference over that of the weight; 0 unless it is requantized.
    pub(super) relative_error: f64,
}

/// Writes a module's four tensors, its columns in the order of [`column_order`].
pub(super) fn write_gptq(
    checkpoint: &Checkpoint,
    planned: &PlannedModule,
    module: &Module,
    decision: &GptqDecision,
    columns: Option<&Permutation>,
    writer: &ShardWriter,
) -> Result<Outcome, crate::Error> {
    let broken = |source: gptq::Error| Error::GptqMatrix { module: planned.source.clone(), source };
    if columns.is_none() && write_with_same_codes(checkpoint, planned, module, decision, writer)? {
        return Ok(Outcome { rows: None, exactness: Exactness::Exact, relative_error: 0.0 });
    }
    let wide = if decision.requantized { gptq::Bits::ALL[3] } else { decision.bits };
    let source = matrix(checkpoint, module, wide)?;
    let mut changed = source.clone();
    if let Some(columns) = columns {
        changed = changed.with_columns(columns).map_err(broken)?;
    }
    let mut rows = None;
    if decision.sorted {
        let (sorted, order) = changed.sorted().map_err(broken)?;
        (changed, rows) = (sorted, Some(order));
    }
    let moved = decision.requantized.then(|| changed.clone());
    changed = match (decision.requantized, decision.recentred) {
        (true, _) => regrid(&changed, &grid(decision, source.g_idx())),
        (false, true) => changed.recentred(decision.bits),
        (false, false) => changed.widened(decision.bits),
    }
    .map_err(broken)?;
    if !decision.requantized && decision.group_size < changed.g_idx().group_size() {
        changed = changed.with_group_size(decision.group_size).map_err(broken)?;
    }
    let shape = *changed.shape();
    let qweight = gptq::pack_codes(&shape, changed.codes()).map_err(broken)?;
    let qzeros = gptq::encode_zeros(&shape, changed.zeros(), decision.zeros).map_err(broken)?;
    let g_idx: Vec<i32> = changed.g_idx().groups().iter().map(|&group| group as i32).collect();
    let (scale_bytes, scales) = stored_scales(changed.scales(), decision.scales);
    let written = Written { shape, qweight: &qweight, qzeros: &qzeros, g_idx: &g_idx, scales };
    let back = read_back(decision, written).map_err(broken)?;
    // Scales that had to be rounded change weights; the plan has asked whether that may be.
    let exactness = match back.scales() == changed.scales() {
        _ if decision.requantized => Exactness::Requantized,
        true => Exactness::Exact,
        false => Exactness::Rounded,
    };
    let relative_error = moved.map_or(0.0, |wanted| relative_error(&wanted, &back));
    if exactness == Exactness::Exact {
        compare(planned, &source, &back, rows.as_ref(), columns)?;
    }
    let write = |suffix: &str, bytes: &[u8]| writer.write(&format!("{}.{suffix}", planned.name), bytes);
    write("qweight", bytemuck::cast_slice(&qweight))?;
    write("qzeros", bytemuck::cast_slice(&qzeros))?;
    write("scales", &scale_bytes)?;
    write("g_idx", bytemuck::cast_slice(&g_idx))?;
    Ok(Outcome { rows: rows.map(|order| order.map().to_vec()), exactness, relative_error })
}

/// The grid of a module that is requantized. Groups that stay keep their rows.
fn grid(decision: &GptqDecision, groups: &GIdx) -> Grid {
    Grid {
        bits: decision.bits,
        group_size: (decision.group_size != groups.group_size()).then_some(decision.group_size),
        zeros: (!decision.symmetric).then_some(decision.zeros),
    }
}

/// Frobenius norm of the difference over that of the weights as decoded; both have the same order.
fn relative_error(wanted: &Matrix, found: &Matrix) -> f64 {
    let (wanted, found) = (wanted.dequantize(), found.dequantize());
    quantize::relative_error(squares(found.iter().map(|w| w.to_f32()).zip(wanted.iter().map(|w| w.to_f32()))))
}

/// Writes a module of which only the storage of its zero points changes: `qweight` and `scales` are the source's
/// bytes, so that equal zero points and groups make equal weights. Gives whether it was one.
fn write_with_same_codes(
    checkpoint: &Checkpoint,
    planned: &PlannedModule,
    module: &Module,
    decision: &GptqDecision,
    writer: &ShardWriter,
) -> Result<bool, crate::Error> {
    let Layout::Gptq(stored) = module.layout() else { return Ok(false) };
    let tensor = |suffix: &str| checkpoint.require_tensor(&format!("{}.{suffix}", planned.source));
    let (qweight, scales) = (tensor("qweight")?, tensor("scales")?);
    let n = module.out_features();
    let whole = module.columns().is_none() && qweight.shape()[1] == n && scales.shape()[1] == n;
    let same = !decision.requantized
        && (stored.shape.bits, stored.scales, stored.shape.groups)
            == (decision.bits, decision.scales, decision.groups)
        && !decision.sorted;
    if !whole || !same {
        return Ok(false);
    }
    let g_idx = checkpoint.gptq_g_idx(module)?;
    let zeros = checkpoint.gptq_zeros(module)?;
    let centre = decision.bits.symmetric_zero();
    if g_idx.group_size() != decision.group_size || decision.recentred && zeros.iter().any(|&z| z != centre) {
        return Ok(false);
    }
    let shape = stored.shape;
    let broken = |source: gptq::Error| Error::GptqMatrix { module: planned.source.clone(), source };
    let qzeros = gptq::encode_zeros(&shape, &zeros, decision.zeros).map_err(broken)?;
    let back = gptq::decode_zeros(&shape, &qzeros, encoding(decision.zeros)).map_err(broken)?;
    if let Some(at) = (0..zeros.len()).find(|&at| zeros[at] != back[at]) {
        let row = (0..shape.in_features).find(|&row| g_idx.groups()[row] as usize == at / n).unwrap_or(0);
        return Err(Error::NotExact { module: planned.source.clone(), row, column: at % n }.into());
    }
    let groups: Vec<i32> = g_idx.groups().iter().map(|&group| group as i32).collect();
    let write = |suffix: &str, bytes: &[u8]| writer.write(&format!("{}.{suffix}", planned.name), bytes);
    write("qweight", qweight.bytes())?;
    write("qzeros", bytemuck::cast_slice(&qzeros))?;
    write("scales", scales.bytes())?;
    write("g_idx", bytemuck::cast_slice(&groups))?;
    Ok(true)
}

/// How a reader without requant's rules for odd files decodes zero points.
fn encoding(zeros: gptq::ZeroConvention) -> ZeroEncoding {
    match zeros {
        gptq::ZeroConvention::V1 => ZeroEncoding::V1PlusOne,
        gptq::ZeroConvention::V2 => ZeroEncoding::V2,
    }
}

/// The order that a module's columns take in the output.
pub(super) fn column_order(
    checkpoint: &Checkpoint,
    module: &Module,
    decision: &GptqDecision,
) -> Result<Option<Permutation>, crate::Error> {
    let Some(down) = &decision.columns_follow else { return Ok(None) };
    let Some(order) = row_order(checkpoint, down)? else { return Ok(None) };
    Ok(columns_that_follow(checkpoint, module, down, &order))
}

/// A quantized module as a GPTQ matrix; one that is EXL2 becomes symmetric.
fn matrix(checkpoint: &Checkpoint, module: &Module, bits: gptq::Bits) -> Result<Matrix, crate::Error> {
    if let Layout::Exl2(_) = module.layout() {
        let exl2: exl2::Matrix = checkpoint.exl2(module)?;
        let from = Matrix::from_exl2(&exl2, module.out_features(), bits);
        return Ok(from.map_err(|source| Error::GptqMatrix { module: module.name().into(), source })?);
    }
    Ok(checkpoint.gptq(module)?)
}

/// The rows of a module sorted by group.
fn row_order(checkpoint: &Checkpoint, name: &str) -> Result<Option<Permutation>, crate::Error> {
    let Some(module) = checkpoint.module(name) else { return Ok(None) };
    match module.layout() {
        Layout::Dense { .. } => Ok(None),
        // Of an EXL2 module not its packed order: rows are sorted by the groups of the GPTQ matrix, stably.
        _ => Ok(Some(matrix(checkpoint, module, gptq::Bits::ALL[3])?.g_idx().sorted_rows())),
    }
}

/// Scales in their stored type, as bytes and as the numbers that these hold. The plan has checked that a
/// narrower type holds them, or that rounding is wanted.
fn stored_scales(scales: &[f32], dtype: Dtype) -> (Vec<u8>, Vec<f32>) {
    match dtype {
        Dtype::F32 => (bytemuck::cast_slice(scales).to_vec(), scales.to_vec()),
        Dtype::BF16 => {
            let stored: Vec<bf16> = scales.iter().map(|&s| bf16::from_f32(s)).collect();
            (bytemuck::cast_slice(&stored).to_vec(), stored.iter().map(|s| s.to_f32()).collect())
        }
        _ => {
            let stored: Vec<f16> = scales.iter().map(|&s| f16::from_f32(s)).collect();
            (bytemuck::cast_slice(&stored).to_vec(), stored.iter().map(|s| s.to_f32()).collect())
        }
    }
}

struct Written<'a> {
    shape: Shape,
    qweight: &'a [u32],
    qzeros: &'a [u32],
    g_idx: &'a [i32],
    scales: Vec<f32>,
}

/// Unpacks what is about to be written.
fn read_back(decision: &GptqDecision, written: Written<'_>) -> Result<Matrix, gptq::Error> {
    let shape = written.shape;
    let index: Vec<i64> = written.g_idx.iter().map(|&group| i64::from(group)).collect();
    let codes = gptq::unpack_codes(&shape, written.qweight)?;
    let zeros = gptq::decode_zeros(&shape, written.qzeros, encoding(decision.zeros))?;
    let g_idx = GIdx::new(Some(&index), shape.in_features, shape.groups, Some(decision.group_size))?;
    Matrix::new(shape, codes, zeros, written.scales, g_idx)
}

/// Compares every weight, the order of rows and columns undone.
fn compare(
    planned: &PlannedModule,
    source: &Matrix,
    written: &Matrix,
    rows: Option<&Permutation>,
    columns: Option<&Permutation>,
) -> Result<(), Error> {
    let n = source.shape().out_features;
    let (wanted, found) = (source.dequantize(), written.dequantize());
    for (place, found) in found.chunks_exact(n).enumerate() {
        let row = rows.map_or(place, |order| order.map()[place] as usize);
        let wanted = &wanted[row * n..][..n];
        let differs = |column: usize| {
            let from = columns.map_or(column, |order| order.map()[column] as usize);
            found[column].to_bits() != wanted[from].to_bits()
        };
        if let Some(column) = (0..n).find(|&column| differs(column)) {
            return Err(Error::NotExact { module: planned.source.clone(), row, column });
        }
    }
    Ok(())
}
