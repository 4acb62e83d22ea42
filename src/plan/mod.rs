//! (being written)
pub mod solve;
