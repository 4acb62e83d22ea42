//! One module, or one dense tensor, from the source's bytes to the output's.

use super::Error;
use super::report::{Exactness, ReportModule, TensorOrigin};
use crate::arch::{DenseTensor, EMBEDDING};
use crate::checkpoint::{Checkpoint, Layout, Module, TensorView};
use crate::output::{ShardWriter, TensorSpec};
use crate::plan::{BiasDecision, Decision, Exl2Decision, PlannedModule};
use crate::quantize::{Source, quantize, to_half};
use half::f16;
use requant_formats::exl2::{Matrix, Packed};
use safetensors::Dtype;

/// An fp16 tensor.
pub(super) fn half_spec(name: &str, shape: &[usize]) -> TensorSpec {
    TensorSpec { name: name.into(), dtype: Dtype::F16, shape: shape.to_vec() }
}

/// The tensors that a module has in the output.
pub(super) fn specs(planned: &PlannedModule) -> Vec<TensorSpec> {
    let (k, n) = (planned.in_features, planned.stored_out_features());
    let named = |suffix: &str, dtype, shape: &[usize]| TensorSpec {
        name: format!("{}.{suffix}", planned.name),
        dtype,
        shape: shape.to_vec(),
    };
    let mut specs = match &planned.decision {
        Decision::Dense => vec![named("weight", Dtype::F16, &[n, k])],
        Decision::Exl2(decision) => {
            let groups = decision.bits.len();
            let word_rows =
                decision.widths(k).iter().map(|(bits, rows)| rows * bits.get() as usize / 32).sum();
            vec![
                named("q_weight", Dtype::I32, &[word_rows, n]),
                named("q_invperm", Dtype::I32, &[k]),
                named("q_scale", Dtype::I32, &[groups, n / 8]),
                named("q_scale_max", Dtype::F16, &[groups]),
                named("q_groups", Dtype::I16, &[2 * groups]),
            ]
        }
    };
    if planned.bias == BiasDecision::Kept {
        specs.push(named("bias", Dtype::F16, &[planned.out_features]));
    }
    specs
}

/// Converts and writes a module.
pub(super) fn convert(
    checkpoint: &Checkpoint,
    planned: &PlannedModule,
    writer: &ShardWriter,
    origins: &mut Vec<TensorOrigin>,
) -> Result<ReportModule, crate::Error> {
    let module = checkpoint.module(&planned.source);
    let sources: Vec<String> = match module {
        Some(module) => module.tensor_names().filter(|name| checkpoint.tensor(name).is_some()).collect(),
        None => vec![EMBEDDING.into()],
    };
    let weight_sources: Vec<String> = sources.iter().filter(|s| !s.ends_with(".bias")).cloned().collect();
    let exactness = match &planned.decision {
        Decision::Dense => write_dense(checkpoint, planned, writer)?,
        Decision::Exl2(_) => Exactness::Requantized,
    };
    let relative_error = match &planned.decision {
        Decision::Dense => 0.0,
        Decision::Exl2(decision) => write_exl2(checkpoint, planned, decision, writer)?,
    };
    for spec in specs(planned) {
        let is_bias = spec.name.ends_with(".bias");
        origins.push(TensorOrigin {
            sources: if is_bias { vec![format!("{}.bias", planned.source)] } else { weight_sources.clone() },
            exactness: if is_bias { Exactness::Exact } else { exactness },
            name: spec.name,
        });
    }
    if planned.bias == BiasDecision::Kept
        && let Some(tensor) = checkpoint.tensor(&format!("{}.bias", planned.source))
    {
        let (bytes, exactness) = half_bytes(tensor)?;
        writer.write(&format!("{}.bias", planned.name), &bytes)?;
        if let Some(origin) = origins.last_mut() {
            origin.exactness = exactness;
        }
    }
    Ok(ReportModule::new(planned, module, relative_error, exactness))
}

/// Writes an embedding, norm or router.
pub(super) fn write_dense_tensor(
    checkpoint: &Checkpoint,
    tensor: &DenseTensor,
    writer: &ShardWriter,
    origins: &mut Vec<TensorOrigin>,
) -> Result<(), crate::Error> {
    // The reader has checked that the architecture's tensors are there.
    if let Some(view) = checkpoint.tensor(&tensor.name) {
        let (bytes, exactness) = half_bytes(view)?;
        writer.write(&tensor.exl2_name, &bytes)?;
        let sources = vec![tensor.name.clone()];
        origins.push(TensorOrigin { name: tensor.exl2_name.clone(), sources, exactness });
    }
    Ok(())
}

/// A tensor's elements as fp16 bytes.
fn half_bytes(tensor: TensorView<'_>) -> Result<(Vec<u8>, Exactness), crate::Error> {
    if tensor.dtype() == Dtype::F16 {
        return Ok((tensor.bytes().to_vec(), Exactness::Identical));
    }
    let (halves, rounding) = to_half(&floats(tensor)?).map_err(|e| not_finite(tensor, e))?;
    let exactness = if rounding.is_exact() { Exactness::Exact } else { Exactness::Rounded };
    Ok((bytemuck::cast_slice(&halves).to_vec(), exactness))
}

/// A tensor's elements.
pub(super) fn floats(tensor: TensorView<'_>) -> Result<Vec<f32>, crate::Error> {
    Ok(tensor.floats().ok_or_else(|| Error::NotAFloat {
        file: tensor.file().into(),
        tensor: tensor.name().into(),
        dtype: tensor.dtype(),
    })?)
}

pub(super) fn not_finite(tensor: TensorView<'_>, at: crate::quantize::NotFinite) -> crate::Error {
    let mut rest = at.position;
    let mut position: Vec<usize> = Vec::new();
    for &size in tensor.shape().iter().rev() {
        position.insert(0, rest % size.max(1));
        rest /= size.max(1);
    }
    let (file, name) = (tensor.file().into(), tensor.name().into());
    Error::NotFinite { file, tensor: name, position, value: at.value }.into()
}

fn write_dense(
    checkpoint: &Checkpoint,
    planned: &PlannedModule,
    writer: &ShardWriter,
) -> Result<Exactness, crate::Error> {
    let name = format!("{}.weight", planned.name);
    if let Some(tensor) = checkpoint.tensor(&format!("{}.weight", planned.source)) {
        let (bytes, exactness) = half_bytes(tensor)?;
        writer.write(&name, &bytes)?;
        return Ok(exactness);
    }
    let Some(module) = checkpoint.module(&planned.source) else { return Ok(Exactness::Exact) };
    let weights = checkpoint.dequantize(module)?;
    let transposed = transpose(&weights, planned.in_features, planned.out_features);
    writer.write(&name, bytemuck::cast_slice(&transposed))?;
    Ok(Exactness::Exact)
}

/// Rows and columns exchanged, in square tiles that fit the cache.
fn transpose<T: Copy + Default>(from: &[T], rows: usize, columns: usize) -> Vec<T> {
    const TILE: usize = 32;
    let mut to = vec![T::default(); from.len()];
    for row_tile in (0..rows).step_by(TILE) {
        for column_tile in (0..columns).step_by(TILE) {
            for row in row_tile..rows.min(row_tile + TILE) {
                for column in column_tile..columns.min(column_tile + TILE) {
                    to[column * rows + row] = from[row * columns + column];
                }
            }
        }
    }
    to
}

/// Quantizes, checks what the packed bytes decode to, and writes them. Gives the relative error.
fn write_exl2(
    checkpoint: &Checkpoint,
    planned: &PlannedModule,
    decision: &Exl2Decision,
    writer: &ShardWriter,
) -> Result<f64, crate::Error> {
    let module = checkpoint.module(&planned.source);
    let source = quantizer_source(checkpoint, planned, module, decision)?;
    let broken = |source| Error::Matrix { module: planned.source.clone(), source };
    let cut = source.cut(decision.group_size);
    let quantized = quantize(&source, &cut, &decision.bits).map_err(broken)?;
    let packed = quantized.matrix.pack();
    check_round_trip(planned, &source, &packed, quantized.squared_error)?;
    let write = |suffix: &str, bytes: &[u8]| writer.write(&format!("{}.{suffix}", planned.name), bytes);
    write("q_weight", bytemuck::cast_slice(&packed.q_weight))?;
    write("q_invperm", bytemuck::cast_slice(&packed.q_invperm))?;
    write("q_scale", bytemuck::cast_slice(&packed.q_scale))?;
    write("q_scale_max", bytemuck::cast_slice(&packed.q_scale_max))?;
    write("q_groups", bytemuck::cast_slice(&packed.q_groups))?;
    Ok(quantized.relative_error())
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
        Some(module) => checkpoint.dense(module)?,
        None => match checkpoint.tensor(EMBEDDING) {
            Some(embedding) => transpose(&floats(embedding)?, n, k),
            None => Vec::new(),
        },
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
    source: &Source,
    packed: &Packed,
    expected: f64,
) -> Result<(), Error> {
    let module = || planned.source.clone();
    let unpacked = Matrix::unpack(packed.tensors(), planned.stored_out_features())
        .map_err(|source| Error::Matrix { module: module(), source })?;
    let n = source.out_features();
    let (decoded, wanted) = (unpacked.dequantize(), source.decoded());
    let rows = decoded.chunks_exact(n).zip(wanted.chunks_exact(n));
    let found: f64 = rows
        .map(|(decoded, wanted)| {
            let miss = |(d, w): (&f16, &f32)| (f64::from(d.to_f32()) - f64::from(*w)).powi(2);
            decoded.iter().zip(wanted).map(miss).sum::<f64>()
        })
        .sum();
    if (found - expected).abs() > 1e-9 * expected.max(f64::MIN_POSITIVE) + f64::MIN_POSITIVE {
        return Err(Error::RoundTrip { module: module(), found, expected });
    }
    Ok(())
}
