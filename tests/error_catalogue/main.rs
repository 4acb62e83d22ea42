//! docs/errors.md, the program's codes and inputs that give them: all three are one list.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod case;
mod planning;
mod reading;
#[path = "../support/mod.rs"]
mod support;
mod validating;
mod writing;

use case::{Case, model, onto, to_exl2};
use planning::planning;
use reading::reading;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use support::binary::FIXTURE;
use validating::{commands, validating};
use writing::writing;

const EXL2: &str = "fixtures/tiny-llama-exl2-4.0bpw";

// The page and the program.

/// Rows of the page: code, exit code, whether a row says something in every cell.
fn page() -> (BTreeMap<String, i32>, BTreeSet<String>) {
    let text = fs::read_to_string("docs/errors.md").unwrap();
    let (codes, unprovoked) = text.split_once("\n## Codes that no input gives\n").unwrap();
    let rows = |text: &str| -> Vec<Vec<String>> {
        let lines = text.lines().filter(|line| line.starts_with("| `"));
        let cells = |line: &str| {
            let inner = line.trim_start_matches("| ").trim_end_matches('|');
            inner.split(" | ").map(|cell| cell.trim().trim_matches('`').to_owned()).collect()
        };
        lines.map(cells).collect()
    };
    let mut found = BTreeMap::new();
    // The table of exit codes has no code in its first cell.
    for row in rows(codes) {
        let [code, exit, meaning, what_to_do] = &row[..] else { panic!("{row:?}") };
        assert!(meaning.ends_with('.'), "{code}: {meaning}");
        assert!(what_to_do.ends_with('.') || what_to_do.is_empty(), "{code}: {what_to_do}");
        let twice = found.insert(code.clone(), exit.parse().unwrap());
        assert_eq!(twice, None, "{code} stands twice");
    }
    let unprovoked = rows(unprovoked);
    assert!(unprovoked.iter().all(|row| row.len() == 2 && !row[1].is_empty()));
    (found, unprovoked.into_iter().map(|row| row[0].clone()).collect())
}

/// Every string of the sources that is a code: `layer.name` in quotes, with a layer that has codes.
fn codes_of_the_program() -> BTreeSet<String> {
    const LAYERS: [&str; 8] =
        ["checkpoint", "plan", "simd", "convert", "output", "validate", "verify", "cli"];
    let mut codes = BTreeSet::from(["interrupted".to_owned()]);
    let mut folders = vec![PathBuf::from("src"), PathBuf::from("kernels/src"), PathBuf::from("formats/src")];
    let mut seen_diagnose = 0;
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let Some("rs") = path.extension().and_then(|extension| extension.to_str()) else { continue };
            let text = fs::read_to_string(&path).unwrap();
            seen_diagnose += usize::from(text.contains("impl Diagnose for"));
            for part in text.split('"') {
                let name = |part: &str| {
                    !part.is_empty()
                        && part.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
                };
                if part.split_once('.').is_some_and(|(layer, rest)| LAYERS.contains(&layer) && name(rest)) {
                    codes.insert(part.to_owned());
                }
            }
        }
    }
    assert!(seen_diagnose >= 6, "the sources weren't read");
    codes
}

#[test]
fn the_page_has_every_code_of_the_program_and_no_other() {
    let (page, unprovoked) = page();
    let page: BTreeSet<String> = page.into_keys().collect();
    let program = codes_of_the_program();
    let difference =
        |a: &BTreeSet<String>, b: &BTreeSet<String>| a.difference(b).cloned().collect::<Vec<_>>();
    assert_eq!(difference(&program, &page), [""; 0], "not in docs/errors.md");
    assert_eq!(difference(&page, &program), [""; 0], "in docs/errors.md only");
    assert_eq!(difference(&unprovoked, &page), [""; 0], "said to be given by no input, and not listed");
    assert!(fs::read_to_string("README.md").unwrap().contains("(docs/errors.md)"), "README.md has no link");
}

/// What a case says, and its exit code; `None` where another user may not run the program.
fn outcome(mut case: Case) -> Option<(i32, Value)> {
    let ran = match case.command.output() {
        Ok(ran) => ran,
        Err(e) => {
            support::skip(&format!("{:?}: {e}", case.command));
            return None;
        }
    };
    let stderr = String::from_utf8_lossy(&ran.stderr);
    let last = stderr.lines().last().unwrap_or_default();
    let error =
        serde_json::from_str(last).unwrap_or_else(|_| json!({"message": format!("no error: {stderr}")}));
    Some((ran.status.code().unwrap_or(-1), error))
}

#[test]
fn each_code_has_an_input_that_gives_it() {
    let (page, unprovoked) = page();
    let mut provoked = BTreeSet::new();
    let mut wrong = Vec::new();
    let mut look = |code: &str, exit: i32, error: &Value| {
        provoked.insert(code.to_owned());
        let text = |key: &str| error[key].as_str().unwrap_or_default();
        if text("code") != code || page.get(code) != Some(&exit) {
            wrong.push(format!("{code}: {exit} {error}"));
        }
        assert!(!text("message").is_empty(), "{code}");
    };
    for cases in [reading, planning, writing, validating, commands] {
        for (code, case) in cases() {
            let excused = page.get(code).map(|exit| (*exit, json!({"code": code, "message": "not run"})));
            let (exit, error) = outcome(case).or(excused).unwrap();
            look(code, exit, &error);
        }
    }
    match of_a_missing_instruction_set() {
        Some((exit, error)) => look("simd.missing", exit, &error),
        None => {
            look("simd.missing", 4, &json!({"code": "simd.missing", "message": "this machine has them all"}))
        }
    }
    let (exit, error) = while_another_run_writes();
    look("output.in_use", exit, &error);
    let (exit, error) = interrupted();
    look("interrupted", exit, &error);
    assert_eq!(wrong, [""; 0]);
    let page: BTreeSet<String> = page.into_keys().collect();
    let open: Vec<&String> = page.difference(&provoked).filter(|code| !unprovoked.contains(*code)).collect();
    assert_eq!(open, [""; 0], "without an input, and not excused in docs/errors.md");
    let both: Vec<&String> = provoked.intersection(&unprovoked).collect();
    assert_eq!(both, [""; 0], "excused in docs/errors.md, and given by an input");
}

/// Of an instruction set that this machine lacks; `None` where it lacks none.
fn of_a_missing_instruction_set() -> Option<(i32, Value)> {
    let ran = |set| to_exl2(&model(), &[]).env("REQUANT_SIMD", set);
    let missing =
        ["avx512", "avx2"].into_iter().find(|set| !ran(set).command.output().unwrap().status.success());
    missing.and_then(|set| outcome(ran(set)))
}

fn while_another_run_writes() -> (i32, Value) {
    let mut lock = None;
    let case = onto(
        |out| {
            let partial = out.with_file_name("out.partial");
            fs::create_dir(&partial).unwrap();
            let held = fs::File::open(&partial).unwrap();
            held.lock().unwrap();
            lock = Some(held);
        },
        &[],
    );
    let outcome = outcome(case).unwrap();
    drop(lock);
    outcome
}

fn interrupted() -> (i32, Value) {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let mut command = Command::new(env!("CARGO_BIN_EXE_requant"));
    command
        .args(["convert", FIXTURE, "--to", "exl2", "--bpw", "4", "--threads", "1", "--json", "--out"])
        .arg(&out);
    let child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    while !dir.path().join("out.partial").exists() {
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let ran = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(ran.stderr).unwrap();
    (ran.status.code().unwrap(), serde_json::from_str(stderr.lines().last().unwrap()).unwrap())
}
