//! How long work tells what it does and asks whether to go on.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A step that long work has reached.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A stage begins: so many modules and weights are to come.
    Stage {
        /// Its name: `measure`, `convert`, `write`.
        name: &'static str,
        /// Modules to come.
        modules: usize,
        /// Weights to come.
        weights: u64,
    },
    /// A module is done.
    Module {
        /// Its name.
        name: &'a str,
        /// Its weights.
        weights: u64,
    },
    /// How long a stage that begins will take, by what was measured before.
    Estimate {
        /// Its name.
        stage: &'static str,
        /// The time.
        time: Duration,
    },
    /// What a device's memory will hold; told before the work on it begins.
    Memory(&'a DeviceMemory),
}

/// What a device's memory will hold, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// The device in words.
    pub device: String,
    /// What can still be allocated; `None` of a device that works in the host's memory.
    pub free: Option<u64>,
    /// Weights that are there at a time: both models, or the largest block of each.
    pub weights: u64,
    /// Whether both models' weights stay there.
    pub resident: bool,
    /// What a block and the logits need in between.
    pub work: u64,
    /// Hidden states of all models and variants at the most.
    pub states: u64,
    /// Of these, what stays on the device: the rest is kept in the host's memory, or made in another pass.
    pub states_on_device: u64,
}

/// Receives events; may be called from any thread.
pub trait Observer: Sync {
    /// Called for each event.
    fn event(&self, event: &Event<'_>) {
        let _ = event;
    }
    /// Asked between modules; `true` stops the work with [`crate::Error::Cancelled`].
    fn cancelled(&self) -> bool {
        false
    }
}

/// Ignores all events and never cancels.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Observer for Silent {}

/// A flag that cancels, for use from another thread or a signal handler.
#[derive(Debug, Default)]
pub struct CancelFlag(AtomicBool);

impl CancelFlag {
    /// Asks the work to stop at the next module.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
    /// Whether it was asked to.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Observer for CancelFlag {
    fn cancelled(&self) -> bool {
        self.is_set()
    }
}
