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

/// Rows of cells as aligned columns: text left, numbers right.
pub(super) fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let cell = |row: &Vec<String>, c: usize| row.get(c).cloned().unwrap_or_default();
    let widths: Vec<usize> =
        (0..columns).map(|c| rows.iter().map(|r| cell(r, c).chars().count()).max().unwrap_or(0)).collect();
    let is_number = |c: usize| {
        rows.iter().skip(1).all(|r| cell(r, c).chars().all(|ch| ch.is_ascii_digit() || ".-+%".contains(ch)))
    };
    let right: Vec<bool> = (0..columns).map(is_number).collect();
    let mut text = String::new();
    for row in rows {
        let line: Vec<String> = (0..columns)
            .map(|c| {
                let (cell, width) = (cell(row, c), widths[c]);
                if right[c] { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
            })
            .collect();
        text.push_str(line.join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// Warnings of one kind together, with at most three subjects each.
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
    scaled(bytes as f64, &["B", "kB", "MB", "GB", "TB"])
}

/// A count with three significant digits.
pub(super) fn count(count: u64) -> String {
    scaled(count as f64, &["", "k", "M", "G", "T"])
}

fn scaled(mut value: f64, units: &[&str]) -> String {
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < units.len() {
        value /= 1000.0;
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
    }

    #[test]
    fn numbers_stand_right() {
        let rows = [vec!["name", "bits"], vec!["a", "4"], vec!["long", "12"]];
        let rows: Vec<Vec<String>> =
            rows.iter().map(|r| r.iter().map(ToString::to_string).collect()).collect();
        assert_eq!(table(&rows), "name  bits\na        4\nlong    12\n");
    }
}
