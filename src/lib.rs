//! requant converts quantized checkpoints between layouts and measures what that did.
//!
//! Data flows one way: [`Checkpoint::open`], a [`Plan`], conversion a module at a
//! time, output. Everything the command line does, a program can do with these types.

pub mod arch;
pub mod checkpoint;
pub mod convert;
pub mod error;
pub mod fit;
pub mod inspect;
pub mod model;
pub mod output;
pub mod plan;
pub mod progress;
pub mod quantize;
pub mod validate;
pub mod verify;
pub mod warning;

pub use checkpoint::Checkpoint;
pub use convert::{ConvertOptions, Report, convert};
pub use error::{Diagnose, Error, Kind};
pub use plan::{Plan, PlanOptions, Target};
pub use requant_formats as formats;
pub use requant_kernels as kernels;
pub use warning::{Warning, WarningCode};

/// The README's example compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
