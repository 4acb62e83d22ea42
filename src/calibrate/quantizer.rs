//! A quantizer that calibrates as it goes.

use super::{BlockHessians, Calibrator, Places};
use crate::checkpoint::Checkpoint;
use crate::convert::{self, ByWeights, Error, Made, Quantizer};
use crate::plan::{Exl2Decision, PlannedModule};
use crate::quantize::{Feedback, Source, Uncalibrated, quantize_calibrated};
use requant_kernels::Calibration;
use std::sync::{Mutex, PoisonError};

/// Quantizes the modules of a plan block by block, each block's Hessians made when its first module comes.
pub struct CalibratedQuantizer<'a, O: Calibration> {
    how: Feedback,
    places: Places,
    state: Mutex<State<'a, O>>,
}

struct State<'a, O: Calibration> {
    calibrator: Calibrator<'a, O>,
    block: Option<BlockHessians>,
}

impl<'a, O: Calibration> CalibratedQuantizer<'a, O> {
    /// For the modules of `checkpoint`, which `calibrator` runs.
    pub fn new(checkpoint: &Checkpoint, calibrator: Calibrator<'a, O>, how: Feedback) -> Self {
        let places = Places::new(checkpoint);
        let state = State { calibrator, block: None };
        Self { how, places, state: Mutex::new(state) }
    }
}

impl<O: Calibration> Quantizer for CalibratedQuantizer<'_, O>
where
    O::Tensor: Send,
{
    fn goes_in_plan_order(&self) -> bool {
        true
    }

    fn quantize(
        &self,
        module: &PlannedModule,
        decision: &Exl2Decision,
        source: &Source,
    ) -> Result<Made, crate::Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((layer, id)) = self.places.get(&module.name) else {
            return ByWeights.quantize(module, decision, source);
        };
        let State { calibrator, block, .. } = &mut *state;
        calibrator.advance(block, layer)?;
        let hessian = state.block.as_ref().filter(|b| b.layer == layer).and_then(|block| block.of(id));
        let Some(hessian) = hessian else {
            let made = ByWeights.quantize(module, decision, source)?;
            let uncalibrated = Some(Uncalibrated::FewTokens(0));
            let calibration = convert::Calibration {
                tokens: 0,
                output_error: None,
                output_error_by_weights: None,
                damping: None,
                uncalibrated,
            };
            return Ok(Made { calibration: Some(calibration), ..made });
        };
        let broken = |source| Error::Matrix { module: module.source.clone(), source };
        let cut = source.cut(decision.group_size);
        let found = quantize_calibrated(source, &cut, &decision.bits, hessian, &self.how).map_err(broken)?;
        let calibration = convert::Calibration {
            tokens: hessian.tokens(),
            output_error: Some(found.output_error),
            output_error_by_weights: Some(found.output_error_by_weights),
            damping: found.damping.ok(),
            uncalibrated: found.damping.err(),
        };
        Ok(Made { quantized: found.quantized, calibration: Some(calibration) })
    }
}
