//! One table of architectures: their linears, tensor names in each ecosystem, and which linears belong
//! together.
//!
//! Takes a `config.json`, gives names and sizes. Must not open tensors or know of layouts: what a linear
//! is stored as, `checkpoint` finds out.

mod dims;
mod names;
mod table;
#[cfg(test)]
mod tests;

pub use dims::{Dims, Error};
pub use names::{AttentionNames, Columns, ExpertNames, MlpNames, Names, NotColumns};
pub use table::{ARCHITECTURES, Architecture, AttentionBias, FALLBACK, MlpKind, QkNorm, Window};

use serde::Serialize;
use serde_json::{Map, Value};

/// The architecture that `config.json` names, if the table has it.
pub fn find(config: &Map<String, Value>) -> Option<&'static Architecture> {
    let name = config.get("architectures")?.as_array()?.first()?.as_str()?;
    ARCHITECTURES.iter().find(|a| a.name == name)
}

/// What a linear does in its block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum Role {
    Q,
    K,
    V,
    O,
    Gate,
    Up,
    Down,
}

impl Role {
    /// The part of the block that loads, and is quantized, as a whole.
    pub const fn part(self) -> Part {
        match self {
            Self::Q | Self::K | Self::V | Self::O => Part::Attention,
            Self::Gate | Self::Up | Self::Down => Part::Mlp,
        }
    }
}

/// Half of a decoder block. exllamav2 loads its linears all quantized or all dense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    /// q, k, v, o.
    Attention,
    /// gate, up, down; of all experts where there are several.
    Mlp,
}

/// One linear of the decoder, as the architecture has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Linear {
    /// Name in the source; of a fused one, that of the linear that holds it.
    pub name: String,
    /// Where it lies in the source's linear, if that holds others, too.
    pub columns: Option<Columns>,
    /// Name that exllamav2 looks for.
    pub exl2_name: String,
    /// What it does.
    pub role: Role,
    /// Block.
    pub layer: usize,
    /// Expert, where the block has several; none for the one that all tokens share.
    pub expert: Option<usize>,
    /// k.
    pub in_features: usize,
    /// n.
    pub out_features: usize,
    /// Whether exllamav2 expects a bias (and refuses the model if its presence differs).
    pub bias: bool,
}

/// What a tensor that belongs to no linear is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DenseRole {
    /// Token embedding, `[vocab, hidden]`.
    Embedding,
    /// Learned positions, `[positions, hidden]`.
    Positions,
    /// A norm's weight.
    Norm,
    /// A norm's bias.
    NormBias,
    /// Router of a mixture of experts, `[experts, hidden]`.
    Router,
    /// Gate of the expert that all tokens share, `[1, hidden]`.
    SharedGate,
}

/// A tensor that is never quantized.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DenseTensor {
    /// Name in the source.
    pub name: String,
    /// Name that exllamav2 looks for.
    pub exl2_name: String,
    /// What it is for.
    pub role: DenseRole,
    /// Its shape.
    pub shape: Vec<usize>,
}

/// Name of the output head's linear in nearly every architecture.
pub const HEAD: &str = "lm_head";

/// Where a linear lies: its module's name within the block, and its columns of it.
type Place = (String, Option<Columns>);

impl Architecture {
    /// The names that exllamav2 expects.
    pub fn exl2_names(&self) -> &'static Names {
        &self.names[0]
    }

    /// Which of the namings in use a file has; `has` tells whether any tensor begins with a prefix.
    pub fn naming(&self, dims: &Dims, has: impl Fn(&str) -> bool) -> &'static Names {
        // A damaged file lacks some names; the naming that most of them fit is meant.
        let found = |names: &&Names| {
            let first = Dims { experts: dims.experts.map(|experts| experts.min(1)), ..dims.clone() };
            let block = self.block(&first, names, 0);
            let modules = block.iter().filter(|linear| has(&format!("{}.", linear.name))).count();
            let norms = names.block_norms.iter().filter(|norm| has(&format!("{}0.{norm}.", names.blocks)));
            let embedding = usize::from(has(&format!("{}.", names.embedding)));
            modules * 100 / block.len().max(1) + norms.count() + embedding
        };
        let best = self.names.iter().rev().max_by_key(found);
        best.unwrap_or(&self.names[0])
    }

    /// All linears of the decoder, block by block.
    pub fn linears(&self, dims: &Dims, names: &Names) -> Vec<Linear> {
        (0..dims.layers).flat_map(|layer| self.block(dims, names, layer)).collect()
    }

    /// The linears of one block.
    pub fn block(&self, dims: &Dims, names: &Names, layer: usize) -> Vec<Linear> {
        let exl2 = self.exl2_names();
        let (hidden, q, kv) = (dims.hidden, dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim);
        let mut linears = Vec::new();
        let mut add = |(name, columns): Place, exl2_name: String, role, expert, [k, n]: [usize; 2]| {
            linears.push(Linear {
                name: format!("{}{layer}.{name}", names.blocks),
                columns,
                exl2_name: format!("{}{layer}.{exl2_name}", exl2.blocks),
                role,
                layer,
                expert,
                in_features: k,
                out_features: n,
                bias: self.expects_bias(dims, role),
            });
        };
        let attention = [
            (Role::Q, [hidden, q]),
            (Role::K, [hidden, kv]),
            (Role::V, [hidden, kv]),
            (Role::O, [q, hidden]),
        ];
        for (role, sizes) in attention {
            let exl2_name = attention_place(exl2, dims, role).0;
            add(attention_place(names, dims, role), exl2_name, role, None, sizes);
        }
        let experts = dims.experts_of(layer);
        let mut mlp = |expert: Option<usize>, place: &dyn Fn(&Names, Role) -> Option<Place>, width: usize| {
            for (role, sizes) in
                [(Role::Gate, [hidden, width]), (Role::Up, [hidden, width]), (Role::Down, [width, hidden])]
            {
                if let (Some(source), Some((exl2_name, _))) = (place(names, role), place(exl2, role)) {
                    add(source, exl2_name, role, expert, sizes);
                }
            }
        };
        let Some(experts) = experts else {
            mlp(None, &|names, role| mlp_place(names, dims, role), dims.intermediate);
            return linears;
        };
        let in_expert = |prefix: String| {
            move |names: &Names, role: Role| {
                let names = names.experts;
                Some((format!("{}.{prefix}.{}", names.module, names.projections[mlp_index(role)]), None))
            }
        };
        for expert in 0..experts {
            mlp(Some(expert), &in_expert(format!("experts.{expert}")), dims.expert_intermediate);
        }
        if let Some(width) = dims.shared_intermediate {
            mlp(None, &in_expert("shared_expert".into()), width);
        }
        linears
    }

    /// The other tensors that the architecture has.
    pub fn dense_tensors(&self, dims: &Dims, names: &Names) -> Vec<DenseTensor> {
        let exl2 = self.exl2_names();
        let hidden = dims.hidden;
        // A tensor that `name` names in both namings.
        let of = |name: &dyn Fn(&Names) -> String, role, shape: &[usize]| DenseTensor {
            name: name(names),
            exl2_name: name(exl2),
            role,
            shape: shape.to_vec(),
        };
        let norm = |name: &dyn Fn(&Names) -> String| {
            let part = |suffix: &str, role| of(&|names| format!("{}.{suffix}", name(names)), role, &[hidden]);
            let bias = self.norm_bias.then(|| part("bias", DenseRole::NormBias));
            std::iter::once(part("weight", DenseRole::Norm)).chain(bias)
        };
        let embedding = of(&Names::embedding_weight, DenseRole::Embedding, &[dims.vocab, hidden]);
        let mut tensors = vec![embedding];
        if let Some(positions) = dims.positions.filter(|_| self.learned_positions) {
            let name = |names: &Names| format!("{}.weight", names.positions);
            tensors.push(of(&name, DenseRole::Positions, &[positions, hidden]));
        }
        for layer in 0..dims.layers {
            let in_block = |names: &Names, name: &str| format!("{}{layer}.{name}", names.blocks);
            for i in 0..names.block_norms.len().min(exl2.block_norms.len()) {
                tensors.extend(norm(&|names| in_block(names, names.block_norms[i])));
            }
            for (norm, heads) in [("q_norm", dims.heads), ("k_norm", dims.kv_heads)] {
                let name = |names: &Names| in_block(names, &format!("self_attn.{norm}.weight"));
                match self.qk_norm {
                    QkNorm::Always => tensors.push(of(&name, DenseRole::Norm, &[dims.head_dim])),
                    QkNorm::EachHeadIfUsed if dims.use_qk_norm => {
                        tensors.push(of(&name, DenseRole::Norm, &[heads, dims.head_dim]));
                    }
                    QkNorm::Never | QkNorm::EachHeadIfUsed => {}
                }
            }
            let Some(experts) = dims.experts_of(layer) else { continue };
            let gate = |gate: &'static str| {
                move |names: &Names| in_block(names, &format!("{}.{gate}.weight", names.experts.module))
            };
            tensors.push(of(&gate("gate"), DenseRole::Router, &[experts, hidden]));
            if dims.shared_intermediate.is_some() {
                tensors.push(of(&gate("shared_expert_gate"), DenseRole::SharedGate, &[1, hidden]));
            }
        }
        tensors.extend(norm(&|names| names.norm.into()));
        tensors
    }

    /// What exllamav2 calls a tensor of another part (vision, projector); `None` where it is none.
    pub fn other_exl2_name(&self, names: &Names, tensor: &str) -> Option<String> {
        let pairs = names.others.iter().zip(self.exl2_names().others);
        pairs.into_iter().find_map(|(from, to)| Some(format!("{to}{}", tensor.strip_prefix(from)?)))
    }

    fn expects_bias(&self, dims: &Dims, role: Role) -> bool {
        match (role.part(), self.attention_bias) {
            (Part::Attention, AttentionBias::All) => true,
            (Part::Attention, AttentionBias::Qkv) => role != Role::O,
            (Part::Attention, AttentionBias::QkvByConfig) => role != Role::O && dims.attention_bias,
            (Part::Attention, AttentionBias::ByConfig) => dims.attention_bias,
            (Part::Mlp, _) => self.mlp_bias || dims.mlp_bias,
        }
    }
}

/// q, k, v and o in a block.
fn attention_place(names: &Names, dims: &Dims, role: Role) -> Place {
    let (d, heads, kv_heads) = (dims.head_dim, dims.heads, dims.kv_heads);
    match (names.attention, role) {
        (AttentionNames::Separate([q, k, v, o]), _) => {
            let name = match role {
                Role::Q => q,
                Role::K => k,
                Role::V => v,
                _ => o,
            };
            (name.into(), None)
        }
        (AttentionNames::Fused([qkv, _]), Role::Q | Role::K | Role::V) => {
            let (begin, count) = match role {
                Role::Q => (0, heads),
                Role::K => (heads, kv_heads),
                _ => (heads + kv_heads, kv_heads),
            };
            (qkv.into(), Some(Columns::range(begin * d, count * d)))
        }
        (AttentionNames::Interleaved([qkv, _]), Role::Q | Role::K | Role::V) => {
            let shared = heads / kv_heads.max(1);
            let (begin, count) = match role {
                Role::Q => (0, shared),
                Role::K => (shared, 1),
                _ => (shared + 1, 1),
            };
            (qkv.into(), Some(Columns::strided(begin * d, count * d, (shared + 2) * d, kv_heads)))
        }
        (AttentionNames::Fused([_, o]) | AttentionNames::Interleaved([_, o]), _) => (o.into(), None),
    }
}

const fn mlp_index(role: Role) -> usize {
    match role {
        Role::Gate => 0,
        Role::Up => 1,
        _ => 2,
    }
}

/// gate, up and down in a block; `None` for a gate where there is none.
fn mlp_place(names: &Names, dims: &Dims, role: Role) -> Option<Place> {
    let width = dims.intermediate;
    match (names.mlp, role) {
        (MlpNames::Gated(all), _) => Some((all[mlp_index(role)].into(), None)),
        (MlpNames::Fused([both, _]), Role::Gate) => Some((both.into(), Some(Columns::range(0, width)))),
        (MlpNames::Fused([both, _]), Role::Up) => Some((both.into(), Some(Columns::range(width, width)))),
        (MlpNames::Fused([_, down]), _) => Some((down.into(), None)),
        (MlpNames::Plain(_), Role::Gate) => None,
        (MlpNames::Plain([up, _]), Role::Up) => Some((up.into(), None)),
        (MlpNames::Plain([_, down]), _) => Some((down.into(), None)),
    }
}
