//! Rope settings where exllamav2 looks for them.

use serde_json::{Map, Value};

use super::ConfigNote;

const ORIGINAL: &str = "original_max_position_embeddings";

/// What each kind of scaling that exllamav2 knows insists on in `rope_scaling`, and what it doesn't read
/// there although transformers does (exllamav2's config.py and rope.py, transformers' modeling_rope_utils.py).
struct Scaling {
    kind: &'static str,
    needs: &'static [&'static str],
    ignores: &'static [&'static str],
}

const SCALINGS: [Scaling; 6] = [
    Scaling { kind: "linear", needs: &["factor"], ignores: &[] },
    Scaling {
        kind: "llama3",
        needs: &["factor", "low_freq_factor", "high_freq_factor", ORIGINAL],
        ignores: &[],
    },
    Scaling {
        kind: "yarn",
        needs: &["factor", ORIGINAL],
        ignores: &["beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"],
    },
    Scaling { kind: "longrope", needs: LONGROPE, ignores: LONGROPE_IGNORED },
    Scaling { kind: "su", needs: LONGROPE, ignores: LONGROPE_IGNORED },
    Scaling { kind: "mrope", needs: &["mrope_section"], ignores: &[] },
];
const LONGROPE: &[&str] = &["long_factor", "short_factor"];
const LONGROPE_IGNORED: &[&str] = &["attention_factor", "short_mscale", "long_mscale"];

/// Writes `rope_theta`, `rope_scaling`, `partial_rotary_factor` and `original_max_position_embeddings` at top
/// level, from `rope_parameters` where they aren't there yet.
///
/// Where both places speak, transformers' order holds: a `rope_scaling` replaces `rope_parameters`, whose
/// `rope_theta` otherwise comes before the one at top level.
pub(super) fn to_top_level(json: &mut Map<String, Value>, notes: &mut Vec<ConfigNote>) {
    let mut stated = object(json, "rope_scaling", notes);
    if let Some(stated) = &mut stated {
        keep_one_kind_key(stated, notes);
    }
    let mut parameters = object(json, "rope_parameters", notes);
    if parameters.as_ref().is_some_and(is_per_layer_type) {
        notes.push(ConfigNote::RopePerLayerType);
        if stated.is_none() {
            return;
        }
        parameters = None;
    }
    if let (Some(stated), Some(parameters)) = (&stated, &parameters)
        && kind(stated) != kind(parameters)
    {
        let (taken, dropped) = ("rope_scaling", "rope_parameters");
        notes.push(ConfigNote::RopeDisagrees { key: "rope_scaling", taken, dropped });
    }

    place_rope_theta(json, stated.as_ref(), parameters.as_ref(), notes);
    let partial = parameters.as_ref().and_then(|p| p.get("partial_rotary_factor"));
    if let (Some(partial), None) = (partial, present(json, "partial_rotary_factor")) {
        place(json, "partial_rotary_factor", partial.clone());
    }
    if let Some(scaling) = stated.or_else(|| parameters.and_then(scaling_of)) {
        place_rope_scaling(json, scaling, notes);
    }
}

/// The value of a key that isn't null.
fn present<'a>(json: &'a Map<String, Value>, key: &str) -> Option<&'a Value> {
    json.get(key).filter(|value| !value.is_null())
}

/// The object at a key; an empty one says nothing, to exllamav2 as to transformers.
fn object(
    json: &Map<String, Value>,
    key: &'static str,
    notes: &mut Vec<ConfigNote>,
) -> Option<Map<String, Value>> {
    match present(json, key)? {
        Value::Object(object) => Some(object.clone()).filter(|object| !object.is_empty()),
        _ => {
            notes.push(ConfigNote::RopeNotAnObject { key });
            None
        }
    }
}

/// Whether `rope_parameters` holds a set for each type of layer instead of one.
fn is_per_layer_type(parameters: &Map<String, Value>) -> bool {
    parameters.values().any(Value::is_object)
}

/// The kind of scaling, `rope_type` first as in transformers.
fn kind(settings: &Map<String, Value>) -> Option<&str> {
    ["rope_type", "type"].iter().find_map(|key| settings.get(*key)?.as_str().filter(|kind| !kind.is_empty()))
}

/// exllamav2 stops where both keys are set, even to the same kind.
fn keep_one_kind_key(scaling: &mut Map<String, Value>, notes: &mut Vec<ConfigNote>) {
    if !(scaling.contains_key("type") && scaling.contains_key("rope_type")) {
        return;
    }
    let named = |key: &str| scaling.get(key).and_then(Value::as_str).map(str::to_owned);
    match (named("type"), named("rope_type")) {
        (Some(_), None) => scaling.shift_remove("rope_type"),
        (dropped, kept) => {
            if let (Some(dropped_type), Some(rope_type)) = (dropped, kept)
                && dropped_type != rope_type
            {
                notes.push(ConfigNote::RopeKindsDiffer { rope_type, dropped_type });
            }
            scaling.shift_remove("type")
        }
    };
}

/// `rope_parameters` as a `rope_scaling`, unless they say that there is none.
fn scaling_of(mut parameters: Map<String, Value>) -> Option<Map<String, Value>> {
    parameters.shift_remove("rope_theta");
    parameters.shift_remove("partial_rotary_factor");
    let kind = kind(&parameters)?.to_owned();
    parameters.shift_remove("type");
    parameters.shift_insert(0, "rope_type".to_owned(), kind.as_str().into());
    (kind != "default").then_some(parameters)
}

fn place_rope_theta(
    json: &mut Map<String, Value>,
    stated: Option<&Map<String, Value>>,
    parameters: Option<&Map<String, Value>>,
    notes: &mut Vec<ConfigNote>,
) {
    let inner = match stated {
        Some(scaling) => present(scaling, "rope_theta").map(|theta| ("rope_scaling", theta)),
        None => parameters.and_then(|p| present(p, "rope_theta")).map(|theta| ("rope_parameters", theta)),
    };
    let outer = present(json, "rope_theta");
    match (inner, outer) {
        (Some((taken, inner)), Some(outer)) => {
            // 10000 and 10000.0 are one theta.
            if inner.as_f64() != outer.as_f64() {
                let dropped = "config.json's top level";
                notes.push(ConfigNote::RopeDisagrees { key: "rope_theta", taken, dropped });
                place(json, "rope_theta", inner.clone());
            }
        }
        (Some((_, inner)), None) => place(json, "rope_theta", inner.clone()),
        (None, Some(_)) => {}
        (None, None) => match parameters.and_then(|p| present(p, "rope_theta")) {
            // Beside a rope_scaling without one: better than none.
            Some(theta) => place(json, "rope_theta", theta.clone()),
            None => {
                let nested = |key: &str| json.get(key).and_then(|v| v.get("rope_theta")).is_some();
                if !nested("text_config") && !nested("attn_config") {
                    notes.push(ConfigNote::NoRopeTheta);
                }
            }
        },
    }
}

fn place_rope_scaling(
    json: &mut Map<String, Value>,
    mut scaling: Map<String, Value>,
    notes: &mut Vec<ConfigNote>,
) {
    let kind = kind(&scaling).map(str::to_owned);
    match kind {
        None => notes.push(ConfigNote::RopeKindMissing),
        Some(kind) if kind == "default" => {}
        Some(kind) => match SCALINGS.iter().find(|known| known.kind == kind) {
            None => notes.push(ConfigNote::RopeKindIgnored { kind }),
            Some(known) => {
                agree_on_original(json, &mut scaling, known, notes);
                note_keys(json, &scaling, known, notes);
                if kind == "yarn" {
                    note_yarn_context(json, &scaling, notes);
                }
            }
        },
    }
    place(json, "rope_scaling", scaling.into());
}

/// `original_max_position_embeddings` stands at top level in some files and in the settings in others; the
/// readers differ in where they look, so it is written to both. Top level comes first in transformers.
fn agree_on_original(
    json: &mut Map<String, Value>,
    scaling: &mut Map<String, Value>,
    known: &Scaling,
    notes: &mut Vec<ConfigNote>,
) {
    match (present(json, ORIGINAL).cloned(), present(scaling, ORIGINAL).cloned()) {
        (None, Some(inner)) => place(json, ORIGINAL, inner),
        (Some(outer), None) if known.needs.contains(&ORIGINAL) => {
            scaling.insert(ORIGINAL.to_owned(), outer);
        }
        (Some(outer), Some(inner)) if outer.as_f64() != inner.as_f64() => {
            let (taken, dropped) = ("config.json's top level", "rope_scaling");
            notes.push(ConfigNote::RopeDisagrees { key: ORIGINAL, taken, dropped });
            scaling.insert(ORIGINAL.to_owned(), outer);
        }
        _ => {}
    }
}

fn note_keys(
    json: &Map<String, Value>,
    scaling: &Map<String, Value>,
    known: &Scaling,
    notes: &mut Vec<ConfigNote>,
) {
    let kind = || known.kind.to_owned();
    for key in known.needs {
        if present(scaling, key).is_none() {
            notes.push(ConfigNote::RopeKeyMissing { kind: kind(), key });
        }
    }
    // longrope's is the one that exllamav2 takes from top level.
    if known.needs == LONGROPE && present(json, ORIGINAL).is_none() {
        notes.push(ConfigNote::RopeKeyMissing { kind: kind(), key: ORIGINAL });
    }
    for key in known.ignores {
        if present(scaling, key).is_some_and(|value| matters(key, value, scaling)) {
            notes.push(ConfigNote::RopeKeyIgnored { kind: kind(), key });
        }
    }
}

/// Whether an ignored key says anything else than what exllamav2 does anyway.
fn matters(key: &str, value: &Value, scaling: &Map<String, Value>) -> bool {
    let number = value.as_f64().unwrap_or(f64::NAN);
    match key {
        "beta_fast" => number != 32.0,
        "beta_slow" => number != 1.0,
        "truncate" => *value == Value::Bool(false),
        // transformers takes them only together.
        "mscale" => scaling.contains_key("mscale_all_dim"),
        "mscale_all_dim" => scaling.contains_key("mscale"),
        "attention_factor" if scaling.contains_key("short_factor") => true,
        "attention_factor" => {
            let factor = scaling.get("factor").and_then(Value::as_f64).unwrap_or(f64::NAN);
            let usual = 0.1 * factor.ln() + 1.0;
            // Files hold it rounded. What is no number is never as usual.
            let as_usual = (number - usual).abs() < 1e-6;
            !as_usual
        }
        _ => true,
    }
}

fn note_yarn_context(json: &Map<String, Value>, scaling: &Map<String, Value>, notes: &mut Vec<ConfigNote>) {
    let length = |map: &Map<String, Value>, key: &str| map.get(key).and_then(Value::as_u64);
    if let (Some(max_position_embeddings), Some(original_max_position_embeddings)) =
        (length(json, "max_position_embeddings"), length(scaling, ORIGINAL))
    {
        notes.push(if max_position_embeddings > original_max_position_embeddings {
            ConfigNote::YarnRamp { max_position_embeddings, original_max_position_embeddings }
        } else {
            ConfigNote::YarnInactive { max_position_embeddings, original_max_position_embeddings }
        });
    }
}

/// Sets a key where it stands, or behind the last key about rope.
fn place(json: &mut Map<String, Value>, key: &str, value: Value) {
    if let Some(old) = json.get_mut(key) {
        *old = value;
        return;
    }
    let last = json.keys().rposition(|key| key.starts_with("rope_"));
    json.shift_insert(last.map_or(json.len(), |i| i + 1), key.to_owned(), value);
}
