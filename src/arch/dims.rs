//! The sizes that `config.json` gives.

use super::{Architecture, MlpKind, Role};
use serde_json::{Map, Value};

/// Sizes of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Dims {
    /// `hidden_size`.
    pub hidden: usize,
    /// `intermediate_size`.
    pub intermediate: usize,
    /// `num_attention_heads`.
    pub heads: usize,
    /// `num_key_value_heads`; `heads` where absent.
    pub kv_heads: usize,
    /// `head_dim`; `hidden / heads` where absent.
    pub head_dim: usize,
    /// `num_hidden_layers`.
    pub layers: usize,
    /// `vocab_size`.
    pub vocab: usize,
    /// `num_local_experts` or `num_experts`, in a mixture of experts.
    pub experts: Option<usize>,
    /// `moe_intermediate_size`; `intermediate_size` where absent.
    pub expert_intermediate: usize,
    /// `mlp_only_layers`: blocks of a mixture of experts that have one plain MLP.
    pub plain_layers: Vec<u64>,
    /// `decoder_sparse_step`: block `i` has experts only if this divides `i + 1`.
    pub sparse_step: usize,
    /// `attention_bias`.
    pub attention_bias: bool,
    /// `mlp_bias`.
    pub mlp_bias: bool,
    /// `shared_expert_intermediate_size`, where the architecture has an expert for all tokens.
    pub shared_intermediate: Option<usize>,
    /// `use_qk_norm`.
    pub use_qk_norm: bool,
    /// `n_positions` or `max_position_embeddings`.
    pub positions: Option<usize>,
    /// What exllamav2 multiplies the scales of o and down by when it loads them: `residual_multiplier`
    /// (Granite), or `scale_depth / √layers` (MiniCPM); 1 elsewhere.
    pub residual_scale: f64,
    /// What it multiplies the scales of a quantized head by: `logit_scale`, 1 / `logits_scaling` (Granite), or with
    /// `dim_model_base` by the architecture (MiniCPM); 1 elsewhere.
    pub logit_scale: f64,
    /// `tie_word_embeddings`, or that the architecture knows no other head.
    pub tied: bool,
}

/// A key of `config.json` that is missing or makes no sense.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("config.json: {key} is {}: {expected}", .found.as_ref().map_or("missing".into(), Value::to_string))]
pub struct Error {
    /// The key.
    pub key: &'static str,
    /// Its value, if it is there.
    pub found: Option<Value>,
    /// In words: what it should be.
    pub expected: &'static str,
}

/// No real model has more of anything; keeps products of two sizes far from overflow.
const LARGEST: u64 = 1 << 28;

/// No model's factor is beyond this, nor its inverse.
const LARGEST_FACTOR: f64 = 65_536.0;

impl Dims {
    /// Reads the sizes.
    ///
    /// # Errors
    /// Names the first key that is missing or isn't a positive integer.
    pub fn read(arch: &Architecture, config: &Map<String, Value>) -> Result<Self, Error> {
        let keys = Keys(config);
        let hidden = keys.size_of(&["hidden_size", "n_embd"])?;
        let heads = keys.size_of(&["num_attention_heads", "n_head"])?;
        let intermediate = match keys.optional_size("n_inner")? {
            Some(intermediate) => intermediate,
            // GPT-2 gives it only where it is another.
            None if arch.learned_positions && keys.get("intermediate_size").is_none() => 4 * hidden,
            None => keys.size("intermediate_size")?,
        };
        let head_dim = match keys.optional_size("head_dim")? {
            Some(head_dim) => head_dim,
            None if hidden % heads == 0 => hidden / heads,
            None => {
                let found = keys.get("num_attention_heads").cloned();
                let expected = "a divisor of hidden_size, as there is no head_dim";
                return Err(Error { key: "num_attention_heads", found, expected });
            }
        };
        let layers = keys.size_of(&["num_hidden_layers", "n_layer"])?;
        let (experts, expert_intermediate, plain_layers, sparse_step) = match arch.mlp {
            MlpKind::Dense => (None, intermediate, Vec::new(), 1),
            MlpKind::Experts | MlpKind::ExpertsAndShared => (
                Some(match keys.optional_size("num_local_experts")? {
                    Some(experts) => experts,
                    None => keys.size("num_experts")?,
                }),
                keys.optional_size("moe_intermediate_size")?.unwrap_or(intermediate),
                keys.plain_layers()?,
                keys.optional_size("decoder_sparse_step")?.unwrap_or(1),
            ),
        };
        Ok(Self {
            hidden,
            intermediate,
            heads,
            kv_heads: match arch.multi_query {
                true => 1,
                false => keys.optional_size("num_key_value_heads")?.unwrap_or(heads),
            },
            head_dim,
            layers,
            vocab: keys.size("vocab_size")?,
            experts,
            expert_intermediate,
            plain_layers,
            sparse_step,
            attention_bias: keys.flag("attention_bias")?,
            mlp_bias: keys.flag("mlp_bias")?,
            shared_intermediate: match arch.mlp {
                MlpKind::ExpertsAndShared => Some(keys.size("shared_expert_intermediate_size")?),
                MlpKind::Dense | MlpKind::Experts => None,
            },
            use_qk_norm: keys.flag("use_qk_norm")?,
            positions: match keys.optional_size("n_positions")? {
                None => keys.optional_size("max_position_embeddings")?,
                positions => positions,
            },
            residual_scale: match (keys.number("residual_multiplier")?, keys.number("scale_depth")?) {
                (Some(scale), _) => scale,
                (None, Some(depth)) => depth / (layers as f64).sqrt(),
                (None, None) => 1.0,
            },
            logit_scale: match keys.number("logits_scaling")? {
                Some(scaling) => 1.0 / scaling,
                None => {
                    let base = keys.number("dim_model_base")?.filter(|_| arch.name == "MiniCPMForCausalLM");
                    keys.number("logit_scale")?.unwrap_or(1.0) / base.map_or(1.0, |base| hidden as f64 / base)
                }
            },
            // A head that was quantized on its own is untied in words, also where the architecture ties it.
            tied: match keys.get("tie_word_embeddings") {
                None | Some(Value::Null) => arch.tied_head,
                Some(_) => keys.flag("tie_word_embeddings")?,
            },
        })
    }

    /// What exllamav2 multiplies the scales of a linear of the decoder by when it loads it: of o and down, but of no
    /// expert's.
    pub fn prescale(&self, linear: &super::Linear) -> f64 {
        match linear.role {
            Role::O | Role::Down if linear.expert.is_none() => self.residual_scale,
            _ => 1.0,
        }
    }

    /// Experts of a block; `None` where it has one plain MLP.
    pub fn experts_of(&self, layer: usize) -> Option<usize> {
        let sparse = (layer + 1).is_multiple_of(self.sparse_step);
        self.experts.filter(|_| sparse && !self.plain_layers.contains(&(layer as u64)))
    }
}

struct Keys<'a>(&'a Map<String, Value>);

impl Keys<'_> {
    /// A key's value, or that of the language model's own configuration in a model of several.
    fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key).or_else(|| self.0.get("text_config")?.get(key))
    }

    /// The first of several names that is there; the error is about the first name.
    fn size_of(&self, names: &[&'static str]) -> Result<usize, Error> {
        for key in &names[1..] {
            if let Some(size) = self.optional_size(key)? {
                return Ok(size);
            }
        }
        self.size(names[0])
    }

    fn size(&self, key: &'static str) -> Result<usize, Error> {
        let expected = "a positive integer";
        self.optional_size(key)?.ok_or(Error { key, found: self.get(key).cloned(), expected })
    }

    fn optional_size(&self, key: &'static str) -> Result<Option<usize>, Error> {
        match self.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_u64() {
                Some(size @ 1..=LARGEST) => Ok(Some(size as usize)),
                _ => {
                    let expected = "a positive integer below 2^28";
                    Err(Error { key, found: Some(value.clone()), expected })
                }
            },
        }
    }

    /// A positive number; `None` where it is missing or 0.
    fn number(&self, key: &'static str) -> Result<Option<f64>, Error> {
        match self.0.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_f64() {
                Some(number) if (0.0..=LARGEST_FACTOR).contains(&number) => {
                    Ok(Some(number).filter(|number| *number >= 1.0 / LARGEST_FACTOR))
                }
                _ => Err(Error { key, found: Some(value.clone()), expected: "a number of 0 to 65536" }),
            },
        }
    }

    fn plain_layers(&self) -> Result<Vec<u64>, Error> {
        let key = "mlp_only_layers";
        let wrong =
            |found: &Value| Error { key, found: Some(found.clone()), expected: "a list of layer numbers" };
        match self.get(key) {
            None | Some(Value::Null) => Ok(Vec::new()),
            Some(found @ Value::Array(list)) => {
                list.iter().map(|layer| layer.as_u64().ok_or_else(|| wrong(found))).collect()
            }
            Some(found) => Err(wrong(found)),
        }
    }

    fn flag(&self, key: &'static str) -> Result<bool, Error> {
        match self.get(key) {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(value) => Err(Error { key, found: Some(value.clone()), expected: "true or false" }),
        }
    }
}
