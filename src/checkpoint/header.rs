//! The header of one safetensors file, with every lie it can tell named.
//!
//! ```text
//! | length of the header, u64 little-endian | header, JSON | tensors' bytes, without gaps |
//! ```
//!
//! Own parsing instead of `safetensors::SafeTensors`: that names the tensor in two of its errors only, and
//! tells a file that is a byte short as "not fully covered".

use super::fault::Fault;
use super::json::Entries;
use safetensors::Dtype;
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, Visitor};
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::fmt;
use std::ops::Range;

/// Headers above this are refused, as the safetensors library does.
const LARGEST_HEADER: u64 = 100_000_000;

/// One tensor as the header describes it; `bytes` is its place in the file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: Range<usize>,
}

/// A parsed header: tensors in the order of their bytes.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Header {
    pub(super) tensors: Vec<Entry>,
    /// `__metadata__`.
    pub(super) metadata: Map<String, Value>,
    /// Bytes before the first tensor's.
    pub(super) len: usize,
}

/// What is wrong, and with which tensor.
#[derive(Debug)]
pub(super) struct Lie {
    pub(super) tensor: Option<String>,
    pub(super) fault: Box<Fault>,
}

fn of_file(fault: Fault) -> Lie {
    Lie { tensor: None, fault: Box::new(fault) }
}

fn of_tensor(name: impl Into<String>, fault: Fault) -> Lie {
    Lie { tensor: Some(name.into()), fault: Box::new(fault) }
}

impl Header {
    /// Parses the header of a file that is mapped as `file`. Allocates no more than the header's own size.
    pub(super) fn parse(file: &[u8]) -> Result<Self, Lie> {
        if file.is_empty() {
            return Err(of_file(Fault::EmptyFile));
        }
        refuse_other_kinds(file)?;
        let found = file.len() as u64;
        let Some((length, rest)) = file.split_first_chunk::<8>() else {
            return Err(of_file(Fault::NoLengthField { found }));
        };
        let header = u64::from_le_bytes(*length);
        if header > rest.len() as u64 {
            return Err(of_file(Fault::HeaderPastEnd { header, found }));
        }
        if header > LARGEST_HEADER {
            return Err(of_file(Fault::HeaderTooLarge { header, allowed: LARGEST_HEADER }));
        }
        let (text, data) = rest.split_at(header as usize);
        let (raw, metadata) = parse_json(text)?;
        let mut tensors = Vec::with_capacity(raw.len());
        for (name, entry) in raw {
            match entry.check() {
                Ok((dtype, shape, bytes)) => tensors.push(Entry { name, dtype, shape, bytes }),
                Err(fault) => return Err(of_tensor(name, fault)),
            }
        }
        tensors.sort_by_key(|tensor| (tensor.bytes.start, tensor.bytes.end));
        let len = 8 + text.len();
        check_tiling(&tensors, len, data.len())?;
        for tensor in &mut tensors {
            tensor.bytes = tensor.bytes.start + len..tensor.bytes.end + len;
        }
        Ok(Self { tensors, metadata, len })
    }
}

/// Recognises by their first bytes what people rename or download instead of a checkpoint.
fn refuse_other_kinds(file: &[u8]) -> Result<(), Lie> {
    // Pickle protocols 2 to 5 begin so, and so can a length field, but that is followed by the header's
    // brace. torch.save writes a zip archive of pickles.
    let pickle = matches!(file, [0x80, 2..=5, ..]) && file.get(8) != Some(&b'{');
    if pickle || file.starts_with(b"PK\x03\x04") {
        return Err(of_file(Fault::Pickle));
    }
    if file.starts_with(b"version https://git-lfs") {
        return Err(of_file(Fault::LfsPointer));
    }
    Ok(())
}

/// The tensors' bytes must follow each other from the first byte to the last of the file.
fn check_tiling(tensors: &[Entry], header: usize, data: usize) -> Result<(), Lie> {
    let mut end = 0;
    let mut before: Option<&Entry> = None;
    for tensor in tensors {
        let begin = tensor.bytes.start;
        if begin < end {
            let with = before.map(|t| t.name.clone()).unwrap_or_default();
            let shared = end.min(tensor.bytes.end) - begin;
            return Err(of_tensor(&tensor.name, Fault::Overlap { with, shared: shared as u64 }));
        }
        if begin > end {
            let unused = (begin - end) as u64;
            return Err(of_tensor(&tensor.name, Fault::Gap { unused }));
        }
        end = tensor.bytes.end;
        before = Some(tensor);
    }
    let (found, expected) = ((header + data) as u64, header as u64 + end as u64);
    if let Some(cut) = tensors.iter().find(|t| t.bytes.end > data) {
        return Err(of_tensor(&cut.name, Fault::Truncated { found, expected }));
    }
    if data > end {
        return Err(of_file(Fault::TrailingBytes { found, expected }));
    }
    Ok(())
}

#[derive(serde::Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl RawEntry {
    fn check(self) -> Result<(Dtype, Vec<usize>, Range<usize>), Fault> {
        let RawEntry { dtype: name, shape, data_offsets: (begin, end) } = self;
        let known = serde_json::from_value::<Dtype>(Value::String(name.clone()));
        let dtype = known.map_err(|_| Fault::UnknownDtype { found: name })?;
        let elements = shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size));
        let Some(bits) = elements.and_then(|n| n.checked_mul(dtype.bitsize() as u64)) else {
            return Err(Fault::ShapeOverflow { shape });
        };
        if begin > end {
            return Err(Fault::OffsetsReversed { begin, end });
        }
        if bits % 8 != 0 || bits / 8 != end - begin {
            return Err(Fault::ByteCount { found: end - begin, expected: bits.div_ceil(8), shape, dtype });
        }
        // Far below what would overflow when the header's length is added.
        if end > i64::MAX as u64 {
            return Err(Fault::ShapeOverflow { shape });
        }
        Ok((dtype, shape.into_iter().map(|size| size as usize).collect(), begin as usize..end as usize))
    }
}

type Raw = (Vec<(String, RawEntry)>, Map<String, Value>);

fn parse_json(text: &[u8]) -> Result<Raw, Lie> {
    let state = State::default();
    let mut json = serde_json::Deserializer::from_slice(text);
    let parsed = HeaderSeed(&state).deserialize(&mut json).and_then(|raw| json.end().map(|()| raw));
    parsed.map_err(|e| {
        if let Some(name) = state.repeated.take() {
            return of_tensor(name, Fault::RepeatedTensor);
        }
        // A wrong value inside an entry is that tensor's; broken JSON is the file's.
        let is_json = || serde_json::from_slice::<serde::de::IgnoredAny>(text).is_ok();
        let tensor = state.current.take().filter(|_| is_json());
        let message = e.to_string();
        match tensor {
            Some(name) => of_tensor(name, Fault::TensorEntry { message }),
            None => of_file(Fault::HeaderNotJson { message }),
        }
    })
}

/// Where the parser is, for errors: serde's carry no more than a text.
#[derive(Default)]
struct State {
    current: RefCell<Option<String>>,
    repeated: RefCell<Option<String>>,
}

struct HeaderSeed<'a>(&'a State);

impl<'de> DeserializeSeed<'de> for HeaderSeed<'_> {
    type Value = Raw;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Raw, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderSeed<'_> {
    type Value = Raw;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Raw, A::Error> {
        let mut tensors = Vec::new();
        let mut metadata = None;
        let mut names = std::collections::HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if !names.insert(name.clone()) {
                *self.0.repeated.borrow_mut() = Some(name);
                return Err(A::Error::custom("repeated"));
            }
            if name == "__metadata__" {
                metadata = Some(map.next_value::<Entries<Value>>()?);
                continue;
            }
            *self.0.current.borrow_mut() = Some(name.clone());
            tensors.push((name, map.next_value()?));
            *self.0.current.borrow_mut() = None;
        }
        let metadata = metadata.map_or_else(Map::new, |entries| entries.0.into_iter().collect());
        Ok((tensors, metadata))
    }
}
