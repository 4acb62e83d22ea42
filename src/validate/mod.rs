//! What a conversion did to the model: takes the source and the converted checkpoint, gives a [`Validation`]
//! and a page that shows it. It changes no checkpoint.

pub mod page;
pub mod report;
pub mod summary;

pub use report::Validation;
