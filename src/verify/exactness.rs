//! Tensors and modules against the source: each must relate to it as the report claims.

use super::batches::in_batches;
use super::claims::{ClaimedModule, Claims};
use super::{Check, CheckKind, Fault};
use crate::arch::Columns;
use crate::checkpoint::{Bias, Checkpoint, Layout, Module, TensorView};
use crate::convert::report::{Exactness, TensorOrigin};
use crate::plan::columns_that_follow;
use crate::progress::{Event, Observer};
use crate::quantize::{relative_error, squares};
use half::{bf16, f16};
use requant_formats::Permutation;
use safetensors::Dtype;
use std::collections::{BTreeMap, BTreeSet};

/// How far the recomputed relative error may be from the reported one, as a part of it: sums are taken in
/// another order than the quantizer's.
const ERROR_TOLERANCE: f64 = 1e-6;

/// Checks every claim.
pub(super) fn check(
    output: &Checkpoint,
    source: &Checkpoint,
    claims: &Claims,
    observer: &dyn Observer,
) -> Result<Check, crate::Error> {
    let mut comparison = Comparison { output, source, orders: BTreeMap::new(), faults: Vec::new() };
    comparison.orders(claims);
    comparison.coverage(claims);
    let weights = claims
        .modules
        .iter()
        .filter_map(|m| source.part(&m.source, m.columns.as_ref()))
        .map(Module::weights)
        .sum();
    observer.event(&Event::Stage { name: "compare", modules: claims.modules.len(), weights });
    let by_stem: BTreeMap<&str, &ClaimedModule> =
        claims.modules.iter().map(|module| (module.name.as_str(), module)).collect();
    for origin in &claims.tensors {
        if observer.cancelled() {
            return Err(crate::Error::Cancelled);
        }
        let stem = origin.name.rsplit_once('.').map_or("", |(stem, _)| stem);
        comparison.tensor(origin, by_stem.get(stem).copied());
    }
    let weights =
        |claim: &ClaimedModule| source.part(&claim.source, claim.columns.as_ref()).map_or(0, Module::weights);
    let found = in_batches(&claims.modules, weights, observer, |claim| {
        let message = comparison.module(claim)?;
        observer.event(&Event::Module { name: &claim.name, weights: weights(claim) });
        Ok(message.map(|message| Fault::tensor(output, &claim.name, message)))
    })?;
    comparison.faults.extend(found.into_iter().flatten());
    let checked = claims.tensors.len() + claims.modules.len();
    Ok(Check { checked, faults: comparison.faults, ..Check::new(CheckKind::Exactness) })
}

struct Comparison<'a> {
    output: &'a Checkpoint,
    source: &'a Checkpoint,
    /// Order of the rows of the source's modules, where the report says that they were sorted.
    orders: BTreeMap<&'a str, Permutation>,
    faults: Vec<Fault>,
}

impl<'a> Comparison<'a> {
    fn fault(&mut self, name: &str, message: impl Into<String>) {
        self.faults.push(Fault::tensor(self.output, name, message));
    }

    /// Reads the row orders that the report gives.
    fn orders(&mut self, claims: &'a Claims) {
        for claim in &claims.modules {
            let Some(order) = &claim.row_order else { continue };
            let k = self.source.part(&claim.source, claim.columns.as_ref()).map(Module::in_features);
            match Permutation::new(order.clone()) {
                Ok(order) if Some(order.len()) == k => {
                    self.orders.insert(&claim.source, order);
                }
                Ok(order) => self.fault(&claim.name, format!("row_order has {} entries", order.len())),
                Err(e) => self.fault(&claim.name, format!("row_order: {e}")),
            }
        }
    }

    /// Nothing of the output is unexplained, nothing of the source is lost.
    fn coverage(&mut self, claims: &Claims) {
        let claimed: BTreeSet<&str> = claims.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        let output = self.output;
        let of_modules = output.modules().iter().flat_map(|module| module.tensor_names());
        let all = of_modules.chain(output.other_tensors().map(|tensor| tensor.name().to_owned()));
        for name in all.filter(|name| output.tensor(name).is_some() && !claimed.contains(name.as_str())) {
            self.fault(&name, "the report doesn't say where it comes from");
        }
        let modules: BTreeSet<&str> = claims.modules.iter().map(|module| module.source.as_str()).collect();
        let source = self.source;
        for module in source.modules() {
            // A copy of a tied embedding may be left out.
            let copy = module.name() == source.naming().head && source.head_is_tied_copy();
            let parts: Vec<&Columns> = (claims.modules.iter())
                .filter(|claim| claim.source == module.name())
                .filter_map(|claim| claim.columns.as_ref())
                .collect();
            let n = module.out_features();
            let within = parts.iter().filter(|columns| columns.end() <= n);
            let columns: BTreeSet<usize> = within.flat_map(|columns| columns.iter()).collect();
            if !parts.is_empty() && !(0..n).eq(columns) {
                self.fault(module.name(), "the report's modules don't hold all of its columns");
            }
            if !modules.contains(module.name()) && !copy {
                self.fault(module.name(), "the source has this module; the report doesn't");
            }
            let bias = format!("{}.bias", module.name());
            let kept = claims.tensors.iter().any(|tensor| tensor.sources == [bias.as_str()]);
            if module.bias() == Some(Bias::NonZero) && !kept {
                self.fault(&bias, "the source has this bias, which isn't zero; the output doesn't");
            }
        }
        if claims.is_exl2() {
            return; // Tensors that exllamav2 doesn't know stay behind.
        }
        let used: BTreeSet<&str> =
            claims.tensors.iter().flat_map(|tensor| tensor.sources.iter().map(String::as_str)).collect();
        for tensor in source.other_tensors().filter(|tensor| !used.contains(tensor.name())) {
            self.fault(tensor.name(), "the source has this tensor; the output doesn't");
        }
    }

    fn tensor(&mut self, origin: &TensorOrigin, module: Option<&'a ClaimedModule>) {
        let Some(found) = self.output.tensor(&origin.name) else {
            self.fault(&origin.name, "the report lists it, but it is missing");
            return;
        };
        let is_bias = origin.name.ends_with(".bias");
        if let Some(module) = module.filter(|_| !is_bias)
            && module.exactness != origin.exactness
        {
            let (tensor, module) = (origin.exactness, module.exactness);
            self.fault(
                &origin.name,
                format!("the report says {tensor:?} of it and {module:?} of its module"),
            );
        }
        // The weight of a module is compared as a whole, unless its bytes are the source's.
        let part_of_weight = module.is_some() && !is_bias;
        if part_of_weight && origin.exactness != Exactness::Identical {
            return;
        }
        let suffix = |name: &str| name.rsplit_once('.').map_or(String::new(), |(_, end)| end.to_owned());
        let from = match origin.sources.as_slice() {
            [one] => Some(one),
            several => several.iter().find(|source| suffix(source) == suffix(&origin.name)),
        };
        let Some(wanted) = from.and_then(|name| self.source.tensor(name)) else {
            self.fault(&origin.name, "the source has no tensor that it could be made of");
            return;
        };
        let order = match module.filter(|_| is_bias).map(|claim| self.columns(claim)) {
            None => None,
            Some(Ok(order)) => order,
            Some(Err(NoOrder)) => {
                self.fault(&origin.name, NO_ORDER);
                return;
            }
        };
        let columns = module.and_then(|module| module.columns.as_ref()).filter(|_| is_bias);
        let factor = module.filter(|_| is_bias).map_or(1.0, |claim| self.bias_factor(claim));
        if let Some(message) = differs(found, wanted, order.as_ref(), columns, factor, origin.exactness) {
            self.fault(&origin.name, message);
        }
    }

    /// What the bias of a module is the source's times.
    fn bias_factor(&self, claim: &ClaimedModule) -> f64 {
        let factor = |checkpoint: &Checkpoint, module: Option<&Module>| {
            module.map_or(1.0, |module| checkpoint.bias_factor(module))
        };
        let before = self.source.part(&claim.source, claim.columns.as_ref());
        factor(self.output, self.output.module(&claim.name)) / factor(self.source, before)
    }

    /// What is wrong with a module's weight.
    fn module(&self, claim: &ClaimedModule) -> Result<Option<String>, crate::Error> {
        if claim.exactness == Exactness::Identical {
            return Ok(None); // Its tensors were compared.
        }
        let Some(found) = self.output.module(&claim.name) else {
            return Ok(Some("the report lists it, but it is missing".into()));
        };
        let source = self.source.part(&claim.source, claim.columns.as_ref());
        if source.is_none() && claim.columns.is_some() {
            return Ok(Some("the report gives it columns that no linear of the source has".into()));
        }
        let Ok(columns) = self.columns(claim) else {
            return Ok(Some(NO_ORDER.into()));
        };
        let columns = columns.as_ref();
        let places = Places { rows: self.orders.get(claim.source.as_str()), columns };
        let n = found.out_features();
        let sizes = source.map(|m| [m.in_features(), m.out_features()]);
        if sizes.is_some_and(|sizes| sizes != [found.in_features(), n])
            || columns.is_some_and(|order| order.len() != n)
        {
            return Ok(Some("its sizes aren't the source's".into()));
        }
        // What doesn't decode has been told of.
        let Ok(values) = self.output.loaded(found) else { return Ok(None) };
        Ok(match (claim.exactness, source) {
            (Exactness::Requantized, source) => {
                let wanted = self.wanted(source, found)?;
                check_error(&values, n, &wanted, &places, claim.relative_error)
            }
            (Exactness::Rounded, Some(source)) => self.check_rounded(found, &values, source, &places)?,
            (_, source) => {
                let wanted = self.wanted(source, found)?;
                places.first_difference(&values, n, |at| wanted[at])
            }
        })
    }

    /// The order of a module's columns, if they follow another module's rows.
    fn columns(&self, claim: &ClaimedModule) -> Result<Option<Permutation>, NoOrder> {
        let Some(down) = claim.decision.columns_follow.as_deref() else { return Ok(None) };
        let module = self.source.part(&claim.source, claim.columns.as_ref());
        let order = self.orders.get(down);
        let (Some(order), Some(module)) = (order, module) else { return Err(NoOrder) };
        columns_that_follow(self.source, module, down, order).map(Some).ok_or(NoOrder)
    }

    /// What the source's module decodes to; of a head that the source ties, the embedding.
    fn wanted(&self, source: Option<&Module>, found: &Module) -> Result<Vec<f32>, crate::Error> {
        if let Some(module) = source {
            return Ok(self.source.decoded(module)?);
        }
        let (k, n) = (found.in_features(), found.out_features());
        let embedding = self
            .source
            .tensor(&self.source.naming().embedding_weight())
            .and_then(|tensor| tensor.floats())
            .unwrap_or_default();
        Ok((0..k * n).map(|i| embedding.get(i % n * k + i / n).copied().unwrap_or(f32::NAN)).collect())
    }

    /// One rounding: of the product to bf16, of a dense weight to a narrower type, or of GPTQ scales.
    fn check_rounded(
        &self,
        found: &Module,
        values: &[f32],
        source: &Module,
        places: &Places<'_>,
    ) -> Result<Option<String>, crate::Error> {
        let n = found.out_features();
        Ok(match (found.layout(), source.layout()) {
            (Layout::Dense { dtype: Dtype::BF16 }, Layout::Gptq(_)) => {
                let wanted = self.source.gptq(source)?.dequantize_bf16();
                places.first_difference(values, n, |at| wanted[at].to_f32())
            }
            (Layout::Dense { dtype }, _) => {
                let wanted = self.source.decoded(source)?;
                places.first_difference(values, n, |at| round_to(wanted[at], *dtype))
            }
            (Layout::Gptq(gptq), Layout::Gptq(_)) => {
                let (found, wanted) = (self.output.gptq(found)?, self.source.gptq(source)?);
                let part = |matrix: &requant_formats::gptq::Matrix, at: usize| {
                    let group = matrix.g_idx().groups()[at / n] as usize * n + at % n;
                    (i32::from(matrix.codes()[at]) - i32::from(matrix.zeros()[group]), matrix.scales()[group])
                };
                let differs = (0..values.len()).find(|&at| {
                    let (difference, scale) = part(&wanted, places.source(at, n));
                    part(&found, at) != (difference, round_to(scale, gptq.scales))
                });
                differs.map(|at| {
                    let (row, column) = (at / n, at % n);
                    format!("row {row}, column {column} isn't the source's with its scale rounded once")
                })
            }
            _ => Some("no rounding leads from the source's layout to this one".into()),
        })
    }
}

/// Columns that follow rows whose order isn't known or doesn't fit them.
struct NoOrder;

const NO_ORDER: &str = "the report lacks the row_order that its columns follow";

/// Where rows and columns of the output stand in the source.
struct Places<'a> {
    rows: Option<&'a Permutation>,
    columns: Option<&'a Permutation>,
}

impl Places<'_> {
    /// The element of the source that stands at `at` of the output; both are `[k, n]`.
    fn source(&self, at: usize, n: usize) -> usize {
        let (row, column) = (at / n, at % n);
        let row = self.rows.map_or(row, |order| order.map()[row] as usize);
        row * n + self.columns.map_or(column, |order| order.map()[column] as usize)
    }

    /// Tells of the first value that isn't, to the bit, what stands in its place in the source.
    fn first_difference(&self, found: &[f32], n: usize, wanted: impl Fn(usize) -> f32) -> Option<String> {
        (0..found.len()).find_map(|at| {
            let wanted = wanted(self.source(at, n));
            let (row, column) = (at / n, at % n);
            (found[at].to_bits() != wanted.to_bits())
                .then(|| format!("the weight at row {row}, column {column} is {}, not {wanted}", found[at]))
        })
    }
}

fn round_to(value: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F16 => f16::from_f32(value).to_f32(),
        Dtype::BF16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// Compares the error of requantized weights with the reported one.
fn check_error(
    found: &[f32],
    n: usize,
    wanted: &[f32],
    places: &Places<'_>,
    reported: f64,
) -> Option<String> {
    let pairs = (0..found.len()).map(|at| (found[at], wanted[places.source(at, n)]));
    let error = relative_error(squares(pairs));
    ((error - reported).abs() > ERROR_TOLERANCE * reported)
        .then(|| format!("its relative error is {error:e}; the report says {reported:e}"))
}

/// Compares a tensor that is no weight of a quantized module.
fn differs(
    found: TensorView<'_>,
    wanted: TensorView<'_>,
    order: Option<&Permutation>,
    columns: Option<&Columns>,
    factor: f64,
    claimed: Exactness,
) -> Option<String> {
    let shape = columns.map_or(wanted.shape().to_vec(), |columns| vec![columns.count()]);
    if columns.is_some_and(|columns| columns.end() > wanted.info().elements()) {
        return Some("the report gives it columns beyond the source's".into());
    }
    if found.shape() != shape || order.is_some_and(|order| [order.len()] != *shape) {
        return Some(format!("its shape is {:?}, the source's {shape:?}", found.shape()));
    }
    if claimed == Exactness::Identical {
        let same = found.dtype() == wanted.dtype() && found.bytes() == wanted.bytes();
        return (!same).then(|| "its bytes aren't the source's, although the report says so".into());
    }
    let (Some(values), Some(source)) = (found.floats(), wanted.floats()) else {
        return Some(format!("{:?} can't be compared with {:?}", found.dtype(), wanted.dtype()));
    };
    let source = columns.map_or(source.clone(), |columns| columns.of(&source, source.len()));
    (0..values.len()).find_map(|i| {
        let value = source[order.map_or(i, |order| order.map()[i] as usize)];
        let value = (f64::from(value) * factor) as f32;
        let wanted = match claimed {
            Exactness::Exact => value,
            _ => round_to(value, found.dtype()),
        };
        (values[i].to_bits() != wanted.to_bits())
            .then(|| format!("element {i} is {}, not {wanted}", values[i]))
    })
}
