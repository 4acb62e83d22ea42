//! Which linears are quantized: exllamav2 loads q/k/v/o, and gate/up/down of all experts, all quantized or
//! all dense.

use super::{Error, PlanOptions};
use crate::arch::{Architecture, AttentionBias, Dims, Linear, Part, Role};
use crate::checkpoint::{Bias, Checkpoint, Layout, Module};
use crate::warning::{Warning, WarningCode};
use requant_formats::exl2::{MAX_ROWS, ROW_UNIT};
use serde::{Deserialize, Serialize};

/// What happens to dense members of a set that is otherwise quantized.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DenseMembers {
    /// They get the widest option of the plan.
    #[default]
    Quantize,
    /// The whole set becomes dense.
    DequantizeSet,
    /// They are an error.
    Error,
}

/// What becomes of a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BiasDecision {
    /// The source has none, and none is expected.
    None,
    /// Stored as fp16, zeros too.
    Kept,
    /// All zeros where exllamav2 expects none: left out.
    DroppedZeros,
}

/// What becomes of a weight, widths aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Treatment {
    Dense,
    Quantize,
    /// Dense in the source: the widest option of the plan.
    QuantizeWidest,
}

/// A linear of the decoder, its tensors, and what becomes of them.
pub(super) struct Member<'a> {
    pub(super) linear: Linear,
    pub(super) module: &'a Module,
    pub(super) treatment: Treatment,
    pub(super) bias: BiasDecision,
}

/// Decides for every linear of the decoder, in block order.
pub(super) fn members<'a>(
    checkpoint: &'a Checkpoint,
    arch: &Architecture,
    dims: &Dims,
    options: &PlanOptions,
) -> Result<(Vec<Member<'a>>, Vec<Warning>), Error> {
    let mut all: Vec<(Linear, &Module)> = Vec::new();
    for linear in arch.linears(dims, checkpoint.naming()) {
        // The reader has found all of them; a linear that is skipped would be a model without it.
        let Some(module) = checkpoint.of_linear(&linear) else {
            return Err(Error::MissingModule { module: linear.name });
        };
        all.push((linear, module));
    }
    let mut members = Vec::with_capacity(all.len());
    let mut warnings = Vec::new();
    // A source without any quantized linear is to be quantized; in others a dense set was meant to be dense.
    let dense_source = all.iter().all(|(_, module)| is_dense(module));
    for set in all.chunk_by(|(a, _), (b, _)| same_set(a, b)) {
        let treatments = treat(set, dense_source, options, &mut warnings)?;
        for ((linear, module), treatment) in set.iter().zip(treatments) {
            if arch.transposed && (treatment == Treatment::Dense || is_dense(module)) {
                return Err(Error::TransposedDense { module: module.name().into() });
            }
            let bias = bias(arch, set, linear, module, &mut warnings)?;
            members.push(Member { linear: linear.clone(), module, treatment, bias });
        }
    }
    Ok((members, warnings))
}

type Set<'s, 'a> = &'s [(Linear, &'a Module)];

fn is_dense(module: &Module) -> bool {
    matches!(module.layout(), Layout::Dense { .. })
}

fn treat(
    set: Set<'_, '_>,
    dense_source: bool,
    options: &PlanOptions,
    warnings: &mut Vec<Warning>,
) -> Result<Vec<Treatment>, Error> {
    if let Some((_, module)) = set.iter().find(|(_, m)| matches!(m.layout(), Layout::Exl2(_))) {
        return Err(Error::AlreadyExl2 { module: module.name().into() });
    }
    let dense: Vec<&Module> = set.iter().map(|(_, m)| *m).filter(|m| is_dense(m)).collect();
    let all = |treatment| Ok(vec![treatment; set.len()]);
    let fp16 = 16 * set.iter().map(|(_, m)| m.weights()).sum::<u64>();
    if dense.len() == set.len() && !dense_source {
        warnings.push(Warning {
            code: WarningCode::DenseSetKept,
            subject: set_name(&set[0].0),
            message: format!("dense in the source and stays so: {fp16} bits as fp16, outside the bpw"),
        });
        return all(Treatment::Dense);
    }
    if let Some((axis, size)) = odd_size(set) {
        warnings.push(Warning {
            code: WarningCode::OddSize,
            subject: set_name(&set[0].0),
            message: format!(
                "{axis} is {size}, which EXL2 can't hold (multiples of 32, at most {MAX_ROWS} rows): the set \
                 becomes fp16, exactly as decoded, {fp16} bits outside the bpw"
            ),
        });
        return all(Treatment::Dense);
    }
    if dense.is_empty() || dense_source {
        return all(Treatment::Quantize);
    }
    match options.dense_members {
        DenseMembers::Error => Err(Error::DenseMember { module: dense[0].name().into() }),
        DenseMembers::DequantizeSet => {
            warnings.push(Warning {
                code: WarningCode::SetDequantized,
                subject: set_name(&set[0].0),
                message: format!(
                    "{} dense in the source, so the whole set becomes fp16, exactly as decoded: {fp16} bits \
                     outside the bpw",
                    names(&dense)
                ),
            });
            all(Treatment::Dense)
        }
        // The warning comes when the widths are known: `dense_members_quantized`.
        DenseMembers::Quantize => {
            let member = |(_, m): &(Linear, &Module)| match is_dense(m) {
                true => Treatment::QuantizeWidest,
                false => Treatment::Quantize,
            };
            Ok(set.iter().map(member).collect())
        }
    }
}

/// Warns of the dense members that a plan quantizes, with what that costs; `bits` is what each member's
/// tensors take.
pub(super) fn dense_members_quantized(members: &[Member<'_>], bits: &[u64]) -> Vec<Warning> {
    let all: Vec<(&Member<'_>, u64)> = members.iter().zip(bits.iter().copied()).collect();
    let widest: Vec<_> = all.into_iter().filter(|(m, _)| m.treatment == Treatment::QuantizeWidest).collect();
    let sets = widest.chunk_by(|(a, _), (b, _)| same_set(&a.linear, &b.linear));
    sets.map(|set| {
        let dense: Vec<&Module> = set.iter().map(|(m, _)| m.module).collect();
        let fp16 = 16 * dense.iter().map(|m| m.weights()).sum::<u64>();
        let stored: u64 = set.iter().map(|(_, bits)| bits).sum();
        Warning {
            code: WarningCode::DenseMemberQuantized,
            subject: set_name(&set[0].0.linear),
            message: format!(
                "{} dense in the source ({fp16} bits as fp16) while the rest of the set is quantized, which \
                 exllamav2 can't load: quantized at the widest option of the plan, {stored} bits",
                names(&dense)
            ),
        }
    })
    .collect()
}

fn same_set(a: &Linear, b: &Linear) -> bool {
    a.layer == b.layer && a.role.part() == b.role.part()
}

fn names(modules: &[&Module]) -> String {
    let last = |m: &&Module| m.name().rsplit('.').next().unwrap_or_default().to_string();
    let mut list: Vec<String> = modules.iter().take(4).map(last).collect();
    if modules.len() > 4 {
        list.push(format!("{} more", modules.len() - 4));
    }
    format!("{} {}", list.join(", "), if modules.len() == 1 { "is" } else { "are" })
}

fn set_name(linear: &Linear) -> String {
    let name = match linear.role.part() {
        Part::Attention => "self_attn",
        Part::Mlp if linear.expert.is_some() => "experts",
        Part::Mlp => "mlp",
    };
    format!("model.layers.{}.{name}", linear.layer)
}

fn odd_size(set: Set<'_, '_>) -> Option<(&'static str, usize)> {
    set.iter().find_map(|(linear, _)| {
        let (k, n) = (linear.in_features, linear.out_features);
        if k % ROW_UNIT != 0 || k > MAX_ROWS {
            Some(("in_features", k))
        } else if n % ROW_UNIT != 0 {
            Some(("out_features", n))
        } else {
            None
        }
    })
}

pub(super) fn zero_bias_dropped(module: &str) -> Warning {
    Warning {
        code: WarningCode::ZeroBiasDropped,
        subject: module.into(),
        message: "its bias is all zeros and exllamav2 expects none: left out, which changes nothing".into(),
    }
}

fn bias(
    arch: &Architecture,
    set: Set<'_, '_>,
    linear: &Linear,
    module: &Module,
    warnings: &mut Vec<Warning>,
) -> Result<BiasDecision, Error> {
    match (linear.bias, module.bias()) {
        (true, Some(_)) => Ok(BiasDecision::Kept),
        (true, None) => Err(Error::MissingBias { tensor: format!("{}.bias", module.name()) }),
        (false, None) => Ok(BiasDecision::None),
        (false, Some(Bias::AllZero)) => {
            warnings.push(zero_bias_dropped(module.name()));
            Ok(BiasDecision::DroppedZeros)
        }
        (false, Some(Bias::NonZero)) => {
            let flag = match (linear.role.part(), arch.attention_bias) {
                (Part::Attention, AttentionBias::ByConfig) => Some("attention_bias"),
                (Part::Attention, AttentionBias::QkvByConfig) if linear.role != Role::O => {
                    Some("attention_bias")
                }
                (Part::Attention, _) => None,
                (Part::Mlp, _) => Some("mlp_bias"),
            };
            let way_out = flag.filter(|_| set.iter().all(|(_, m)| m.bias().is_some()));
            Err(Error::UnexpectedBias { tensor: format!("{}.bias", module.name()), way_out })
        }
    }
}
