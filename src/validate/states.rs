//! Hidden states, on the device while there is room and in the host's memory otherwise.

use requant_kernels::{Error, Operations};
use std::cell::Cell;

/// Hidden states of a chunk of windows.
pub(super) enum State<O: Operations> {
    /// On the device.
    Device(O::Tensor),
    /// In the host's memory, fp32: the same bits.
    Host {
        /// `[rows, columns]`, row-major.
        values: Vec<f32>,
        /// Columns.
        columns: usize,
    },
}

/// Puts states where there is room.
pub(super) struct Shelf<'a, O: Operations> {
    ops: &'a O,
    /// Bytes that the device still takes.
    left: Cell<u64>,
}

impl<'a, O: Operations> Shelf<'a, O> {
    /// With so many bytes on the device.
    pub(super) fn new(ops: &'a O, bytes: u64) -> Self {
        Self { ops, left: Cell::new(bytes) }
    }

    /// Keeps a state.
    ///
    /// # Errors
    /// Those of the device.
    pub(super) fn put(&self, tensor: O::Tensor) -> Result<State<O>, Error> {
        let (rows, columns) = self.ops.shape(&tensor);
        if self.takes(rows, columns) {
            return Ok(State::Device(tensor));
        }
        Ok(State::Host { values: self.ops.download(&tensor)?, columns })
    }

    /// Keeps another of the same.
    ///
    /// # Errors
    /// Those of the device.
    pub(super) fn copy(&self, state: &State<O>) -> Result<State<O>, Error> {
        match state {
            State::Host { values, columns } => Ok(State::Host { values: values.clone(), columns: *columns }),
            State::Device(tensor) => {
                let (rows, columns) = self.ops.shape(tensor);
                match self.takes(rows, columns) {
                    true => Ok(State::Device(self.ops.copy(tensor)?)),
                    false => Ok(State::Host { values: self.ops.download(tensor)?, columns }),
                }
            }
        }
    }

    /// Puts what `work` makes of a state in its place.
    ///
    /// # Errors
    /// Those of the device and of `work`.
    pub(super) fn replace(
        &self,
        state: &mut State<O>,
        work: impl FnOnce(&O::Tensor) -> Result<O::Tensor, Error>,
    ) -> Result<(), Error> {
        match state {
            State::Device(tensor) => *tensor = work(tensor)?,
            State::Host { values, columns } => {
                *values = self.ops.download(&work(&self.ops.upload(values, *columns)?)?)?;
            }
        }
        Ok(())
    }

    /// The rows of a state, on the device.
    ///
    /// # Errors
    /// Those of the device.
    pub(super) fn rows(&self, state: &State<O>, rows: &[u32]) -> Result<O::Tensor, Error> {
        match state {
            State::Device(tensor) => self.ops.select_rows(tensor, rows),
            State::Host { values, columns } => {
                let row = |&row: &u32| &values[row as usize * columns..][..*columns];
                let chosen: Vec<f32> = rows.iter().flat_map(row).copied().collect();
                self.ops.upload(&chosen, *columns)
            }
        }
    }

    /// How many rows it has.
    pub(super) fn count(&self, state: &State<O>) -> usize {
        match state {
            State::Device(tensor) => self.ops.shape(tensor).0,
            State::Host { values, columns } => values.len() / (*columns).max(1),
        }
    }

    fn takes(&self, rows: usize, columns: usize) -> bool {
        let left = self.left.get().checked_sub(4 * rows as u64 * columns as u64);
        self.left.set(left.unwrap_or(self.left.get()));
        left.is_some()
    }
}
