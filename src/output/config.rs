//! The output's `config.json`.

use std::fmt;

use serde_json::{Map, Number, Value, json};

use super::rope;
use crate::arch::{self, Window};

/// The exllamav2 whose configuration is written.
pub const EXLLAMAV2_VERSION: &str = "0.3.2";

/// What the conversion decided, as far as the configuration says it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exl2Facts {
    /// The bits a weight that were reached.
    pub bpw: f64,
    /// The head's bits; 16 for a dense one.
    pub head_bits: u8,
    /// The source ties the head to the embeddings and the output doesn't.
    pub untied: bool,
}

/// A configuration and what exllamav2 makes of it that its user should know.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// `config.json`, for [`config_json`].
    pub json: Map<String, Value>,
    /// What exllamav2 fails on or silently reads otherwise than transformers does.
    pub notes: Vec<ConfigNote>,
}

/// The source's `config.json` as exllamav2 has to find it (specs: what its `config.py` reads).
///
/// - `quantization_config` is the one that exllamav2's own converter writes, with the bits reached and no
///   calibration. The source's goes, and with it a `checkpoint_format` that exllamav2 would obey.
/// - `rope_theta`, `rope_scaling` and `original_max_position_embeddings` stand at top level, where alone
///   exllamav2 looks; newer files have them in `rope_parameters`, which stays.
/// - `rope_scaling` has one of `type` and `rope_type`: with both exllamav2 stops.
/// - `dtype` and `torch_dtype` say float16.
/// - Keys that it insists on and newer files name otherwise, or leave out, are added (`add_keys`).
///
/// All other keys stay as and where they are.
pub fn exl2_config(source: &Map<String, Value>, facts: &Exl2Facts) -> Config {
    let mut json = source.clone();
    let mut notes = Vec::new();

    json.insert("quantization_config".to_owned(), quantization_config(facts));
    if let Some(Value::Object(text_config)) = json.get_mut("text_config") {
        text_config.shift_remove("quantization_config");
    }
    let dtypes = ["dtype", "torch_dtype"].map(|key| match json.get_mut(key) {
        Some(dtype) => {
            *dtype = "float16".into();
            true
        }
        None => false,
    });
    if dtypes == [false; 2] {
        json.insert("torch_dtype".to_owned(), "float16".into());
    }
    if facts.untied {
        json.insert("tie_word_embeddings".to_owned(), false.into());
    }
    note_architectures(&json, &mut notes);
    add_keys(&mut json);
    rope::to_top_level(&mut json, &mut notes);
    note_sliding_window(&json, &mut notes);
    Config { json, notes }
}

/// The source's `config.json` with another `quantization_config`, and rope settings at top level as well.
pub fn gptq_config(source: &Map<String, Value>, quantization: Map<String, Value>) -> Config {
    let mut json = source.clone();
    json.insert("quantization_config".to_owned(), Value::Object(quantization));
    rope_for_older_readers(&mut json);
    Config { json, notes: Vec::new() }
}

/// Programs from before transformers 5 know no `rope_parameters`: they silently take a `rope_theta` of 10000.
fn rope_for_older_readers(json: &mut Map<String, Value>) {
    rope::to_top_level(json, &mut Vec::new());
}

/// The source's `config.json` without a quantization, for weights of type `dtype`, and rope settings at top level
/// as well.
pub fn dense_config(source: &Map<String, Value>, dtype: &str) -> Config {
    let mut json = source.clone();
    json.shift_remove("quantization_config");
    for key in ["dtype", "torch_dtype"] {
        if let Some(value) = json.get_mut(key) {
            *value = dtype.into();
        }
    }
    rope_for_older_readers(&mut json);
    Config { json, notes: Vec::new() }
}

/// The text of a `config.json`: indented by two, as transformers writes it, with a final newline.
pub fn config_json(json: &Map<String, Value>) -> String {
    // The alternate form of a `Value` is the pretty one.
    format!("{:#}\n", Value::Object(json.clone()))
}

/// Something that exllamav2 fails on or silently reads otherwise than transformers does.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ConfigNote {
    /// `architectures` has not exactly one entry.
    Architectures {
        /// How many it has.
        count: usize,
    },
    /// No `rope_theta` anywhere.
    NoRopeTheta,
    /// Two places say different things.
    RopeDisagrees {
        /// Of what: `rope_theta` or `rope_scaling`.
        key: &'static str,
        /// The place that was believed.
        taken: &'static str,
        /// The other.
        dropped: &'static str,
    },
    /// `rope_scaling` or `rope_parameters` is no object.
    RopeNotAnObject {
        /// Which.
        key: &'static str,
    },
    /// `rope_parameters` holds one set for each type of layer.
    RopePerLayerType,
    /// Scaling without a kind.
    RopeKindMissing,
    /// `type` and `rope_type` name different kinds.
    RopeKindsDiffer {
        /// `rope_type`, which was kept, as transformers does.
        rope_type: String,
        /// `type`, which was dropped.
        dropped_type: String,
    },
    /// A kind that exllamav2 doesn't know.
    RopeKindIgnored {
        /// The kind.
        kind: String,
    },
    /// A key that exllamav2 insists on.
    RopeKeyMissing {
        /// The kind of scaling.
        kind: String,
        /// The key.
        key: &'static str,
    },
    /// A key that exllamav2 doesn't read although it changes positions.
    RopeKeyIgnored {
        /// The kind of scaling.
        kind: String,
        /// The key.
        key: &'static str,
    },
    /// YaRN that exllamav2 leaves off, since the context isn't longer than the original one.
    YarnInactive {
        /// The context.
        max_position_embeddings: u64,
        /// The original one.
        original_max_position_embeddings: u64,
    },
    /// YaRN's ramp, which exllamav2 places by the context and transformers by the original one.
    YarnRamp {
        /// The context.
        max_position_embeddings: u64,
        /// The original one.
        original_max_position_embeddings: u64,
    },
    /// A sliding window that exllamav2 doesn't apply to this architecture.
    SlidingWindow {
        /// Its length in tokens.
        window: u64,
    },
}

impl fmt::Display for ConfigNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConfigNote::Architectures { count } => {
                write!(f, "architectures has {count} entries; exllamav2 loads a model with exactly one")
            }
            ConfigNote::NoRopeTheta => {
                f.write_str("rope_theta stands nowhere; exllamav2 takes 10000")
            }
            ConfigNote::RopeDisagrees { key, taken, dropped } => {
                write!(f, "{taken} and {dropped} disagree about {key}; {taken} was taken, as transformers does")
            }
            ConfigNote::RopeNotAnObject { key } => {
                write!(f, "{key} is not an object; exllamav2 finds no rope settings in it")
            }
            ConfigNote::RopePerLayerType => f.write_str(
                "rope_parameters differ by type of layer; exllamav2 has one rope_theta and rope_scaling for all, \
                 so they were left where they are and it won't see them",
            ),
            ConfigNote::RopeKindMissing => {
                f.write_str("rope_scaling has neither type nor rope_type; exllamav2 ignores it")
            }
            ConfigNote::RopeKindsDiffer { rope_type, dropped_type } => write!(
                f,
                "rope_scaling has rope_type {rope_type} and type {dropped_type}; rope_type was kept, as \
                 transformers does"
            ),
            ConfigNote::RopeKindIgnored { kind } => {
                write!(f, "rope scaling of type {kind} is unknown to exllamav2, which runs without scaling")
            }
            ConfigNote::RopeKeyMissing { kind, key } => {
                write!(f, "rope scaling of type {kind} lacks {key}; exllamav2 fails to load it")
            }
            ConfigNote::RopeKeyIgnored { kind, key } => {
                write!(f, "exllamav2 ignores {key} of rope scaling of type {kind}; long contexts come out otherwise")
            }
            ConfigNote::YarnInactive { max_position_embeddings, original_max_position_embeddings } => write!(
                f,
                "exllamav2 applies yarn only where max_position_embeddings ({max_position_embeddings}) exceeds \
                 original_max_position_embeddings ({original_max_position_embeddings}), so not here"
            ),
            ConfigNote::YarnRamp { max_position_embeddings, original_max_position_embeddings } => write!(
                f,
                "exllamav2 places yarn's ramp by max_position_embeddings ({max_position_embeddings}), transformers \
                 by original_max_position_embeddings ({original_max_position_embeddings}); positions differ a little"
            ),
            ConfigNote::SlidingWindow { window } => write!(
                f,
                "exllamav2 doesn't apply this model's sliding window of {window} tokens; contexts longer than that \
                 come out otherwise"
            ),
        }
    }
}

fn quantization_config(facts: &Exl2Facts) -> Value {
    let bits = (facts.bpw * 1e4).round() / 1e4;
    json!({
        "quant_method": "exl2",
        "version": EXLLAMAV2_VERSION,
        "bits": Number::from_f64(bits),
        "head_bits": facts.head_bits,
        "calibration": { "rows": 0, "length": 0, "dataset": "(none)" },
    })
}

/// Adds what exllamav2 doesn't load a model without, where the source says it in other words:
/// `layer_norm_epsilon` (Starcoder2 has `norm_epsilon`), `n_inner` (GPTBigCode leaves it out where it is four
/// times `n_embd`), and of `vision_config` `rope_theta` (newer files have it in `rope_parameters`) and
/// `spatial_patch_size` (Qwen2-VL's, the same as `patch_size`).
fn add_keys(json: &mut Map<String, Value>) {
    let missing = |json: &Map<String, Value>, key: &str| json.get(key).is_none_or(Value::is_null);
    let arch = arch::find(json);
    if let Some(epsilon) = json.get("norm_epsilon").cloned()
        && missing(json, "layer_norm_epsilon")
    {
        json.insert("layer_norm_epsilon".into(), epsilon);
    }
    if arch.is_some_and(|arch| arch.learned_positions)
        && missing(json, "n_inner")
        && missing(json, "intermediate_size")
        && let Some(hidden) = json.get("n_embd").and_then(Value::as_u64)
    {
        json.insert("n_inner".into(), (4 * hidden).into());
    }
    let Some(Value::Object(vision)) = json.get_mut("vision_config") else { return };
    let theta = vision.get("rope_parameters").and_then(|rope| rope.get("rope_theta")).and_then(Value::as_f64);
    if let Some(theta) = theta.filter(|_| missing(vision, "rope_theta")) {
        vision.insert("rope_theta".into(), theta.into());
    }
    let is_qwen = json.get("model_type").and_then(Value::as_str).is_some_and(|t| t.starts_with("qwen2"));
    if let Some(Value::Object(vision)) = json.get_mut("vision_config").filter(|_| is_qwen)
        && missing(vision, "spatial_patch_size")
        && let Some(size) = vision.get("patch_size").cloned()
    {
        vision.insert("spatial_patch_size".into(), size);
    }
}

fn note_architectures(json: &Map<String, Value>, notes: &mut Vec<ConfigNote>) {
    let count = json.get("architectures").and_then(Value::as_array).map_or(0, Vec::len);
    if count != 1 {
        notes.push(ConfigNote::Architectures { count });
    }
}

fn note_sliding_window(json: &Map<String, Value>, notes: &mut Vec<ConfigNote>) {
    let applied = match arch::find(json).map_or(Window::None, |arch| arch.window) {
        Window::None => false,
        Window::Always => true,
        Window::IfUsed => json.get("use_sliding_window") == Some(&Value::Bool(true)),
    };
    let context = json.get("max_position_embeddings").and_then(Value::as_u64).unwrap_or(u64::MAX);
    if let Some(window) = json.get("sliding_window").and_then(Value::as_u64)
        && applied
        && window < context
    {
        notes.push(ConfigNote::SlidingWindow { window });
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
