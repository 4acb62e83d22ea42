//! Settings of the rotary embedding in `config.json`: their types. What they mean is for the model and the
//! output to say; a loader that meets text where a number should be fails, or runs with another value.

use super::fault::Fault;
use serde_json::{Map, Value};

/// Keys whose value is a number above 0.
const NUMBERS: [&str; 8] = [
    "rope_theta",
    "rope_local_base_freq",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "attention_factor",
];

/// Keys whose value is any number.
const ANY_NUMBERS: [&str; 6] =
    ["beta_fast", "beta_slow", "mscale", "mscale_all_dim", "short_mscale", "long_mscale"];

/// Keys whose value is a list of numbers.
const LISTS: [&str; 3] = ["long_factor", "short_factor", "mrope_section"];

/// Keys whose value is a name.
const NAMES: [&str; 2] = ["rope_type", "type"];

/// The objects that hold settings.
const SETTINGS: [&str; 2] = ["rope_scaling", "rope_parameters"];

/// Checks `config.json`, and the language model's own part of it. A value of null says nothing.
///
/// # Errors
/// [`Fault::ConfigValue`] for the first value of a wrong type.
pub(super) fn check(config: &Map<String, Value>) -> Result<(), Fault> {
    check_top(config, "")?;
    match config.get("text_config") {
        Some(Value::Object(text)) => check_top(text, "text_config."),
        _ => Ok(()),
    }
}

fn check_top(config: &Map<String, Value>, path: &str) -> Result<(), Fault> {
    // At top level, other keys than these may have the same names.
    for key in
        ["rope_theta", "rope_local_base_freq", "partial_rotary_factor", "original_max_position_embeddings"]
    {
        config.get(key).map_or(Ok(()), |value| check_value(key, value, path))?;
    }
    for key in SETTINGS {
        let Some(Value::Object(settings)) = config.get(key) else { continue };
        check_settings(settings, &format!("{path}{key}."))?;
        // Newer files have a set for each type of layer.
        for (layers, settings) in settings {
            if let Value::Object(settings) = settings {
                check_settings(settings, &format!("{path}{key}.{layers}."))?;
            }
        }
    }
    Ok(())
}

fn check_settings(settings: &Map<String, Value>, path: &str) -> Result<(), Fault> {
    settings.iter().try_for_each(|(key, value)| check_value(key, value, path))
}

fn check_value(key: &str, value: &Value, path: &str) -> Result<(), Fault> {
    let number = value.as_f64();
    let (fits, expected) = if NUMBERS.contains(&key) {
        (number.is_some_and(|number| number > 0.0), "a number above 0")
    } else if ANY_NUMBERS.contains(&key) {
        (number.is_some(), "a number")
    } else if LISTS.contains(&key) {
        (value.as_array().is_some_and(|list| list.iter().all(Value::is_number)), "a list of numbers")
    } else if NAMES.contains(&key) {
        (value.is_string(), "a name")
    } else {
        return Ok(());
    };
    match fits || value.is_null() {
        true => Ok(()),
        false => Err(Fault::ConfigValue { key: format!("{path}{key}"), found: value.clone(), expected }),
    }
}
