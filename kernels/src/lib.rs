//! Operations on packed weights (being written).
