//! The schema of validation.json: a change of it fails here, and docs/validation.md names every field.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use requant::kernels::Cpu;
use requant::progress::Silent;
use requant::validate::report::{GateKind, LayoutFault, ModelSide, NonFinite, Validation, Verdict};
use requant::validate::{Gates, Layers, Options, SwapIn, validate};
use requant::{Warning, WarningCode};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use support::binary::{FIXTURE, convert};
use support::open;

/// Of a 4-bit conversion, with all that can be asked for.
fn validation() -> Validation {
    let converted = convert(FIXTURE.as_ref(), &["--bits", "4"]);
    let options = Options {
        tokens: 256,
        window: Some(64),
        swap_in: Some(SwapIn { layers: Layers::All, tokens: 128 }),
        gates: Gates { max_kl: Some(10.0), max_ppl_increase: Some(10.0), min_top1: Some(0.0) },
        ..Options::default()
    };
    let (source, converted) = (open(FIXTURE.as_ref()), open(&converted.out));
    validate(&source, &converted, &options, &Cpu::new(2), &Silent).unwrap()
}

fn faults() -> [LayoutFault; 5] {
    [
        LayoutFault::NotAsPromised { promised: 0.1, found: 0.2 },
        LayoutFault::PermutationInverted,
        LayoutFault::GroupsSwapped { first: 1, second: 2 },
        LayoutFault::ScaleIndexOff { by: 1 },
        LayoutFault::ZeroOff { by: -1 },
    ]
}

/// Figures that differ from machine to machine, or from version to version, by what they are; of each list of
/// objects the first and the last.
fn redacted(value: &mut Value) {
    match value {
        Value::Number(number) if number.is_f64() => *value = "[number]".into(),
        Value::String(text) if text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit()) => {
            *value = "[sha256]".into();
        }
        Value::String(text) if *text == format!("requant {}", env!("CARGO_PKG_VERSION")) => {
            *value = "requant [version]".into();
        }
        Value::Array(all) => {
            if all.len() > 2 && all[0].is_object() {
                all.drain(1..all.len() - 1);
            }
            all.iter_mut().for_each(redacted);
        }
        Value::Object(fields) => fields.values_mut().for_each(redacted),
        _ => {}
    }
}

#[test]
fn the_schema_is_what_it_was() {
    let mut found = serde_json::to_value(validation()).unwrap();
    redacted(&mut found);
    let mut settings = insta::Settings::clone_current();
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.bind(|| insta::assert_json_snapshot!("validation", found));
}

/// The values of each field, by its path.
fn fields(value: &Value, path: &str, found: &mut BTreeMap<String, Vec<Value>>) {
    match value {
        Value::Object(fields_of) => {
            for (name, value) in fields_of {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                found.entry(path.clone()).or_default().push(value.clone());
                fields(value, &path, found);
            }
        }
        Value::Array(all) => all.iter().for_each(|value| fields(value, &format!("{path}[]"), found)),
        _ => {}
    }
}

fn page() -> String {
    std::fs::read_to_string("docs/validation.md").unwrap()
}

/// The types that the page gives each path.
fn documented() -> BTreeMap<String, String> {
    let mut types = BTreeMap::new();
    let (mut objects, mut of_fields) = (Vec::new(), false);
    for line in page().lines() {
        let in_ticks =
            |text: &str| -> Vec<String> { text.split('`').skip(1).step_by(2).map(str::to_owned).collect() };
        if let Some(heading) = line.strip_prefix("## ") {
            objects = in_ticks(heading);
        }
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        match cells[..] {
            ["", "field", "type", ..] => of_fields = true,
            ["", field, kind, _, ""] if of_fields && field.starts_with('`') => {
                for object in &objects {
                    let field = &in_ticks(field)[0];
                    let path =
                        if object == "validation" { field.clone() } else { format!("{object}.{field}") };
                    assert_eq!(types.insert(path.clone(), kind.to_owned()), None, "{path} is there twice");
                }
            }
            ["", "---", ..] => {}
            _ => of_fields = false,
        }
    }
    types
}

fn is_of(value: &Value, kind: &str) -> bool {
    kind.split(" or ").any(|kind| match kind {
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "object" => value.is_object(),
        "list" => value.as_array().is_some_and(|all| all.iter().all(Value::is_object)),
        "list of strings" => value.as_array().is_some_and(|all| all.iter().all(Value::is_string)),
        "null" => value.is_null(),
        other => panic!("no type: {other}"),
    })
}

#[test]
fn each_field_is_documented_with_its_type_and_each_documented_field_is_there() {
    let mut good = validation();
    let all_null = Validation { model: None, ..good.clone() };
    good.non_finite =
        Some(NonFinite { model: ModelSide::Variant, layer: Some(0), module: Some("m".into()), token: 0 });
    good.warnings =
        vec![Warning { code: WarningCode::DeviceMemory, subject: "a".into(), message: "b".into() }];
    good.not_run = vec!["This.".into()];
    good.gates[0].found = f64::NAN;
    for (layer, fault) in good.layers.iter_mut().zip(faults()) {
        layer.fault = Some(fault);
    }
    let mut found = BTreeMap::new();
    for validation in [good, all_null] {
        fields(&serde_json::to_value(validation).unwrap(), "", &mut found);
    }
    let documented = documented();
    let names = |paths: &mut dyn Iterator<Item = &String>| paths.cloned().collect::<BTreeSet<String>>();
    assert_eq!(names(&mut documented.keys()), names(&mut found.keys()));
    for (path, values) in &found {
        let kind = &documented[path];
        assert!(values.iter().all(|value| is_of(value, kind)), "{path} is documented as {kind}");
    }
    assert_eq!(found["schema"][0], 1, "docs/validation.md says so");
}

#[test]
fn each_name_in_a_field_is_documented() {
    let page = page();
    let verdicts =
        [Verdict::Exact, Verdict::Passed, Verdict::GateMissed, Verdict::Broken, Verdict::NonFinite];
    let kinds = [GateKind::MaxKl, GateKind::MaxPplIncrease, GateKind::MinTop1];
    let sides = [ModelSide::Source, ModelSide::Converted, ModelSide::Variant];
    let of_faults = faults().map(|fault| serde_json::to_value(fault).unwrap()["kind"].clone());
    let Value::Array(mut names) = json!([verdicts, kinds, sides, of_faults]) else { unreachable!() };
    let names = names.iter_mut().flat_map(|names| names.as_array().unwrap());
    for name in names.chain(&["gptq", "exl2", "dense", "other", "head"].map(Value::from)) {
        assert!(page.contains(&format!("`{}`", name.as_str().unwrap())), "{name}");
    }
}
