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
