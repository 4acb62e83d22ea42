//! Models that are the source but for a part.

use super::forward::{Models, id_of};
use super::options::Layers;
use crate::arch::Role;
use fancy_regex::Regex;
use std::collections::BTreeMap;

/// A model that is the source but for a part.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Variant {
    /// These pairs of one block are converted: a linear, or one projection of all experts.
    Linear { layer: usize, pairs: Vec<usize> },
    /// The head is.
    Head { pair: usize },
    /// All blocks up to this one are.
    Blocks { layer: usize },
}

impl Variant {
    /// The first block after which it isn't the source any more.
    pub(super) fn layer(&self) -> Option<usize> {
        match self {
            Self::Linear { layer, .. } | Self::Blocks { layer } => Some(*layer),
            Self::Head { .. } => None,
        }
    }
}

/// The variants that a choice of layers asks for; those that are the source to the bit are left out, as their
/// divergence is known to be 0.
///
/// # Errors
/// A pattern that is none, or that no name matches.
pub(super) fn variants(
    models: &Models<'_>,
    layers: &Layers,
    errors: &[f64],
) -> Result<Vec<Variant>, super::Error> {
    let mut units: BTreeMap<(usize, Role), Vec<usize>> = BTreeMap::new();
    for (i, pair) in models.pairs.iter().enumerate() {
        if let Some((layer, id)) = id_of(pair) {
            units.entry((layer, id.role)).or_default().push(i);
        }
    }
    let mut all: Vec<Variant> = (units.into_iter())
        .map(|((layer, _), pairs)| Variant::Linear { layer, pairs })
        .chain(models.pairs.iter().position(super::pair::Pair::is_head).map(|pair| Variant::Head { pair }))
        .collect();
    let members = |variant: &Variant| match variant {
        Variant::Linear { pairs, .. } => pairs.clone(),
        Variant::Head { pair } => vec![*pair],
        Variant::Blocks { .. } => Vec::new(),
    };
    let converted = |variant: &Variant| members(variant).iter().any(|&pair| !models.checked[pair].exact);
    match layers {
        Layers::All => {
            all.retain(converted);
            let changed: Vec<usize> = all.iter().filter_map(Variant::layer).collect();
            all.extend(
                (0..models.source.layers())
                    .filter(|l| changed.contains(l))
                    .map(|layer| Variant::Blocks { layer }),
            );
        }
        Layers::Worst(count) => {
            all.retain(converted);
            let error =
                |variant: &Variant| members(variant).iter().map(|&pair| errors[pair]).fold(0.0, f64::max);
            all.sort_by(|a, b| error(b).total_cmp(&error(a)));
            all.truncate(*count);
        }
        Layers::Matching(pattern) => {
            let failed = |e: fancy_regex::Error| super::Error::Pattern {
                pattern: pattern.clone(),
                message: e.to_string(),
            };
            let regex = Regex::new(pattern).map_err(failed)?;
            let mut kept = Vec::new();
            for variant in all {
                let mut matches = false;
                for pair in members(&variant) {
                    matches |= regex.is_match(&models.pairs[pair].source).map_err(failed)?;
                }
                if matches {
                    kept.push(variant);
                }
            }
            if kept.is_empty() {
                return Err(super::Error::NoLayers { pattern: pattern.clone() });
            }
            kept.retain(converted);
            all = kept;
        }
    }
    Ok(all)
}
