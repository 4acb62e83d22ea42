//! What stands in the way of an output.

use super::FIXTURE;
use super::case::*;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

pub(super) fn writing() -> Vec<Given> {
    vec![
        ("output.no_name", {
            let dir = tempfile::tempdir().unwrap();
            let above = format!("{}/absent/..", text(dir.path()));
            Case::new(vec![dir], &["convert", FIXTURE, "--to", "same", "--out", &above])
        }),
        ("output.exists", onto(|out| fs::create_dir(out).unwrap(), &[])),
        (
            "output.partial_exists",
            onto(
                |out| {
                    let partial = out.with_file_name("out.partial");
                    fs::create_dir(&partial).unwrap();
                    fs::write(partial.join("mine"), "").unwrap();
                },
                &[],
            ),
        ),
        ("output.unfinished", onto(|out| unfinished(out, "{}"), &[])),
        (
            "output.other_job",
            onto(
                |out| {
                    let identity =
                        json!({"tool": "requant", "version": "0.0.0", "source": "none", "flags": {}});
                    unfinished(out, &job_of(&identity));
                },
                &["--resume"],
            ),
        ),
        ("output.state", onto(|out| unfinished(out, "nonsense"), &["--resume"])),
        (
            "output.not_ours",
            onto(
                |out| {
                    fs::create_dir(out).unwrap();
                    fs::write(out.join("mine"), "").unwrap();
                },
                &["--force"],
            ),
        ),
        ("output.holds_source", {
            let dir = model().write();
            let path = text(dir.path()).to_owned();
            Case::new(vec![dir], &["convert", &path, "--to", "same", "--force", "--out", &path])
        }),
        ("output.not_a_directory", {
            Case::new(vec![], &["convert", FIXTURE, "--to", "same", "--out", "Cargo.toml/out"])
        }),
        ("output.permission", {
            let (source, target) = (model().write(), tempfile::tempdir().unwrap());
            let (from, out) = (text(source.path()).to_owned(), target.path().join("out"));
            let command = ["convert", &from, "--to", "same", "--progress", "none", "--out", text(&out)];
            let dirs = [target.path().to_owned(), source.path().to_owned()];
            let case = Case::new(vec![source, target], &command);
            // Root's folder, and another user; or one's own, closed.
            let case = as_nobody(case, &[&dirs[0], &dirs[1]]);
            fs::set_permissions(&dirs[0], fs::Permissions::from_mode(0o555)).unwrap();
            case
        }),
        ("output.unreadable", {
            let source = model().write();
            let secret = source.path().join("vocab.json");
            fs::write(&secret, "{}").unwrap();
            fs::set_permissions(&secret, fs::Permissions::from_mode(0o000)).unwrap();
            let (path, from) = (source.path().to_owned(), text(source.path()).to_owned());
            let target = tempfile::tempdir().unwrap();
            let out = target.path().join("out");
            let case =
                Case::new(vec![source, target], &["convert", &from, "--to", "same", "--out", text(&out)]);
            as_nobody(case, &[&path])
        }),
        ("output.io", {
            // Files of at most 8 blocks of 512 or 1024 bytes, and an error instead of a signal for more.
            let (source, target) = (model().write(), tempfile::tempdir().unwrap());
            let (from, out) = (text(source.path()).to_owned(), target.path().join("out"));
            let mut command = Command::new("sh");
            command.args([
                "-c",
                "trap '' XFSZ; ulimit -f 8; exec \"$@\"",
                "sh",
                env!("CARGO_BIN_EXE_requant"),
            ]);
            command
                .args(["convert", &from, "--to", "same", "--json", "--progress", "none", "--out"])
                .arg(&out);
            Case { command, dirs: vec![source, target] }
        }),
    ]
}

/// The state of a job with this identity.
fn job_of(identity: &Value) -> String {
    json!({"identity": identity, "source_files": [], "plan": {}}).to_string()
}
