//! Files as the report lists them, and the index.

use super::claims::Claims;
use super::{Check, CheckKind, Fault};
use crate::convert::REPORT_FILE;
use crate::output::{self, Action, INDEX_FILE};
use crate::progress::{Event, Observer};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Names of all files of weights, sorted.
pub(super) fn list_weights(dir: &Path) -> Result<Vec<String>, crate::Error> {
    let failed = |source| output::Error::Io { action: Action::List, path: dir.to_owned(), source };
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".safetensors") {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// Sizes and hashes of the shards, presence of the other files, and no weights beside them.
pub(super) fn check(
    dir: &Path,
    weights: &[String],
    claims: &Claims,
    observer: &dyn Observer,
) -> Result<Check, crate::Error> {
    let mut check = Check::new(CheckKind::Files);
    observer.event(&Event::Stage { name: "hash", modules: claims.shards.len(), weights: 0 });
    for shard in &claims.shards {
        check.checked += 1;
        let mut fault = |message| check.faults.push(Fault::file(&shard.file, message));
        if !is_plain(&shard.file) {
            fault("the report names a file outside the directory".into());
            continue;
        }
        match hash(&dir.join(&shard.file), observer) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => return Err(crate::Error::Cancelled),
            Err(e) => fault(format!("can't be read: {e}")),
            Ok((bytes, _)) if bytes != shard.bytes => {
                fault(format!("{bytes} bytes; the report says {}", shard.bytes));
            }
            Ok((_, sha256)) if sha256 != shard.sha256 => {
                fault(format!("sha256 {sha256}; the report says {}", shard.sha256));
            }
            Ok(_) => {}
        }
        observer.event(&Event::Module { name: &shard.file, weights: 0 });
    }
    let mut others: BTreeSet<&str> = claims.side_files.copied.iter().map(String::as_str).collect();
    others.extend(["config.json", INDEX_FILE]);
    if claims.is_gptq() {
        others.insert("quantize_config.json");
    }
    for name in others {
        check.checked += 1;
        if !is_plain(name) || !dir.join(name).is_file() {
            check.faults.push(Fault::file(name, "is missing"));
        }
    }
    let listed: BTreeSet<&str> = claims.shards.iter().map(|shard| shard.file.as_str()).collect();
    for name in weights.iter().filter(|name| !listed.contains(name.as_str())) {
        let message = format!("{REPORT_FILE} doesn't list this file of weights; exllamav2 loads every one");
        check.faults.push(Fault::file(name, message));
    }
    Ok(check)
}

/// Whether the index names each tensor's file, no other, and their size.
pub(super) fn check_index(dir: &Path, weights: &[String], required: bool) -> Check {
    let mut check = Check::new(CheckKind::Index);
    let text = match std::fs::read(dir.join(INDEX_FILE)) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound && !required => {
            return Check::skipped(CheckKind::Index, "the directory has none");
        }
        Err(e) => {
            check.faults.push(Fault::file(INDEX_FILE, format!("can't be read: {e}")));
            return check;
        }
    };
    let index: Value = match serde_json::from_slice(&text) {
        Ok(index) => index,
        Err(e) => {
            check.faults.push(Fault::file(INDEX_FILE, e.to_string()));
            return check;
        }
    };
    let empty = Map::new();
    let map = index.get("weight_map").and_then(Value::as_object).unwrap_or(&empty);
    let mut stored: BTreeMap<String, &str> = BTreeMap::new();
    let mut total = 0;
    for name in weights {
        match header(&dir.join(name)) {
            Ok(tensors) => {
                for (tensor, bytes) in tensors {
                    total += bytes;
                    stored.insert(tensor, name);
                }
            }
            Err(message) => check.faults.push(Fault::file(name, message)),
        }
    }
    check.checked = map.len();
    for (tensor, file) in map {
        let (file, found) = (file.as_str().unwrap_or_default(), stored.get(tensor).copied());
        if found != Some(file) {
            let message = match found {
                Some(found) => format!("the index says {file}, but it is in {found}"),
                None => format!("the index says {file}, but no file has it"),
            };
            let (name, tensor) = (Some(INDEX_FILE.into()), Some(tensor.clone()));
            check.faults.push(Fault { file: name, tensor, message });
        }
    }
    for (tensor, file) in stored.iter().filter(|(tensor, _)| !map.contains_key(*tensor)) {
        let (name, tensor) = (Some((*file).into()), Some(tensor.clone()));
        check.faults.push(Fault { file: name, tensor, message: "the index doesn't list it".into() });
    }
    // Some writers leave the size out, or count what they merge: only ours is held to it.
    let size = index.pointer("/metadata/total_size").and_then(Value::as_u64);
    if required && check.faults.is_empty() && size != Some(total) {
        let found = size.map_or("nothing".into(), |size| size.to_string());
        let message = format!("total_size says {found}; the tensors take {total} bytes");
        check.faults.push(Fault::file(INDEX_FILE, message));
    }
    check
}

/// A report could name anything.
fn is_plain(name: &str) -> bool {
    Path::new(name).file_name().is_some_and(|file| file == name)
}

/// Size and sha256 of a file.
fn hash(path: &Path, observer: &dyn Observer) -> io::Result<(u64, String)> {
    const CHUNK: usize = 1 << 20;
    let mut file = File::open(path)?;
    let (mut hasher, mut chunk, mut bytes) = (Sha256::new(), vec![0; CHUNK], 0);
    loop {
        if observer.cancelled() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let n = match file.read(&mut chunk) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            read => read?,
        };
        if n == 0 {
            break;
        }
        bytes += n as u64;
        hasher.update(&chunk[..n]);
    }
    Ok((bytes, hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()))
}

/// Names and sizes of a file's tensors.
fn header(path: &Path) -> Result<Vec<(String, u64)>, String> {
    // The longest header that the safetensors crate reads.
    const LONGEST: u64 = 100_000_000;
    let mut file = File::open(path).map_err(|e| e.to_string())?;
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(|e| e.to_string())?;
    let length = u64::from_le_bytes(length);
    let mut text = Vec::new();
    file.take(length.min(LONGEST)).read_to_end(&mut text).map_err(|e| e.to_string())?;
    let header: Map<String, Value> = serde_json::from_slice(&text).map_err(|e| e.to_string())?;
    let tensors = header.into_iter().filter(|(name, _)| name != "__metadata__");
    Ok(tensors
        .map(|(name, entry)| {
            let offset = |i: usize| entry.pointer(&format!("/data_offsets/{i}")).and_then(Value::as_u64);
            let bytes = offset(1).unwrap_or(0).saturating_sub(offset(0).unwrap_or(0));
            (name, bytes)
        })
        .collect())
}
