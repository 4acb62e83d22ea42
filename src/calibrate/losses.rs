//! What errors of groups do to the model, for the choice of widths.

use super::{BlockHessians, Calibrator, Places};
use crate::checkpoint::Checkpoint;
use crate::plan::Losses;
use crate::quantize::{Cut, Feedback, GroupLosses, Source, group_losses};
use requant_formats::exl2::Bits;
use requant_kernels::Calibration;
use std::collections::BTreeMap;

/// [`Losses`] from Hessians that are made block by block as they are asked for.
pub struct CalibratedLosses<'a, O: Calibration> {
    how: Feedback,
    places: Places,
    calibrator: Calibrator<'a, O>,
    block: Option<BlockHessians>,
    sensitivities: BTreeMap<String, f64>,
    /// Of linears that weren't measured.
    mean: f64,
}

impl<'a, O: Calibration> CalibratedLosses<'a, O> {
    /// For the modules of `checkpoint`, which `calibrator` runs, with the divergence of the model for a relative squared
    /// output error of 1 of each, by name in the output.
    pub fn new(
        checkpoint: &Checkpoint,
        calibrator: Calibrator<'a, O>,
        how: Feedback,
        sensitivities: BTreeMap<String, f64>,
    ) -> Self {
        let mean = sensitivities.values().sum::<f64>() / sensitivities.len().max(1) as f64;
        Self { how, places: Places::new(checkpoint), calibrator, block: None, sensitivities, mean }
    }
}

impl<O: Calibration> Losses for CalibratedLosses<'_, O> {
    fn group_losses(
        &mut self,
        module: &str,
        source: &Source,
        cut: &Cut,
        widths: &[Bits],
    ) -> Result<Option<GroupLosses>, crate::Error> {
        let Some((layer, id)) = self.places.get(module) else { return Ok(None) };
        self.calibrator.advance(&mut self.block, layer)?;
        let Some(hessian) = self.block.as_ref().and_then(|block| block.of(id)) else { return Ok(None) };
        let broken = |source| crate::convert::Error::Matrix { module: module.into(), source };
        Ok(group_losses(source, cut, widths, hessian, &self.how).map_err(broken)?)
    }

    fn sensitivity(&self, module: &str) -> f64 {
        self.sensitivities.get(module).copied().unwrap_or(self.mean)
    }
}
