//! What errors of a module do to the model, where a calibration tells.

use crate::quantize::{Cut, GroupLosses, Source};
use requant_formats::exl2::Bits;

/// A calibration, as the choice of widths needs it. Modules come in the order of the model's blocks.
pub trait Losses {
    /// What the groups of a module lose at each width; `None` where the calibration doesn't tell, as for an expert
    /// that saw too few tokens.
    ///
    /// # Errors
    /// Those of calibrating.
    fn group_losses(
        &mut self,
        module: &str,
        source: &Source,
        cut: &Cut,
        widths: &[Bits],
    ) -> Result<Option<GroupLosses>, crate::Error>;

    /// The divergence of the model, in nats a token, for each unit of a module's relative squared output error. `module`
    /// is the name in the output.
    fn sensitivity(&self, module: &str) -> f64;
}
