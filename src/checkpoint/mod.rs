//! Opens a checkpoint directory and gives its linears as typed modules.
//!
//! Takes a folder with `config.json` and `.safetensors` files; gives [`Module`]s (what each linear's tensors
//! say it is), the other tensors, and warnings. Must not write, run pickles, or decide what becomes of a
//! module. Configuration breaks ties; where it contradicts the tensors, they count and a [`Warning`] says so.
//!
//! All that headers and values can tell is checked by [`Checkpoint::open`], so that later code need not:
//! every header and offset, the index, all modules of the architecture with their sizes, `g_idx`, scales,
//! group tables, permutations, and the convention of the zero points. Files are mapped, and nothing is
//! copied until it is asked for.
//!
//! ```no_run
//! # fn main() -> Result<(), requant::checkpoint::Error> {
//! use requant::checkpoint::{Checkpoint, OpenOptions};
//! let checkpoint = Checkpoint::open("model".as_ref(), &OpenOptions::default())?;
//! for module in checkpoint.modules() {
//!     let weights = checkpoint.dequantize(module)?; // fp16, [in_features, out_features]
//!     assert_eq!(weights.len() as u64, module.weights());
//! }
//! # Ok(())
//! # }
//! ```

mod config;
mod dynamic;
mod error;
mod examine;
mod fault;
mod header;
mod json;
mod mapped;
mod module;
mod open;
mod read;
mod report;
mod rope;
mod shards;
mod tensor;
mod zeros;

pub use config::{CONFIG, GroupSize, Producer, QuantConfig};
pub use dynamic::{Overrides, Resolved, Rules, Verdict};
pub use error::Error;
pub use fault::{Fault, MixedZeros};
pub use module::{Bias, Exl2, Gptq, Layout, Module};
pub(crate) use read::transpose;
pub use shards::{MappedTensor, Shard};
pub use tensor::{TensorInfo, TensorView};
pub use zeros::{AllOnes, ZeroEvidence, Zeros};

use crate::arch::{Architecture, Columns, Dims, Linear, Names};
use crate::warning::Warning;
use requant_formats::gptq::ZeroConvention;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use shards::Shards;
use std::path::{Path, PathBuf};

/// What the user settles where files can't.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenOptions {
    /// What an all-ones zero point of an asymmetric v1 module means, where its writer isn't GPTQModel.
    pub all_ones: Option<AllOnes>,
    /// The convention of all zero points, against values and label.
    pub zeros: Option<ZeroConvention>,
    /// Whether an architecture that isn't in the table is read as a Llama.
    pub any_arch: bool,
}

/// An open checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    config: Map<String, Value>,
    quant: Option<QuantConfig>,
    known: Option<(&'static Architecture, Dims)>,
    naming: &'static Names,
    shards: Shards,
    modules: Vec<Module>,
    by_name: open::ByName,
    parts: open::Parts,
    other_tensors: Vec<usize>,
    tied_copy: bool,
    warnings: Vec<Warning>,
}

impl Checkpoint {
    /// Opens a directory and checks all that can be checked without decoding weights.
    ///
    /// # Errors
    /// The first fault, with its file and tensor: see [`Fault`].
    pub fn open(dir: &Path, options: &OpenOptions) -> Result<Self, Error> {
        open::open(dir, options)
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// `config.json` as it is.
    pub fn config(&self) -> &Map<String, Value> {
        &self.config
    }

    /// What the configuration files say about quantization.
    pub fn quant_config(&self) -> Option<&QuantConfig> {
        self.quant.as_ref()
    }

    /// The architecture; `None` when the table doesn't have it.
    pub fn architecture(&self) -> Option<&'static Architecture> {
        self.known.as_ref().map(|(arch, _)| *arch)
    }

    /// The architecture's sizes.
    pub fn dims(&self) -> Option<&Dims> {
        self.known.as_ref().map(|(_, dims)| dims)
    }

    /// How its files name tensors; the usual names for an unknown architecture.
    pub fn naming(&self) -> &'static Names {
        self.naming
    }

    /// All linears, block by block, `lm_head` last. Of an unknown architecture: those that tensors show.
    pub fn modules(&self) -> &[Module] {
        &self.modules
    }

    /// A linear by name.
    pub fn module(&self, name: &str) -> Option<&Module> {
        self.by_name.get(name).map(|&i| &self.modules[i])
    }

    /// A part of a fused module, or without `columns` the module: everything that reads a module reads a part
    /// as if it were one. Its name, and thus its tensors, are those of the whole.
    pub fn part(&self, name: &str, columns: Option<&Columns>) -> Option<&Module> {
        match columns {
            None => self.module(name),
            Some(columns) => self.parts.get(name)?.iter().find(|part| part.columns() == Some(columns)),
        }
    }

    /// The module, or the part of a fused one, that holds a linear of the architecture and nothing else.
    pub fn of_linear(&self, linear: &Linear) -> Option<&Module> {
        self.part(&linear.name, linear.columns.as_ref())
    }

    /// The tensors that belong to no module: embeddings, norms, routers.
    pub fn other_tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.other_tensors.iter().map(|&i| &self.shards.tensors[i])
    }

    /// A tensor by name.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.shards.tensor(name)
    }

    /// The file of a tensor, or of a module: that of its first tensor, also where `name` is a tensor that the
    /// module lacks.
    pub fn file_of(&self, name: &str) -> Option<&Path> {
        let of_module = |name: &str| self.module(name)?.tensor_names().find_map(|name| self.tensor(&name));
        let tensor = self.tensor(name).or_else(|| of_module(name));
        Some(tensor.or_else(|| of_module(name.rsplit_once('.')?.0))?.file())
    }

    /// A tensor that must be there.
    ///
    /// # Errors
    /// [`Fault::TensorMissing`].
    pub fn require_tensor(&self, name: &str) -> Result<TensorView<'_>, Error> {
        self.tensor(name).ok_or_else(|| self.missing(name))
    }

    /// The bytes of a tensor where they lie in its file, for as long as they are wanted.
    ///
    /// # Errors
    /// [`Fault::TensorMissing`].
    pub fn mapped(&self, name: &str) -> Result<MappedTensor, Error> {
        self.shards.mapped(name).ok_or_else(|| self.missing(name))
    }

    fn missing(&self, name: &str) -> Error {
        let beside = name.rsplit_once('.').map_or(name, |(module, _)| module).into();
        Error::tensor(self.shards.list_of_tensors(), name, Fault::TensorMissing { beside })
    }

    /// Whether `lm_head.weight` is stored although the embedding is tied and has the same bytes.
    pub fn head_is_tied_copy(&self) -> bool {
        self.tied_copy
    }

    /// What was odd.
    pub fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// The files of weights.
    pub fn files(&self) -> &[Shard] {
        &self.shards.files
    }

    /// The index in use, if the weights are sharded by one.
    pub fn index(&self) -> Option<&Path> {
        self.shards.index.as_deref()
    }

    /// sha256 over the configuration and the names, sizes and headers of all weight files, in hexadecimal.
    /// It doesn't read weights: it tells one checkpoint from another, not a damaged one from a whole one.
    pub fn fingerprint(&self) -> String {
        let mut hash = Sha256::new();
        let mut add = |part: &[u8]| {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        };
        add(&serde_json::to_vec(&self.config).unwrap_or_default());
        for file in self.files() {
            add(file.name().as_bytes());
            add(&file.size().to_le_bytes());
            add(file.header());
        }
        hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Checks that no file of weights changed since it was opened.
    ///
    /// # Errors
    /// [`Fault::Changed`], [`Fault::Io`].
    pub fn check_unchanged(&self) -> Result<(), Error> {
        for file in self.files() {
            match file.map.unchanged() {
                Ok(true) => {}
                Ok(false) => return Err(Error::new(file.path(), Fault::Changed)),
                Err(e) => return Err(Error::new(file.path(), e)),
            }
        }
        Ok(())
    }
}
