//! A quantizer that calibrates as it goes.

use super::{BlockHessians, Calibrator};
use crate::checkpoint::Checkpoint;
use crate::convert::{ByWeights, Error, Quantizer};
use crate::model::LinearId;
use crate::plan::{Exl2Decision, PlannedModule};
use crate::quantize::{
    Feedback, FeedbackOrder, Quantized, RowOrder, Source, Uncalibrated, quantize_calibrated,
};
use requant_formats::exl2::Group;
use requant_kernels::Calibration;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Quantizes the modules of a plan block by block, each block's Hessians made when its first module comes.
pub struct CalibratedQuantizer<'a, O: Calibration> {
    how: Feedback,
    /// By the name in the output.
    places: BTreeMap<String, (usize, LinearId)>,
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
    /// The order of its rows, if it was calibrated.
    pub order: Option<FeedbackOrder>,
    /// What was added to the Hessian's diagonal, as a share of its mean, if it was calibrated.
    pub damping: Option<f64>,
    /// Why it was not.
    pub uncalibrated: Option<Uncalibrated>,
}

impl<'a, O: Calibration> CalibratedQuantizer<'a, O> {
    /// For the modules of `checkpoint`, which `calibrator` runs.
    pub fn new(checkpoint: &Checkpoint, calibrator: Calibrator<'a, O>, how: Feedback) -> Self {
        let mut places = BTreeMap::new();
        if let (Some(arch), Some(dims)) = (checkpoint.architecture(), checkpoint.dims()) {
            for layer in 0..dims.layers {
                for linear in arch.block(dims, checkpoint.naming(), layer) {
                    let id = LinearId { role: linear.role, expert: linear.expert };
                    places.insert(linear.exl2_name, (layer, id));
                }
            }
        }
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
        let Some(&(layer, id)) = self.places.get(&module.name) else {
            return ByWeights.quantize(module, decision, source);
        };
        while state.block.as_ref().is_none_or(|block| block.layer < layer) {
            state.block = None;
            match state.calibrator.next_block()? {
                Some(block) => state.block = Some(block),
                None => break,
            }
        }
        let mut record = CalibratedModule {
            name: module.name.clone(),
            tokens: 0,
            output_error: None,
            order: None,
            damping: None,
            uncalibrated: Some(Uncalibrated::FewTokens(0)),
        };
        let hessian = state.block.as_ref().filter(|b| b.layer == layer).and_then(|block| block.of(id));
        let quantized = match hessian {
            None => ByWeights.quantize(module, decision, source)?,
            Some(hessian) => {
                let broken = |source| Error::Matrix { module: module.source.clone(), source };
                let mut how = self.how.clone();
                if decision.order == RowOrder::Natural {
                    how.orders = vec![FeedbackOrder::Grouped];
                }
                let groups: Vec<Group> = (source.cut(decision.group_size).groups.iter())
                    .zip(&decision.bits)
                    .map(|(places, &bits)| Group { bits, rows: places.len() })
                    .collect();
                let calibrated = quantize_calibrated(source, &groups, hessian, &how).map_err(broken)?;
                record.tokens = hessian.tokens();
                record.output_error = Some(calibrated.output_error);
                record.order = calibrated.how.ok().map(|(order, _)| order);
                record.damping = calibrated.how.ok().map(|(_, damping)| damping);
                record.uncalibrated = calibrated.how.err();
                calibrated.quantized
            }
        };
        state.modules.push(record);
        Ok(quantized)
    }
}
