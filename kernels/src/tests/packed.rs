//! Decoding packed weights, and multiplying by them.

use super::Stream;
use crate::{Operations, Weight};
use half::f16;
use proptest::prelude::*;
use requant_formats::Permutation;
use requant_formats::exl2::{self, Group, GroupTable};
use requant_formats::gptq::{self, GIdx, Shape};
use std::sync::Arc;

/// A weight, and what it decodes to by definition.
#[derive(Clone, Debug)]
pub(super) struct Case {
    weight: Weight,
    decoded: Vec<f16>,
}

