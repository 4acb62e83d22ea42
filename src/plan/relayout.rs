//! Plans that change no weight: GPTQ from GPTQ or EXL2, dense from anything, or the same tensors again.

use super::fold::{Fold, folds};
use super::readers::{Objection, Reader};
use super::{BiasDecision, Decision, DenseType, Error, Plan, PlannedModule, PlannedTensor, Target, Totals};
use crate::arch::Role;
use crate::checkpoint::{Bias, Checkpoint, Gptq, Layout, Module};
use crate::warning::{Warning, WarningCode};
use requant_formats::gptq::{self, Bits, GIdxKind, ZeroConvention};
use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// How GPTQ is written.
#[derive(Clone, Debug, Default)]
pub struct GptqOptions {
    /// Convention of zero points; the source's where left out.
    pub zeros: Option<ZeroConvention>,
    /// Width; the source's where left out.
    pub bits: Option<Bits>,
    /// Whether asymmetric modules are re-centred.
    pub symmetric: bool,
    /// Rows of a group; the source's where left out.
    pub group_size: Option<usize>,
    /// Whether act-order is folded away where that is exact.
    pub order: Order,
    /// Whether a scale may be rounded where its type must change.
    pub allow_rounding: bool,
    /// The program that is to read the output.
    pub reader: Option<&'static Reader>,
}

/// The order of rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// As in the source.
    #[default]
    Keep,
    /// Rows of down_proj sorted by group, and the columns of gate and up in the same order.
    Sorted,
}

/// A GPTQ layout, decided.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GptqDecision {
    /// Width of a code.
    pub bits: Bits,
    /// Rows of a group.
    pub group_size: usize,
    /// Number of groups.
    pub groups: usize,
    /// Convention of the stored zero points.
    pub zeros: ZeroConvention,
    /// Whether codes are moved so that every zero point is `2^(bits − 1)`.
    pub recentred: bool,
    /// Whether every zero point is `2^(bits − 1)`.
    pub symmetric: bool,
    /// Whether rows are sorted by group.
    pub sorted: bool,
    /// The module whose sorted rows give the order of this module's columns.
    pub columns_follow: Option<String>,
    /// Whether `g_idx` differs from the rows' order.
    pub act_order: bool,
    /// Whether all groups but the last have `group_size` rows.
    pub equal_groups: bool,
    /// Type of `scales`.
    pub scales: Dtype,
    /// Whether the width asked for doesn't hold the module's codes, so that its weights change.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub requantized: bool,
}

impl GptqDecision {
    /// Rows of a group as a configuration states them, of a module with `in_features` rows: where groups differ
    /// in size, the number that makes readers expect as many rows of scales as there are.
    pub(crate) fn stated_group_size(&self, in_features: usize) -> usize {
        if self.equal_groups { self.group_size } else { in_features.div_ceil(self.groups.max(1)) }
    }
}

impl Plan {
    /// Plans a conversion to GPTQ: exact, but for modules that don't fit the width that `options` ask for. These
    /// are requantized, and a warning says so; without a width none is.
    ///
    /// # Errors
    /// [`Error`] for a module that can't be stored as asked, or that
    /// `options.reader` would not read.
    pub fn to_gptq(checkpoint: &Checkpoint, options: &GptqOptions) -> Result<Self, crate::Error> {
        checkpoint.require_decodable()?;
        let mut warnings = Vec::new();
        let folds = match options.order {
            Order::Keep => BTreeMap::new(),
            Order::Sorted => folds(checkpoint, &mut warnings),
        };
        let mut modules = Vec::new();
        for module in checkpoint.modules() {
            modules.push(gptq_module(checkpoint, module, options, &folds, &mut warnings)?);
        }
        if !modules.iter().any(|m| matches!(m.decision, Decision::Gptq(_))) {
            // All kept, or nothing quantized at all.
            let quantized = checkpoint.modules().iter().any(|m| m.layout().is_quantized());
            if !quantized {
                return Err(Error::NothingQuantized.into());
            }
        }
        warnings.extend(requantized(&modules));
        if let Some(reader) = options.reader.filter(|reader| reader.fuses) {
            check_siblings(checkpoint, reader, &modules)?;
        }
        if let Some(reader) = options.reader
            && let Some(module) = reader.mixed(checkpoint, &modules)
        {
            let (reader, objection) = (reader.name, Objection::Mixed);
            return Err(Error::ReaderRefuses { module, reader, objection }.into());
        }
        Ok(Self::exact(checkpoint, Target::Gptq, modules, None, warnings))
    }

    /// Plans the decoding of every module to fp16 or bf16.
    ///
    /// # Errors
    /// What keeps a module from being decoded.
    pub fn to_dense(checkpoint: &Checkpoint, dtype: DenseType) -> Result<Self, crate::Error> {
        checkpoint.require_decodable()?;
        if checkpoint.architecture().is_some_and(|arch| arch.transposed)
            && let Some(module) = checkpoint.modules().iter().find(|module| !module.linears().is_empty())
        {
            return Err(Error::TransposedDense { module: module.name().into() }.into());
        }
        let mut warnings = Vec::new();
        let modules = (checkpoint.modules().iter())
            .map(|module| planned(checkpoint, module, Decision::Dense(dtype), &mut warnings))
            .collect();
        let plan = Self::exact(checkpoint, Target::Dense(dtype), modules, Some(dtype.dtype()), warnings);
        super::overflow::check(
            checkpoint,
            &super::overflow::stored_as_half(&plan.dense_tensors, &plan.modules),
        )?;
        Ok(plan)
    }

    /// Plans the same tensors in new files.
    pub fn same(checkpoint: &Checkpoint) -> Self {
        let kept = |module: &Module| {
            let mut kept = planned(checkpoint, module, Decision::Kept, &mut Vec::new());
            kept.bias = if module.bias().is_some() { BiasDecision::Kept } else { BiasDecision::None };
            kept.stored_bits = kept.count_bits(checkpoint);
            kept
        };
        let modules = checkpoint.modules().iter().map(kept).collect();
        Self::exact(checkpoint, Target::Same, modules, None, Vec::new())
    }

    fn exact(
        checkpoint: &Checkpoint,
        target: Target,
        modules: Vec<PlannedModule>,
        dtype: Option<Dtype>,
        warnings: Vec<Warning>,
    ) -> Self {
        let dense_tensors: Vec<PlannedTensor> = checkpoint
            .other_tensors()
            .map(|tensor| PlannedTensor {
                name: tensor.name().into(),
                source: tensor.name().into(),
                // Counters and masks keep their type.
                dtype: dtype.filter(|_| is_float(tensor.dtype())).unwrap_or(tensor.dtype()),
                shape: tensor.shape().to_vec(),
            })
            .collect();
        let totals = Totals::new(checkpoint, &modules, &dense_tensors);
        Self { target, modules, totals, objective: None, warnings, dense_tensors, untied: false }
    }
}

fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F16 | Dtype::BF16 | Dtype::F32)
}

/// A module with its names; a bias of zeros is dropped where the architecture has none.
fn planned(
    checkpoint: &Checkpoint,
    module: &Module,
    decision: Decision,
    warnings: &mut Vec<Warning>,
) -> PlannedModule {
    let expected = match module.linear() {
        Some(linear) => linear.bias,
        // Nothing is known about a module outside the architecture, so nothing is dropped.
        None => true,
    };
    let bias = match module.bias() {
        None => BiasDecision::None,
        Some(Bias::AllZero) if !expected && decision != Decision::Kept => {
            warnings.push(super::sets::zero_bias_dropped(module.name()));
            BiasDecision::DroppedZeros
        }
        Some(_) => BiasDecision::Kept,
    };
    let mut planned = PlannedModule {
        name: module.name().into(),
        source: module.name().into(),
        columns: None,
        head: module.name() == checkpoint.naming().head,
        in_features: module.in_features(),
        out_features: module.out_features(),
        decision,
        bias,
        stored_bits: 0,
        options: Vec::new(),
        step_up: None,
        step_down: None,
    };
    planned.stored_bits = planned.count_bits(checkpoint);
    planned
}

fn gptq_module(
    checkpoint: &Checkpoint,
    module: &Module,
    options: &GptqOptions,
    folds: &BTreeMap<String, Fold>,
    warnings: &mut Vec<Warning>,
) -> Result<PlannedModule, crate::Error> {
    let mut decision = match module.layout() {
        Layout::Dense { .. } => return Ok(planned(checkpoint, module, Decision::Kept, warnings)),
        Layout::Gptq(gptq) => from_gptq(module, gptq, options)?,
        Layout::Exl2(exl2) => {
            let widest = exl2.groups.groups().iter().map(|g| g.bits.get()).max().unwrap_or(2);
            let needed = if widest <= 4 { 4 } else { 8 };
            let (bits, requantized) = width(needed, options.bits);
            let group_size = exl2.groups.common_rows();
            GptqDecision {
                bits,
                group_size,
                groups: module.in_features() / group_size,
                zeros: options.zeros.unwrap_or(ZeroConvention::V1),
                recentred: false,
                symmetric: !requantized || is_regridded_symmetric(options),
                sorted: false,
                columns_follow: None,
                act_order: true,
                equal_groups: true,
                scales: Dtype::F16,
                requantized,
            }
        }
    };
    if let Some(size) = options.group_size.filter(|&size| size > 0 && decision.requantized) {
        decision.group_size = size.min(module.in_features());
        decision.groups = module.in_features().div_ceil(decision.group_size);
        (decision.equal_groups, decision.act_order) = (true, decision.act_order && decision.groups > 1);
    } else if let Some(size) = options.group_size.filter(|&size| size != decision.group_size) {
        if size == 0 || !decision.group_size.is_multiple_of(size) || !decision.equal_groups {
            let (module, found) = (module.name().into(), decision.group_size);
            return Err(Error::GroupSplit { module, found, asked: size }.into());
        }
        decision.group_size = size;
        decision.groups = module.in_features().div_ceil(size);
    }
    match folds.get(module.name()) {
        Some(Fold::Rows) => (decision.sorted, decision.act_order) = (true, false),
        Some(Fold::ColumnsFollow(down)) => decision.columns_follow = Some(down.clone()),
        None => {}
    }
    if options.reader.is_some() && decision.scales != Dtype::F16 {
        decision.scales = Dtype::F16;
        check_scales(checkpoint, module, options)?;
    }
    if let Some(reader) = options.reader
        && let Some(objection) = reader.objection(&decision, module.in_features(), module.out_features())
    {
        let (module, reader) = (module.name().into(), reader.name);
        return Err(Error::ReaderRefuses { module, reader, objection }.into());
    }
    check_zeros(checkpoint, module, &decision, options.zeros.is_some())?;
    let mut module_plan = planned(checkpoint, module, Decision::Kept, warnings);
    let unchanged = match module.layout() {
        Layout::Gptq(gptq) => stays(module, gptq, &decision, checkpoint),
        _ => false,
    };
    if !unchanged {
        module_plan = planned(checkpoint, module, Decision::Gptq(decision), &mut Vec::new());
    }
    Ok(module_plan)
}

/// Whether the tensors as they are already are what was decided.
pub(super) fn stays(module: &Module, gptq: &Gptq, decision: &GptqDecision, checkpoint: &Checkpoint) -> bool {
    let g_idx = checkpoint.tensor(&format!("{}.g_idx", module.name()));
    let whole_columns = checkpoint
        .tensor(&format!("{}.scales", module.name()))
        .is_some_and(|scales| scales.shape().get(1) == Some(&module.out_features()));
    decision.bits == gptq.shape.bits
        && decision.group_size == gptq.group_size
        && decision.zeros == gptq.zeros.convention
        && !decision.recentred
        && !decision.requantized
        && !decision.sorted
        && decision.columns_follow.is_none()
        && decision.scales == gptq.scales
        && whole_columns
        && g_idx.is_some_and(|t| t.dtype() == Dtype::I32 && t.shape() == [module.in_features()])
        && gptq.g_idx != GIdxKind::ZeroLeftover
        && !matches!(gptq.zeros.encoding, Some(gptq::ZeroEncoding::V1ThreeBitSwapped))
}

/// The width, and whether it is one that doesn't hold the module's codes, which only a user may ask for.
fn width(needed: u32, asked: Option<Bits>) -> (Bits, bool) {
    let needed = Bits::try_from(needed).unwrap_or(Bits::ALL[3]);
    asked.map_or((needed, false), |asked| (asked, asked < needed))
}

/// Whether a requantized module gets zero points of `2^(bits − 1)`: unless a convention for others is asked for.
fn is_regridded_symmetric(options: &GptqOptions) -> bool {
    options.zeros.is_none() || must_be_symmetric(options)
}

fn must_be_symmetric(options: &GptqOptions) -> bool {
    options.symmetric || options.reader.is_some_and(|reader| reader.symmetric_only)
}

/// That weights change, for all modules in one.
fn requantized(modules: &[PlannedModule]) -> Option<Warning> {
    let mut lossy = (modules.iter()).filter_map(|module| match &module.decision {
        Decision::Gptq(decision) if decision.requantized => Some((module, decision.bits.get())),
        _ => None,
    });
    let (first, bits) = lossy.next()?;
    Some(Warning {
        code: WarningCode::Requantized,
        subject: first.source.clone(),
        message: format!(
            "{} modules, of which this is the first, don't fit {bits} bits and are requantized as --bits asks: \
             their weights change; report.json has the relative error of each",
            1 + lossy.count()
        ),
    })
}

pub(super) fn from_gptq(
    module: &Module,
    gptq: &Gptq,
    options: &GptqOptions,
) -> Result<GptqDecision, crate::Error> {
    let from = gptq.shape.bits;
    let symmetric = gptq.zeros.symmetric;
    let must_be_symmetric = must_be_symmetric(options);
    // No width re-centres an asymmetric 8-bit module exactly.
    let no_exact = !symmetric && must_be_symmetric && from.get() == 8;
    let needed = match (symmetric || !must_be_symmetric, from.get()) {
        (true, bits) => bits,
        (false, 2 | 3) => 4,
        (false, _) => 8,
    };
    if no_exact && options.bits.is_none() {
        return Err(Error::CannotRecentre { module: module.name().into() }.into());
    }
    // A width that the reader doesn't have is widened, which is exact.
    let readable = |bits: &u32| options.reader.is_none_or(|reader| reader.bits.contains(bits));
    let needed = [2, 3, 4, 8].into_iter().filter(|b| *b >= needed).find(readable).unwrap_or(needed);
    let (bits, narrowed) = width(needed, options.bits);
    let requantized = narrowed || no_exact;
    // Marlin-style readers ignore stored zero points, so a symmetric module stays symmetric in its new width.
    let recentred = !requantized && if symmetric { bits != from } else { must_be_symmetric };
    let zeros = options.zeros.unwrap_or(match options.reader {
        Some(reader) if !reader.zeros.contains(&gptq.zeros.convention) => reader.zeros[0],
        _ => gptq.zeros.convention,
    });
    Ok(GptqDecision {
        bits,
        group_size: gptq.group_size,
        groups: gptq.shape.groups,
        zeros,
        recentred,
        symmetric: if requantized { is_regridded_symmetric(options) } else { symmetric || recentred },
        sorted: false,
        columns_follow: None,
        act_order: gptq.g_idx == GIdxKind::ActOrder,
        equal_groups: gptq.equal_groups,
        scales: if requantized { Dtype::F16 } else { gptq.scales },
        requantized,
    })
}

/// A zero point of 0 can't be told in v1, one of `2^bits` not in v2.
fn check_zeros(
    checkpoint: &Checkpoint,
    module: &Module,
    decision: &GptqDecision,
    asked_for: bool,
) -> Result<(), crate::Error> {
    let Layout::Gptq(gptq) = module.layout() else { return Ok(()) };
    // Nothing but a change of convention or of width, or a field of only ones, can meet one.
    if decision.recentred || decision.symmetric || decision.requantized {
        return Ok(());
    }
    let matrix = checkpoint.gptq(module)?;
    let unstorable = match decision.zeros {
        ZeroConvention::V1 => 0,
        ZeroConvention::V2 => 1u16 << decision.bits.get(),
    };
    let kept = !asked_for && decision.zeros == gptq.zeros.convention && decision.bits == gptq.shape.bits;
    match matrix.zeros().iter().filter(|&&z| z == unstorable).count() {
        0 => Ok(()),
        // The same words again: what they mean to a reader doesn't change.
        _ if kept && decision.columns_follow.is_none() && decision.group_size == gptq.group_size => Ok(()),
        count => {
            let (module, convention, zero) = (module.name().into(), decision.zeros, unstorable);
            Err(Error::ZeroNotStorable { module, convention, zero, count }.into())
        }
    }
}

fn check_scales(checkpoint: &Checkpoint, module: &Module, options: &GptqOptions) -> Result<(), crate::Error> {
    let Some(scales) = checkpoint.tensor(&format!("{}.scales", module.name())) else { return Ok(()) };
    let values = scales.floats().unwrap_or_default();
    let rounded = match crate::quantize::to_half(&values) {
        Ok((_, rounding)) => rounding.rounded,
        Err(at) => {
            let (module, value) = (module.name().to_string(), at.value);
            return Err(Error::ScaleOverflow { module, value }.into());
        }
    };
    if rounded > 0 && !options.allow_rounding {
        let dtype = format!("{:?}", scales.dtype());
        return Err(Error::ScaleRounded { module: module.name().into(), count: rounded, dtype }.into());
    }
    Ok(())
}

/// Joined parts must have the same width, group size and symmetry.
pub(super) fn check_siblings(
    checkpoint: &Checkpoint,
    reader: &'static Reader,
    modules: &[PlannedModule],
) -> Result<(), crate::Error> {
    // Layer, whether it is q, k or v, expert.
    type Key = (usize, bool, Option<usize>);
    // Width, group size, symmetry; `None` for a dense module.
    type Alike = Option<(u32, usize, bool)>;
    let mut first: BTreeMap<Key, Alike> = BTreeMap::new();
    for planned in modules {
        let Some(module) = checkpoint.module(&planned.source) else { continue };
        let Some(linear) = module.linear() else { continue };
        let key: Key = match linear.role {
            Role::Q | Role::K | Role::V => (linear.layer, true, None),
            Role::Gate | Role::Up => (linear.layer, false, linear.expert),
            Role::O | Role::Down => continue,
        };
        let stored = match (&planned.decision, module.layout()) {
            (Decision::Gptq(d), _) => Some((d.bits.get(), d.group_size, d.symmetric)),
            (Decision::Kept, Layout::Gptq(g)) => Some((g.shape.bits.get(), g.group_size, g.zeros.symmetric)),
            _ => None,
        };
        if *first.entry(key).or_insert(stored) != stored {
            let (module, reader, objection) = (planned.source.clone(), reader.name, Objection::Siblings);
            return Err(Error::ReaderRefuses { module, reader, objection }.into());
        }
    }
    Ok(())
}
