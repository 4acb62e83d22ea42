//! One module, or one dense tensor, from the source's bytes to the output's.

use super::done::Outcome;
use super::relayout;
use super::report::{Exactness, TensorOrigin};
use super::{Calibration, Error, Made, Quantizer};
use crate::checkpoint::{Checkpoint, Layout, Module, TensorView, transpose};
use crate::output::{ShardWriter, TensorSpec};
use crate::plan::{
    Decision, Exl2Decision, Plan, PlannedModule, PlannedTensor, columns_that_follow, specs, stored_rows,
};
use crate::quantize::{Source, to_half};
use half::{bf16, f16};
use requant_formats::Permutation;
use requant_formats::exl2::{Matrix, Packed};
use safetensors::Dtype;
use std::borrow::Cow;

/// Converts and writes a module of `plan`.
pub(super) fn convert(
    checkpoint: &Checkpoint,
    plan: &Plan,
    planned: &PlannedModule,
    quantizer: &dyn Quantizer,
    writer: &ShardWriter,
    origins: &mut Vec<TensorOrigin>,
) -> Result<Outcome, crate::Error> {
    let module = checkpoint.part(&planned.source, planned.columns.as_ref());
    let weight_sources: Vec<String> = match module {
        Some(module) => module
            .tensor_names()
            .filter(|name| !name.ends_with(".bias") && checkpoint.tensor(name).is_some())
            .collect(),
        None => vec![format!("{}.weight", planned.source)],
    };
    let (mut relative_error, mut row_order, mut columns, mut calibration) = (0.0, None, None, None);
    let exactness = match (&planned.decision, module) {
        (Decision::Dense(dtype), _) => write_dense(checkpoint, planned, dtype.dtype(), writer)?,
        (Decision::Exl2(decision), _) => {
            let rows = match (decision.folded, module) {
                (true, Some(module)) => Some(stored_rows(checkpoint, module, decision)),
                _ => None,
            };
            columns = exl2_column_order(checkpoint, plan, module, decision);
            let orders = Orders { rows: rows.as_ref(), columns: columns.as_ref() };
            (relative_error, calibration) =
                write_exl2(checkpoint, planned, decision, &orders, quantizer, writer)?;
            row_order = rows.map(|rows| rows.map().to_vec());
            Exactness::Requantized
        }
        (Decision::Gptq(decision), Some(module)) => {
            columns = relayout::column_order(checkpoint, module, decision)?;
            let outcome =
                relayout::write_gptq(checkpoint, planned, module, decision, columns.as_ref(), writer)?;
            (row_order, relative_error) = (outcome.rows, outcome.relative_error);
            outcome.exactness
        }
        (Decision::Kept | Decision::Gptq(_), _) => {
            for name in &weight_sources {
                if let Some(tensor) = checkpoint.tensor(name) {
                    writer.write(&name.replacen(&planned.source, &planned.name, 1), tensor.bytes())?;
                }
            }
            Exactness::Identical
        }
    };
    for spec in specs(checkpoint, planned) {
        let (sources, exactness) = match spec.name.strip_suffix(".bias") {
            None => (weight_sources.clone(), exactness),
            Some(_) => {
                let source = format!("{}.bias", planned.source);
                let order = columns.as_ref();
                let factor = bias_factor(checkpoint, module, &planned.decision);
                let exactness = write_bias(checkpoint, module, &source, &spec, order, factor, writer)?;
                (vec![source], exactness)
            }
        };
        origins.push(TensorOrigin { name: spec.name, sources, columns: planned.columns.clone(), exactness });
    }
    Ok(Outcome { relative_error, exactness, row_order, calibration })
}

/// What a bias is to be multiplied by: see [`Checkpoint::bias_factor`].
fn bias_factor(checkpoint: &Checkpoint, module: Option<&Module>, decision: &Decision) -> f64 {
    let before = module.map_or(1.0, |module| checkpoint.bias_factor(module));
    match decision {
        Decision::Kept => 1.0,
        Decision::Exl2(decision) => decision.prescale / before,
        Decision::Gptq(_) | Decision::Dense(_) => 1.0 / before,
    }
}

/// Writes a bias times `factor` in the type of `spec`, in another order where the module's columns have one.
fn write_bias(
    checkpoint: &Checkpoint,
    module: Option<&Module>,
    source: &str,
    spec: &TensorSpec,
    columns: Option<&Permutation>,
    factor: f64,
    writer: &ShardWriter,
) -> Result<Exactness, crate::Error> {
    let Some(tensor) = checkpoint.tensor(source) else { return Ok(Exactness::Identical) };
    let (bytes, exactness) = match factor == 1.0 {
        true => bytes_as(tensor, spec.dtype)?,
        false => {
            let mut values = floats(tensor)?;
            values.iter_mut().for_each(|value| *value = (f64::from(*value) * factor) as f32);
            (rounded(tensor, &values, spec.dtype)?.0, Exactness::Rounded)
        }
    };
    // Columns that only pad have a bias of 0, which goes with them.
    let size = spec.dtype.bitsize() / 8;
    let part = module.and_then(Module::columns);
    let bytes = match part {
        Some(columns) => &columns.rows_of(&bytes, size),
        None => &bytes[..spec.shape[0] * size],
    };
    match columns {
        None => writer.write(&spec.name, bytes)?,
        Some(order) => {
            let moved: Vec<u8> = (order.map().iter())
                .flat_map(|&column| bytes[column as usize * size..][..size].iter().copied())
                .collect();
            writer.write(&spec.name, &moved)?;
        }
    }
    let exactness = match exactness {
        Exactness::Identical if columns.is_some() || part.is_some() => Exactness::Exact,
        other => other,
    };
    Ok(exactness)
}

/// Writes a tensor that belongs to no module.
pub(super) fn write_dense_tensor(
    checkpoint: &Checkpoint,
    tensor: &PlannedTensor,
    writer: &ShardWriter,
    origins: &mut Vec<TensorOrigin>,
) -> Result<(), crate::Error> {
    // The reader has checked that the architecture's tensors are there.
    if let Some(view) = checkpoint.tensor(&tensor.source) {
        let (bytes, exactness) = bytes_as(view, tensor.dtype)?;
        writer.write(&tensor.name, &bytes)?;
        let sources = vec![tensor.source.clone()];
        origins.push(TensorOrigin { name: tensor.name.clone(), sources, columns: None, exactness });
    }
    Ok(())
}

/// A tensor's elements in another type.
fn bytes_as(tensor: TensorView<'_>, dtype: Dtype) -> Result<(Cow<'_, [u8]>, Exactness), crate::Error> {
    if tensor.dtype() == dtype {
        return Ok((Cow::Borrowed(tensor.bytes()), Exactness::Identical));
    }
    rounded(tensor, &floats(tensor)?, dtype)
}

/// Values that stand for a tensor's elements in bf16, or else fp16.
fn rounded<'a>(
    tensor: TensorView<'_>,
    values: &[f32],
    dtype: Dtype,
) -> Result<(Cow<'a, [u8]>, Exactness), crate::Error> {
    if dtype == Dtype::BF16 {
        let rounded: Vec<bf16> = values.iter().map(|&value| bf16::from_f32(value)).collect();
        let exact = rounded.iter().zip(values).all(|(r, v)| r.to_f32() == *v);
        return Ok((Cow::Owned(bytemuck::cast_slice(&rounded).to_vec()), exactness_if(exact)));
    }
    let (halves, rounding) = to_half(values).map_err(|e| not_finite(tensor, e))?;
    Ok((Cow::Owned(bytemuck::cast_slice(&halves).to_vec()), exactness_if(rounding.is_exact())))
}

fn exactness_if(exact: bool) -> Exactness {
    if exact { Exactness::Exact } else { Exactness::Rounded }
}

/// A tensor's elements.
pub(super) fn floats(tensor: TensorView<'_>) -> Result<Vec<f32>, crate::Error> {
    Ok(tensor.floats().ok_or_else(|| not_a_float(tensor))?)
}

pub(super) fn not_a_float(tensor: TensorView<'_>) -> Error {
    Error::NotAFloat { file: tensor.file().into(), tensor: tensor.name().into(), dtype: tensor.dtype() }
}

pub(super) fn not_finite(tensor: TensorView<'_>, at: crate::quantize::NotFinite) -> crate::Error {
    let (file, name, position) = (tensor.file().into(), tensor.name().into(), tensor.position(at.position));
    Error::NotFinite { file, tensor: name, position, value: at.value }.into()
}

fn write_dense(
    checkpoint: &Checkpoint,
    planned: &PlannedModule,
    dtype: Dtype,
    writer: &ShardWriter,
) -> Result<Exactness, crate::Error> {
    let name = format!("{}.weight", planned.name);
    if let Some(tensor) = checkpoint.tensor(&format!("{}.weight", planned.source)) {
        let (bytes, exactness) = bytes_as(tensor, dtype)?;
        let Some(columns) = &planned.columns else {
            writer.write(&name, &bytes)?;
            return Ok(exactness);
        };
        // Other bytes than the source's, as it has others between them.
        writer.write(&name, &columns.rows_of(&bytes, planned.in_features * dtype.bitsize() / 8))?;
        return Ok(exactness.max(Exactness::Exact));
    }
    let Some(module) = checkpoint.part(&planned.source, planned.columns.as_ref()) else {
        return Ok(Exactness::Exact);
    };
    let (k, n) = (planned.in_features, planned.out_features);
    if dtype != Dtype::BF16 {
        let weights = checkpoint.dequantize(module)?;
        writer.write(&name, bytemuck::cast_slice(&transpose(&weights, k, n)))?;
        return Ok(Exactness::Exact);
    }
    // One rounding, from the fp32 product where the layout has one.
    let weights: Vec<bf16> = match module.layout() {
        Layout::Gptq(_) => checkpoint.gptq(module)?.dequantize_bf16(),
        _ => checkpoint.dequantize(module)?.iter().map(|w| bf16::from_f32(w.to_f32())).collect(),
    };
    writer.write(&name, bytemuck::cast_slice(&transpose(&weights, k, n)))?;
    Ok(Exactness::Rounded)
}

/// The order that rows and columns take in the output.
struct Orders<'a> {
    rows: Option<&'a Permutation>,
    columns: Option<&'a Permutation>,
}

/// The order of the columns of a module that feeds one whose rows are folded.
fn exl2_column_order(
    checkpoint: &Checkpoint,
    plan: &Plan,
    module: Option<&Module>,
    decision: &Exl2Decision,
) -> Option<Permutation> {
    let name = decision.columns_follow.as_deref()?;
    let down = plan.modules.iter().find(|planned| planned.source == name)?;
    let Decision::Exl2(down) = &down.decision else { return None };
    let rows = stored_rows(checkpoint, checkpoint.module(name)?, down);
    columns_that_follow(checkpoint, module?, name, &rows)
}

/// Quantizes, checks what the packed bytes decode to, and writes them. Gives the relative error, and how the module was
/// calibrated.
fn write_exl2(
    checkpoint: &Checkpoint,
    planned: &PlannedModule,
    decision: &Exl2Decision,
    orders: &Orders<'_>,
    quantizer: &dyn Quantizer,
    writer: &ShardWriter,
) -> Result<(f64, Option<Calibration>), crate::Error> {
    let module = checkpoint.part(&planned.source, planned.columns.as_ref());
    let source = quantizer_source(checkpoint, planned, module, decision)?.prescaled(decision.prescale);
    let Made { quantized, calibration } = quantizer.quantize(planned, decision, &source)?;
    let relative_error = quantized.relative_error();
    let packed = quantized.matrix.reordered(orders.rows, orders.columns).pack();
    check_round_trip(planned, decision, &source, orders, &packed, quantized.squared_error)?;
    let write = |suffix: &str, bytes: &[u8]| writer.write(&format!("{}.{suffix}", planned.name), bytes);
    write("q_weight", bytemuck::cast_slice(&packed.q_weight))?;
    write("q_invperm", bytemuck::cast_slice(&packed.q_invperm))?;
    write("q_scale", bytemuck::cast_slice(&packed.q_scale))?;
    write("q_scale_max", bytemuck::cast_slice(&packed.q_scale_max))?;
    write("q_groups", bytemuck::cast_slice(&packed.q_groups))?;
    Ok((relative_error, calibration))
}

/// The weights to quantize, columns padded to a multiple of 32 with zeros.
fn quantizer_source(
    checkpoint: &Checkpoint,
    planned: &PlannedModule,
    module: Option<&Module>,
    decision: &Exl2Decision,
) -> Result<Source, crate::Error> {
    let (k, n, stored) = (planned.in_features, planned.out_features, planned.stored_out_features());
    let weights = match module {
        Some(module) if n == stored && matches!(module.layout(), Layout::Gptq(_)) => {
            return Ok(Source::gptq(checkpoint.gptq(module)?, decision.order));
        }
        Some(module) if matches!(module.layout(), Layout::Gptq(_)) => {
            checkpoint.dequantize(module)?.into_iter().map(f16::to_f32).collect()
        }
        Some(module) if module.columns().is_some() => checkpoint.dense(module)?,
        // A dense linear, or the embedding.
        _ => {
            let tensor = checkpoint.require_tensor(&format!("{}.weight", planned.source))?;
            let weights = tensor.transposed_floats(stored).ok_or_else(|| not_a_float(tensor))?;
            return Ok(Source::dense(weights, k, stored));
        }
    };
    if n == stored {
        return Ok(Source::dense(weights, k, n));
    }
    let mut padded = vec![0.0; k * stored];
    for (to, from) in padded.chunks_exact_mut(stored).zip(weights.chunks_exact(n)) {
        to[..n].copy_from_slice(from);
    }
    Ok(Source::dense(padded, k, stored))
}

/// Decodes the bytes that are about to be written and compares with the source: the sum of squared
/// differences must be what the quantizer promised (it sums in another order, hence the tolerance).
fn check_round_trip(
    planned: &PlannedModule,
    decision: &Exl2Decision,
    source: &Source,
    orders: &Orders<'_>,
    packed: &Packed,
    expected: f64,
) -> Result<(), Error> {
    let module = || planned.source.clone();
    let unpacked = Matrix::unpack(packed.tensors(), planned.stored_out_features())
        .map_err(|source| Error::Matrix { module: module(), source })?;
    let n = source.out_features();
    let decoded = unpacked.dequantize_prescaled(decision.prescale);
    drop(unpacked);
    // A row at a time: a head can be the largest thing in memory.
    let (mut row_as_decoded, mut in_order) = (vec![0.0; n], vec![0.0; n]);
    let mut found = 0.0;
    for (row, decoded) in decoded.chunks_exact(n).enumerate() {
        let row = orders.rows.map_or(row, |order| order.map()[row] as usize);
        source.row(row, &mut row_as_decoded);
        let mut wanted = &row_as_decoded;
        if let Some(columns) = orders.columns {
            in_order.iter_mut().zip(columns.map()).for_each(|(to, &column)| *to = wanted[column as usize]);
            wanted = &in_order;
        }
        let miss = |(d, w): (&f16, &f32)| (f64::from(d.to_f32()) - f64::from(*w)).powi(2);
        found += decoded.iter().zip(wanted).map(miss).sum::<f64>();
    }
    if (found - expected).abs() > 1e-9 * expected.max(f64::MIN_POSITIVE) + f64::MIN_POSITIVE {
        return Err(Error::RoundTrip { module: module(), found, expected });
    }
    Ok(())
}
