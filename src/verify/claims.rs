//! What `report.json` claims, as far as it is checked.

use crate::arch::Columns;
use crate::convert::report::{Exactness, SCHEMA, TensorOrigin};
use crate::output::ShardFile;
use serde::Deserialize;
use serde_json::Value;

/// A report as read back.
#[derive(Debug, Deserialize)]
pub(super) struct Claims {
    schema: u32,
    pub(super) source: Source,
    target: Value,
    pub(super) modules: Vec<ClaimedModule>,
    pub(super) tensors: Vec<TensorOrigin>,
    pub(super) shards: Vec<ShardFile>,
    pub(super) side_files: SideFiles,
}

#[derive(Debug, Deserialize)]
pub(super) struct Source {
    pub(super) fingerprint: String,
}

#[derive(Debug, Deserialize)]
pub(super) struct SideFiles {
    pub(super) copied: Vec<String>,
}

#[derive(Debug, Deserialize)]
pub(super) struct ClaimedModule {
    pub(super) name: String,
    pub(super) source: String,
    #[serde(default)]
    pub(super) columns: Option<Columns>,
    pub(super) exactness: Exactness,
    pub(super) relative_error: f64,
    pub(super) row_order: Option<Vec<u32>>,
    pub(super) decision: ClaimedDecision,
}

#[derive(Debug, Deserialize)]
pub(super) struct ClaimedDecision {
    /// The source's module that this module's columns follow.
    #[serde(default)]
    pub(super) columns_follow: Option<String>,
}

impl Claims {
    /// Reads a report; the error says what is wrong with it.
    pub(super) fn parse(json: &[u8]) -> Result<Self, String> {
        let claims: Self = serde_json::from_slice(json).map_err(|e| e.to_string())?;
        match claims.schema {
            SCHEMA => Ok(claims),
            found => Err(format!("schema {found}: this version of requant reads schema {SCHEMA}")),
        }
    }

    /// Whether the output is for exllamav2.
    pub(super) fn is_exl2(&self) -> bool {
        ["bpw", "uniform"].iter().any(|key| self.target.get(key).is_some())
    }

    /// Whether the output is the source in new files, faults and all.
    pub(super) fn is_same(&self) -> bool {
        self.target == "same"
    }

    /// Whether the output is GPTQ, with a quantize_config.json.
    pub(super) fn is_gptq(&self) -> bool {
        self.target == "gptq"
    }
}
