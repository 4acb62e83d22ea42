//! Which tensor stands in which shard, and where.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use super::Error;

/// The longest header that the safetensors crate reads, in bytes.
const MAX_HEADER: u64 = 100_000_000;
/// What a header holds before its first tensor: its length, `{"__metadata__":{"format":"pt"}}`, padding.
const EMPTY_FILE: u64 = 8 + 33 + 8;

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its full name.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its dimensions.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Its size in bytes.
    ///
    /// # Errors
    /// [`Error::Size`] if that overflows or, for dtypes below a byte, isn't whole.
    pub fn bytes(&self) -> Result<u64, Error> {
        let elements = self.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        elements
            .and_then(|n| n.checked_mul(self.dtype.bitsize()))
            .filter(|bits| bits.is_multiple_of(8))
            .map(|bits| bits as u64 / 8)
            .ok_or_else(|| Error::Size { tensor: self.name.clone(), shape: self.shape.clone() })
    }

    /// No fewer bytes than its entry in a header takes, whatever its offsets turn out to be.
    fn header_bytes(&self) -> u64 {
        // ,"":{"dtype":"F8_E4M3FNUZ","shape":[],"data_offsets":[,]} and two offsets.
        const FRAME: u64 = 60 + 2 * 20;
        // A control character takes six bytes in JSON, and no character takes more for its length.
        let name: usize = self.name.chars().map(|c| if c < ' ' { 6 } else { c.len_utf8() + 1 }).sum();
        FRAME + name as u64 + self.shape.iter().map(|d| decimal_digits(*d) + 1).sum::<u64>()
    }
}

fn decimal_digits(n: usize) -> u64 {
    u64::from(n.checked_ilog10().unwrap_or(0)) + 1
}

/// One shard as planned: its name, header, and where each tensor goes.
#[derive(Clone, Debug)]
pub struct PlannedShard {
    file: String,
    /// The length field, the header and its padding: everything before the first tensor.
    head: Vec<u8>,
    bytes: u64,
    tensors: Vec<String>,
}

impl PlannedShard {
    /// Its file name.
    pub fn file(&self) -> &str {
        &self.file
    }
    /// Its size in bytes, header included.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
    /// Its tensors, in the order in which they stand.
    pub fn tensors(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(String::as_str)
    }
    pub(super) fn head(&self) -> &[u8] {
        &self.head
    }
}

/// Where a tensor goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// Index of its shard.
    pub(super) shard: usize,
    /// Bytes from the start of the file.
    pub(super) offset: u64,
    /// Its size in bytes.
    pub(super) bytes: u64,
}

/// All shards of an output.
///
/// Tensors come in units (a module's tensors) that stay together in one shard where they fit, in the order
/// given. Files are named `model.safetensors`, or `model-00001-of-00003.safetensors` where there are several.
/// Inside a shard tensors stand as the safetensors crate's own writer puts them, widest dtype first, then by
/// name: so each is aligned to its element.
#[derive(Clone, Debug)]
pub struct ShardPlan {
    shards: Vec<PlannedShard>,
    places: BTreeMap<String, Place>,
    total_size: u64,
}

impl ShardPlan {
    /// Assigns the tensors of `units` to files of at most `limit` bytes, header included. A tensor that alone
    /// is larger gets a file of its own; a unit that is larger is cut between tensors.
    ///
    /// # Errors
    /// [`Error::NoTensors`], [`Error::PlannedTwice`], [`Error::ReservedName`], [`Error::Size`],
    /// [`Error::Header`].
    pub fn new(units: Vec<Vec<TensorSpec>>, limit: u64) -> Result<Self, Error> {
        let total_size = check(units.iter().flatten())?;
        let mut packer = Packer::new(limit);
        for unit in units {
            packer.push_unit(unit)?;
        }
        let shards = packer.finish();
        if shards.is_empty() {
            return Err(Error::NoTensors);
        }
        let count = shards.len();
        let mut plan = ShardPlan { shards: Vec::with_capacity(count), places: BTreeMap::new(), total_size };
        for (i, tensors) in shards.into_iter().enumerate() {
            let file = match count {
                1 => "model.safetensors".to_owned(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
            };
            plan.push_shard(file, tensors)?;
        }
        Ok(plan)
    }

    /// The shards, in order.
    pub fn files(&self) -> &[PlannedShard] {
        &self.shards
    }

    /// Bytes of all tensors: `total_size` of the index, which counts no headers.
    pub fn total_size(&self) -> u64 {
        self.total_size
    }

    /// The file that holds a tensor.
    pub fn file_of(&self, tensor: &str) -> Option<&str> {
        self.places.get(tensor).map(|place| self.shards[place.shard].file())
    }

    /// Where a tensor stands: the index of its shard, and bytes from the start of that file.
    pub fn position(&self, tensor: &str) -> Option<(usize, u64)> {
        self.places.get(tensor).map(|place| (place.shard, place.offset))
    }

    pub(super) fn places(&self) -> &BTreeMap<String, Place> {
        &self.places
    }

    fn push_shard(&mut self, file: String, mut tensors: Vec<TensorSpec>) -> Result<(), Error> {
        tensors.sort_by(|a, b| b.dtype.cmp(&a.dtype).then_with(|| a.name.cmp(&b.name)));
        let mut end = 0;
        let mut infos = Vec::with_capacity(tensors.len());
        for tensor in &tensors {
            let start = end;
            // No overflow, and usize holds it: `check` has seen the sum of all, and files are that long.
            end += tensor.bytes()? as usize;
            let (dtype, shape) = (tensor.dtype, tensor.shape.clone());
            infos.push((tensor.name.clone(), TensorInfo { dtype, shape, data_offsets: (start, end) }));
        }
        let places: Vec<(usize, usize)> = infos.iter().map(|(_, info)| info.data_offsets).collect();
        let head = match head(infos) {
            Ok(head) => head,
            Err(source) => return Err(Error::Header { file, source }),
        };
        let shard = self.shards.len();
        for (tensor, (start, end)) in tensors.iter().zip(places) {
            let place = Place { shard, offset: (head.len() + start) as u64, bytes: (end - start) as u64 };
            self.places.insert(tensor.name.clone(), place);
        }
        let bytes = (head.len() + end) as u64;
        let tensors = tensors.into_iter().map(|tensor| tensor.name).collect();
        self.shards.push(PlannedShard { file, head, bytes, tensors });
        Ok(())
    }
}

/// Checks names and sizes and gives the bytes of all tensors.
fn check<'a>(tensors: impl Iterator<Item = &'a TensorSpec>) -> Result<u64, Error> {
    let mut names = BTreeSet::new();
    let mut total = 0u64;
    for tensor in tensors {
        let name = || tensor.name.clone();
        if tensor.name == "__metadata__" {
            return Err(Error::ReservedName { tensor: name() });
        }
        if !names.insert(&tensor.name) {
            return Err(Error::PlannedTwice { tensor: name() });
        }
        // No file system holds more, and it leaves room for any header.
        total = total
            .checked_add(tensor.bytes()?)
            .filter(|total| *total <= (isize::MAX / 2) as u64)
            .ok_or_else(|| Error::Size { tensor: name(), shape: tensor.shape.clone() })?;
    }
    Ok(total)
}

/// The length field and the header, padded with spaces so that the tensors start at a multiple of 8 bytes.
fn head(infos: Vec<(String, TensorInfo)>) -> Result<Vec<u8>, safetensors::SafeTensorError> {
    // transformers refuses a file that doesn't name its framework. One key: a hash map of more would be
    // written in another order by each run.
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let mut json = serde_json::to_vec(&Metadata::new(Some(format), infos)?)?;
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut head = (json.len() as u64).to_le_bytes().to_vec();
    head.append(&mut json);
    Ok(head)
}

/// Fills shards one after the other.
struct Packer {
    limit: u64,
    full: Vec<Vec<TensorSpec>>,
    open: Vec<TensorSpec>,
    open_size: Size,
}

/// A bound on what tensors take in a file.
#[derive(Clone, Copy, Default)]
struct Size {
    header: u64,
    data: u64,
}

impl Size {
    fn of(tensor: &TensorSpec) -> Result<Self, Error> {
        Ok(Size { header: tensor.header_bytes(), data: tensor.bytes()? })
    }

    fn plus(self, other: Size) -> Self {
        Size { header: self.header.saturating_add(other.header), data: self.data.saturating_add(other.data) }
    }
}

impl Packer {
    fn new(limit: u64) -> Self {
        Packer { limit, full: Vec::new(), open: Vec::new(), open_size: Size::default() }
    }

    fn fits(&self, size: Size) -> bool {
        let header = size.header.saturating_add(EMPTY_FILE);
        header <= MAX_HEADER && header.saturating_add(size.data) <= self.limit
    }

    fn push_unit(&mut self, unit: Vec<TensorSpec>) -> Result<(), Error> {
        let mut whole = Size::default();
        for tensor in &unit {
            whole = whole.plus(Size::of(tensor)?);
        }
        if !self.fits(self.open_size.plus(whole)) && self.fits(whole) {
            self.close();
        }
        for tensor in unit {
            let size = Size::of(&tensor)?;
            if !self.fits(self.open_size.plus(size)) {
                self.close();
            }
            self.open.push(tensor);
            self.open_size = self.open_size.plus(size);
        }
        Ok(())
    }

    fn close(&mut self) {
        if !self.open.is_empty() {
            self.full.push(std::mem::take(&mut self.open));
            self.open_size = Size::default();
        }
    }

    fn finish(mut self) -> Vec<Vec<TensorSpec>> {
        self.close();
        self.full
    }
}
