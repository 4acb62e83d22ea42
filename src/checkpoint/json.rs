//! JSON objects read with all their entries: serde's maps silently keep the last of two equal keys.

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use std::fmt;
use std::io::ErrorKind;
use std::marker::PhantomData;
use std::path::Path;

/// No configuration or index is larger.
const MOST_BYTES: u64 = 1 << 28;

/// Reads a file that should hold JSON: a regular one of bearable size, not a pipe or device that never ends.
pub(super) fn read(path: &Path) -> std::io::Result<Vec<u8>> {
    let metadata = std::fs::metadata(path)?;
    if !metadata.is_file() {
        return Err(std::io::Error::new(ErrorKind::InvalidInput, "not a regular file"));
    }
    if metadata.len() > MOST_BYTES {
        return Err(std::io::Error::new(ErrorKind::InvalidData, "far too large to be what its name says"));
    }
    std::fs::read(path)
}

/// The entries of an object in the file's order, repeated keys included.
#[derive(Debug)]
pub(super) struct Entries<V>(pub(super) Vec<(String, V)>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Entries<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EntriesVisitor<V>(PhantomData<V>);

        impl<'de, V: Deserialize<'de>> Visitor<'de> for EntriesVisitor<V> {
            type Value = Entries<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries<V>, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }

        deserializer.deserialize_map(EntriesVisitor(PhantomData))
    }
}
