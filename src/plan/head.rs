//! What becomes of the output head. It is outside bpw.

use super::options::{stored_bits, straddling};
use super::sets::zero_bias_dropped;
use super::{BiasDecision, Decision, DenseType, Error, Exl2Decision, PlanOptions, PlannedModule, Target};
use crate::arch::{Architecture, Dims};
use crate::checkpoint::{Bias, Checkpoint, Layout};
use crate::quantize::RowOrder;
use crate::warning::{Warning, WarningCode};
use requant_formats::exl2::{MAX_ROWS, ROW_UNIT};

/// Rows of a group of the head, unless the user gives a size for all.
const GROUP_SIZE: usize = 64;

/// The head's module, if the output has one of its own.
pub(super) fn plan(
    checkpoint: &Checkpoint,
    arch: &Architecture,
    dims: &Dims,
    options: &PlanOptions,
    warnings: &mut Vec<Warning>,
) -> Result<Option<PlannedModule>, Error> {
    let (naming, name) = (checkpoint.naming(), arch.exl2_names().head);
    let module = checkpoint.module(naming.head);
    if let Some(module) = module {
        if module.bias() == Some(Bias::NonZero) {
            return Err(Error::HeadBias { tensor: format!("{}.bias", module.name()) });
        }
        if matches!(module.layout(), Layout::Exl2(_)) {
            return Err(Error::AlreadyExl2 { module: module.name().into() });
        }
    }
    let own = module.filter(|_| !checkpoint.head_is_tied_copy());
    let source = match (own, options.head_bits) {
        (Some(module), _) => module.name(),
        (None, Some(_)) => naming.embedding,
        (None, None) => return Ok(None),
    };
    let (k, n) = (dims.hidden, dims.vocab);
    let decision = match options.head_bits {
        None => Decision::Dense(DenseType::Fp16),
        Some(_) if k % ROW_UNIT != 0 || k > MAX_ROWS => return Err(Error::HeadSize { hidden: k }),
        Some(bits) => {
            let group_size = match options.target {
                Target::Uniform { group_size, .. } => group_size,
                _ => GROUP_SIZE,
            };
            let order = RowOrder::Grouped;
            let bits = vec![bits; k.div_ceil(group_size)];
            // A head that is padded is quantized from its dense weights, which have no groups.
            let aligned = own.filter(|_| n % ROW_UNIT == 0);
            Decision::Exl2(Exl2Decision {
                group_size,
                order,
                folded: false,
                columns_follow: None,
                prescale: dims.logit_scale,
                straddling_groups: aligned.map_or(0, |m| straddling(checkpoint, m, order, group_size)),
                stored_bits: stored_bits(k, n.next_multiple_of(ROW_UNIT), group_size, &bits),
                bits,
                relative_error: None,
            })
        }
    };
    if matches!(decision, Decision::Dense(_))
        && let Some(Layout::Gptq(_)) = own.map(|m| m.layout())
    {
        warnings.push(Warning {
            code: WarningCode::HeadDequantized,
            subject: naming.head.into(),
            message: format!(
                "quantized in the source: stored as fp16, exactly as decoded, {} bits; --head-bits makes it smaller",
                16 * k * n
            ),
        });
    }
    let bias = match module.and_then(|m| m.bias()) {
        Some(_) => {
            warnings.push(zero_bias_dropped(naming.head));
            BiasDecision::DroppedZeros
        }
        None => BiasDecision::None,
    };
    let stored_bits = match &decision {
        Decision::Exl2(decision) => decision.stored_bits,
        _ => 16 * (k * n) as u64,
    };
    Ok(Some(PlannedModule {
        name: name.into(),
        source: source.into(),
        columns: None,
        head: true,
        in_features: k,
        out_features: n,
        decision,
        stored_bits,
        bias,
        options: Vec::new(),
        step_up: None,
        step_down: None,
    }))
}
