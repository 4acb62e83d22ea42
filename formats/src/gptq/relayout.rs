//! Exact changes of layout: other integers or another order, the same decoded weights (SPEC §6).

use super::{Bits, Error, GIdx, Matrix, Shape};
use crate::Permutation;
use crate::exl2;

impl Matrix {
    /// The same weights with every zero point at `2^(bits − 1)` (SPEC G6.1).
    ///
    /// # Errors
    /// [`Error::Recentre`] for a row whose `q − z` doesn't fit.
    pub fn recentred(&self, bits: Bits) -> Result<Self, Error> {
        let (n, zero) = (self.shape().out_features, i32::from(bits.symmetric_zero()));
        let mut codes = Vec::with_capacity(self.codes().len());
        for (row, from) in self.codes().chunks_exact(n).enumerate() {
            let group = self.g_idx().groups()[row] as usize;
            for (column, (&code, &z)) in from.iter().zip(&self.zeros()[group * n..]).enumerate() {
                let difference = i32::from(code) - i32::from(z);
                match u8::try_from(difference + zero) {
                    Ok(code) if u32::from(code) <= bits.max_code() => codes.push(code),
                    _ => return Err(Error::Recentre { row, column, difference, bits }),
                }
            }
        }
        let shape = Shape { bits, ..*self.shape() };
        let zeros = vec![bits.symmetric_zero(); self.zeros().len()];
        Self::new(shape, codes, zeros, self.scales().to_vec(), self.g_idx().clone())
    }

    /// The same codes and zero points in wider fields (SPEC G6.2).
    ///
    /// # Errors
    /// [`Error::Narrower`] when `bits` is less than the matrix has.
    pub fn widened(&self, bits: Bits) -> Result<Self, Error> {
        if bits < self.shape().bits {
            return Err(Error::Narrower { from: self.shape().bits, to: bits });
        }
        let shape = Shape { bits, ..*self.shape() };
        let (codes, zeros, scales) = (self.codes().to_vec(), self.zeros().to_vec(), self.scales().to_vec());
        Self::new(shape, codes, zeros, scales, self.g_idx().clone())
    }

    /// Every group cut into groups of `size` rows, in the order of the model's rows, with the same scales and
    /// zero points (SPEC G6.3).
    ///
    /// # Errors
    /// [`Error::Split`] when a group of the matrix isn't a multiple of `size` rows (the last one may end
    /// short).
    pub fn with_group_size(&self, size: usize) -> Result<Self, Error> {
        let (old, groups) = (self.g_idx().groups(), self.shape().groups);
        let mut counts = vec![0usize; groups];
        for &group in old {
            counts[group as usize] += 1;
        }
        let uneven = |group: &usize| size == 0 || !counts[*group].is_multiple_of(size);
        let last = if size == 0 { groups } else { groups - 1 };
        if let Some(group) = (0..last).find(uneven) {
            return Err(Error::Split { group, rows: counts[group], size });
        }
        let first: Vec<usize> = counts
            .iter()
            .scan(0, |next, &rows| {
                let first = *next;
                *next += rows.div_ceil(size);
                Some(first)
            })
            .collect();
        let mut seen = vec![0usize; groups];
        let index: Vec<i64> = old
            .iter()
            .map(|&group| {
                let group = group as usize;
                seen[group] += 1;
                (first[group] + (seen[group] - 1) / size) as i64
            })
            .collect();
        let copies = || (0..groups).flat_map(|g| std::iter::repeat_n(g, counts[g].div_ceil(size)));
        let n = self.shape().out_features;
        let shape = Shape { groups: copies().count(), ..*self.shape() };
        let g_idx = GIdx::new(Some(&index), shape.in_features, shape.groups, Some(size))?;
        Self::new(
            shape,
            self.codes().to_vec(),
            copies().flat_map(|g| self.zeros()[g * n..][..n].iter().copied()).collect(),
            copies().flat_map(|g| self.scales()[g * n..][..n].iter().copied()).collect(),
            g_idx,
        )
    }

    /// Rows sorted by group: row `j` of the result is row `order.map()[j]` (SPEC G6.4). The result's inputs
    /// must be permuted in the same way.
    ///
    /// # Errors
    /// None for a valid matrix; those of [`Matrix::new`] stand in the signature.
    pub fn sorted(&self) -> Result<(Self, Permutation), Error> {
        let order = self.g_idx().sorted_rows();
        let n = self.shape().out_features;
        let rows = order.map().iter().map(|&row| row as usize);
        let codes = rows.clone().flat_map(|row| self.codes()[row * n..][..n].iter().copied()).collect();
        let index: Vec<i64> = rows.map(|row| i64::from(self.g_idx().groups()[row])).collect();
        let shape = *self.shape();
        let size = Some(self.g_idx().group_size());
        let g_idx = GIdx::new(Some(&index), shape.in_features, shape.groups, size)?;
        let sorted = Self::new(shape, codes, self.zeros().to_vec(), self.scales().to_vec(), g_idx)?;
        Ok((sorted, order))
    }

    /// Columns gathered: column `j` of the result is column `order.map()[j]` (SPEC G6.5).
    ///
    /// # Errors
    /// [`Error::Length`] when `order` isn't of `out_features` columns.
    pub fn with_columns(&self, order: &Permutation) -> Result<Self, Error> {
        let n = self.shape().out_features;
        if order.len() != n {
            return Err(Error::Length { tensor: "columns", found: order.len(), expected: n });
        }
        fn gather<T: Copy>(rows: &[T], order: &Permutation) -> Vec<T> {
            let rows = rows.chunks_exact(order.len());
            rows.flat_map(|row| order.map().iter().map(|&column| row[column as usize])).collect()
        }
        let (codes, zeros) = (gather(self.codes(), order), gather(self.zeros(), order));
        Self::new(*self.shape(), codes, zeros, gather(self.scales(), order), self.g_idx().clone())
    }

    /// An EXL2 matrix as a symmetric GPTQ one, without its padding columns (SPEC G6.6): 4 bits where all its
    /// widths are at most 4, else 8.
    ///
    /// # Errors
    /// [`Error::Recentre`] when `bits` is 4 and a code doesn't fit; [`Error::Length`] when `out_features` is
    /// more than the matrix has.
    pub fn from_exl2(matrix: &exl2::Matrix, out_features: usize, bits: Bits) -> Result<Self, Error> {
        let stored = matrix.out_features();
        if out_features > stored {
            return Err(Error::Length { tensor: "columns", found: stored, expected: out_features });
        }
        let groups = matrix.groups().groups();
        let size = matrix.groups().common_rows();
        let perm = matrix.invperm().inverse();
        let (k, n) = (matrix.in_features(), out_features);
        let (mut codes, mut index) = (vec![0u8; k * n], vec![0i64; k]);
        let (mut scales, mut first_row) = (Vec::with_capacity(k / size * n), 0);
        for (g, group) in groups.iter().enumerate() {
            let decoded = matrix.scales_of(g);
            for _ in 0..group.rows / size {
                scales.extend_from_slice(&decoded[..n]);
            }
            let shift = i32::from(bits.symmetric_zero()) - group.bits.zero() as i32;
            for packed in first_row..first_row + group.rows {
                let row = perm.map()[packed] as usize;
                index[row] = (packed / size) as i64;
                let from = &matrix.codes()[packed * stored..][..n];
                for (column, (to, &code)) in codes[row * n..][..n].iter_mut().zip(from).enumerate() {
                    let moved = i32::from(code) + shift;
                    *to = u8::try_from(moved).ok().filter(|&c| u32::from(c) <= bits.max_code()).ok_or(
                        Error::Recentre {
                            row,
                            column,
                            difference: i32::from(code) - group.bits.zero() as i32,
                            bits,
                        },
                    )?;
                }
            }
            first_row += group.rows;
        }
        let shape = Shape { in_features: k, out_features: n, bits, groups: k / size };
        let g_idx = GIdx::new(Some(&index), k, shape.groups, Some(size))?;
        let zeros = vec![bits.symmetric_zero(); shape.groups * n];
        Self::new(shape, codes, zeros, scales, g_idx)
    }
}
