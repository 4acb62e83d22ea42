//! What `config.json` says of the forward pass. Sources: transformers' modelling code of each architecture.

use super::rope::{self, RopeSpec};
use crate::arch::{Architecture, Dims, Names};
use crate::checkpoint::Checkpoint;
use requant_kernels::Activation;
use serde_json::{Map, Value};

/// Why there is no forward pass for a model.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Unsupported {
    /// The architecture.
    #[error("the forward pass of {} is not supported", .0.as_deref().unwrap_or("a model without `architectures`"))]
    Architecture(Option<String>),
    /// A setting of `config.json`.
    #[error("the forward pass with {key} {value} is not supported")]
    Setting {
        /// The key.
        key: &'static str,
        /// Its value, as JSON.
        value: String,
    },
}

/// All that the forward pass needs to know besides weights.
#[derive(Debug)]
pub(super) struct Spec {
    pub(super) arch: &'static Architecture,
    pub(super) dims: Dims,
    pub(super) names: &'static Names,
    pub(super) epsilon: f32,
    /// What is added to the weights of norms: 1 in Gemma.
    pub(super) norm_offset: f32,
    pub(super) embedding_scale: f32,
    pub(super) activation: Activation,
    pub(super) attention_scale: f32,
    pub(super) attention_cap: Option<f32>,
    pub(super) logit_cap: Option<f32>,
    /// Of each block: how many tokens back attention sees.
    pub(super) sliding: Vec<Option<usize>>,
    pub(super) rope: RopeSpec,
    pub(super) routing: Option<Routing>,
}

/// How tokens choose experts: softmax over all, then the best.
#[derive(Clone, Copy, Debug)]
pub(super) struct Routing {
    pub(super) top_k: usize,
    /// Whether the chosen experts' weights are made to add up to 1.
    pub(super) normalised: bool,
}

/// `config.json`, or the language model's part of it.
#[derive(Clone, Copy)]
pub(super) struct Keys<'a>(pub(super) &'a Map<String, Value>);

impl<'a> Keys<'a> {
    pub(super) fn get(self, key: &str) -> Option<&'a Value> {
        let found = self.0.get(key).or_else(|| self.0.get("text_config")?.get(key));
        found.filter(|value| !value.is_null())
    }

    /// A number; `default` where the key is missing.
    pub(super) fn number(self, key: &'static str, default: f64) -> Result<f64, Unsupported> {
        Ok(self.optional_number(key)?.unwrap_or(default))
    }

    pub(super) fn optional_number(self, key: &'static str) -> Result<Option<f64>, Unsupported> {
        let number = |value: &Value| value.as_f64().ok_or_else(|| unsupported(key, value));
        self.get(key).map(number).transpose()
    }

    fn size(self, key: &'static str) -> Result<Option<usize>, Unsupported> {
        let size = |value: &Value| match value.as_u64() {
            Some(size @ 1..) => Ok(size as usize),
            _ => Err(unsupported(key, value)),
        };
        self.get(key).map(size).transpose()
    }

    fn flag(self, key: &'static str) -> bool {
        self.get(key).and_then(Value::as_bool).unwrap_or(false)
    }
}

pub(super) fn unsupported(key: &'static str, value: &Value) -> Unsupported {
    Unsupported::Setting { key, value: value.to_string() }
}

impl Spec {
    pub(super) fn read(checkpoint: &Checkpoint) -> Result<Self, Unsupported> {
        let config = checkpoint.config();
        let keys = Keys(config);
        let stated = config.get("architectures").and_then(|names| names.get(0)?.as_str());
        let refused = || Unsupported::Architecture(stated.map(str::to_owned));
        let (arch, dims) = checkpoint.architecture().zip(checkpoint.dims()).ok_or_else(refused)?;
        let gemma = match arch.name {
            "LlamaForCausalLM"
            | "MistralForCausalLM"
            | "Qwen2ForCausalLM"
            | "Qwen3ForCausalLM"
            | "MixtralForCausalLM"
            | "Qwen2MoeForCausalLM"
            | "Qwen3MoeForCausalLM"
            | "Phi3ForCausalLM" => false,
            "GemmaForCausalLM" | "Gemma2ForCausalLM" => true,
            _ => return Err(refused()),
        };
        // An unknown architecture read as a Llama isn't one.
        if stated != Some(arch.name) {
            return Err(refused());
        }
        let activation = match (keys.get("hidden_activation").or_else(|| keys.get("hidden_act")), gemma) {
            // Gemma's first configurations say `gelu` and mean this.
            (None | Some(Value::String(_)), true) => Activation::GeluTanh,
            (None, false) => Activation::Silu,
            (Some(value), _) => match value.as_str() {
                Some("silu" | "swish") => Activation::Silu,
                Some("gelu") => Activation::Gelu,
                Some("gelu_pytorch_tanh" | "gelu_new") => Activation::GeluTanh,
                _ => return Err(unsupported("hidden_act", value)),
            },
        };
        let head_dim = dims.head_dim as f64;
        let scalar = keys.number("query_pre_attn_scalar", head_dim)?;
        let cap = |key| Ok(keys.optional_number(key)?.map(|cap| cap as f32));
        let gemma2 = arch.name == "Gemma2ForCausalLM";
        Ok(Self {
            arch,
            dims: dims.clone(),
            names: checkpoint.naming(),
            epsilon: keys.number("rms_norm_eps", 1e-6)? as f32,
            norm_offset: if gemma { 1.0 } else { 0.0 },
            embedding_scale: if gemma { (dims.hidden as f64).sqrt() as f32 } else { 1.0 },
            activation,
            attention_scale: (if gemma2 { scalar } else { head_dim }).powf(-0.5) as f32,
            attention_cap: if gemma2 { cap("attn_logit_softcapping")? } else { None },
            logit_cap: if gemma2 { cap("final_logit_softcapping")? } else { None },
            sliding: sliding(arch.name, dims.layers, keys)?,
            rope: rope::read(dims, keys)?,
            routing: match dims.experts {
                None => None,
                Some(experts) => Some(Routing {
                    top_k: keys.size("num_experts_per_tok")?.unwrap_or(2).min(experts),
                    normalised: arch.name == "MixtralForCausalLM" || keys.flag("norm_topk_prob"),
                }),
            },
        })
    }
}

/// Of each block, the window that it attends through.
fn sliding(arch: &str, layers: usize, keys: Keys<'_>) -> Result<Vec<Option<usize>>, Unsupported> {
    let qwen = arch.starts_with("Qwen");
    let gemma2 = arch == "Gemma2ForCausalLM";
    let may_slide = match arch {
        "MistralForCausalLM" | "MixtralForCausalLM" | "Phi3ForCausalLM" => true,
        _ => gemma2 || (qwen && keys.flag("use_sliding_window")),
    };
    // A model that doesn't slide may hold any value there: transformers writes 0 for Qwen2-MoE.
    let window = match may_slide {
        true => keys.size("sliding_window")?.or(gemma2.then_some(4096)),
        false => None,
    };
    let Some(window) = window else { return Ok(vec![None; layers]) };
    if let Some(types) = keys.get("layer_types") {
        let kind = |value: &Value| match value.as_str() {
            Some("sliding_attention") => Ok(Some(window)),
            Some("full_attention") => Ok(None),
            _ => Err(unsupported("layer_types", value)),
        };
        let types = types.as_array().filter(|types| types.len() == layers);
        let types = types.ok_or_else(|| {
            unsupported("layer_types", &keys.get("layer_types").cloned().unwrap_or_default())
        })?;
        return types.iter().map(kind).collect();
    }
    // The first blocks of Qwen2 and Qwen3 see everything; every second one of Gemma 2 does.
    let first = match qwen && arch != "Qwen3MoeForCausalLM" {
        true => keys.number("max_window_layers", 28.0)? as usize,
        false => 0,
    };
    Ok((0..layers).map(|i| (i >= first && !(gemma2 && i % 2 == 1)).then_some(window)).collect())
}
