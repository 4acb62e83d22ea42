//! Reads the files of `fixtures/vectors`.

use serde_json::Value;

/// Parses `fixtures/vectors/<name>.json`.
pub(crate) fn load(name: &str) -> Value {
    let path = format!("{}/../fixtures/vectors/{name}.json", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).expect("the vector file is part of the repository");
    serde_json::from_str(&text).expect("the vector file is JSON")
}

/// The entries of an array.
pub(crate) fn list(value: &Value) -> &[Value] {
    value.as_array().expect("an array")
}

/// A string of hexadecimal digits.
pub(crate) fn hex(value: &Value) -> u32 {
    u32::from_str_radix(text(value), 16).expect("hexadecimal digits")
}

/// An array of hexadecimal strings.
pub(crate) fn words(value: &Value) -> Vec<u32> {
    list(value).iter().map(hex).collect()
}

/// An integer.
pub(crate) fn int(value: &Value) -> i64 {
    value.as_i64().expect("an integer")
}

/// An array of integers.
pub(crate) fn ints<T: TryFrom<i64>>(value: &Value) -> Vec<T> {
    list(value).iter().map(|v| T::try_from(int(v)).ok().expect("in range")).collect()
}

/// A string.
pub(crate) fn text(value: &Value) -> &str {
    value.as_str().expect("a string")
}
