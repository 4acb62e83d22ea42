//! Opening: from files to modules. Everything is checked here, so that later code need not.

use super::config::{self, CONFIG, QuantConfig};
use super::error::Error;
use super::examine::{Found, LAYOUTS, Stated, Stored, StoredGptq, Wanted, examine};
use super::fault::Fault;
use super::module::{Bias, Exl2, Gptq, Layout, Module};
use super::report;
use super::shards::Shards;
use super::zeros::{self, Claims, Surveyed, Zeros};
use super::{Checkpoint, OpenOptions};
use crate::arch::{self, Architecture, Dims, Linear, Names};
use crate::warning::{Warning, WarningCode};
use rayon::prelude::*;
use serde_json::{Map, Value};
use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};
use std::path::Path;

pub(super) fn open(dir: &Path, options: &OpenOptions) -> Result<Checkpoint, Error> {
    let metadata = std::fs::metadata(dir).map_err(|e| Error::new(dir, e))?;
    if !metadata.is_dir() {
        return Err(Error::new(dir, Fault::NotAFolder));
    }
    let config::Config { model, mut quant, mut warnings } = config::read(dir)?;
    let shards = Shards::open(dir)?;
    let (label, producer) =
        (config::label_of_file(&shards.metadata), config::producer_of_file(&shards.metadata));
    if let Some(quant) = &mut quant {
        quant.label = quant.label.or(label);
        quant.producer = quant.producer.take().or_else(|| producer.clone());
    }
    warnings.extend(shards.warnings.iter().cloned());

    let known = known_architecture(dir, &model, options.any_arch, &mut warnings)?;
    let has = |prefix: &str| shards.tensors.iter().any(|t| t.name().starts_with(prefix));
    let naming = known.as_ref().map_or(&Names::LLAMA, |(arch, dims)| arch.naming(dims, has));
    let wanted = match &known {
        Some((arch, dims)) => expected_modules(&shards, arch, dims, naming)?,
        None => modules_by_tensors(&shards),
    };
    let found = examine_all(dir, &shards, &wanted, quant.as_ref(), known.as_ref())?;
    if let Some((arch, dims)) = &known {
        check_rest(&shards, arch, dims, naming, &wanted)?;
    }
    report::contradictions(&wanted, &found, quant.as_ref(), &mut warnings);

    let claims = Claims {
        label: quant.as_ref().map_or(label, |q| q.label),
        producer: quant.as_ref().map_or(producer.as_ref(), |q| q.producer.as_ref()),
        chosen: options.zeros,
        all_ones: options.all_ones,
    };
    let zeros = decide_zeros(&shards, &wanted, &found, claims, &mut warnings)?;
    let modules = assemble(wanted, found, zeros);
    let tied_copy = match &known {
        Some((_, dims)) => examine_head(&shards, &modules, dims, naming, &mut warnings),
        None => false,
    };
    let by_name = modules.iter().enumerate().map(|(i, m)| (m.name.clone(), i)).collect();
    let parts = parts(&shards, &modules);
    let other_tensors = tensors_of_no_module(&shards, &modules);
    if let Some((arch, dims)) = &known {
        let others = other_tensors.iter().map(|&i| shards.tensors[i].name());
        warnings.extend(unused_tensors(others, arch, dims, naming));
    }
    Ok(Checkpoint {
        dir: dir.to_owned(),
        config: model,
        quant,
        known,
        naming,
        shards,
        modules,
        by_name,
        parts,
        other_tensors,
        tied_copy,
        warnings,
    })
}

type Known = (&'static Architecture, Dims);

fn known_architecture(
    dir: &Path,
    config: &Map<String, Value>,
    any_arch: bool,
    warnings: &mut Vec<Warning>,
) -> Result<Option<Known>, Error> {
    let known = arch::find(config);
    let Some(arch) = known.or(any_arch.then_some(arch::FALLBACK)) else {
        let named = config.get("architectures").and_then(Value::as_array).and_then(|list| list.first());
        let named = named.and_then(Value::as_str).unwrap_or("none");
        warnings.push(Warning {
            code: WarningCode::UnknownArchitecture,
            subject: CONFIG.into(),
            message: format!(
                "The architecture ({named}) isn't known: linears are found by their tensors, and neither their \
                 sizes nor their completeness is checked."
            ),
        });
        return Ok(None);
    };
    if known.is_none() {
        warnings.push(Warning {
            code: WarningCode::UnknownArchitecture,
            subject: CONFIG.into(),
            message: "The architecture isn't known: it is read as a Llama, as exllamav2 will take it for one. If it \
                      is none in all but its name, it will load and run wrongly."
                .into(),
        });
    }
    let dims = Dims::read(arch, config).map_err(|e| Error::new(dir.join(CONFIG), e))?;
    Ok(Some((arch, dims)))
}

/// All linears that the architecture has, and the head unless it is tied.
fn expected_modules(
    shards: &Shards,
    arch: &Architecture,
    dims: &Dims,
    naming: &Names,
) -> Result<Vec<Wanted>, Error> {
    // A configuration can claim 2^28 layers of as many experts; listing their names would take all memory. So
    // blocks are listed up to the first that lacks a linear, and no more experts than a file can have.
    let most = shards.tensors.len() + 1;
    let bounded = Dims { experts: dims.experts.map(|experts| experts.min(most)), ..dims.clone() };
    let is_stored = |name: &str| LAYOUTS.iter().any(|suffix| shards.has(&format!("{name}.{suffix}")));
    let mut wanted: Vec<Wanted> = Vec::new();
    for layer in 0..dims.layers {
        let block = arch.block(&bounded, naming, layer);
        let whole = block.iter().all(|linear| is_stored(&linear.name));
        wanted.extend(block.chunk_by(|a, b| a.name == b.name).map(|linears| Wanted {
            name: linears[0].name.clone(),
            sizes: Some([linears[0].in_features, linears.iter().map(|linear| linear.out_features).sum()]),
            linears: linears.to_vec(),
        }));
        if !whole {
            break;
        }
    }
    if is_stored(naming.head) {
        let sizes = Some([dims.hidden, dims.vocab]);
        wanted.push(Wanted { name: naming.head.into(), sizes, linears: Vec::new() });
    } else if !dims.tied {
        let name = format!("{}.weight", naming.head);
        return Err(Error::tensor(shards.list_of_tensors(), name, Fault::HeadMissing));
    }
    Ok(wanted)
}

/// Linears of an unknown architecture: what is quantized, and dense matrices that are named like linears
/// or like a quantized module of another layer.
fn modules_by_tensors(shards: &Shards) -> Vec<Wanted> {
    let stem_of = |name: &str, suffixes: &[&str]| {
        let (stem, suffix) = name.rsplit_once('.')?;
        suffixes.contains(&suffix).then(|| stem.to_owned())
    };
    let names = || shards.tensors.iter();
    let quantized: HashSet<String> =
        names().filter_map(|t| stem_of(t.name(), &["qweight", "q_weight"])).collect();
    let kinds: HashSet<String> = names()
        .filter_map(|t| stem_of(t.name(), &["qweight", "q_weight"]))
        .map(|stem| without_numbers(&stem))
        .collect();
    let mut stems: Vec<String> = names()
        .filter_map(|tensor| match stem_of(tensor.name(), &["weight"]) {
            None => stem_of(tensor.name(), &["qweight", "q_weight"]),
            Some(stem) => {
                let is_linear = stem.ends_with("_proj")
                    || stem == arch::HEAD
                    || quantized.contains(&stem)
                    || kinds.contains(&without_numbers(&stem));
                (tensor.shape().len() == 2 && is_linear).then_some(stem)
            }
        })
        .collect();
    stems.sort_by(|a, b| natural_order(a, b));
    stems.dedup();
    stems.into_iter().map(|name| Wanted { name, sizes: None, linears: Vec::new() }).collect()
}

fn without_numbers(name: &str) -> String {
    let parts: Vec<&str> = name
        .split('.')
        .map(|part| if part.bytes().all(|b| b.is_ascii_digit()) { "*" } else { part })
        .collect();
    parts.join(".")
}

/// Numbers between dots by value, all else by bytes.
fn natural_order(a: &str, b: &str) -> Ordering {
    for (a, b) in a.split('.').zip(b.split('.')) {
        let order = match (a.parse::<u64>(), b.parse::<u64>()) {
            (Ok(a), Ok(b)) => a.cmp(&b),
            _ => a.cmp(b),
        };
        if order.is_ne() {
            return order;
        }
    }
    a.len().cmp(&b.len()).then_with(|| a.cmp(b))
}

/// Examines all modules in parallel; the error is that of the first in their order.
fn examine_all(
    dir: &Path,
    shards: &Shards,
    wanted: &[Wanted],
    quant: Option<&QuantConfig>,
    known: Option<&Known>,
) -> Result<Vec<Found>, Error> {
    let examined: Vec<Result<Found, Error>> = wanted
        .par_iter()
        .map(|module| {
            let stated = match quant {
                Some(quant) => Stated::of(quant, &module.name)
                    .map_err(|fault| Error::new(dir.join(quant.dynamic.file()), fault))?,
                None => Stated::default(),
            };
            examine(shards, module, stated)?.ok_or_else(|| {
                let (architecture, layers) = known.map_or(("", 0), |(arch, dims)| (arch.name, dims.layers));
                let name = format!("{}.qweight", module.name);
                Error::tensor(shards.list_of_tensors(), name, Fault::ModuleMissing { architecture, layers })
            })
        })
        .collect();
    examined.into_iter().collect()
}

/// Checks the tensors beside the linears, and that no quantized module is left over.
fn check_rest(
    shards: &Shards,
    arch: &Architecture,
    dims: &Dims,
    naming: &Names,
    wanted: &[Wanted],
) -> Result<(), Error> {
    let names: HashSet<&str> = wanted.iter().map(|module| module.name.as_str()).collect();
    for tensor in &shards.tensors {
        let beyond = layer_of(naming, tensor.name()).is_some_and(|layer| layer >= dims.layers);
        if let Some((stem, suffix)) = tensor.name().rsplit_once('.')
            && !names.contains(stem)
            && (matches!(suffix, "qweight" | "q_weight") || beyond && tensor.shape().len() == 2)
        {
            let fault = Fault::ModuleUnexpected { architecture: arch.name, layers: dims.layers };
            return Err(shards.view(tensor).error(fault));
        }
    }
    // Every linear was found, so that the number of layers and experts is no lie.
    for dense in arch.dense_tensors(dims, naming) {
        match shards.tensor(&dense.name) {
            Some(tensor) => tensor.expect_shape(&dense.shape)?,
            None => {
                let fault = Fault::DenseMissing { architecture: arch.name };
                return Err(Error::tensor(shards.list_of_tensors(), dense.name, fault));
            }
        }
    }
    Ok(())
}

/// The block that a name belongs to.
fn layer_of(naming: &Names, name: &str) -> Option<usize> {
    name.strip_prefix(naming.blocks)?.split('.').next()?.parse().ok()
}

/// Of the tensors that belong to no module, those that the architecture has no use for. Buffers that older
/// files hold are no news.
fn unused_tensors<'a>(
    others: impl Iterator<Item = &'a str>,
    arch: &Architecture,
    dims: &Dims,
    naming: &Names,
) -> Option<Warning> {
    let dense: HashSet<String> = arch.dense_tensors(dims, naming).into_iter().map(|t| t.name).collect();
    let unused: Vec<&str> = others
        .filter(|name| !dense.contains(*name) && !name.ends_with(".inv_freq"))
        .filter(|name| arch.other_exl2_name(naming, name).is_none())
        .collect();
    let (first, rest) = unused.split_first()?;
    let more = if rest.is_empty() { String::new() } else { format!(" and {} more", rest.len()) };
    Some(Warning {
        code: WarningCode::TensorsUnused,
        subject: (*first).into(),
        message: format!(
            "It{more} belong to nothing that {} has. An EXL2 output leaves them out; if the model needs them, its \
             config.json names the wrong architecture.",
            arch.name
        ),
    })
}

fn decide_zeros(
    shards: &Shards,
    wanted: &[Wanted],
    found: &[Found],
    claims: Claims<'_>,
    warnings: &mut Vec<Warning>,
) -> Result<Vec<Zeros>, Error> {
    let gptq = wanted.iter().zip(found).filter_map(|(wanted, found)| match &found.stored {
        Stored::Gptq(stored) => Some(Surveyed {
            name: wanted.name.clone(),
            bits: stored.shape.bits,
            survey: stored.survey,
            sym: found.stated.sym,
        }),
        Stored::Exl2 { .. } | Stored::Dense { .. } => None,
    });
    let surveyed: Vec<Surveyed> = gptq.collect();
    zeros::decide(&surveyed, claims, warnings).map_err(|(module, fault)| {
        let name = format!("{}.qzeros", surveyed[module].name);
        let file = shards.tensor(&name).map_or(shards.list_of_tensors(), |tensor| tensor.file());
        Error::tensor(file, name, fault)
    })
}

fn assemble(wanted: Vec<Wanted>, found: Vec<Found>, zeros: Vec<Zeros>) -> Vec<Module> {
    let mut zeros = zeros.into_iter();
    let layout = |stored, zeros: &mut std::vec::IntoIter<Zeros>| match stored {
        Stored::Dense { dtype } => Layout::Dense { dtype },
        Stored::Exl2 { groups, stored_out_features } => Layout::Exl2(Exl2 { groups, stored_out_features }),
        Stored::Gptq(StoredGptq { shape, g_idx, scales, .. }) => Layout::Gptq(Gptq {
            shape,
            group_size: g_idx.group_size(),
            g_idx: g_idx.kind(),
            equal_groups: g_idx.equal_groups(),
            scales,
            zeros: zeros.next().expect("`decide` gives one for each GPTQ module, in their order"),
        }),
    };
    wanted
        .into_iter()
        .zip(found)
        .map(|(wanted, found)| Module {
            name: wanted.name,
            in_features: found.in_features,
            out_features: found.out_features,
            layout: layout(found.stored, &mut zeros),
            bias: found.bias,
            linears: wanted.linears,
            columns: None,
            whole_out_features: found.out_features,
            stated_group_size: found.stated.group_size.map(|size| size.rows(found.in_features)),
        })
        .collect()
}

/// Compares a stored head with the embedding that the configuration ties it to. True: it is a mere copy.
fn examine_head(
    shards: &Shards,
    modules: &[Module],
    dims: &Dims,
    naming: &Names,
    warnings: &mut Vec<Warning>,
) -> bool {
    let Some(head) = modules.iter().find(|m| m.name == naming.head).filter(|_| dims.tied) else {
        return false;
    };
    if head.layout.is_quantized() {
        warnings.push(Warning {
            code: WarningCode::TiedHeadQuantized,
            subject: naming.head.into(),
            message:
                "config.json ties the head to the embedding, but the head is stored quantized. It is read; \
                      engines that obey the configuration use the embedding instead."
                    .into(),
        });
        return false;
    }
    let tensor = |name: &str| shards.tensor(name);
    let embedding_weight = naming.embedding_weight();
    let (stored, embedding) = (tensor(&format!("{}.weight", naming.head)), tensor(&embedding_weight));
    let copy = match (stored, embedding) {
        (Some(head), Some(embedding)) => {
            head.dtype() == embedding.dtype() && head.bytes() == embedding.bytes()
        }
        _ => false,
    };
    if !copy {
        warnings.push(Warning {
            code: WarningCode::TiedHeadDiffers,
            subject: format!("{}.weight", naming.head),
            message: format!(
                "config.json ties the head to the embedding, but the stored head differs from {}. It is read; \
                 engines that obey the configuration use the embedding instead.",
                embedding_weight
            ),
        });
    }
    copy
}

fn tensors_of_no_module(shards: &Shards, modules: &[Module]) -> Vec<usize> {
    let taken: HashSet<String> = modules.iter().flat_map(Module::tensor_names).collect();
    (0..shards.tensors.len()).filter(|&i| !taken.contains(shards.tensors[i].name())).collect()
}

/// Each linear of a fused module as a module of its own.
fn parts(shards: &Shards, modules: &[Module]) -> Parts {
    let part = |whole: &Module, linear: &Linear| {
        let mut part = Module {
            out_features: linear.out_features,
            linears: vec![linear.clone()],
            columns: linear.columns.clone(),
            ..whole.clone()
        };
        if let Layout::Gptq(gptq) = &mut part.layout {
            gptq.shape.out_features = linear.out_features;
        }
        let bias = whole.bias.and_then(|_| shards.tensor(&format!("{}.bias", whole.name))?.floats());
        part.bias = bias.map(|mut bias| {
            bias.truncate(whole.out_features);
            let zero = part.cut(bias.into()).iter().all(|&value| value == 0.0);
            if zero { Bias::AllZero } else { Bias::NonZero }
        });
        part
    };
    let fused = modules.iter().filter(|module| module.linears.len() > 1);
    fused.map(|m| (m.name.clone(), m.linears.iter().map(|linear| part(m, linear)).collect())).collect()
}

/// The parts of fused modules, by the name of the whole.
pub(super) type Parts = HashMap<String, Vec<Module>>;

/// Module names and their places.
pub(super) type ByName = HashMap<String, usize>;
