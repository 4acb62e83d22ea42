//! Warnings are data: what was odd about the user's model, what was assumed, what it changes.

use serde::Serialize;

/// A stable name for each kind of warning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum WarningCode {}

/// One warning. `subject` is a module, tensor or file; `message` says what was found, what requant assumes
/// and what that changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Warning {
    /// Which kind.
    pub code: WarningCode,
    /// What it is about.
    pub subject: String,
    /// One or two sentences.
    pub message: String,
}
