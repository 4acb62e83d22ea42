//! What an output is made of: where this is the same, so is every byte.

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Name of the report in a complete output.
pub const REPORT_FILE: &str = "report.json";

const NAME: &str = "requant";

/// Name and version of the tool, as in `report.json`.
pub const TOOL: &str = concat!("requant ", env!("CARGO_PKG_VERSION"));

/// What decides the bytes of an output.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Identity {
    /// Name and version of the tool.
    pub tool: String,
    /// Fingerprint of the source.
    pub source: String,
    /// What was asked for, by the names of the flags; what has no effect on bytes isn't among them.
    pub flags: Map<String, Value>,
}

/// Something in which two outputs differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// What differs: `source`, `version`, or a flag.
    pub what: String,
    /// How it was when the output was begun.
    pub before: String,
    /// How it is asked for now.
    pub now: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} was {} and is {}", self.what, self.before, self.now)
    }
}

impl Identity {
    /// That of an output of this version of the tool.
    pub fn new(source: String, flags: Map<String, Value>) -> Self {
        Identity { tool: TOOL.to_owned(), source, flags }
    }

    /// In what `now` differs.
    pub fn differences(&self, now: &Identity) -> Vec<Difference> {
        let mut differences = Vec::new();
        let mut compare = |what: &str, before: String, now: String| {
            if before != now {
                differences.push(Difference { what: what.to_owned(), before, now });
            }
        };
        compare("the tool", self.tool.clone(), now.tool.clone());
        compare("the source", short(&self.source), short(&now.source));
        let only_now = now.flags.keys().filter(|name| !self.flags.contains_key(*name));
        for name in self.flags.keys().chain(only_now) {
            compare(&format!("--{name}"), value(&self.flags, name), value(&now.flags, name));
        }
        differences
    }

    /// That of a complete output of ours; `None` for any other directory, and for a link to one.
    pub fn of_output(dir: &Path) -> Option<Self> {
        /// What `report.json` has of it.
        #[derive(Deserialize)]
        struct Report {
            tool: String,
            source: Source,
            #[serde(default)]
            flags: Map<String, Value>,
        }
        #[derive(Deserialize)]
        struct Source {
            fingerprint: String,
        }
        if !dir.symlink_metadata().is_ok_and(|metadata| metadata.is_dir()) {
            return None;
        }
        let report: Report = serde_json::from_slice(&std::fs::read(dir.join(REPORT_FILE)).ok()?).ok()?;
        let ours = report.tool.split(' ').next() == Some(NAME);
        ours.then_some(Identity { tool: report.tool, source: report.source.fingerprint, flags: report.flags })
    }
}

/// As much of a fingerprint as a person compares.
fn short(fingerprint: &str) -> String {
    fingerprint.chars().take(16).collect()
}

fn value(flags: &Map<String, Value>, name: &str) -> String {
    match flags.get(name) {
        None => "left out".to_owned(),
        Some(Value::Bool(true)) => "given".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}
