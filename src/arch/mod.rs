//! One table of architectures: their linears, tensor names in each ecosystem, and which linears belong
//! together.
//!
//! Takes a `config.json`, gives names and sizes. Must not open tensors or know of layouts: what a linear
//! is stored as, `checkpoint` finds out.

mod dims;
mod table;
#[cfg(test)]
mod tests;

pub use dims::{Dims, Error};
pub use table::{ARCHITECTURES, Architecture, AttentionBias, ExpertNames, MlpKind, Window};

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
    /// Name in the source.
    pub name: String,
    /// Name that exllamav2 looks for.
    pub exl2_name: String,
    /// What it does.
    pub role: Role,
    /// Block.
    pub layer: usize,
    /// Expert, where the block has several.
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
#[serde(rename_all = "lowercase")]
pub enum DenseRole {
    /// Token embedding, `[vocab, hidden]`.
    Embedding,
    /// A norm's weight.
    Norm,
    /// Router of a mixture of experts, `[experts, hidden]`.
    Router,
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

/// Name of the output head's linear in every architecture of the table.
pub const HEAD: &str = "lm_head";

/// Name of the embedding's tensor in every architecture of the table.
pub const EMBEDDING: &str = "model.embed_tokens.weight";

impl Architecture {
    /// Which of the names in use a file has; `has` tells whether any tensor begins with a prefix.
    pub fn naming(&self, has: impl Fn(&str) -> bool) -> ExpertNames {
        let MlpKind::Experts { names } = self.mlp else { return ExpertNames::MLP };
        let in_file = |names: &&ExpertNames| has(&format!("model.layers.0.{}.experts.", names.module));
        *names.iter().find(in_file).unwrap_or(&names[0])
    }

    /// All linears of the decoder, block by block.
    pub fn linears(&self, dims: &Dims, naming: ExpertNames) -> Vec<Linear> {
        (0..dims.layers).flat_map(|layer| self.block(dims, naming, layer)).collect()
    }

    /// The linears of one block.
    pub fn block(&self, dims: &Dims, naming: ExpertNames, layer: usize) -> Vec<Linear> {
        let prefix = format!("model.layers.{layer}");
        let (hidden, q, kv) = (dims.hidden, dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim);
        let attention = [
            ("q_proj", Role::Q, hidden, q),
            ("k_proj", Role::K, hidden, kv),
            ("v_proj", Role::V, hidden, kv),
            ("o_proj", Role::O, q, hidden),
        ];
        let mut linears: Vec<Linear> = attention
            .into_iter()
            .map(|(proj, role, in_features, out_features)| {
                let name = format!("{prefix}.self_attn.{proj}");
                let bias = self.expects_bias(dims, role);
                Linear {
                    exl2_name: name.clone(),
                    name,
                    role,
                    layer,
                    expert: None,
                    in_features,
                    out_features,
                    bias,
                }
            })
            .collect();
        let experts = dims.experts_of(layer);
        let width = if experts.is_some() { dims.expert_intermediate } else { dims.intermediate };
        for expert in 0..experts.unwrap_or(1) {
            let place = |names: ExpertNames, proj: usize| match experts {
                Some(_) => format!("{prefix}.{}.experts.{expert}.{}", names.module, names.projections[proj]),
                None => format!("{prefix}.mlp.{}", ExpertNames::MLP.projections[proj]),
            };
            let mlp = [(Role::Gate, hidden, width), (Role::Up, hidden, width), (Role::Down, width, hidden)];
            linears.extend(mlp.into_iter().enumerate().map(|(i, (role, in_features, out_features))| {
                Linear {
                    name: place(naming, i),
                    exl2_name: place(self.exl2_naming(), i),
                    role,
                    layer,
                    expert: experts.map(|_| expert),
                    in_features,
                    out_features,
                    bias: self.expects_bias(dims, role),
                }
            }));
        }
        linears
    }

    /// The tensors that belong to no linear: embedding, norms, routers. All must exist.
    pub fn dense_tensors(&self, dims: &Dims, naming: ExpertNames) -> Vec<DenseTensor> {
        let same = |name: String, role, shape: &[usize]| DenseTensor {
            exl2_name: name.clone(),
            name,
            role,
            shape: shape.to_vec(),
        };
        let mut tensors = vec![same(EMBEDDING.into(), DenseRole::Embedding, &[dims.vocab, dims.hidden])];
        for layer in 0..dims.layers {
            let prefix = format!("model.layers.{layer}");
            for norm in ["input_layernorm", "post_attention_layernorm"] {
                tensors.push(same(format!("{prefix}.{norm}.weight"), DenseRole::Norm, &[dims.hidden]));
            }
            if self.qk_norm {
                for norm in ["q_norm", "k_norm"] {
                    let name = format!("{prefix}.self_attn.{norm}.weight");
                    tensors.push(same(name, DenseRole::Norm, &[dims.head_dim]));
                }
            }
            if let Some(experts) = dims.experts_of(layer) {
                let router = |names: ExpertNames| format!("{prefix}.{}.gate.weight", names.module);
                tensors.push(DenseTensor {
                    name: router(naming),
                    exl2_name: router(self.exl2_naming()),
                    role: DenseRole::Router,
                    shape: vec![experts, dims.hidden],
                });
            }
        }
        tensors.push(same("model.norm.weight".into(), DenseRole::Norm, &[dims.hidden]));
        tensors
    }

    fn exl2_naming(&self) -> ExpertNames {
        match self.mlp {
            MlpKind::Dense => ExpertNames::MLP,
            MlpKind::Experts { names } => names[0],
        }
    }

    fn expects_bias(&self, dims: &Dims, role: Role) -> bool {
        match (role.part(), self.attention_bias) {
            (Part::Attention, AttentionBias::Qkv) => role != Role::O,
            (Part::Attention, AttentionBias::ByConfig) => dims.attention_bias,
            (Part::Mlp, _) => dims.mlp_bias,
        }
    }
}
