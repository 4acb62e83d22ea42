//! Errors as text or JSON, and as exit codes.

use super::print;
use requant::checkpoint::Checkpoint;
use requant::validate::report::Verdict;
use requant::{Diagnose, Kind};
use serde::Serialize;
use std::process::ExitCode;

/// What the user is told about an error.
#[derive(Debug, Serialize)]
pub(super) struct Failure {
    code: &'static str,
    kind: Kind,
    file: Option<String>,
    tensor: Option<String>,
    message: String,
    hint: Option<String>,
}

impl<E: Diagnose> From<E> for Failure {
    fn from(error: E) -> Self {
        Self {
            code: error.code(),
            kind: error.kind(),
            file: error.file().map(|f| f.display().to_string()),
            tensor: error.tensor().map(Into::into),
            message: error.to_string(),
            hint: error.hint(),
        }
    }
}

impl Failure {
    /// An error of working on `checkpoint`, whose files tell where a module is.
    pub(super) fn working_on(checkpoint: &Checkpoint, error: requant::Error) -> Self {
        let file = error.file_in(checkpoint).map(|file| file.display().to_string());
        Self { file, ..Self::from(error) }
    }

    /// The environment failed outside the library.
    pub(super) fn environment(message: String) -> Self {
        let (code, kind) = ("cli.environment", Kind::Environment);
        Self { code, kind, file: None, tensor: None, message, hint: None }
    }

    /// Arguments that don't go together.
    pub(super) fn usage(message: String, hint: &str) -> Self {
        let (code, kind, hint) = ("cli.usage", Kind::Usage, Some(hint.into()));
        Self { code, kind, file: None, tensor: None, message, hint }
    }

    /// A verification that found faults, which are printed already.
    pub(super) fn found(dir: &std::path::Path, faults: usize) -> Self {
        let (code, kind, file) = ("verify.failed", Kind::Input, Some(dir.display().to_string()));
        let message = match faults {
            1 => "verification found a fault".into(),
            faults => format!("verification found {faults} faults"),
        };
        Self { code, kind, file, tensor: None, message, hint: None }
    }

    /// A validation that found something, which is printed already.
    pub(super) fn validation(dir: &std::path::Path, verdict: Verdict, message: String) -> Self {
        let (code, kind) = match verdict {
            Verdict::GateMissed => ("validate.gate_missed", Kind::Gate),
            Verdict::NonFinite => ("validate.not_finite", Kind::Input),
            _ => ("validate.broken", Kind::Input),
        };
        Self { code, kind, file: Some(dir.display().to_string()), tensor: None, message, hint: None }
    }

    /// What clap says of the arguments: the first paragraph in one line, without its label.
    pub(super) fn arguments(error: &clap::Error) -> Self {
        let text = error.render().to_string();
        let first: Vec<&str> = text.lines().take_while(|line| !line.is_empty()).map(str::trim).collect();
        let message = first.join(" ");
        Self::usage(message.trim_start_matches("error: ").into(), "see --help")
    }

    /// The same with a hint that tells more.
    pub(super) fn with_hint(mut self, hint: &str) -> Self {
        self.hint = Some(match self.hint {
            Some(first) => format!("{first}; {hint}"),
            None => hint.into(),
        });
        self
    }

    /// Whether the user or the machine stopped the work, not the input.
    pub(super) fn may_go_on(&self) -> bool {
        matches!(self.kind, Kind::Interrupted | Kind::Environment)
    }

    /// Prints the error on stderr and gives the exit code.
    pub(super) fn report(&self, json: bool) -> ExitCode {
        print::stderr(&if json { self.json() } else { self.text() });
        ExitCode::from(exit_code(self.kind))
    }

    fn json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    fn text(&self) -> String {
        let mut text = String::from("error: ");
        // Some messages tell what was done with the file, and so name it themselves.
        let named = |part: &str| self.message.split([' ', ':']).any(|word| word == part);
        for part in [&self.file, &self.tensor].into_iter().flatten().filter(|part| !named(part)) {
            text.push_str(part);
            text.push_str(": ");
        }
        text.push_str(&self.message);
        if let Some(hint) = &self.hint {
            text.push_str("\n  hint: ");
            text.push_str(hint);
        }
        text
    }
}

/// The exit code of each kind of error; 0 is success.
fn exit_code(kind: Kind) -> u8 {
    match kind {
        Kind::Gate => 1,
        Kind::Usage => 2,
        Kind::Environment => 4,
        Kind::Interrupted => 130,
        // A bug of ours shows on this input, and trying again won't help.
        Kind::Input | Kind::Bug => 3,
        _ => 3,
    }
}
