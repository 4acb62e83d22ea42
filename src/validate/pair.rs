//! Which module of the converted model is made of which of the source, and what was promised of it.
//!
//! The report of the conversion says so where it is there; places in the architecture do otherwise, and last
//! the names.

use super::Error;
use crate::arch::{Columns, Linear};
use crate::checkpoint::{Checkpoint, Module};
use crate::convert::REPORT_FILE;
use crate::convert::report::{Exactness, SCHEMA};
use crate::plan::columns_that_follow;
use requant_formats::Permutation;
use serde::Deserialize;
use std::collections::BTreeMap;

/// A linear in both models.
#[derive(Clone, Debug)]
pub(super) struct Pair {
    /// Name in the source.
    pub(super) source: String,
    /// Of a linear that is fused with others in the source: its columns there.
    pub(super) part: Option<Columns>,
    /// Name in the converted model.
    pub(super) converted: String,
    /// The same in the converted model.
    pub(super) converted_part: Option<Columns>,
    /// Whether it is the output head.
    pub(super) head: bool,
    /// Its place; `None` for the head, and where the architecture is unknown.
    pub(super) linear: Option<Linear>,
    /// k.
    pub(super) in_features: usize,
    /// n.
    pub(super) out_features: usize,
    /// Row j of the converted weight is this row of the source's.
    pub(super) rows: Option<Permutation>,
    /// The same of columns.
    pub(super) columns: Option<Permutation>,
    /// What the conversion promised.
    pub(super) promise: Option<Promise>,
}

/// What the report of a conversion says of a weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Promise {
    /// Every value as decoded is the source's.
    Exact,
    /// Rounded once, to no worse than bf16.
    Rounded,
    /// This relative error.
    Error(f64),
}

impl Pair {
    /// Whether it is the output head.
    pub(super) fn is_head(&self) -> bool {
        self.head
    }

    /// The source's module, or part of one; of a head that it doesn't store, nothing.
    pub(super) fn source_module<'a>(&self, source: &'a Checkpoint) -> Option<&'a Module> {
        source.part(&self.source, self.part.as_ref())
    }

    /// The converted module, or part of one.
    pub(super) fn converted_module<'a>(&self, converted: &'a Checkpoint) -> Option<&'a Module> {
        converted.part(&self.converted, self.converted_part.as_ref())
    }

    /// Whether rows or columns stand in another order in the converted model.
    pub(super) fn is_permuted(&self) -> bool {
        self.rows.is_some() || self.columns.is_some()
    }

    /// Brings a converted weight `[k, n]` into the source's order.
    pub(super) fn to_source_order<T: Copy>(&self, weights: Vec<T>) -> Vec<T> {
        reorder(weights, self.out_features, self.rows.as_ref(), self.columns.as_ref())
    }
}

/// Puts row j and column c of a weight `[k, n]` where the permutations say that they come from.
pub(super) fn reorder<T: Copy>(
    weights: Vec<T>,
    n: usize,
    rows: Option<&Permutation>,
    columns: Option<&Permutation>,
) -> Vec<T> {
    if rows.is_none() && columns.is_none() {
        return weights;
    }
    let mut ordered = weights.clone();
    for (row, from) in weights.chunks_exact(n).enumerate() {
        let row = rows.map_or(row, |order| order.map()[row] as usize);
        let to = &mut ordered[row * n..][..n];
        match columns {
            None => to.copy_from_slice(from),
            Some(order) => order.map().iter().zip(from).for_each(|(&column, &w)| to[column as usize] = w),
        }
    }
    ordered
}

/// A weight of the source `[k, n]`, exact; of a head that it doesn't store, the embedding.
pub(super) fn source_values(source: &Checkpoint, pair: &Pair) -> Result<Vec<f32>, crate::Error> {
    if let Some(module) = pair.source_module(source) {
        return Ok(source.decoded(module)?);
    }
    let Some(embedding) = source.tensor(&source.naming().embedding_weight()) else { return Ok(Vec::new()) };
    let floats = embedding.floats().unwrap_or_default();
    Ok(crate::checkpoint::transpose(&floats, embedding.shape()[0], embedding.shape()[1]))
}

/// What is read of a report.
#[derive(Deserialize)]
struct Report {
    schema: u32,
    source: ReportSource,
    modules: Vec<ReportModule>,
}

#[derive(Deserialize)]
struct ReportSource {
    fingerprint: String,
}

#[derive(Deserialize)]
struct ReportModule {
    name: String,
    source: String,
    #[serde(default)]
    columns: Option<Columns>,
    exactness: Exactness,
    relative_error: f64,
    row_order: Option<Vec<u32>>,
    decision: Decision,
}

#[derive(Deserialize)]
struct Decision {
    #[serde(default)]
    columns_follow: Option<String>,
}

/// Pairs all linears of the two models, in the source's order, the head last.
///
/// # Errors
/// A report that is of another source or can't be read; sizes that differ; nothing in common.
pub(super) fn pairs(source: &Checkpoint, converted: &Checkpoint) -> Result<Vec<Pair>, Error> {
    let mut pairs = match read_report(source, converted)? {
        Some(report) => by_report(source, converted, &report)?,
        None => by_place(source, converted),
    };
    for pair in &pairs {
        // A file can hold any name, so the report's are looked up again.
        let found = pair.converted_module(converted);
        let sizes = |k: usize, n: usize| format!("{k} × {n}");
        let expected = sizes(pair.in_features, pair.out_features);
        let found = found.map_or("nothing".into(), |m| sizes(m.in_features(), m.out_features()));
        if found != expected {
            return Err(Error::Mismatch { name: pair.source.clone(), found, expected });
        }
    }
    let order = |pair: &Pair| {
        let place = source.modules().iter().position(|module| module.name() == pair.source);
        place.unwrap_or(usize::MAX)
    };
    pairs.sort_by_cached_key(order);
    match pairs.is_empty() {
        true => Err(Error::NothingInCommon),
        false => Ok(pairs),
    }
}

/// The report, if there is one and it isn't of other software.
fn read_report(source: &Checkpoint, converted: &Checkpoint) -> Result<Option<Report>, Error> {
    let path = converted.dir().join(REPORT_FILE);
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(Error::Read { path, source }),
    };
    let failed = |message: String| Error::Report { path: path.clone(), message };
    let report: Report = serde_json::from_slice(&bytes).map_err(|e| failed(e.to_string()))?;
    if report.schema != SCHEMA {
        let found = report.schema;
        return Err(failed(format!("schema {found}: this version of requant reads schema {SCHEMA}")));
    }
    if report.source.fingerprint != source.fingerprint() {
        return Err(failed("it is of another source: the fingerprint differs".into()));
    }
    Ok(Some(report))
}

fn by_report(source: &Checkpoint, converted: &Checkpoint, report: &Report) -> Result<Vec<Pair>, Error> {
    let path = converted.dir().join(REPORT_FILE);
    let failed = |message: String| Error::Report { path: path.clone(), message };
    let mut orders: BTreeMap<&str, Permutation> = BTreeMap::new();
    for module in &report.modules {
        if let Some(order) = &module.row_order {
            let order = Permutation::new(order.clone())
                .map_err(|e| failed(format!("row_order of {}: {e}", module.name)))?;
            orders.insert(&module.source, order);
        }
    }
    let mut pairs = Vec::with_capacity(report.modules.len());
    for module in &report.modules {
        let found = source.part(&module.source, module.columns.as_ref());
        // The source of a tied head is the embedding, which is no linear of the source.
        let head = module.name == converted.naming().head;
        let (in_features, out_features) = match (found, source.dims()) {
            (Some(found), _) => (found.in_features(), found.out_features()),
            (None, Some(dims)) if head => (dims.hidden, dims.vocab),
            _ => return Err(failed(format!("the source has no {}", module.source))),
        };
        let rows = orders.get(module.source.as_str()).cloned();
        let columns = match &module.decision.columns_follow {
            None => None,
            Some(down) => {
                let order = orders.get(down.as_str());
                let columns =
                    found.zip(order).and_then(|(m, order)| columns_that_follow(source, m, down, order));
                Some(columns.ok_or_else(|| failed(format!("{}: {down} has no row_order", module.name)))?)
            }
        };
        let fits = |order: &Option<Permutation>, len| order.as_ref().is_none_or(|order| order.len() == len);
        if !fits(&rows, in_features) || !fits(&columns, out_features) {
            return Err(failed(format!("{}: an order of another length than its rows", module.name)));
        }
        let promise = match module.exactness {
            Exactness::Identical | Exactness::Exact => Promise::Exact,
            Exactness::Rounded => Promise::Rounded,
            Exactness::Requantized => Promise::Error(module.relative_error),
        };
        pairs.push(Pair {
            linear: found.and_then(|module| module.linear().cloned()),
            source: module.source.clone(),
            part: module.columns.clone(),
            converted: module.name.clone(),
            converted_part: None,
            head,
            in_features,
            out_features,
            rows,
            columns,
            promise: Some(promise),
        });
    }
    Ok(pairs)
}

/// Pairs by block, role and expert; of unknown architectures by name.
fn by_place(source: &Checkpoint, converted: &Checkpoint) -> Vec<Pair> {
    let place = |linear: &Linear| (linear.layer, linear.role, linear.expert);
    let linears = |checkpoint: &'_ Checkpoint| -> Vec<Linear> {
        checkpoint.modules().iter().flat_map(|module| module.linears().iter().cloned()).collect()
    };
    let other: BTreeMap<_, Linear> = linears(converted).into_iter().map(|l| (place(&l), l)).collect();
    let mut pairs = Vec::new();
    let mut add = |name: &str, linear: Option<&Linear>, sizes: (usize, usize), to: &str, to_part, head| {
        pairs.push(Pair {
            source: name.into(),
            part: linear.and_then(|linear| linear.columns.clone()),
            converted: to.into(),
            converted_part: to_part,
            head,
            linear: linear.cloned(),
            in_features: sizes.0,
            out_features: sizes.1,
            rows: None,
            columns: None,
            promise: None,
        });
    };
    let (head, other_head) = (source.naming().head, converted.naming().head);
    for module in source.modules() {
        for linear in module.linears() {
            if let Some(to) = other.get(&place(linear)) {
                let sizes = (linear.in_features, linear.out_features);
                add(module.name(), Some(linear), sizes, &to.name, to.columns.clone(), false);
            }
        }
        let is_head = module.name() == head;
        let to = if is_head { other_head } else { module.name() };
        if module.linears().is_empty() && converted.module(to).is_some() {
            let sizes = (module.in_features(), module.out_features());
            add(module.name(), None, sizes, to, None, is_head);
        }
    }
    // A converter may have written out the head that the source ties to the embedding.
    if let (None, Some(_), Some(dims)) = (source.module(head), converted.module(other_head), source.dims()) {
        add(head, None, (dims.hidden, dims.vocab), other_head, None, true);
    }
    pairs
}
