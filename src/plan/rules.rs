//! Floors and fixed widths by module name.

use super::Error;
use super::sets::{Member, Treatment};
use fancy_regex::Regex;
use requant_formats::exl2::Bits;

/// A width for every module whose name a pattern is found in.
#[derive(Clone, Debug)]
pub struct WidthRule {
    pattern: Regex,
    bits: Bits,
}

impl WidthRule {
    /// A rule for modules whose name in the source or in the output contains a match of `pattern`.
    ///
    /// # Errors
    /// [`Error::Pattern`].
    pub fn new(pattern: &str, bits: Bits) -> Result<Self, Error> {
        match Regex::new(pattern) {
            Ok(pattern) => Ok(Self { pattern, bits }),
            Err(source) => Err(Error::Pattern { pattern: pattern.into(), source: Box::new(source) }),
        }
    }

    fn matches(&self, member: &Member<'_>) -> Result<bool, Error> {
        let found = |name: &str| {
            let failed =
                |source| Error::Pattern { pattern: self.pattern.as_str().into(), source: Box::new(source) };
            self.pattern.is_match(name).map_err(failed)
        };
        Ok(found(&member.linear.name)? || found(&member.linear.exl2_name)?)
    }
}

/// The width of the first rule that matches.
pub(super) fn width(rules: &[WidthRule], member: &Member<'_>) -> Result<Option<Bits>, Error> {
    for rule in rules {
        if rule.matches(member)? {
            return Ok(Some(rule.bits));
        }
    }
    Ok(None)
}

/// Checks that each rule matches a module that is quantized; `heads` are the head's names, which no rule can
/// mean.
pub(super) fn check_used(rules: &[WidthRule], members: &[Member<'_>], heads: [&str; 2]) -> Result<(), Error> {
    for rule in rules {
        let mut used = false;
        for member in members.iter().filter(|m| m.treatment != Treatment::Dense) {
            used = used || rule.matches(member)?;
        }
        if !used {
            let head = heads.iter().any(|head| rule.pattern.is_match(head).unwrap_or(false));
            return Err(Error::UnusedRule { pattern: rule.pattern.as_str().into(), head });
        }
    }
    Ok(())
}
