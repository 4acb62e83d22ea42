//! Which convention the zero points of a model are stored in, decided over all its modules.
//!
//! A wrong guess moves every weight by one step and no number shows it. So values come first: a symmetric
//! module has one zero point, `2^(bits − 1)`, and its stored fields tell v1 (one less) from v2. Then the
//! label, then the producer. Where a v1 field is all ones, readers disagree on its meaning; GPTQModel's own
//! rule is applied to its files, and other files stay undecided until the user chooses.

use super::config::Producer;
use super::fault::{Fault, MixedZeros};
use crate::warning::{Warning, WarningCode};
use requant_formats::gptq::{Bits, ZeroConvention, ZeroEncoding, ZeroSurvey};
use serde::Serialize;

/// What an all-ones field of an asymmetric v1 module stands for, where its writer isn't known to be
/// GPTQModel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AllOnes {
    /// 0: what the quantizer meant. AutoGPTQ's cuda_old and TGI's Triton kernel compute this.
    Wrap,
    /// `2^bits`: what exllama, exllamav2 and vLLM compute.
    PlusOne,
}

/// What decided the convention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ZeroEvidence {
    /// The user.
    Option,
    /// The stored values of symmetric modules.
    Values,
    /// `checkpoint_format`.
    Label,
    /// The producer writes v1.
    Producer,
    /// Nothing: v1, as every reader assumes.
    Default,
}

/// How a module's zero points are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Zeros {
    /// v1 or v2.
    pub convention: ZeroConvention,
    /// What decided that.
    pub evidence: ZeroEvidence,
    /// How fields become zero points; `None` where that is undecided or lost.
    pub encoding: Option<ZeroEncoding>,
    /// Whether every zero point is `2^(bits − 1)`.
    pub symmetric: bool,
    /// Fields of only ones.
    pub all_ones: usize,
    /// Words whose zero points AutoGPTQ overwrote with ones.
    pub smears: usize,
}

/// A module as this decision sees it.
pub(super) struct Surveyed {
    pub(super) name: String,
    pub(super) bits: Bits,
    pub(super) survey: ZeroSurvey,
    /// `sym` as stated for it.
    pub(super) sym: Option<bool>,
}

/// What the configuration and the user say.
#[derive(Clone, Copy)]
pub(super) struct Claims<'a> {
    pub(super) label: Option<ZeroConvention>,
    pub(super) producer: Option<&'a Producer>,
    pub(super) chosen: Option<ZeroConvention>,
    pub(super) all_ones: Option<AllOnes>,
}

/// What the stored fields of a symmetric module are evidence of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fingerprint {
    V1,
    V1ThreeBitSwapped,
    V2,
}

impl Fingerprint {
    const fn convention(self) -> ZeroConvention {
        match self {
            Self::V1 | Self::V1ThreeBitSwapped => ZeroConvention::V1,
            Self::V2 => ZeroConvention::V2,
        }
    }

    const fn describe(self) -> &'static str {
        match self {
            Self::V1 => "v1",
            Self::V1ThreeBitSwapped => "v1 of GPTQModel before 7.0",
            Self::V2 => "v2",
        }
    }

    fn of(module: &Surveyed) -> Option<Self> {
        // An asymmetric module may have one zero point everywhere; at 2 bits that is no surprise.
        let symmetric = module.sym.unwrap_or(module.bits.get() > 2);
        if !symmetric {
            return None;
        }
        if module.survey.three_bit_swapped {
            return Some(Self::V1ThreeBitSwapped);
        }
        let constant = u16::from(module.survey.constant?);
        let zero = module.bits.symmetric_zero();
        if constant == zero {
            Some(Self::V2)
        } else if constant + 1 == zero {
            Some(Self::V1)
        } else {
            None
        }
    }
}

/// Decides for each module, in the order given.
///
/// # Errors
/// [`Fault::MixedZeros`], with the index of the first module that contradicts the others.
pub(super) fn decide(
    modules: &[Surveyed],
    claims: Claims<'_>,
    warnings: &mut Vec<Warning>,
) -> Result<Vec<Zeros>, (usize, Fault)> {
    let votes: Vec<Option<Fingerprint>> = modules.iter().map(Fingerprint::of).collect();
    if claims.chosen.is_none() {
        expect_unanimous(modules, &votes, claims)?;
    }
    let voted = votes.iter().flatten().next().map(|vote| vote.convention());
    let (convention, evidence) = match (claims.chosen, voted, claims.label, claims.producer) {
        (Some(chosen), ..) => (chosen, ZeroEvidence::Option),
        (_, Some(voted), ..) => (voted, ZeroEvidence::Values),
        (_, _, Some(label), _) => (label, ZeroEvidence::Label),
        (_, _, _, Some(_)) => (ZeroConvention::V1, ZeroEvidence::Producer),
        _ => (ZeroConvention::V1, ZeroEvidence::Default),
    };
    let swapped = three_bit_swapped(modules, &votes, claims);
    let zeros: Vec<Zeros> = modules
        .iter()
        .map(|module| {
            let survey = &module.survey;
            let stored_less = u16::from(convention == ZeroConvention::V1);
            let (encoding, smears) = match convention {
                ZeroConvention::V2 => (Some(ZeroEncoding::V2), 0),
                ZeroConvention::V1 => v1_encoding(module, claims, swapped),
            };
            let symmetric = match encoding {
                Some(ZeroEncoding::V1ThreeBitSwapped) => survey.three_bit_swapped,
                _ => survey
                    .constant
                    .is_some_and(|c| u16::from(c) + stored_less == module.bits.symmetric_zero()),
            };
            Zeros { convention, evidence, encoding, symmetric, all_ones: survey.all_ones, smears }
        })
        .collect();
    if !modules.is_empty() {
        warn(modules, &zeros, &votes, claims, warnings);
    }
    Ok(zeros)
}

fn expect_unanimous(
    modules: &[Surveyed],
    votes: &[Option<Fingerprint>],
    claims: Claims<'_>,
) -> Result<(), (usize, Fault)> {
    let with = |vote| -> Vec<usize> { (0..votes.len()).filter(|&i| votes[i] == Some(vote)).collect() };
    let (v1, swapped, v2) =
        (with(Fingerprint::V1), with(Fingerprint::V1ThreeBitSwapped), with(Fingerprint::V2));
    // The exchanged constants concern 3 bits only: other widths beside them are plain v1.
    let three_bit_v1 = v1.iter().copied().filter(|&i| modules[i].bits.get() == 3).collect();
    let names = |list: &[usize]| list.iter().map(|&i| modules[i].name.clone()).collect();
    for (one, other) in [(&v1, &v2), (&swapped, &v2), (&three_bit_v1, &swapped)] {
        if let (Some(&first_one), Some(&first_other)) = (one.first(), other.first()) {
            let kind = |i: usize| votes[i].map_or("", Fingerprint::describe);
            let mixed = MixedZeros {
                one_kind: kind(first_one),
                one: names(one),
                other_kind: kind(first_other),
                other: names(other),
                label: claims.label.map(|label| label.to_string()),
                producer: claims.producer.map(|producer| producer.to_string()),
            };
            let fault = Fault::MixedZeros(Box::new(mixed));
            return Err((if one.len() < other.len() { first_one } else { first_other }, fault));
        }
    }
    Ok(())
}

/// Whether the 3-bit modules have GPTQModel's exchanged constants: by their values, else by the producer.
fn three_bit_swapped(modules: &[Surveyed], votes: &[Option<Fingerprint>], claims: Claims<'_>) -> bool {
    let mut three_bit = modules.iter().zip(votes).filter(|(m, _)| m.bits.get() == 3).filter_map(|(_, v)| *v);
    match three_bit.next() {
        Some(vote) => vote == Fingerprint::V1ThreeBitSwapped,
        None => claims.producer.is_some_and(|p| p.is_below("gptqmodel", [7, 0, 0])),
    }
}

/// How a v1 module's fields become zero points, and how many words are smeared.
fn v1_encoding(module: &Surveyed, claims: Claims<'_>, swapped: bool) -> (Option<ZeroEncoding>, usize) {
    let (three_bits, survey) = (module.bits.get() == 3, &module.survey);
    let writes_word_wise = claims.producer.is_some_and(|p| {
        let packing = p.packing_format.as_deref();
        p.name == "gptqmodel" || matches!(packing, Some("auto_round:auto_gptq" | "auto_round:gptq"))
    });
    if three_bits && swapped {
        return (Some(ZeroEncoding::V1ThreeBitSwapped), 0);
    }
    if three_bits && claims.producer.is_some_and(|p| p.is_at_least("gptqmodel", [7, 0, 0])) {
        return (Some(ZeroEncoding::V1Wrap), 0);
    }
    if !three_bits && writes_word_wise {
        return (Some(ZeroEncoding::V1WordWise), 0);
    }
    let encoding = match claims.all_ones {
        _ if survey.all_ones == 0 => Some(ZeroEncoding::V1PlusOne),
        _ if survey.smears > 0 => None,
        Some(AllOnes::Wrap) => Some(ZeroEncoding::V1Wrap),
        Some(AllOnes::PlusOne) => Some(ZeroEncoding::V1PlusOne),
        None => None,
    };
    (encoding, survey.smears)
}

/// The modules that a warning is about, as its subject and the end of its message.
pub(super) fn some_of<'a>(names: impl IntoIterator<Item = &'a str>) -> Option<(String, String)> {
    let mut names = names.into_iter();
    let subject = names.next()?.to_owned();
    let more = match names.count() {
        0 => String::new(),
        1 => " (The same in 1 more module.)".to_owned(),
        more => format!(" (The same in {more} more modules.)"),
    };
    Some((subject, more))
}

fn warn(
    modules: &[Surveyed],
    zeros: &[Zeros],
    votes: &[Option<Fingerprint>],
    claims: Claims<'_>,
    warnings: &mut Vec<Warning>,
) {
    let mut tell = |code, keep: &dyn Fn(usize) -> bool, message: &dyn Fn() -> String| {
        let names = (0..modules.len()).filter(|&i| keep(i)).map(|i| modules[i].name.as_str());
        if let Some((subject, more)) = some_of(names) {
            warnings.push(Warning { code, subject, message: message() + &more });
        }
    };
    let (convention, evidence) = (zeros[0].convention, zeros[0].evidence);
    if let Some(label) = claims.label
        && label != convention
    {
        let message = || {
            let why = match evidence {
                ZeroEvidence::Option => "as asked",
                _ => "because their stored zero points are those of symmetric modules",
            };
            format!(
                "Labelled {label}, read as {convention}, {why}. Engines that trust the label misread them."
            )
        };
        let voted = |i: usize| evidence == ZeroEvidence::Option || votes[i].is_some();
        tell(WarningCode::ZeroLabelWrong, &voted, &message);
    }
    if evidence == ZeroEvidence::Default {
        tell(WarningCode::ZerosAssumed, &|_| true, &|| {
            "Nothing tells how zero points are stored. They are read as v1, as every engine does; \
                 if the model's output is gibberish, they are v2."
                .to_owned()
        });
    }
    let suspicious = |i: usize| {
        let other_less = u16::from(convention == ZeroConvention::V2);
        modules[i]
            .survey
            .constant
            .is_some_and(|c| u16::from(c) + other_less == modules[i].bits.symmetric_zero())
    };
    if evidence != ZeroEvidence::Values && (0..modules.len()).all(suspicious) {
        tell(WarningCode::ZerosSuspicious, &|_| true, &|| {
            format!(
                "Read as {convention}, but every stored zero point is that of a symmetric model in the \
                 other convention."
            )
        });
    }
    tell(WarningCode::SymConflict, &|i| modules[i].sym == Some(true) && !zeros[i].symmetric, &|| {
        "Stated to be symmetric, but the zero points aren't. They are used as stored; Marlin kernels \
             would ignore them and compute something else."
            .to_owned()
    });
    let wrapped = |i: usize| {
        zeros[i].convention == ZeroConvention::V1 && zeros[i].all_ones > 0 && zeros[i].encoding.is_some()
    };
    let count = |keep: &dyn Fn(usize) -> bool| -> usize {
        (0..zeros.len()).filter(|&i| keep(i)).map(|i| zeros[i].all_ones).sum()
    };
    let wrapped_count = count(&wrapped);
    let first = zeros.iter().enumerate().find(|&(i, _)| wrapped(i)).and_then(|(_, zeros)| zeros.encoding);
    let rule = match first {
        Some(ZeroEncoding::V1WordWise) => "word by word, which undoes what their writer did",
        Some(ZeroEncoding::V1PlusOne) => "as 2^bits",
        _ => "as 0",
    };
    tell(WarningCode::ZeroPointsWrapped, &wrapped, &|| {
        format!(
            "{wrapped_count} stored zero points of the model are all ones. They are read {rule}; engines disagree \
             on them."
        )
    });
    let undecided = |i: usize| zeros[i].encoding.is_none() && zeros[i].smears == 0;
    let undecided_count = count(&undecided);
    tell(WarningCode::ZerosUndecided, &undecided, &|| {
        format!(
            "{undecided_count} zero points of the model are stored as all ones, which readers take for 0 or for \
             2^bits. They can't be converted until one is chosen."
        )
    });
    tell(WarningCode::ZerosLost, &|i| zeros[i].encoding.is_none() && zeros[i].smears > 0, &|| {
        "Zero points were overwritten with ones when the file was written. They can't be converted."
            .to_owned()
    });
}
