//! What becomes of the output head. It is outside bpw.

use super::{BiasDecision, Decision, DenseType, Error, Exl2Decision, PlanOptions, PlannedModule, Target};
use crate::arch::{Dims, EMBEDDING, HEAD};
use crate::checkpoint::{Bias, Checkpoint, Layout};
use crate::quantize::RowOrder;
use crate::warning::{Warning, WarningCode};
use requant_formats::exl2::{Group, GroupTable, ROW_UNIT};

/// Rows of a group of the head, unless the user gives a size for all.
const GROUP_SIZE: usize = 64;

/// The head's module, if the output has one of its own.
pub(super) fn plan(
    checkpoint: &Checkpoint,
    dims: &Dims,
    options: &PlanOptions,
    warnings: &mut Vec<Warning>,
) -> Result<Option<PlannedModule>, Error> {
    let module = checkpoint.module(HEAD);
    if let Some(module) = module {
        if module.bias() == Some(Bias::NonZero) {
            return Err(Error::HeadBias);
        }
        if matches!(module.layout(), Layout::Exl2(_)) {
            return Err(Error::AlreadyExl2 { module: module.name().into() });
        }
    }
    let own = module.filter(|_| !checkpoint.head_is_tied_copy());
    let source = match (own, options.head_bits) {
        (Some(module), _) => module.name(),
        (None, Some(_)) => EMBEDDING.trim_end_matches(".weight"),
        (None, None) => return Ok(None),
    };
    let (k, n) = (dims.hidden, dims.vocab);
    let decision = match options.head_bits {
        None => Decision::Dense(DenseType::Fp16),
        Some(_) if k % ROW_UNIT != 0 => return Err(Error::HeadSize { hidden: k }),
        Some(bits) => {
            let group_size = match options.target {
                Target::Uniform { group_size, .. } => group_size,
                _ => GROUP_SIZE,
            };
            let starts = (0..k).step_by(group_size);
            let groups: Vec<Group> = starts.map(|at| Group { bits, rows: group_size.min(k - at) }).collect();
            let bits = vec![bits; groups.len()];
            let table = GroupTable::new(groups).map_err(|_| Error::HeadSize { hidden: k })?;
            Decision::Exl2(Exl2Decision {
                group_size,
                bits,
                order: RowOrder::Grouped,
                straddling_groups: 0,
                stored_bits: table.stored_bits(n.next_multiple_of(ROW_UNIT)),
                relative_error: None,
            })
        }
    };
    if matches!(decision, Decision::Dense(_))
        && let Some(Layout::Gptq(_)) = own.map(|m| m.layout())
    {
        warnings.push(Warning {
            code: WarningCode::HeadDequantized,
            subject: HEAD.into(),
            message: format!(
                "quantized in the source: stored as fp16, exactly as decoded, {} bits; --head-bits makes it smaller",
                16 * k * n
            ),
        });
    }
    Ok(Some(PlannedModule {
        name: HEAD.into(),
        source: source.into(),
        in_features: k,
        out_features: n,
        decision,
        bias: match module.and_then(|m| m.bias()) {
            Some(_) => BiasDecision::DroppedZeros,
            None => BiasDecision::None,
        },
        options: Vec::new(),
        step_up: None,
        step_down: None,
    }))
}
