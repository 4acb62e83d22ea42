//! requant converts quantized checkpoints between layouts and measures what that did.
//!
//! Data flows one way:
//!
//! 1. [`Checkpoint::open`] reads a directory and checks all that can be checked without decoding weights.
//!    [`inspect`] says what it is and who loads it, [`fit`] whether a GPU holds it.
//! 2. A [`Plan`] decides what becomes of each linear: [`Plan::new`] and [`Plan::for_budgets`] for EXL2,
//!    [`Plan::to_gptq`], [`Plan::to_dense`] and [`Plan::same`] for what loses nothing. It can be printed, stored
//!    and read again.
//! 3. [`convert()`](convert()) executes it, a module at a time, and gives a [`Report`]; a [`convert::Job`] can be
//!    stopped and go on.
//! 4. [`verify`] checks an output against what its report claims, [`validate`] runs both models and measures what
//!    changed.
//!
//! Everything the command line does, a program can do with these types; depend on the package with
//! `default-features = false` to leave the command line's crates out. Long work reports to an
//! [`Observer`](progress::Observer), which can also cancel it. Every error says through [`Diagnose`] its code, who
//! has to act, the file and tensor concerned, and what to do; `docs/errors.md` lists them all. [`Warning`]s are
//! data, too. The bit layouts are a crate of their own, [`formats`], and so are the device operations, [`kernels`].
//!
//! # Example
//!
//! `examples/convert.rs`, whole:
//!

#![doc = concat!("```no_run\n", include_str!("../examples/convert.rs"), "```")]

pub mod arch;
pub mod calibrate;
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
