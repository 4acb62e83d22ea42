//! `requant convert --calibrate`: what is calibrated on, and what comes of it.

use super::convert::Arguments;
use super::errors::Failure;
use super::progress::Progress;
use requant::calibrate::{CalibratedLosses, CalibratedQuantizer, Calibrator};
use requant::checkpoint::Checkpoint;
use requant::convert::Quantizer;
use requant::kernels::Cpu;
use requant::model::Model;
use requant::plan::{Plan, PlanOptions};
use requant::quantize::{Feedback, SimdPath};
use requant::validate::{DEFAULT_SENSITIVITY_TOKENS, Text, Windows, sensitivities};
use serde_json::{Value, json};
use std::path::Path;

/// What to calibrate on.
pub(super) struct Calibration {
    text: Text,
    windows: Windows,
    /// Products of weights and errors are fused differently by each.
    instructions: &'static str,
}

impl Calibration {
    /// That of the flags; `None` without --calibrate.
    pub(super) fn new(arguments: &Arguments, checkpoint: &Checkpoint) -> Result<Option<Self>, Failure> {
        if !arguments.calibrate {
            return Ok(None);
        }
        let at = |error: requant::Error| Failure::working_on(checkpoint, error);
        // A model without a forward pass is refused before its text is read.
        Model::new(checkpoint).map_err(|e| at(requant::validate::Error::from(e).into()))?;
        let text = arguments.calibration_text.clone().map_or(Text::Calibration, Text::File);
        let windows = Windows::new(&text, checkpoint, arguments.calibration_tokens, None, false);
        let instructions = SimdPath::chosen().map_err(|e| at(requant::plan::Error::from(e).into()))?.name();
        Ok(Some(Self { text, windows: windows.map_err(|e| at(e.into()))?, instructions }))
    }

    /// What of it decides the bytes of an output.
    pub(super) fn flags(&self) -> Value {
        json!({
            "text": self.windows.name, "token_ids_sha256": self.windows.sha256(), "tokens": self.windows.tokens.len(),
            "window": self.windows.window, "instructions": self.instructions,
        })
    }

    /// A plan for each budget. `dir` is written and removed again.
    pub(super) fn plans(
        &self,
        checkpoint: &Checkpoint,
        options: &PlanOptions,
        budgets: &[f64],
        dir: &Path,
        progress: &Progress,
    ) -> Result<Vec<Plan>, requant::Error> {
        let tokens = DEFAULT_SENSITIVITY_TOKENS.min(self.windows.tokens.len());
        let sensitivities = sensitivities(checkpoint, dir, (&self.text, tokens), &Cpu::new(0), progress)?;
        self.calibrating(checkpoint, |calibrator| {
            let how = Feedback::default();
            let mut losses = CalibratedLosses::new(checkpoint, calibrator, how, sensitivities);
            Plan::for_budgets_by(checkpoint, options, budgets, Some(&mut losses), progress)
        })
    }

    /// Has `work` quantize with a calibration of its own.
    pub(super) fn quantizing<T>(
        &self,
        checkpoint: &Checkpoint,
        work: impl FnOnce(&dyn Quantizer) -> Result<T, requant::Error>,
    ) -> Result<T, requant::Error> {
        self.calibrating(checkpoint, |calibrator| {
            work(&CalibratedQuantizer::new(checkpoint, calibrator, Feedback::default()))
        })
    }

    fn calibrating<T>(
        &self,
        checkpoint: &Checkpoint,
        work: impl FnOnce(Calibrator<'_, Cpu>) -> Result<T, requant::Error>,
    ) -> Result<T, requant::Error> {
        let ops = Cpu::new(0);
        let model = Model::new(checkpoint).map_err(requant::validate::Error::from)?;
        work(Calibrator::new(&ops, &model, &self.windows)?)
    }
}
