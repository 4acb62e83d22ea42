//! Frequencies of rotary position embeddings, as transformers' `modeling_rope_utils.py` has them.

use super::spec::{Keys, Unsupported, unsupported};
use crate::arch::Dims;
use requant_kernels::Rope;
use serde_json::{Map, Value};
use std::f64::consts::PI;

/// What the configuration says.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RopeSpec {
    theta: f64,
    /// Columns of a head that are rotated.
    columns: usize,
    scaling: Scaling,
}

#[derive(Clone, Debug, PartialEq)]
enum Scaling {
    None,
    Linear { factor: f64 },
    Llama3 { factor: f64, low: f64, high: f64, original: f64 },
    Yarn { factor: f64, fast: f64, slow: f64, original: f64, truncate: bool, attention: f64 },
    Long { short: Vec<f64>, long: Vec<f64>, original: f64, attention: f64 },
}

/// Reads `rope_parameters`, or `rope_theta` and `rope_scaling`.
pub(super) fn read(dims: &Dims, keys: Keys<'_>) -> Result<RopeSpec, Unsupported> {
    // Where both are there, transformers takes `rope_scaling`; see output/rope.rs.
    let object = |key| keys.get(key).and_then(Value::as_object).filter(|object| !object.is_empty());
    let parameters = object("rope_parameters");
    let scaling = object("rope_scaling").or(parameters);
    let empty = Map::new();
    let inner = Keys(scaling.unwrap_or(&empty));
    let either = |key| {
        Ok(parameters
            .map(|p| Keys(p).optional_number(key))
            .transpose()?
            .flatten()
            .or(keys.optional_number(key)?))
    };
    let theta = either("rope_theta")?.unwrap_or(10_000.0);
    let partial = either("partial_rotary_factor")?.unwrap_or(1.0);
    let columns = (dims.head_dim as f64 * partial) as usize;
    let positions = keys.number("max_position_embeddings", 2048.0)?;
    let need = |key| {
        inner
            .optional_number(key)?
            .ok_or_else(|| unsupported("rope_scaling", &Value::Object(inner.0.clone())))
    };
    let kind = inner.get("rope_type").or_else(|| inner.get("type"));
    let scaling = match kind.map(|kind| kind.as_str().unwrap_or("")) {
        None | Some("default") => Scaling::None,
        Some("linear") => Scaling::Linear { factor: need("factor")? },
        Some("llama3") => Scaling::Llama3 {
            factor: need("factor")?,
            low: need("low_freq_factor")?,
            high: need("high_freq_factor")?,
            original: need("original_max_position_embeddings")?,
        },
        Some("yarn") => {
            let factor = need("factor")?;
            let (mscale, all) = (inner.number("mscale", 0.0)?, inner.number("mscale_all_dim", 0.0)?);
            let attention = match inner.optional_number("attention_factor")? {
                Some(attention) => attention,
                None if mscale != 0.0 && all != 0.0 => magnitude(factor, mscale) / magnitude(factor, all),
                None => magnitude(factor, 1.0),
            };
            Scaling::Yarn {
                factor,
                fast: inner.number("beta_fast", 32.0)?,
                slow: inner.number("beta_slow", 1.0)?,
                original: inner.number("original_max_position_embeddings", positions)?,
                truncate: inner.get("truncate").and_then(Value::as_bool).unwrap_or(true),
                attention,
            }
        }
        Some("longrope" | "su") => {
            let list = |key| {
                let list = inner.get(key).and_then(Value::as_array).filter(|list| list.len() == columns / 2);
                let numbers: Option<Vec<f64>> =
                    list.and_then(|list| list.iter().map(Value::as_f64).collect());
                numbers.ok_or_else(|| unsupported(key, inner.get(key).unwrap_or(&Value::Null)))
            };
            let original = match keys.optional_number("original_max_position_embeddings")? {
                Some(original) => original,
                None => inner.number("original_max_position_embeddings", positions)?,
            };
            let factor = inner.number("factor", positions / original)?;
            let attention = match inner.optional_number("attention_factor")? {
                Some(attention) => attention,
                None if factor <= 1.0 => 1.0,
                None => (1.0 + factor.ln() / original.ln()).sqrt(),
            };
            Scaling::Long { short: list("short_factor")?, long: list("long_factor")?, original, attention }
        }
        Some(_) => return Err(unsupported("rope_type", kind.unwrap_or(&Value::Null))),
    };
    Ok(RopeSpec { theta, columns, scaling })
}

/// YaRN's `get_mscale`.
fn magnitude(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

impl RopeSpec {
    /// The rotation for windows of so many tokens.
    pub(super) fn of_window(&self, window: usize) -> Rope {
        let pairs = self.columns / 2;
        // In fp32 like torch: a frequency's last bit is an angle's, some hundred positions on.
        let base: Vec<f32> = (0..pairs)
            .map(|j| 1.0 / (self.theta as f32).powf((2 * j) as f32 / self.columns as f32))
            .collect();
        let scaled = |scale: &dyn Fn(usize, f64) -> f64| -> Vec<f32> {
            base.iter().enumerate().map(|(j, &f)| scale(j, f64::from(f)) as f32).collect()
        };
        let (frequencies, scale) = match &self.scaling {
            Scaling::None => (base.clone(), 1.0),
            Scaling::Linear { factor } => (scaled(&|_, f| f / factor), 1.0),
            Scaling::Llama3 { factor, low, high, original } => {
                let one = |_: usize, f: f64| {
                    let length = 2.0 * PI / f;
                    if length > original / low {
                        f / factor
                    } else if length < original / high {
                        f
                    } else {
                        let smooth = (original / length - low) / (high - low);
                        (1.0 - smooth) * f / factor + smooth * f
                    }
                };
                (scaled(&one), 1.0)
            }
            Scaling::Yarn { factor, fast, slow, original, truncate, attention } => {
                let columns = self.columns as f64;
                let place =
                    |turns: f64| columns * (original / (turns * 2.0 * PI)).ln() / (2.0 * self.theta.ln());
                let (low, high) = (place(*fast), place(*slow));
                let (low, high) = if *truncate { (low.floor(), high.ceil()) } else { (low, high) };
                let (low, mut high) = (low.max(0.0), high.min(columns - 1.0));
                if low == high {
                    high += 0.001;
                }
                let one = |j: usize, f: f64| {
                    let ramp = ((j as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    f / factor * ramp + f * (1.0 - ramp)
                };
                (scaled(&one), *attention)
            }
            Scaling::Long { short, long, original, attention } => {
                let factors = if window as f64 > *original { long } else { short };
                (scaled(&|j, f| f / factors[j]), *attention)
            }
        };
        Rope { frequencies, scale: scale as f32 }
    }
}
