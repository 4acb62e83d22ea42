//! Modules looked at on all cores, a bounded number of weights at a time, with results in their order.

use crate::Error;
use crate::progress::Observer;
use rayon::prelude::*;

/// Weights that are decoded at the same time at most, unless one module has more: with all that a comparison
/// keeps of a weight about half a GiB.
const WEIGHTS_AT_ONCE: u64 = 32 << 20;

/// What `look` finds of each item. Of several errors that of the first item counts.
pub(super) fn in_batches<T: Sync, R: Send>(
    items: &[T],
    weights: impl Fn(&T) -> u64,
    observer: &dyn Observer,
    look: impl Fn(&T) -> Result<R, Error> + Sync,
) -> Result<Vec<R>, Error> {
    let look = |item: &T| if observer.cancelled() { Err(Error::Cancelled) } else { look(item) };
    let mut found = Vec::with_capacity(items.len());
    let mut rest = items;
    while !rest.is_empty() {
        let mut sum = 0u64;
        let fits = |item: &&T| {
            sum = sum.saturating_add(weights(item));
            sum <= WEIGHTS_AT_ONCE
        };
        let (batch, later) = rest.split_at(rest.iter().take_while(fits).count().max(1));
        let results: Vec<Result<R, Error>> = batch.par_iter().map(look).collect();
        found.extend(results.into_iter().collect::<Result<Vec<R>, Error>>()?);
        rest = later;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Silent;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn results_keep_their_order_and_no_batch_is_too_large() {
        let items: Vec<u64> = (0..50).map(|i| (i * 7 % 13) << 20).chain([100 << 20, 1]).collect();
        let (now, most) = (AtomicU64::new(0), AtomicU64::new(0));
        let found = in_batches(
            &items,
            |&weights| weights,
            &Silent,
            |&weights| {
                let sum = now.fetch_add(weights, Ordering::SeqCst) + weights;
                most.fetch_max(sum, Ordering::SeqCst);
                std::thread::yield_now();
                now.fetch_sub(weights, Ordering::SeqCst);
                Ok(weights)
            },
        );
        assert_eq!(found.unwrap(), items);
        assert_eq!(most.into_inner(), 100 << 20);
    }
}
