//! Which files hold the weights, and which file each tensor is taken from.

use super::error::Error;
use super::fault::Fault;
use super::header::{Entry, Header, Lie};
use super::json::{self, Entries};
use super::mapped::Mapped;
use super::tensor::{TensorInfo, TensorView};
use crate::warning::{Warning, WarningCode};
use rayon::prelude::*;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A file of weights.
#[derive(Debug)]
pub struct Shard {
    pub(super) name: String,
    pub(super) map: Arc<Mapped>,
    header_len: usize,
}

impl Shard {
    /// Its name in the directory.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.map.path()
    }

    /// Its size in bytes.
    pub fn size(&self) -> u64 {
        self.map.bytes().len() as u64
    }

    /// The length field and the header.
    pub fn header(&self) -> &[u8] {
        &self.map.bytes()[..self.header_len]
    }
}

/// The bytes of a tensor in its mapped file, which outlive the checkpoint that they came from.
#[derive(Clone, Debug)]
pub struct MappedTensor {
    map: Arc<Mapped>,
    bytes: Range<usize>,
}

impl AsRef<[u8]> for MappedTensor {
    fn as_ref(&self) -> &[u8] {
        // `Header::parse` checked the range against the file's length.
        &self.map.bytes()[self.bytes.clone()]
    }
}

/// All tensors of a directory.
#[derive(Debug)]
pub(super) struct Shards {
    pub(super) files: Vec<Shard>,
    pub(super) tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
    /// `__metadata__` of the first file that has some.
    pub(super) metadata: Map<String, Value>,
    /// The index in use.
    pub(super) index: Option<PathBuf>,
    pub(super) warnings: Vec<Warning>,
}

/// Files beside a model that hold adapters, not weights of its own.
const ADAPTERS: [&str; 3] = ["eora.safetensors", "adapter_model.safetensors", "adapter.safetensors"];

const PICKLES: [&str; 4] = ["bin", "pt", "pth", "ckpt"];

const INDEX_SUFFIX: &str = ".safetensors.index.json";

impl Shards {
    /// Finds and maps the files, and checks every header.
    pub(super) fn open(dir: &Path) -> Result<Self, Error> {
        let mut listing = Listing::read(dir)?;
        let mut warnings = listing.warnings.split_off(0);
        let index = Index::find(dir, &listing, &mut warnings)?;
        let names = match &index {
            Some(index) => index.shards.clone(),
            None => listing.weights.clone(),
        };
        if names.is_empty() {
            return Err(match listing.pickles.first() {
                Some(pickle) => Error::new(dir.join(pickle), Fault::Pickle),
                None => Error::new(dir, Fault::NoWeights),
            });
        }
        let opened: Vec<Result<(Shard, Header), Error>> =
            names.par_iter().map(|name| open_shard(dir, name)).collect();
        let (mut files, mut headers) = (Vec::new(), Vec::new());
        for opened in opened {
            let (shard, header) = opened?;
            files.push(shard);
            headers.push(header);
        }
        let metadata = headers.iter_mut().find(|h| !h.metadata.is_empty());
        let metadata = metadata.map(|h| std::mem::take(&mut h.metadata)).unwrap_or_default();
        let mut shards = Self {
            files,
            tensors: Vec::new(),
            by_name: HashMap::new(),
            metadata,
            index: index.as_ref().map(|index| dir.join(&index.file)),
            warnings,
        };
        match index {
            Some(index) => shards.take_by_index(headers, &index)?,
            None => shards.take_all(headers)?,
        }
        Ok(shards)
    }

    fn take_all(&mut self, headers: Vec<Header>) -> Result<(), Error> {
        for (file, header) in headers.into_iter().enumerate() {
            for entry in header.tensors {
                self.push_new(file, entry)?;
            }
        }
        Ok(())
    }

    fn take_by_index(&mut self, headers: Vec<Header>, index: &Index) -> Result<(), Error> {
        let mut strays = Vec::new();
        for (file, header) in headers.into_iter().enumerate() {
            for entry in header.tensors {
                match index.shard_of.get(&entry.name) {
                    Some(&shard) if shard == file => self.push(file, entry),
                    Some(&shard) => self.warnings.push(Warning {
                        code: WarningCode::CopyElsewhere,
                        subject: entry.name,
                        message: format!(
                            "The tensor stands in {} too. {} places it in {}, and it is read from there.",
                            index.shards[file], index.file, index.shards[shard]
                        ),
                    }),
                    None => strays.push((file, entry)),
                }
            }
        }
        for (name, shard) in &index.weight_map {
            if !self.by_name.contains_key(name) {
                let fault = Fault::NotInShard { index: index.file.clone() };
                return Err(Error::tensor(self.files[*shard].path(), name.as_str(), fault));
            }
        }
        let count = strays.len();
        if let Some((file, first)) = strays.first() {
            self.warnings.push(Warning {
                code: WarningCode::NotInIndex,
                subject: self.files[*file].name.clone(),
                message: format!(
                    "{} doesn't list {count} tensors of its shards, such as {}. They are read nevertheless.",
                    index.file, first.name
                ),
            });
        }
        for (file, entry) in strays {
            self.push_new(file, entry)?;
        }
        Ok(())
    }

    /// A tensor whose name no file may have had before.
    fn push_new(&mut self, file: usize, entry: Entry) -> Result<(), Error> {
        if let Some(&first) = self.by_name.get(&entry.name) {
            let other = self.files[self.tensors[first].file].name.clone();
            let path = self.files[file].path();
            return Err(Error::tensor(path, entry.name, Fault::InTwoFiles { other }));
        }
        self.push(file, entry);
        Ok(())
    }

    fn push(&mut self, file: usize, entry: Entry) {
        let Entry { name, dtype, shape, bytes } = entry;
        self.by_name.insert(name.clone(), self.tensors.len());
        self.tensors.push(TensorInfo { name, dtype, shape, file, bytes });
    }

    /// A tensor by name.
    pub(super) fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.by_name.get(name).map(|&i| self.view(&self.tensors[i]))
    }

    /// The bytes of a tensor, for as long as they are wanted.
    pub(super) fn mapped(&self, name: &str) -> Option<MappedTensor> {
        let info = &self.tensors[*self.by_name.get(name)?];
        Some(MappedTensor { map: self.files[info.file].map.clone(), bytes: info.bytes.clone() })
    }

    /// Whether there is a tensor of that name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    pub(super) fn view<'a>(&'a self, info: &'a TensorInfo) -> TensorView<'a> {
        let map = &self.files[info.file].map;
        // `Header::parse` checked the range against the file's length.
        TensorView { info, file: map.path(), bytes: &map.bytes()[info.bytes.clone()] }
    }

    /// The file to name when a tensor is nowhere: what lists the tensors.
    pub(super) fn list_of_tensors(&self) -> &Path {
        self.index.as_deref().unwrap_or_else(|| self.files[0].path())
    }
}

fn open_shard(dir: &Path, name: &str) -> Result<(Shard, Header), Error> {
    let path = dir.join(name);
    let map = Arc::new(Mapped::open(&path).map_err(|e| Error::new(&path, e))?);
    let header =
        Header::parse(map.bytes()).map_err(|Lie { tensor, fault }| Error { file: path, tensor, fault })?;
    Ok((Shard { name: name.into(), map, header_len: header.len }, header))
}

/// The files of the directory that matter here, each list sorted.
struct Listing {
    weights: Vec<String>,
    indexes: Vec<String>,
    pickles: Vec<String>,
    warnings: Vec<Warning>,
}

impl Listing {
    fn read(dir: &Path) -> Result<Self, Error> {
        let io = |e| Error::new(dir, Fault::Io(e));
        let mut names = Vec::new();
        for entry in std::fs::read_dir(dir).map_err(io)? {
            let entry = entry.map_err(io)?;
            // Through links: the Hub's cache is made of them. A name that isn't UTF-8 is none of ours.
            if let (Ok(name), true) = (entry.file_name().into_string(), entry.path().is_file()) {
                names.push(name);
            }
        }
        names.sort();
        let mut listing =
            Self { weights: Vec::new(), indexes: Vec::new(), pickles: Vec::new(), warnings: Vec::new() };
        for name in names {
            if ADAPTERS.contains(&name.as_str()) {
                listing.warnings.push(Warning {
                    code: WarningCode::AdapterIgnored,
                    message:
                        "The file holds an adapter and isn't read. exllamav2 loads every .safetensors file \
                              of a folder, this one too."
                            .into(),
                    subject: name,
                });
            } else if name.ends_with(".safetensors") {
                listing.weights.push(name);
            } else if name.ends_with(INDEX_SUFFIX) {
                listing.indexes.push(name);
            } else if name.rsplit_once('.').is_some_and(|(_, extension)| PICKLES.contains(&extension)) {
                listing.pickles.push(name);
            }
        }
        // Of several indexes, that of the usual name first.
        listing.indexes.sort_by_key(|name| !name.starts_with("model."));
        Ok(listing)
    }
}

struct Index {
    file: String,
    /// Distinct shard names, sorted.
    shards: Vec<String>,
    /// Tensor and its shard, in the file's order.
    weight_map: Vec<(String, usize)>,
    shard_of: HashMap<String, usize>,
}

impl Index {
    /// Reads the index that counts, if there is one.
    fn find(dir: &Path, listing: &Listing, warnings: &mut Vec<Warning>) -> Result<Option<Self>, Error> {
        let mut used: Option<Self> = None;
        for file in &listing.indexes {
            let warn = |subject: &str, message: String| Warning {
                code: WarningCode::IndexIgnored,
                subject: subject.into(),
                message,
            };
            if let Some(used) = &used {
                let message = format!("{} is read; this second index is not.", used.file);
                warnings.push(warn(file, message));
                continue;
            }
            let index = Self::parse(dir, file)?;
            let absent = index.shards.iter().filter(|&shard| !listing.weights.contains(shard));
            let absent: Vec<&String> = absent.collect();
            // An index left over from another version of the model: nothing of what it names is there.
            if absent.len() == index.shards.len() && !listing.weights.is_empty() {
                let message = format!(
                    "None of its {} shards exist, so it is taken for a leftover and ignored: {} is read instead.",
                    index.shards.len(),
                    listing.weights.join(", ")
                );
                warnings.push(warn(file, message));
                continue;
            }
            if let Some(shard) = absent.first() {
                return Err(Error::new(dir.join(shard), Fault::ShardMissing { index: file.clone() }));
            }
            used = Some(index);
        }
        if let Some(used) = &used {
            let strays = listing.weights.iter().filter(|name| !used.shards.contains(name));
            warnings.extend(strays.map(|name| used.ignored(dir, name)));
        }
        Ok(used)
    }

    /// Tells of a file that the index doesn't name, and of what it holds too.
    fn ignored(&self, dir: &Path, name: &str) -> Warning {
        let header = open_shard(dir, name).map(|(_, header)| header).unwrap_or_default();
        let copies = header.tensors.iter().filter_map(|tensor| {
            self.shard_of.get(&tensor.name).map(|&shard| (tensor.name.as_str(), self.shards[shard].as_str()))
        });
        let copies: Vec<(&str, &str)> = copies.collect();
        let mut message = format!("{} doesn't name this file, so it isn't read.", self.file);
        if let Some((tensor, shard)) = copies.first() {
            message += &format!(
                " Of {} tensors it holds a copy, such as {tensor}, which is read from {shard}.",
                copies.len()
            );
        }
        Warning { code: WarningCode::FileIgnored, subject: name.into(), message }
    }

    fn parse(dir: &Path, file: &str) -> Result<Self, Error> {
        #[derive(serde::Deserialize)]
        struct Raw {
            weight_map: Entries<String>,
        }
        let path = dir.join(file);
        let text = json::read(&path).map_err(|e| Error::new(&path, e))?;
        let raw: Raw = serde_json::from_slice(&text)
            .map_err(|e| Error::new(&path, Fault::IndexMalformed { message: e.to_string() }))?;
        let entries = raw.weight_map.0;
        if entries.is_empty() {
            return Err(Error::new(path, Fault::IndexMalformed { message: "an empty weight_map".into() }));
        }
        let mut shards: Vec<String> = entries.iter().map(|(_, shard)| shard.clone()).collect();
        shards.sort();
        shards.dedup();
        if let Some(shard) = shards.iter().find(|shard| !is_plain_name(shard)) {
            return Err(Error::new(path, Fault::ShardOutside { shard: shard.clone() }));
        }
        let mut weight_map = Vec::with_capacity(entries.len());
        let mut shard_of = HashMap::with_capacity(entries.len());
        for (tensor, shard) in entries {
            let place = shards.partition_point(|name| *name < shard);
            match shard_of.insert(tensor.clone(), place) {
                Some(first) if first != place => {
                    let fault = Fault::IndexRepeated { first: shards[first].clone(), second: shard };
                    return Err(Error::tensor(path, tensor, fault));
                }
                Some(_) => {}
                None => weight_map.push((tensor, place)),
            }
        }
        Ok(Self { file: file.into(), shards, weight_map, shard_of })
    }
}

/// Whether a name is that of a file directly in the folder: no `..`, no separator, not absolute.
fn is_plain_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    let first = components.next();
    matches!(first, Some(std::path::Component::Normal(_)))
        && components.next().is_none()
        && !name.contains(['/', '\\', ':'])
}
