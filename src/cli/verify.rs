//! `requant verify`.

use super::errors::Failure;
use super::print;
use super::progress::{Progress, Style};
use requant::checkpoint::{Checkpoint, OpenOptions};
use requant::convert::REPORT_FILE;
use requant::verify::{Check, Verification, verify};
use std::path::PathBuf;

/// Check a converted directory: its files, what readers ask of it, how exact it is.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// The directory. Without report.json only what readers ask of it is checked.
    dir: PathBuf,
    /// The checkpoint that it was made of: checks the exactness that report.json claims.
    #[arg(long, value_name = "SOURCE")]
    against: Option<PathBuf>,
    /// What a stored zero point of only ones means, if the conversion was told.
    #[arg(long, value_name = "MEANING", value_enum)]
    all_ones: Option<super::convert::Ones>,
    /// Convention of the source's stored zero points, if the conversion was told.
    #[arg(long, value_name = "CONVENTION", value_enum, requires = "against")]
    source_zeros: Option<super::convert::Zeros>,
    /// Read an architecture that isn't known as a Llama, if the conversion was told.
    #[arg(long)]
    any_arch: bool,
    /// How progress is shown.
    #[arg(long, value_enum, default_value_t = Style::Auto)]
    progress: Style,
}

impl Arguments {
    pub(super) fn run(&self, json: bool) -> Result<(), Failure> {
        if self.against.is_some() && self.dir.is_dir() && !self.dir.join(REPORT_FILE).exists() {
            let message = format!("{} has no {REPORT_FILE}, so that nothing is claimed", self.dir.display());
            return Err(Failure::usage(message, "without --against, what readers ask of it is checked"));
        }
        let all_ones = self.all_ones.map(Into::into);
        let options = OpenOptions { all_ones, any_arch: self.any_arch, ..OpenOptions::default() };
        let of_source = OpenOptions { zeros: self.source_zeros.map(Into::into), ..options };
        let source = self.against.as_ref().map(|dir| Checkpoint::open(dir, &of_source)).transpose()?;
        let progress = Progress::new(self.progress);
        let verification = verify(&self.dir, &options, source.as_ref(), &progress);
        progress.finish();
        let verification = verification?;
        let text = match json {
            true => serde_json::to_string_pretty(&verification).unwrap_or_default() + "\n",
            false => text(&verification),
        };
        print::stdout(&text)?;
        if verification.good { Ok(()) } else { Err(Failure::found(&self.dir, verification.faults().count())) }
    }
}

fn text(verification: &Verification) -> String {
    let mut text = String::new();
    for check in &verification.checks {
        text.push_str(&format!("{:<14} {}\n", check.kind.name(), outcome(check)));
        for fault in &check.faults {
            let place: Vec<&str> =
                [&fault.file, &fault.tensor].into_iter().flatten().map(String::as_str).collect();
            text.push_str(&format!("  {}: {}\n", place.join(": "), fault.message));
        }
    }
    let faults = verification.faults().count();
    text.push_str(&match faults {
        0 => "good\n".into(),
        1 => "bad: 1 fault\n".into(),
        faults => format!("bad: {faults} faults\n"),
    });
    text
}

fn outcome(check: &Check) -> String {
    match (check.skipped, check.faults.len()) {
        (Some(reason), _) => format!("not checked: {reason}"),
        (None, 0) => format!("good ({})", check.checked),
        (None, 1) => "1 fault".into(),
        (None, faults) => format!("{faults} faults"),
    }
}
