//! The measure of all that quantizing loses.

/// Σ (found − wanted)² and Σ wanted², in fp64 and in the order of the pairs `(found, wanted)`.
pub(crate) fn squares(pairs: impl Iterator<Item = (f32, f32)>) -> (f64, f64) {
    pairs.fold((0.0, 0.0), |(squared, norm), (found, wanted)| {
        let (found, wanted) = (f64::from(found), f64::from(wanted));
        (squared + (found - wanted) * (found - wanted), norm + wanted * wanted)
    })
}

/// Frobenius norm of the difference over that of the weights, from [`squares`]; of weights of zeros the norm of the
/// difference.
pub(crate) fn relative_error((squared_error, squared_norm): (f64, f64)) -> f64 {
    if squared_norm > 0.0 { (squared_error / squared_norm).sqrt() } else { squared_error.sqrt() }
}
