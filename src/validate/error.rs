//! Why a validation could not be made. What a validation finds is no error.

use crate::{Diagnose, Kind};
use std::io;
use std::path::{Path, PathBuf};

/// Why a validation could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A text can't be read.
    #[error("the text can't be read: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A file's name doesn't say what it holds.
    #[error("its name ends in none of .txt, .jsonl, .parquet and .json")]
    UnknownKind {
        /// The file.
        path: PathBuf,
    },
    /// A text holds bytes that aren't UTF-8.
    #[error("byte {at} is no UTF-8")]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// The first byte that isn't.
        at: usize,
    },
    /// A line of a .jsonl file isn't an object with a `text`.
    #[error("line {line}: {problem}")]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong.
        problem: LineProblem,
    },
    /// A .parquet file can't be read.
    #[error("no Parquet file with a column of text named `text`: {message}")]
    Parquet {
        /// The file.
        path: PathBuf,
        /// What its reader says.
        message: String,
    },
    /// The model has no tokenizer that can be read.
    #[error("the tokenizer can't be used: {message}")]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// The model has no tokenizer.json.
    #[error("there is no tokenizer.json, so that text has no tokens")]
    NoTokenizer {
        /// The file that is missing.
        path: PathBuf,
    },
    /// A list of token ids isn't one.
    #[error("no JSON list of token ids: {source}")]
    TokenIds {
        /// The file.
        path: PathBuf,
        /// What the parser says.
        source: serde_json::Error,
    },
    /// A token that the model doesn't have.
    #[error("token {id} at position {position}: the model has {vocabulary}")]
    TokenOutOfRange {
        /// The file.
        path: PathBuf,
        /// The token.
        id: u32,
        /// Its place.
        position: usize,
        /// Tokens of the model.
        vocabulary: usize,
    },
    /// The text is too short.
    #[error("the text has {found} tokens: at least 2 are needed")]
    TooShort {
        /// The text.
        path: PathBuf,
        /// Its tokens.
        found: usize,
    },
    /// `bos` was asked for, but no configuration names the token.
    #[error("config.json names no `bos_token_id`")]
    NoBos {
        /// The file.
        path: PathBuf,
    },
    /// Fewer than two tokens a window.
    #[error("a window of {window} tokens: at least 2 are needed, and at most {most}")]
    Window {
        /// What was asked for.
        window: usize,
        /// Positions of the model.
        most: usize,
    },
    /// The two models don't belong together.
    #[error("{name}: {found} in the converted model, {expected} in the source")]
    Mismatch {
        /// The module.
        name: String,
        /// In the converted model.
        found: String,
        /// In the source.
        expected: String,
    },
    /// No device was given.
    #[error("there is no device to validate on")]
    NoDevices,
    /// No module of the converted model has a counterpart in the source.
    #[error("no module of the converted model is one of the source")]
    NothingInCommon,
    /// report.json of the converted model can't be used.
    #[error("report.json: {message}")]
    Report {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// No linear matches the selection.
    #[error("--layers {pattern}: no linear's name matches")]
    NoLayers {
        /// The pattern.
        pattern: String,
    },
    /// A pattern that is no regular expression.
    #[error("--layers {pattern}: {message}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        message: String,
    },
    /// The model has no forward pass here.
    #[error("{0}")]
    Unsupported(#[from] crate::model::Unsupported),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] requant_kernels::Error),
}

/// What is wrong with a line of a .jsonl file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LineProblem {
    /// It isn't JSON.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    /// It has no string `text`.
    #[error("no field `text` with a string")]
    NoText,
}

impl Diagnose for Error {
    fn code(&self) -> &'static str {
        match self {
            Self::Read { .. } => "validate.read",
            Self::UnknownKind { .. } => "validate.unknown_kind",
            Self::NotUtf8 { .. } => "validate.not_utf8",
            Self::Line { .. } => "validate.line",
            Self::Parquet { .. } => "validate.parquet",
            Self::Tokenizer { .. } => "validate.tokenizer",
            Self::NoTokenizer { .. } => "validate.no_tokenizer",
            Self::TokenIds { .. } => "validate.token_ids",
            Self::TokenOutOfRange { .. } => "validate.token_out_of_range",
            Self::TooShort { .. } => "validate.too_short",
            Self::NoBos { .. } => "validate.no_bos",
            Self::Window { .. } => "validate.window",
            Self::Mismatch { .. } => "validate.mismatch",
            Self::NoDevices => "validate.no_devices",
            Self::NothingInCommon => "validate.nothing_in_common",
            Self::Report { .. } => "validate.report",
            Self::NoLayers { .. } => "validate.no_layers",
            Self::Pattern { .. } => "validate.pattern",
            Self::Unsupported(_) => "validate.unsupported",
            Self::Device(_) => "validate.device",
        }
    }

    fn kind(&self) -> Kind {
        match self {
            Self::Read { .. } => Kind::Environment,
            Self::Device(requant_kernels::Error::Shape { .. }) => Kind::Bug,
            Self::Device(_) => Kind::Environment,
            Self::UnknownKind { .. } | Self::NoBos { .. } | Self::Window { .. } => Kind::Usage,
            Self::NoLayers { .. } | Self::Pattern { .. } | Self::TooShort { .. } => Kind::Usage,
            Self::NoDevices | Self::NothingInCommon | Self::NoTokenizer { .. } => Kind::Usage,
            _ => Kind::Input,
        }
    }

    fn file(&self) -> Option<&Path> {
        match self {
            Self::Read { path, .. }
            | Self::UnknownKind { path }
            | Self::NotUtf8 { path, .. }
            | Self::Line { path, .. }
            | Self::Parquet { path, .. }
            | Self::Tokenizer { path, .. }
            | Self::NoTokenizer { path }
            | Self::TokenIds { path, .. }
            | Self::TokenOutOfRange { path, .. }
            | Self::TooShort { path, .. }
            | Self::NoBos { path }
            | Self::Report { path, .. } => Some(path),
            _ => None,
        }
    }

    fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::NoTokenizer { .. } => {
                "copy the model's tokenizer.json there (a SentencePiece tokenizer.model isn't read), or give the \
                 tokens themselves with --token-ids FILE, a JSON list of numbers"
            }
            Self::UnknownKind { .. } => "rename it after what it holds; .txt is taken as it is",
            Self::NoBos { .. } => "leave --bos out",
            Self::NothingInCommon | Self::Mismatch { .. } => {
                "SOURCE must be the model that CONVERTED was made of"
            }
            Self::TooShort { .. } => "give a longer text",
            Self::Device(requant_kernels::Error::OutOfMemory { .. }) => {
                "--device cpu needs none of its memory"
            }
            _ => return None,
        };
        Some(hint.into())
    }
}
