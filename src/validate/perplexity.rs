//! The perplexity of one model.

use super::forward::{Logits, cancel, embed};
use super::memory::LOGIT_BYTES;
use super::text::Windows;
use crate::checkpoint::Checkpoint;
use crate::model::Model;
use crate::progress::{Event, Observer};
use requant_kernels::Operations;

/// What one model says of a text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Perplexity {
    /// Mean negative log likelihood, nats a token.
    pub mean_nll: f64,
    /// Tokens that were predicted: all of a window but its first.
    pub predictions: usize,
}

impl Perplexity {
    /// `exp` of the mean.
    pub fn value(&self) -> f64 {
        self.mean_nll.exp()
    }
}

/// The perplexity of a model on some windows, a block in memory at a time.
///
/// # Errors
/// A model without a forward pass here; those of reading and of the device; [`crate::Error::Cancelled`].
pub fn perplexity<O: Operations>(
    checkpoint: &Checkpoint,
    windows: &Windows,
    ops: &O,
    observer: &dyn Observer,
) -> Result<Perplexity, crate::Error> {
    let model = Model::new(checkpoint).map_err(super::Error::from)?;
    observer.event(&Event::Stage { name: "forward", modules: model.layers() + 1, weights: 0 });
    let mut hidden = embed(ops, &model.embedding(ops)?, windows)?;
    for layer in 0..model.layers() {
        let block = model.block(ops, layer)?;
        for hidden in &mut hidden {
            cancel(observer)?;
            *hidden = block.forward(ops, hidden, windows.window, &mut |_, _, _| Ok(()))?;
        }
        observer.event(&Event::Module { name: &format!("block {layer}"), weights: 0 });
    }
    let head = model.head(ops)?;
    let (mut sum, mut predictions, mut first) = (0.0, 0, 0);
    for hidden in &hidden {
        let part = Logits { vocabulary: model.vocabulary(), windows, first };
        for rows in part.parts(ops.shape(hidden).0, LOGIT_BYTES) {
            cancel(observer)?;
            let logits = head.logits(ops, &ops.select_rows(hidden, &rows)?)?;
            let targets: Vec<Option<u32>> = rows.iter().map(|&row| part.target(row)).collect();
            let any: Vec<u32> = targets.iter().map(|target| target.unwrap_or(0)).collect();
            let scores = ops.negative_log_likelihood(&logits, &any)?;
            for (score, _) in scores.iter().zip(&targets).filter(|(_, target)| target.is_some()) {
                sum += f64::from(*score);
                predictions += 1;
            }
        }
        first += ops.shape(hidden).0;
    }
    Ok(Perplexity { mean_nll: sum / predictions.max(1) as f64, predictions })
}
