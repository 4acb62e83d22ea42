//! Each numbered statement of a SPEC has a test that cites its number.

/// Numbers of the statements: `G1.2` from `- **G1.2** …`.
fn statements(spec: &str) -> Vec<String> {
    spec.lines()
        .filter_map(|line| line.strip_prefix("- **")?.split_once("**"))
        .map(|(number, _)| number.to_owned())
        .collect()
}

/// Whether the name of a test has the number: `g1_2`, not as the start of `g1_20`.
fn cited(number: &str, tests: &[&str]) -> bool {
    let number = number.to_lowercase().replace('.', "_");
    let names = tests.iter().flat_map(|file| file.lines()).filter(|line| line.starts_with("fn "));
    names.into_iter().any(|name| {
        name.match_indices(&number)
            .any(|(at, _)| !name[at + number.len()..].starts_with(|next: char| next.is_ascii_digit()))
    })
}

fn uncited(spec: &str, tests: &[&str]) -> Vec<String> {
    let statements = statements(spec);
    assert!(statements.len() > 25, "the SPEC's list items begin with bold numbers");
    statements.into_iter().filter(|number| !cited(number, tests)).collect()
}

#[test]
fn each_statement_of_gptq_is_tested() {
    let tests = [include_str!("gptq_spec.rs"), include_str!("gptq_errors.rs")];
    assert_eq!(uncited(include_str!("../src/gptq/SPEC.md"), &tests), Vec::<String>::new());
}

#[test]
fn each_statement_of_exl2_is_tested() {
    let tests = [include_str!("exl2_spec.rs"), include_str!("exl2_errors.rs")];
    assert_eq!(uncited(include_str!("../src/exl2/SPEC.md"), &tests), Vec::<String>::new());
}
