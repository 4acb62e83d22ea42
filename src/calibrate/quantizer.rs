//! A quantizer that calibrates as it goes.

use super::{BlockHessians, Calibrator, Places};
use crate::checkpoint::Checkpoint;
use crate::convert::{ByWeights, Error, Quantizer};
use crate::plan::{Exl2Decision, PlannedModule};
use crate::quantize::{Feedback, Quantized, Source, Uncalibrated, quantize_calibrated};
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
    modules: Vec<CalibratedModule>,
}

/// How a module was quantized.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct CalibratedModule {
    /// Name in the output.
    pub name: String,
    /// Tokens that it was calibrated on.
    pub tokens: usize,
    /// tr(ΔᵀHΔ) over tr(WᵀHW); `None` without a Hessian.
    pub output_error: Option<f64>,
    /// The same of what its weights alone would have made of it.
    pub output_error_by_weights: Option<f64>,
    /// What was added to the Hessian's diagonal, as a share of its mean, if it was calibrated.
    pub damping: Option<f64>,
    /// Why it was not.
    pub uncalibrated: Option<Uncalibrated>,
}

impl<'a, O: Calibration> CalibratedQuantizer<'a, O> {
    /// For the modules of `checkpoint`, which `calibrator` runs.
    pub fn new(checkpoint: &Checkpoint, calibrator: Calibrator<'a, O>, how: Feedback) -> Self {
        let places = Places::new(checkpoint);
        let state = State { calibrator, block: None, modules: Vec::new() };
        Self { how, places, state: Mutex::new(state) }
    }

    /// What became of the modules so far.
    pub fn modules(&self) -> Vec<CalibratedModule> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).modules.clone()
    }
}

impl<O: Calibration> Quantizer for CalibratedQuantizer<'_, O>
where
    O::Tensor: Send,
{
    fn quantize(
        &self,
        module: &PlannedModule,
        decision: &Exl2Decision,
        source: &Source,
    ) -> Result<Quantized, crate::Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((layer, id)) = self.places.get(&module.name) else {
            return ByWeights.quantize(module, decision, source);
        };
        let State { calibrator, block, .. } = &mut *state;
        calibrator.advance(block, layer)?;
        let mut record = CalibratedModule {
            name: module.name.clone(),
            tokens: 0,
            output_error: None,
            output_error_by_weights: None,
            damping: None,
            uncalibrated: Some(Uncalibrated::FewTokens(0)),
        };
        let hessian = state.block.as_ref().filter(|b| b.layer == layer).and_then(|block| block.of(id));
        let quantized = match hessian {
            None => ByWeights.quantize(module, decision, source)?,
            Some(hessian) => {
                let broken = |source| Error::Matrix { module: module.source.clone(), source };
                let cut = source.cut(decision.group_size);
                let calibrated =
                    quantize_calibrated(source, &cut, &decision.bits, hessian, &self.how).map_err(broken)?;
                record.tokens = hessian.tokens();
                record.output_error = Some(calibrated.output_error);
                record.output_error_by_weights = Some(calibrated.output_error_by_weights);
                record.damping = calibrated.damping.ok();
                record.uncalibrated = calibrated.damping.err();
                calibrated.quantized
            }
        };
        state.modules.push(record);
        Ok(quantized)
    }
}
