//! The text that models are compared on, as windows of tokens.
//!
//! The tokens are those of tokenizer.json alone: nothing that configuration files say of special tokens is
//! added, but a BOS in front of each window where that is asked for.

use super::Error;
use crate::checkpoint::Checkpoint;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::path::{Path, PathBuf};

/// The text that is used where none is named; `sample/README.md` says what it is.
const SAMPLE: &str = include_str!("sample/heldout.txt");

/// Characters that are tokenized at a time, up to the next end of a line: a text can be much longer than the
/// tokens that are wanted of it, and the tokenizer takes time for all that it is given.
const PIECE: usize = 1 << 16;

/// Where tokens come from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Text {
    /// The built-in sample.
    #[default]
    Sample,
    /// The built-in text that models are calibrated on, which is not to judge them.
    Calibration,
    /// A file of text: `.txt` (or another ending that says nothing) as it is, `.jsonl` and `.parquet` with the
    /// texts of their field `text` joined by empty lines.
    File(PathBuf),
    /// A JSON list of token ids.
    TokenIds(PathBuf),
}

/// Windows of tokens, all of the same length but perhaps the last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Windows {
    /// The tokens of all windows, one after the other.
    pub tokens: Vec<u32>,
    /// Tokens a window.
    pub window: usize,
    /// Whether each begins with the BOS token.
    pub bos: bool,
    /// A file's name, or `built-in`.
    pub name: String,
}

impl Windows {
    /// Takes `tokens` tokens at most of a text, in windows that don't overlap. A window holds `window` tokens, or
    /// as many as the model has positions; BOS counts as one of them.
    ///
    /// # Errors
    /// Those of reading the text and the tokenizer; a text or a window of fewer than 2 tokens.
    pub fn new(
        text: &Text,
        model: &Checkpoint,
        tokens: usize,
        window: Option<usize>,
        bos: bool,
    ) -> Result<Self, Error> {
        let positions = model.config().get("max_position_embeddings").and_then(Value::as_u64);
        let most = positions.map_or(usize::MAX, |most| most as usize);
        let window = window.unwrap_or(super::DEFAULT_WINDOW.min(most));
        if window < 2 || window > most {
            return Err(Error::Window { window, most });
        }
        let bos_token = match bos {
            true => Some(bos_token(model)?),
            false => None,
        };
        let content = window - usize::from(bos);
        // Of the last window, too, one token is BOS.
        let wanted = tokens - tokens.div_ceil(window) * usize::from(bos);
        let (path, ids) = match text {
            Text::TokenIds(path) => (path.clone(), read_token_ids(path)?),
            Text::Sample => (PathBuf::from("the built-in text"), tokenize(&[SAMPLE.into()], model, wanted)?),
            Text::Calibration => {
                let text = crate::calibrate::text();
                (PathBuf::from("the built-in text"), tokenize(&[text], model, wanted)?)
            }
            Text::File(path) => (path.clone(), tokenize(&read_texts(path)?, model, wanted)?),
        };
        let ids = &ids[..ids.len().min(wanted)];
        let mut all = Vec::with_capacity(tokens);
        for part in ids.chunks(content) {
            let before = all.len();
            all.extend(bos_token.iter().chain(part));
            // One token alone predicts nothing.
            if all.len() - before < 2 {
                all.truncate(before);
            }
        }
        if all.is_empty() {
            return Err(Error::TooShort { path, found: ids.len() });
        }
        let vocabulary = model.dims().map_or(usize::MAX, |dims| dims.vocab);
        if let Some(position) = all.iter().position(|&id| id as usize >= vocabulary) {
            return Err(Error::TokenOutOfRange { path, id: all[position], position, vocabulary });
        }
        let name = match text {
            Text::Sample | Text::Calibration => "built-in".into(),
            Text::File(path) | Text::TokenIds(path) => {
                path.file_name().map_or(String::new(), |name| name.to_string_lossy().into_owned())
            }
        };
        Ok(Self { tokens: all, window, bos, name })
    }

    /// How many.
    pub fn count(&self) -> usize {
        self.tokens.len().div_ceil(self.window)
    }

    /// The first windows that hold at most `tokens` tokens; one at least.
    #[must_use]
    pub fn first(&self, tokens: usize) -> &[u32] {
        let windows = (tokens / self.window).max(1);
        &self.tokens[..self.tokens.len().min(windows * self.window)]
    }

    /// sha256 of the ids as little-endian u32, in hexadecimal.
    pub fn sha256(&self) -> String {
        let mut hash = Sha256::new();
        for id in &self.tokens {
            hash.update(id.to_le_bytes());
        }
        hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

fn bos_token(model: &Checkpoint) -> Result<u32, Error> {
    let id = match model.config().get("bos_token_id") {
        Some(Value::Array(ids)) => ids.first().and_then(Value::as_u64),
        Some(id) => id.as_u64(),
        None => None,
    };
    let path = model.dir().join(crate::checkpoint::CONFIG);
    id.and_then(|id| u32::try_from(id).ok()).ok_or(Error::NoBos { path })
}

fn read(path: &Path) -> Result<String, Error> {
    let bytes = std::fs::read(path).map_err(|source| Error::Read { path: path.into(), source })?;
    String::from_utf8(bytes)
        .map_err(|e| Error::NotUtf8 { path: path.into(), at: e.utf8_error().valid_up_to() })
}

fn read_token_ids(path: &Path) -> Result<Vec<u32>, Error> {
    serde_json::from_str(&read(path)?).map_err(|source| Error::TokenIds { path: path.into(), source })
}

/// The texts of a file.
fn read_texts(path: &Path) -> Result<Vec<String>, Error> {
    match path.extension().and_then(|end| end.to_str()).map(str::to_lowercase).as_deref() {
        Some("jsonl" | "ndjson") => read_jsonl(path),
        Some("parquet") => read_parquet(path),
        Some("json") => Err(Error::UnknownKind { path: path.into() }),
        _ => Ok(vec![read(path)?]),
    }
}

fn read_jsonl(path: &Path) -> Result<Vec<String>, Error> {
    let text = read(path)?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let of_line = |(i, line): (usize, &str)| {
        let failed = |problem| Error::Line { path: path.into(), line: i + 1, problem };
        let mut value: Value = serde_json::from_str(line).map_err(|e| failed(e.into()))?;
        match value.get_mut("text").map(Value::take) {
            Some(Value::String(text)) => Ok(text),
            _ => Err(failed(super::error::LineProblem::NoText)),
        }
    };
    lines.map(of_line).collect()
}

fn read_parquet(path: &Path) -> Result<Vec<String>, Error> {
    let failed = |message: String| Error::Parquet { path: path.into(), message };
    let file = File::open(path).map_err(|source| Error::Read { path: path.into(), source })?;
    let reader = SerializedFileReader::new(file).map_err(|e| failed(e.to_string()))?;
    let mut texts = Vec::new();
    for row in reader.get_row_iter(None).map_err(|e| failed(e.to_string()))? {
        let row = row.map_err(|e| failed(e.to_string()))?;
        match row.get_column_iter().find(|(name, _)| *name == "text") {
            Some((_, Field::Str(text))) => texts.push(text.clone()),
            Some((_, Field::Null)) => {}
            Some((_, other)) => return Err(failed(format!("`text` holds {other}"))),
            None => return Err(failed("it has no such column".into())),
        }
    }
    Ok(texts)
}

/// The first tokens of the texts, joined by empty lines; `wanted` of them, or a few more.
fn tokenize(texts: &[String], model: &Checkpoint, wanted: usize) -> Result<Vec<u32>, Error> {
    let path = model.dir().join("tokenizer.json");
    if !path.exists() {
        return Err(Error::NoTokenizer { path });
    }
    let failed = |e: tokenizers::Error| Error::Tokenizer { path: path.clone(), message: e.to_string() };
    let mut tokenizer = tokenizers::Tokenizer::from_file(&path).map_err(failed)?;
    // What a tokenizer.json says of lengths is about batches.
    tokenizer.with_padding(None);
    tokenizer.with_truncation(None).map_err(failed)?;
    let joined = texts.join("\n\n");
    // A text that is tokenized in pieces can have other tokens at their ends, so the first piece is doubled
    // until it has enough.
    let mut length = (wanted.saturating_mul(8)).max(PIECE);
    loop {
        let end = end_of_line(&joined, length);
        let encoding = tokenizer.encode(&joined[..end], false).map_err(failed)?;
        // The last word may go on behind the end.
        if end == joined.len() || encoding.len() > wanted + 64 {
            return Ok(encoding.get_ids().to_vec());
        }
        length *= 2;
    }
}

/// The end of the line that holds byte `at`.
fn end_of_line(text: &str, at: usize) -> usize {
    if at >= text.len() {
        return text.len();
    }
    text.as_bytes()[at..].iter().position(|&b| b == b'\n').map_or(text.len(), |i| at + i + 1)
}

#[cfg(test)]
mod tests;
