//! Which instruction set the search runs on.
//!
//! Takes what the processor has and what `REQUANT_SIMD` asks for; gives a [`SimdPath`], which is proof that
//! its instructions are there. All paths give the same bits, so that this decides nothing but the speed.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;

use super::feedback::kernel::Rows;
use super::panel::{LANES, Lanes, Panel, Range, Steps, Window};
use crate::{Diagnose, Kind};
use std::fmt;
use std::sync::OnceLock;

/// The environment variable that forces a path.
pub const VARIABLE: &str = "REQUANT_SIMD";

/// An instruction set of this processor. Only detecting it makes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimdPath(Set);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// The names that [`VARIABLE`] may hold, whatever the machine.
const NAMES: [&str; 3] = ["scalar", "avx2", "avx512"];

/// Why the path that was asked for can't be taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SimdError {
    /// No instruction set has this name.
    #[error("{VARIABLE} is {found:?}; it can be {}", NAMES.join(", "))]
    Unknown {
        /// What the variable holds.
        found: String,
    },
    /// The processor, or this build, lacks it.
    #[error("{VARIABLE} is {asked}, but this machine has only {}", available.join(", "))]
    Missing {
        /// What the variable holds.
        asked: String,
        /// What there is.
        available: Vec<&'static str>,
    },
}

impl Diagnose for SimdError {
    fn code(&self) -> &'static str {
        match self {
            SimdError::Unknown { .. } => "simd.unknown",
            SimdError::Missing { .. } => "simd.missing",
        }
    }
    fn kind(&self) -> Kind {
        match self {
            SimdError::Unknown { .. } => Kind::Usage,
            SimdError::Missing { .. } => Kind::Environment,
        }
    }
    fn hint(&self) -> Option<String> {
        Some(format!("unset {VARIABLE}: the fastest path is then chosen, and all give the same result"))
    }
}

impl SimdPath {
    /// Plain Rust, which every machine has.
    pub const SCALAR: SimdPath = SimdPath(Set::Scalar);

    /// All that this processor has, the fastest last.
    pub fn available() -> Vec<Self> {
        #[allow(unused_mut)]
        let mut paths = vec![Self::SCALAR];
        #[cfg(target_arch = "x86_64")]
        {
            if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
                paths.push(SimdPath(Set::Avx2));
            }
            if std::arch::is_x86_feature_detected!("avx512f") {
                paths.push(SimdPath(Set::Avx512));
            }
        }
        paths
    }

    /// The path that a value of [`VARIABLE`] asks for; the fastest where it is absent or empty.
    ///
    /// # Errors
    /// Both of [`SimdError`].
    pub fn asked(value: Option<&str>) -> Result<Self, SimdError> {
        let available = Self::available();
        let Some(asked) = value.filter(|value| !value.is_empty()) else {
            return Ok(available.last().copied().unwrap_or(Self::SCALAR));
        };
        if !NAMES.contains(&asked) {
            return Err(SimdError::Unknown { found: asked.into() });
        }
        let found = available.iter().find(|path| path.name() == asked).copied();
        found.ok_or_else(|| SimdError::Missing {
            asked: asked.into(),
            available: available.iter().map(|path| path.name()).collect(),
        })
    }

    /// The path of this process: [`VARIABLE`] is read once.
    ///
    /// # Errors
    /// Both of [`SimdError`].
    pub fn chosen() -> Result<Self, SimdError> {
        static CHOSEN: OnceLock<Result<SimdPath, SimdError>> = OnceLock::new();
        let read = || {
            let value = std::env::var_os(VARIABLE).map(|value| value.to_string_lossy().into_owned());
            Self::asked(value.as_deref())
        };
        CHOSEN.get_or_init(read).clone()
    }

    /// The path of this process, and the fastest where [`SimdPath::chosen`] is an error: who asks for a path
    /// is told of that before work begins, and the result is the same on any.
    pub(super) fn or_fastest() -> Self {
        Self::chosen().or_else(|_| Self::asked(None)).unwrap_or(Self::SCALAR)
    }

    /// Its name, as [`VARIABLE`] takes it.
    pub fn name(self) -> &'static str {
        match self.0 {
            Set::Scalar => NAMES[0],
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => NAMES[1],
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => NAMES[2],
        }
    }
}

impl fmt::Display for SimdPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A function of `kernel` on each path.
macro_rules! dispatch {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        impl SimdPath {
            $($(#[$doc])*
            pub(super) fn $name(self, $($arg: $type),*) $(-> $result)? {
                match self.0 {
                    Set::Scalar => scalar::$name($($arg),*),
                    // The features of both were detected: nothing else makes these values.
                    #[cfg(target_arch = "x86_64")]
                    Set::Avx2 => avx2::detected::$name($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    Set::Avx512 => avx512::detected::$name($($arg),*),
                }
            })*
        }
    };
}

dispatch! {
    /// [`super::kernel::add_best_errors`].
    add_best_errors(
        panel: Panel<'_>, window: Window<'_>, ceilings: &[Steps], range: Range, sums: &mut [f64]
    );
    /// [`super::kernel::best_index`].
    best_index(panel: Panel<'_>, steps: &Steps, range: Range) -> [u8; LANES];
    /// [`super::kernel::encode`].
    encode(
        panel: Panel<'_>, scale: &Lanes, range: Range, table: &mut Vec<[u8; LANES]>, errors: &mut [f64; LANES]
    );
    /// [`super::feedback::kernel::pull`].
    pull(coefficients: &[f32], stride: usize, errors: &[Lanes], targets: &mut [Lanes]);
    /// [`super::feedback::kernel::encode_with_feedback`].
    encode_with_feedback(
        rows: Rows<'_>, scale: &Lanes, range: Range, codes: &mut [[u8; LANES]], errors: &mut [Lanes]
    ) -> [f64; LANES];
}

/// The functions of `kernel`, compiled for an instruction set. `$vector` is its vector.
#[cfg(target_arch = "x86_64")]
macro_rules! compile_for {
    ($feature:literal, $vector:ty) => {
        /// To be called only where the processor has the feature.
        pub(super) mod detected {
            use super::*;
            use crate::quantize::feedback::kernel::{self as feedback, Rows};
            use crate::quantize::kernel;
            use crate::quantize::panel::{Panel, Range, Steps, Window};

            #[inline]
            pub(in super::super) fn add_best_errors(
                panel: Panel<'_>,
                window: Window<'_>,
                ceilings: &[Steps],
                range: Range,
                sums: &mut [f64],
            ) {
                #[target_feature(enable = $feature)]
                fn compiled(p: Panel<'_>, w: Window<'_>, c: &[Steps], r: Range, s: &mut [f64]) {
                    kernel::add_best_errors::<$vector>(p, w, c, r, s);
                }
                // SAFETY: called by `SimdPath` alone, whose value for this set exists only where
                // `SimdPath::available` found the feature.
                unsafe { compiled(panel, window, ceilings, range, sums) }
            }

            #[inline]
            pub(in super::super) fn best_index(panel: Panel<'_>, steps: &Steps, range: Range) -> [u8; LANES] {
                #[target_feature(enable = $feature)]
                fn compiled(panel: Panel<'_>, steps: &Steps, range: Range) -> [u8; LANES] {
                    kernel::best_index::<$vector>(panel, steps, range)
                }
                // SAFETY: as above.
                unsafe { compiled(panel, steps, range) }
            }

            #[inline]
            pub(in super::super) fn encode(
                panel: Panel<'_>,
                scale: &Lanes,
                range: Range,
                table: &mut Vec<[u8; LANES]>,
                errors: &mut [f64; LANES],
            ) {
                #[target_feature(enable = $feature)]
                fn compiled(
                    panel: Panel<'_>,
                    scale: &Lanes,
                    range: Range,
                    table: &mut Vec<[u8; LANES]>,
                    errors: &mut [f64; LANES],
                ) {
                    kernel::encode(panel, scale, range, table, errors);
                }
                // SAFETY: as above.
                unsafe { compiled(panel, scale, range, table, errors) }
            }

            #[inline]
            pub(in super::super) fn pull(
                coefficients: &[f32],
                stride: usize,
                errors: &[Lanes],
                targets: &mut [Lanes],
            ) {
                #[target_feature(enable = $feature)]
                fn compiled(coefficients: &[f32], stride: usize, errors: &[Lanes], targets: &mut [Lanes]) {
                    feedback::pull::<$vector>(coefficients, stride, errors, targets);
                }
                // SAFETY: as above.
                unsafe { compiled(coefficients, stride, errors, targets) }
            }

            #[inline]
            pub(in super::super) fn encode_with_feedback(
                rows: Rows<'_>,
                scale: &Lanes,
                range: Range,
                codes: &mut [[u8; LANES]],
                errors: &mut [Lanes],
            ) -> [f64; LANES] {
                #[target_feature(enable = $feature)]
                fn compiled(
                    rows: Rows<'_>,
                    scale: &Lanes,
                    range: Range,
                    codes: &mut [[u8; LANES]],
                    errors: &mut [Lanes],
                ) -> [f64; LANES] {
                    feedback::encode_with_feedback::<$vector>(rows, scale, range, codes, errors)
                }
                // SAFETY: as above.
                unsafe { compiled(rows, scale, range, codes, errors) }
            }
        }
    };
}
#[cfg(target_arch = "x86_64")]
use compile_for;
