//! GPTQModel's `dynamic`: overrides for modules by regular expressions on their full names.
//!
//! A pattern is matched from the start of the name and need not reach its end. `-:` before it means that
//! the module isn't quantized, `+:` or nothing that the object's keys replace the base values. Negative
//! rules come first, as GPTQModel sorts them; then the first match wins, and rules aren't merged.

use super::config::GroupSize;
use super::fault::Fault;
use requant_formats::gptq::Bits;
use serde_json::{Map, Value};

/// What a positive rule replaces; `None` falls back to the base value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    /// `bits`.
    pub bits: Option<Bits>,
    /// `group_size`.
    pub group_size: Option<GroupSize>,
    /// `desc_act`.
    pub desc_act: Option<bool>,
    /// `sym`.
    pub sym: Option<bool>,
}

/// All rules, in the order in which they are tried.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    file: &'static str,
    rules: Vec<Rule>,
}

#[derive(Clone, Debug)]
struct Rule {
    /// As the file has it, with its prefix.
    text: String,
    pattern: fancy_regex::Regex,
    /// `None` in a negative rule.
    overrides: Option<Overrides>,
    /// Place in the file.
    place: usize,
}

/// What the rules say of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// No rule matches.
    Base,
    /// It is left dense.
    Dense,
    /// Some values differ from the base.
    Override(Overrides),
}

/// What the rules say of a module, and whether readers agree on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// The rule that wins in GPTQModel.
    pub verdict: Verdict,
    /// Whether vLLM and SGLang, which try rules in the file's order, would take another.
    pub order_matters: bool,
}

impl Rules {
    /// Compiles the rules of `file`.
    pub(super) fn parse(file: &'static str, value: &Value) -> Result<Self, Fault> {
        let bad = |expected| Fault::ConfigValue { key: "dynamic".into(), found: value.clone(), expected };
        let Value::Object(entries) = value else {
            return Err(bad("an object of rules"));
        };
        let mut rules = Vec::with_capacity(entries.len());
        for (place, (text, overrides)) in entries.iter().enumerate() {
            let negative = text.starts_with("-:");
            let pattern = text.strip_prefix("-:").or(text.strip_prefix("+:")).unwrap_or(text);
            let rule_error =
                |e: fancy_regex::Error| Fault::DynamicRule { rule: text.clone(), message: e.to_string() };
            let overrides = match overrides {
                _ if negative => None,
                Value::Object(keys) => Some(Overrides::parse(keys)?),
                Value::Null => Some(Overrides::parse(&Map::new())?),
                _ => return Err(bad("an object of overrides for each rule")),
            };
            rules.push(Rule {
                pattern: fancy_regex::Regex::new(&format!(r"\A(?:{pattern})")).map_err(rule_error)?,
                text: text.clone(),
                overrides,
                place,
            });
        }
        rules.sort_by_key(|rule| rule.overrides.is_some());
        Ok(Self { file, rules })
    }

    /// The file they stand in.
    pub fn file(&self) -> &'static str {
        self.file
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Finds the rule for a module.
    ///
    /// # Errors
    /// [`Fault::DynamicRule`] when a pattern backtracks too often to be evaluated.
    pub fn resolve(&self, module: &str) -> Result<Resolved, Fault> {
        let mut winner: Option<&Rule> = None;
        let mut order_matters = false;
        for rule in &self.rules {
            if !rule.matches(module)? {
                continue;
            }
            match winner {
                None => winner = Some(rule),
                Some(first) => order_matters |= rule.place < first.place,
            }
        }
        let verdict = match winner.map(|rule| rule.overrides) {
            None => Verdict::Base,
            Some(None) => Verdict::Dense,
            Some(Some(overrides)) => Verdict::Override(overrides),
        };
        Ok(Resolved { verdict, order_matters })
    }
}

impl Rule {
    fn matches(&self, module: &str) -> Result<bool, Fault> {
        self.pattern
            .is_match(module)
            .map_err(|e| Fault::DynamicRule { rule: self.text.clone(), message: e.to_string() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn rules(value: Value) -> Rules {
        Rules::parse("quantize_config.json", &value).unwrap()
    }

    fn bits(rules: &Rules, module: &str) -> Option<u32> {
        match rules.resolve(module).unwrap().verdict {
            Verdict::Override(o) => o.bits.map(Bits::get),
            _ => None,
        }
    }

    #[test]
    fn the_first_match_wins_and_is_not_merged() {
        let rules = rules(json!({
            r"+:.*\.(?:1[0-5])\..*": {"bits": 8},
            r"+:.*\.down_proj": {"group_size": 64},
            r"-:.*\.gate$": {}
        }));
        let down = |layer| rules.resolve(&format!("model.layers.{layer}.mlp.down_proj")).unwrap().verdict;
        let Verdict::Override(twelve) = down(12) else { panic!() };
        assert_eq!((twelve.bits.map(Bits::get), twelve.group_size), (Some(8), None));
        let Verdict::Override(three) = down(3) else { panic!() };
        assert_eq!((three.bits, three.group_size), (None, Some(GroupSize::Rows(64))));
        assert_eq!(rules.resolve("model.layers.3.mlp.gate").unwrap().verdict, Verdict::Dense);
        assert_eq!(rules.resolve("model.layers.3.mlp.gate_proj").unwrap().verdict, Verdict::Base);
    }

    #[test]
    fn patterns_are_anchored_at_the_start_only() {
        let rules =
            rules(json!({r"model\.layers\.1": {"bits": 8}, "layers": {"bits": 2}, "a|lm_head": {"bits": 3}}));
        assert_eq!(bits(&rules, "model.layers.1.mlp.up_proj"), Some(8));
        assert_eq!(bits(&rules, "model.layers.17.mlp.up_proj"), Some(8));
        assert_eq!(bits(&rules, "model.layers.2.mlp.up_proj"), None);
        assert_eq!(bits(&rules, "lm_head"), Some(3));
    }

    #[test]
    fn negative_rules_come_first_and_a_difference_in_order_is_told() {
        let rules = rules(json!({r".*q_proj": {"bits": 8}, r"-:.*layers\.0\.": {}}));
        let zero = rules.resolve("model.layers.0.self_attn.q_proj").unwrap();
        assert_eq!(zero, Resolved { verdict: Verdict::Dense, order_matters: true });
        assert!(!rules.resolve("model.layers.1.self_attn.q_proj").unwrap().order_matters);
    }

    #[test]
    fn look_around_and_back_references_work() {
        let rules = rules(json!({r"+:(?!.*down).*layers\.(\d)\1\.": {"bits": 2}}));
        assert_eq!(bits(&rules, "model.layers.11.mlp.up_proj"), Some(2));
        assert_eq!(bits(&rules, "model.layers.11.mlp.down_proj"), None);
        assert_eq!(bits(&rules, "model.layers.12.mlp.up_proj"), None);
    }

    #[test]
    fn a_pattern_that_backtracks_without_end_is_an_error() {
        let rules = rules(json!({r"+:(?=(a*)*b)\1x": {}}));
        let fault = rules.resolve(&"a".repeat(40)).unwrap_err();
        assert!(matches!(fault, Fault::DynamicRule { .. }), "{fault}");
    }

    #[test]
    fn broken_rules_are_refused() {
        for value in [json!({"+:(": {}}), json!({"a": {"bits": 5}}), json!([1]), json!({"a": 3})] {
            assert!(Rules::parse("config.json", &value).is_err(), "{value}");
        }
    }
}
