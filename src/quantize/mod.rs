//! Weights of a source module → EXL2 codes and scales.
//!
//! Takes an unpacked GPTQ matrix or dense weights, a cut of its rows into groups and a width for each; gives
//! an EXL2 matrix and the squared error of every group, measured on the weights as exllamav2 decodes them.
//! Must not choose widths (that is `plan`), read files, or depend on the number of threads.
//!
//! Rows are taken in the order of their GPTQ group ("grid-aligned"): a column of a group then holds at most
//! `2^bits` different values, all multiples of one scale, and one EXL2 scale can follow it. The search looks
//! at these values and how often each occurs, not at the rows.

mod feedback;
mod fit;
mod half_precision;
mod kernel;
mod panel;
mod regrid;
mod relative_error;
mod samples;
mod search;
mod simd;
mod source;
#[cfg(test)]
mod tests;

pub use feedback::{
    Calibrated, Feedback, GroupLosses, Hessian, NotTriangular, Uncalibrated, group_losses,
    quantize_calibrated,
};
pub use fit::{Fit, Quantized, fit_group, fit_group_on, fit_group_with, quantize};
pub use half_precision::{NotFinite, Rounding, to_half};
pub use regrid::{Grid, regrid};
pub(crate) use relative_error::{relative_error, squares};
pub use samples::Samples;
pub use search::Search;
pub use simd::{SimdError, SimdPath, VARIABLE as SIMD_VARIABLE};
pub use source::{Cut, RowOrder, Source, stored_places};
