//! Text for people.

use super::errors::Failure;
use requant::Warning;
use std::io::{ErrorKind, Write};

/// Prints on stdout. A reader that closed the pipe has seen enough: that is no error.
pub(super) fn stdout(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(Failure::environment(format!("stdout: {e}"))),
        _ => Ok(()),
    }
}

/// Prints a line on stderr, if anyone listens.
pub(super) fn stderr(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// Rows of cells as aligned columns: text left, numbers right. The first row is the header; columns with
/// nothing below it are left out.
pub(super) fn table(rows: &[Vec<String>]) -> String {
    let cell = |row: &Vec<String>, c: usize| row.get(c).cloned().unwrap_or_default();
    let body = || rows.iter().skip(1);
    let columns: Vec<usize> = (0..rows.iter().map(Vec::len).max().unwrap_or(0))
        .filter(|&c| body().any(|r| !cell(r, c).is_empty()))
        .collect();
    let width = |c: usize| rows.iter().map(|r| cell(r, c).chars().count()).max().unwrap_or(0);
    let is_number =
        |c: usize| body().all(|r| cell(r, c).chars().all(|ch| ch.is_ascii_digit() || ".-+%".contains(ch)));
    let columns: Vec<(usize, usize, bool)> = columns.iter().map(|&c| (c, width(c), is_number(c))).collect();
    let mut text = String::new();
    for row in rows {
        let line: Vec<String> = columns
            .iter()
            .map(|&(c, width, right)| {
                let cell = cell(row, c);
                if right { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
            })
            .collect();
        text.push_str(line.join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// Warnings a line each; those that say the same of several subjects together.
pub(super) fn warnings(warnings: &[Warning]) -> String {
    let mut text = String::new();
    let mut seen: Vec<(&Warning, usize)> = Vec::new();
    for warning in warnings {
        match seen
            .iter_mut()
            .find(|(first, _)| first.code == warning.code && first.message == warning.message)
        {
            Some((_, more)) => *more += 1,
            None => seen.push((warning, 0)),
        }
    }
    for (warning, more) in seen {
        let and = match more {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        text.push_str(&format!("warning: {}{and}: {}\n", warning.subject, warning.message));
    }
    text
}

/// A number of bytes with three significant digits.
pub(super) fn bytes(bytes: u64) -> String {
    scaled(bytes as f64, 1000.0, &["B", "kB", "MB", "GB", "TB"])
}

/// A number of bytes in the units of memory, with three significant digits.
pub(super) fn memory(bytes: u64) -> String {
    scaled(bytes as f64, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB"])
}

/// A count with three significant digits.
pub(super) fn count(count: u64) -> String {
    scaled(count as f64, 1000.0, &["", "k", "M", "G", "T"])
}

fn scaled(mut value: f64, step: f64, units: &[&str]) -> String {
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    let digits = if unit == 0 || value >= 99.95 {
        0
    } else if value >= 9.995 {
        1
    } else {
        2
    };
    format!("{value:.digits$} {}", units[unit]).trim_end().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        let all: Vec<String> = [0, 999, 1000, 12_345, 999_499, 999_500, 5_000_000_000].map(bytes).to_vec();
        assert_eq!(all, ["0 B", "999 B", "1.00 kB", "12.3 kB", "999 kB", "1.00 MB", "5.00 GB"]);
        assert_eq!(count(106_168_320), "106 M");
        assert_eq!([memory(24 << 30), memory(12 << 20), memory(1000)], ["24.0 GiB", "12.0 MiB", "0.98 KiB"]);
    }

    #[test]
    fn warnings_that_say_the_same_are_told_once() {
        let warning = |subject: &str, message: &str| Warning {
            code: requant::WarningCode::ZeroBiasDropped,
            subject: subject.into(),
            message: message.into(),
        };
        let all = [warning("a.q", "odd"), warning("a.k", "left out"), warning("a.v", "left out")];
        assert_eq!(warnings(&all), "warning: a.q: odd\nwarning: a.k and 1 more: left out\n");
    }

    #[test]
    fn numbers_stand_right() {
        let rows = [vec!["name", "none", "bits"], vec!["a", "", "4"], vec!["long", "", "12"]];
        let rows: Vec<Vec<String>> =
            rows.iter().map(|r| r.iter().map(ToString::to_string).collect()).collect();
        assert_eq!(table(&rows), "name  bits\na        4\nlong    12\n");
    }
}
