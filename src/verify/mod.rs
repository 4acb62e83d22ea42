//! Checks a directory that a conversion wrote: its files, that readers will load it, and the exactness that
//! its report claims.
//!
//! Takes a directory, with or without a `report.json`, and perhaps the checkpoint that it was made of; gives a
//! [`Verification`]: what was checked, and each fault with its file and tensor. Must not write, and must not
//! trust the report: whatever it says is read again from the bytes. A fault is a result, not an error.

mod batches;
mod claims;
mod exactness;
mod exllamav2;
mod files;

use crate::Diagnose;
use crate::checkpoint::{self, Checkpoint, Layout, Module, OpenOptions};
use crate::convert::REPORT_FILE;
use crate::progress::{Event, Observer};
use crate::warning::WarningCode;
use batches::in_batches;
use claims::Claims;
use serde::Serialize;
use std::path::Path;

/// What was found.
#[derive(Clone, Debug, Serialize)]
pub struct Verification {
    /// Whether nothing is wrong.
    pub good: bool,
    /// Each kind of check, in the order of [`CheckKind`].
    pub checks: Vec<Check>,
}

/// One kind of check.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// Which.
    pub kind: CheckKind,
    /// How many files, tensors or modules were looked at.
    pub checked: usize,
    /// Why nothing was looked at, if so.
    pub skipped: Option<&'static str>,
    /// What is wrong.
    pub faults: Vec<Fault>,
}

/// The kinds of checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CheckKind {
    /// The files that the report lists are there, with their sizes and sha256, and no other weights.
    Files,
    /// The index names the tensors' files.
    Index,
    /// Headers, tensors, sizes: all that opening a checkpoint checks.
    Open,
    /// Every module decodes.
    Decode,
    /// The configuration agrees with the tensors.
    Config,
    /// What exllamav2 asks of a directory (specs of EXL2: mixtures, biases, names, configuration).
    Exllamav2,
    /// The source is the one that was converted.
    Source,
    /// Tensors and modules relate to the source as the report claims.
    Exactness,
}

impl CheckKind {
    /// In words.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Files => "files",
            Self::Index => "index",
            Self::Open => "tensors",
            Self::Decode => "decoding",
            Self::Config => "configuration",
            Self::Exllamav2 => "exllamav2",
            Self::Source => "source",
            Self::Exactness => "exactness",
        }
    }
}

/// Something wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fault {
    /// The file, by its name in the directory.
    pub file: Option<String>,
    /// The tensor or module.
    pub tensor: Option<String>,
    /// What was found and what was expected.
    pub message: String,
}

/// What exllamav2 would fail on or misread in a directory that holds EXL2 modules; nothing where no module is
/// EXL2. GPTQ modules among them are unpacked for it.
pub fn exllamav2_faults(checkpoint: &Checkpoint) -> Vec<Fault> {
    match has_exl2(checkpoint) {
        true => exllamav2::check(checkpoint, &[]).faults,
        false => Vec::new(),
    }
}

/// What exllamav2 would fail on or misread, whatever the directory holds; files that it would load beside the
/// model included.
///
/// # Errors
/// A directory that can't be listed.
pub fn exllamav2_reads(checkpoint: &Checkpoint) -> Result<Vec<Fault>, crate::Error> {
    let weights = files::list_weights(checkpoint.dir())?;
    Ok(exllamav2::check(checkpoint, &weights).faults)
}

impl Fault {
    fn file(file: &str, message: impl Into<String>) -> Self {
        Self { file: Some(file.into()), tensor: None, message: message.into() }
    }

    /// Of a tensor, or of a module, whose file is that of its first tensor.
    fn tensor(checkpoint: &Checkpoint, name: &str, message: impl Into<String>) -> Self {
        let module = checkpoint.module(name);
        let first = module.and_then(|m| m.tensor_names().find_map(|name| checkpoint.tensor(&name)));
        let file = checkpoint.tensor(name).or(first).and_then(|tensor| name_of(tensor.file()));
        Self { file, tensor: Some(name.into()), message: message.into() }
    }

    fn of_error(error: &impl Diagnose) -> Self {
        let (file, tensor) = (error.file().and_then(name_of), error.tensor().map(Into::into));
        Self { file, tensor, message: error.to_string() }
    }
}

fn name_of(path: &Path) -> Option<String> {
    path.file_name().map(|name| name.to_string_lossy().into_owned())
}

impl Check {
    fn new(kind: CheckKind) -> Self {
        Self { kind, checked: 0, skipped: None, faults: Vec::new() }
    }

    fn skipped(kind: CheckKind, reason: &'static str) -> Self {
        Self { skipped: Some(reason), ..Self::new(kind) }
    }
}

const NO_REPORT: &str = "the directory has no report.json";
const UNREADABLE: &str = "the checkpoint can't be opened";

/// Verifies `dir`, opened with `options`; `against` is the checkpoint that it was made of, opened as it was for
/// the conversion.
///
/// # Errors
/// Only what keeps the checks from running: a directory that can't be listed, [`crate::Error::Cancelled`].
pub fn verify(
    dir: &Path,
    options: &OpenOptions,
    against: Option<&Checkpoint>,
    observer: &dyn Observer,
) -> Result<Verification, crate::Error> {
    if dir.is_file() {
        let (file, fault) = (dir.to_owned(), Box::new(checkpoint::Fault::NotAFolder));
        return Err(checkpoint::Error { file, tensor: None, fault }.into());
    }
    let weights = files::list_weights(dir)?;
    let mut checks = Vec::new();
    let claims = match std::fs::read(dir.join(REPORT_FILE)) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
        Err(e) => Some(Err(e.to_string())),
        Ok(json) => Some(Claims::parse(&json)),
    };
    let (claims, report_fault) = match claims {
        None => (None, None),
        Some(Ok(claims)) => (Some(claims), None),
        Some(Err(message)) => (None, Some(Fault::file(REPORT_FILE, message))),
    };
    checks.push(match (&claims, report_fault) {
        (Some(claims), _) => files::check(dir, &weights, claims, observer)?,
        (None, Some(fault)) => Check { faults: vec![fault], ..Check::new(CheckKind::Files) },
        (None, None) => Check::skipped(CheckKind::Files, NO_REPORT),
    });
    checks.push(files::check_index(dir, &weights, claims.is_some()));
    let mut open = Check::new(CheckKind::Open);
    let checkpoint = match Checkpoint::open(dir, options) {
        Ok(checkpoint) => Some(checkpoint),
        Err(error) => {
            open.faults.push(Fault::of_error(&error));
            None
        }
    };
    open.checked = checkpoint.iter().flat_map(|c| c.modules().iter().map(|_| ())).count();
    checks.push(open);
    if let Some(checkpoint) = &checkpoint {
        checks.push(decode(checkpoint, observer)?);
        checks.push(config(checkpoint, claims.as_ref()));
        checks.push(match has_exl2(checkpoint) || claims.as_ref().is_some_and(Claims::is_exl2) {
            true => exllamav2::check(checkpoint, &weights),
            false => Check::skipped(CheckKind::Exllamav2, "no module is EXL2"),
        });
    } else {
        checks.extend(
            [CheckKind::Decode, CheckKind::Config, CheckKind::Exllamav2]
                .map(|kind| Check::skipped(kind, UNREADABLE)),
        );
    }
    let [source, exactness] = match (&checkpoint, &claims, against) {
        (_, _, None) => skip_both("no source was given"),
        (_, None, _) => skip_both(NO_REPORT),
        (None, ..) => skip_both(UNREADABLE),
        (Some(checkpoint), Some(claims), Some(source)) => {
            let mut check = Check { checked: 1, ..Check::new(CheckKind::Source) };
            if source.fingerprint() == claims.source.fingerprint {
                [check, exactness::check(checkpoint, source, claims, observer)?]
            } else {
                let message = "the report names another source: its fingerprint differs";
                check.faults.push(Fault::file(REPORT_FILE, message));
                [check, Check::skipped(CheckKind::Exactness, "the source is another")]
            }
        }
    };
    checks.extend([source, exactness]);
    let good = checks.iter().all(|check| check.faults.is_empty());
    Ok(Verification { good, checks })
}

fn skip_both(reason: &'static str) -> [Check; 2] {
    [CheckKind::Source, CheckKind::Exactness].map(|kind| Check::skipped(kind, reason))
}

fn has_exl2(checkpoint: &Checkpoint) -> bool {
    checkpoint.modules().iter().any(|module| matches!(module.layout(), Layout::Exl2(_)))
}

/// Unpacks every module, which checks every code, scale and zero point.
fn decode(checkpoint: &Checkpoint, observer: &dyn Observer) -> Result<Check, crate::Error> {
    let mut check = Check::new(CheckKind::Decode);
    let modules = checkpoint.modules();
    let weights = modules.iter().map(|module| module.weights()).sum();
    observer.event(&Event::Stage { name: "decode", modules: modules.len(), weights });
    let look = |module: &Module| {
        let fault = match checkpoint.dequantize(module) {
            Err(error) => Some(Fault::of_error(&error)),
            Ok(weights) => weights.iter().position(|w| !w.is_finite()).map(|i| {
                let (row, column) = (i / module.out_features(), i % module.out_features());
                let message = format!("the weight at row {row}, column {column} is {}", weights[i]);
                Fault::tensor(checkpoint, module.name(), message)
            }),
        };
        observer.event(&Event::Module { name: module.name(), weights: module.weights() });
        Ok(fault)
    };
    check.checked = modules.len();
    check.faults.extend(in_batches(modules, Module::weights, observer, look)?.into_iter().flatten());
    Ok(check)
}

/// Contradictions that opening found. In new files of the same tensors they are the source's.
fn config(checkpoint: &Checkpoint, claims: Option<&Claims>) -> Check {
    let mut check = Check::new(CheckKind::Config);
    if claims.is_some_and(Claims::is_same) {
        return Check::skipped(CheckKind::Config, "it is the source's, unchanged");
    }
    check.checked = 1;
    let has_exl2 = has_exl2(checkpoint);
    // What opening tells of the weights themselves is no contradiction.
    let tolerated = |code| {
        use WarningCode as W;
        matches!(code, W::ZeroPointsWrapped | W::UnknownArchitecture | W::TiedHeadQuantized)
            || matches!(code, W::TiedHeadDiffers | W::ZerosRepeated | W::PaddingIgnored | W::ZerosSuspicious)
            // An EXL2 configuration doesn't say; exllamav2 reads v1, and its check holds modules to that.
            || (matches!(code, W::ZerosAssumed) && has_exl2)
            // Tells of a file that the check of files, or exllamav2's, names.
            || matches!(code, W::FileIgnored | W::AdapterIgnored)
    };
    for warning in checkpoint.warnings().iter().filter(|w| !tolerated(w.code)) {
        let (subject, message) = (&warning.subject, warning.message.clone());
        check.faults.push(match checkpoint.module(subject).is_some() {
            true => Fault::tensor(checkpoint, subject, message),
            false => Fault::file(subject, message),
        });
    }
    if claims.is_some_and(Claims::is_gptq) {
        const FILE: &str = "quantize_config.json";
        let text = std::fs::read(checkpoint.dir().join(FILE)).unwrap_or_default();
        let found: Option<serde_json::Value> = serde_json::from_slice(&text).ok();
        if found.is_none() || found.as_ref() != checkpoint.config().get("quantization_config") {
            check.faults.push(Fault::file(FILE, "differs from `quantization_config` of config.json"));
        }
    }
    check
}

impl Verification {
    /// All faults, with the kind of check that found them.
    pub fn faults(&self) -> impl Iterator<Item = (CheckKind, &Fault)> {
        self.checks.iter().flat_map(|check| check.faults.iter().map(move |fault| (check.kind, fault)))
    }
}
