//! `q_groups`: the width and the rows of each group (SPEC §2).

use super::{Bits, Error, ExpectedOffset, MAX_GROUP_ROWS, MAX_ROWS, ROW_UNIT};
use serde::{Deserialize, Serialize};

/// A run of packed rows that share a width and a row of scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// Width of its codes.
    pub bits: Bits,
    /// Its rows, a multiple of 32.
    pub rows: usize,
}

impl Group {
    /// Words a column that hold the group's codes.
    pub fn words(&self) -> usize {
        self.rows / ROW_UNIT * self.bits.get() as usize
    }
}

/// The groups of a matrix in packed order, widths never rising.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct GroupTable(Vec<Group>);

impl GroupTable {
    /// Checks groups that are to be written.
    ///
    /// # Errors
    /// [`Error::OddGroups`] without a group, [`Error::GroupRows`], [`Error::LongGroup`],
    /// [`Error::RisingWidth`], [`Error::Offset`] when an offset doesn't fit 15 bits, [`Error::Rows`].
    pub fn new(groups: Vec<Group>) -> Result<Self, Error> {
        if groups.is_empty() {
            return Err(Error::OddGroups { found: 0 });
        }
        let mut offset = 0;
        for (i, group) in groups.iter().enumerate() {
            let bits = group.bits;
            if group.rows > MAX_GROUP_ROWS {
                return Err(Error::LongGroup { group: i, found: group.rows });
            }
            if group.rows == 0 || !group.rows.is_multiple_of(ROW_UNIT) {
                return Err(Error::GroupRows { group: i, bits, words: group.words() });
            }
            if i > 0 && bits > groups[i - 1].bits {
                return Err(Error::RisingWidth { group: i, found: bits, before: groups[i - 1].bits });
            }
            if offset > i16::MAX as usize {
                let expected = ExpectedOffset::SixteenBits;
                return Err(Error::Offset { group: i, found: offset as i32, expected });
            }
            offset += group.words();
        }
        let table = Self(groups);
        check_rows(table.rows())?;
        Ok(table)
    }

    /// Reads `q_groups` (pairs of width and first word row) for a `q_weight` of `word_rows` rows.
    ///
    /// # Errors
    /// Those of SPEC §7 that concern `q_groups`: as [`GroupTable::new`], and [`Error::Bits`].
    pub fn parse(q_groups: &[i16], word_rows: usize) -> Result<Self, Error> {
        if q_groups.is_empty() || !q_groups.len().is_multiple_of(2) {
            return Err(Error::OddGroups { found: q_groups.len() });
        }
        let count = q_groups.len() / 2;
        let last_end = i64::try_from(word_rows).unwrap_or(i64::MAX);
        let mut groups = Vec::with_capacity(count);
        for i in 0..count {
            let (width, offset) = (q_groups[2 * i], q_groups[2 * i + 1]);
            let bits = u32::try_from(width)
                .ok()
                .and_then(|width| Bits::try_from(width).ok())
                .ok_or(Error::Bits { group: Some(i), found: i32::from(width) })?;
            let end = if i + 1 < count { i64::from(q_groups[2 * i + 3]) } else { last_end };
            if i == 0 && offset != 0 {
                let expected = ExpectedOffset::Zero;
                return Err(Error::Offset { group: 0, found: i32::from(offset), expected });
            }
            if end <= i64::from(offset) {
                let (group, found, expected) = if i + 1 < count {
                    (i + 1, end as i32, ExpectedOffset::Above(offset))
                } else {
                    (i, i32::from(offset), ExpectedOffset::Below(word_rows))
                };
                return Err(Error::Offset { group, found, expected });
            }
            let words = (end - i64::from(offset)) as usize;
            let width = bits.get() as usize;
            if !words.is_multiple_of(width) {
                return Err(Error::GroupRows { group: i, bits, words });
            }
            // `width` words hold 32 rows.
            groups.push(Group { bits, rows: (words / width).saturating_mul(ROW_UNIT) });
        }
        Self::new(groups)
    }

    /// `q_groups` as stored.
    pub fn to_q_groups(&self) -> Vec<i16> {
        let mut offset = 0;
        let mut q_groups = Vec::with_capacity(2 * self.0.len());
        for group in &self.0 {
            q_groups.extend([group.bits.get() as i16, offset as i16]);
            offset += group.words();
        }
        q_groups
    }

    /// The groups in packed order.
    pub fn groups(&self) -> &[Group] {
        &self.0
    }

    /// Rows of all groups: k.
    pub fn rows(&self) -> usize {
        self.0.iter().map(|g| g.rows).sum()
    }

    /// The largest number of rows that divides those of every group.
    pub fn common_rows(&self) -> usize {
        fn gcd(a: usize, b: usize) -> usize {
            if b == 0 { a } else { gcd(b, a % b) }
        }
        self.0.iter().fold(0, |rows, group| gcd(rows, group.rows))
    }

    /// Rows of each width in use, the widest first.
    pub fn rows_of_widths(&self) -> Vec<(Bits, usize)> {
        let rows = |bits| self.0.iter().filter(|g| g.bits == bits).map(|g| g.rows).sum();
        let all = Bits::ALL.into_iter().rev().map(|bits| (bits, rows(bits)));
        all.filter(|(_, rows)| *rows > 0).collect()
    }

    /// R, rows of `q_weight`: words a column.
    pub fn word_rows(&self) -> usize {
        self.0.iter().map(Group::words).sum()
    }

    /// Bits that the five tensors of a matrix with `out_features` columns take (SPEC §6).
    pub fn stored_bits(&self, out_features: usize) -> u64 {
        let (words, groups, n) = (self.word_rows() as u64, self.0.len() as u64, out_features as u64);
        32 * words * n + (4 * n + 16 + 32) * groups + 32 * self.rows() as u64
    }
}

pub(crate) fn check_rows(rows: usize) -> Result<(), Error> {
    if rows > MAX_ROWS {
        return Err(Error::Rows { found: rows });
    }
    Ok(())
}

pub(crate) fn check_columns(columns: usize) -> Result<(), Error> {
    if columns == 0 || !columns.is_multiple_of(ROW_UNIT) {
        return Err(Error::Columns { found: columns });
    }
    Ok(())
}
