//! Validated permutations of rows.

/// A permutation of `0..len`.
///
/// `map()[i]` is where row `i` goes or comes from; which of the two is said where it is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permutation(Vec<u32>);

/// The first entry that keeps a slice from being a permutation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("entry {position} is {value}: {}", if *.repeated { "it occurs twice" } else { "it is out of range" })]
pub struct NotAPermutation {
    /// Index of the offending entry.
    pub position: usize,
    /// Its value, as the signed 32-bit integer that files store.
    pub value: i32,
    /// Whether the value is in range but was seen before.
    pub repeated: bool,
}

impl Permutation {
    /// The identity on `len` rows.
    pub fn identity(len: usize) -> Self {
        Self((0..len as u32).collect())
    }

    /// Checks that `map` holds each of `0..map.len()` once.
    ///
    /// # Errors
    /// The first entry that is out of range or repeated.
    pub fn new(map: Vec<u32>) -> Result<Self, NotAPermutation> {
        let mut seen = vec![false; map.len()];
        for (position, &value) in map.iter().enumerate() {
            match seen.get_mut(value as usize) {
                Some(seen) if !*seen => *seen = true,
                found => {
                    let repeated = found.is_some();
                    return Err(NotAPermutation { position, value: value as i32, repeated });
                }
            }
        }
        Ok(Self(map))
    }

    /// Sorts rows by key, stably: rows with equal keys keep their order. Entry `j` of the result is the row that stands at place `j`.
    pub fn stable_sort_by_key<K: Ord>(len: usize, key: impl Fn(u32) -> K) -> Self {
        let mut order: Vec<u32> = (0..len as u32).collect();
        order.sort_by_key(|&row| key(row));
        Self(order)
    }

    /// The inverse: `inverse.map()[map()[i]] == i`.
    #[must_use]
    pub fn inverse(&self) -> Self {
        let mut inverse = vec![0; self.0.len()];
        for (i, &to) in self.0.iter().enumerate() {
            inverse[to as usize] = i as u32;
        }
        Self(inverse)
    }

    /// Both in turn: entry `j` is where `next` maps entry `j` of this one.
    ///
    /// # Panics
    /// If they are of different lengths.
    #[must_use]
    pub fn then(&self, next: &Self) -> Self {
        assert_eq!(self.len(), next.len(), "permutations of one length");
        Self(self.0.iter().map(|&entry| next.0[entry as usize]).collect())
    }

    /// The entries.
    pub fn map(&self) -> &[u32] {
        &self.0
    }

    /// How many rows.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether every row stays where it is.
    pub fn is_identity(&self) -> bool {
        self.0.iter().enumerate().all(|(i, &to)| i as u32 == to)
    }
}
