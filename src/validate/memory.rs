//! What a device's memory holds: decided from what is free before the work begins, and less where that fails.

use super::forward::Models;
use super::text::Windows;
use crate::progress::DeviceMemory;
use requant_kernels::Operations;

/// Tokens that go through a block at a time in the host's memory: what a block needs in between is bounded by
/// these.
pub(super) const CHUNK_TOKENS: usize = 2048;

/// The same on a device with its own memory, where there is room: few launches for much work.
const DEVICE_CHUNK_TOKENS: usize = 8192;

/// Bytes of logits of one model that are made at a time.
pub(super) const LOGIT_BYTES: usize = 64 << 20;

/// The same on a device with its own memory, where there is room.
const DEVICE_LOGIT_BYTES: usize = 1 << 30;

/// Rows of logits that are made at a time at the least: devices multiply fewer in another order, whose last digits
/// are others.
const LEAST_ROWS: usize = 128;

/// Of the memory that is free, this part is left alone: allocators round, and others use the device.
const LEFT_ALONE: u64 = 8;

/// What a weight takes on a device, over what it takes in its file: zero points are wider there, and codes are a
/// byte each until they are packed.
const GROWTH: (u64, u64) = (5, 4);

/// How a device's memory is used.
#[derive(Clone, Debug)]
pub(super) struct Room {
    /// `None`: the device works in the host's memory, where all states are.
    free: Option<u64>,
    /// Whether both models' weights stay on the device.
    pub(super) resident: bool,
    /// Tokens that go through a block at a time, in whole windows.
    pub(super) chunk: usize,
    /// Bytes of logits of one model that are made at a time.
    pub(super) logits: usize,
    /// Bytes of hidden states on the device.
    pub(super) states: u64,
    /// Bytes of hidden states in the host's memory.
    host: u64,
    sizes: Sizes,
}

/// What models need, in bytes.
#[derive(Clone, Debug)]
struct Sizes {
    window: usize,
    /// Of both models.
    weights: u64,
    /// Of the largest block, or of embedding or head, of each.
    largest: u64,
    /// Of a token's logits.
    row: usize,
    /// In between, for each token of a chunk.
    token: u64,
}

impl Room {
    /// For these models; `memory` is the user's limit for hidden states in the host's memory.
    ///
    /// # Errors
    /// Those of the device.
    pub(super) fn new<O: Operations>(
        ops: &O,
        models: &Models<'_>,
        windows: &Windows,
        memory: u64,
    ) -> Result<Self, crate::Error> {
        let grown = |bytes: u64| bytes / GROWTH.1 * GROWTH.0;
        let reordered = models.reordered_bytes();
        let blocks = models.source.layers().max(1) as u64;
        let models = [models.source, models.converted];
        let weights = models.iter().map(|model| model.weight_bytes()).sum();
        let largest = models.iter().map(|model| model.largest_part_bytes()).sum();
        let sizes = Sizes {
            window: windows.window.min(windows.tokens.len().max(1)),
            weights: grown(weights) + reordered,
            largest: grown(largest) + reordered / blocks,
            row: 4 * models[0].vocabulary().max(1),
            token: models.iter().map(|model| model.work_bytes_of_token()).max().unwrap_or(0),
        };
        Ok(Self::of(ops.free_memory()?, sizes, memory))
    }

    fn of(free: Option<u64>, sizes: Sizes, memory: u64) -> Self {
        let window = sizes.window;
        let whole = |tokens: usize| (tokens / window).max(1) * window;
        let mut room = Self {
            free,
            resident: false,
            chunk: whole(CHUNK_TOKENS),
            logits: LOGIT_BYTES,
            states: memory,
            host: 0,
            sizes,
        };
        let Some(free) = free else { return room };
        let usable = free - free / LEFT_ALONE;
        room.host = memory;
        room.chunk = whole(DEVICE_CHUNK_TOKENS);
        room.logits = DEVICE_LOGIT_BYTES.min(DEVICE_CHUNK_TOKENS * room.sizes.row);
        // A quarter of what is free is enough to work with.
        while room.work() > usable / 4 && room.halve() {}
        let state = room.chunk as u64 * room.sizes.token;
        room.resident = room.sizes.weights + room.work() + state <= usable;
        room.states = usable.saturating_sub(room.weights() + room.work());
        room
    }

    fn weights(&self) -> u64 {
        if self.resident { self.sizes.weights } else { self.sizes.largest }
    }

    /// A block in between, and logits of two models with as much again.
    fn work(&self) -> u64 {
        self.chunk as u64 * self.sizes.token + 4 * self.logits as u64
    }

    /// Smaller pieces; whether there are any.
    fn halve(&mut self) -> bool {
        let (chunk, logits) = (self.chunk, self.logits);
        let windows = chunk / self.sizes.window / 2;
        self.chunk = windows.max(1) * self.sizes.window;
        let rows = (logits / self.sizes.row / 2).next_multiple_of(LEAST_ROWS);
        self.logits = logits.min(rows * self.sizes.row);
        (self.chunk, self.logits) != (chunk, logits)
    }

    /// What needs less of the device's memory; whether there is anything left to give up. Results stay the same.
    pub(super) fn shrink(&mut self) -> bool {
        let gives = self.resident || (self.free.is_some() && self.states > 0);
        (self.resident, self.states) = (false, if self.free.is_some() { 0 } else { self.states });
        self.halve() || gives
    }

    /// Bytes of hidden states that a pass may hold.
    pub(super) fn of_pass(&self) -> u64 {
        self.states.saturating_add(self.host)
    }

    /// Bytes of states that stay on the device before others go to the host's memory.
    pub(super) fn on_device(&self) -> u64 {
        if self.free.is_some() { self.states } else { u64::MAX }
    }

    /// What is said before the start, for so many bytes of states.
    pub(super) fn stated(&self, device: String, states: u64) -> DeviceMemory {
        DeviceMemory {
            device,
            free: self.free,
            weights: self.weights(),
            resident: self.resident,
            work: self.work(),
            states,
            states_on_device: states.min(self.states),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes() -> Sizes {
        // SmolLM2 at 4 bits.
        Sizes { window: 512, weights: 350 << 20, largest: 140 << 20, row: 4 * 49_152, token: 60 << 10 }
    }

    #[test]
    fn a_large_device_keeps_weights_and_states_and_a_small_one_streams() {
        let large = Room::of(Some(139 << 30), sizes(), 4 << 30);
        assert!(large.resident && large.chunk == 8192 && large.logits == 1 << 30, "{large:?}");
        assert!(large.states > 100 << 30);
        let two = Room::of(Some(2 << 30), sizes(), 4 << 30);
        assert!(two.resident && two.work() <= 2 << 28, "{two:?}");
        let small = Room::of(Some(256 << 20), sizes(), 4 << 30);
        assert!(!small.resident && small.chunk >= 512, "{small:?}");
        assert!(small.of_pass() >= 4 << 30);
    }

    #[test]
    fn in_the_host_s_memory_nothing_is_resident_and_all_states_stay() {
        let room = Room::of(None, sizes(), 1 << 20);
        assert_eq!((room.resident, room.chunk, room.logits), (false, 2048, LOGIT_BYTES));
        assert_eq!((room.of_pass(), room.on_device()), (1 << 20, u64::MAX));
    }

    #[test]
    fn shrinking_gives_up_residence_first_and_ends() {
        let mut room = Room::of(Some(139 << 30), sizes(), 4 << 30);
        assert!(room.shrink() && !room.resident && room.on_device() == 0);
        let steps = std::iter::from_fn(|| room.shrink().then_some(())).count();
        assert!((4..20).contains(&steps), "{steps}");
        assert_eq!((room.chunk, room.logits), (512, 128 * 4 * 49_152));
    }
}
