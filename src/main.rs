//! The `requant` binary.

fn main() {}
