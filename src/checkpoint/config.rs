//! What the configuration files say about quantization. Tensors overrule it: it breaks ties, and a
//! contradiction is a warning.

use super::dynamic::{Overrides, Rules};
use super::error::Error;
use super::fault::Fault;
use super::{json, rope};
use crate::warning::{Warning, WarningCode};
use requant_formats::gptq::{Bits, ZeroConvention};
use serde_json::{Map, Value};
use std::fmt;
use std::path::Path;

/// The model's configuration.
pub const CONFIG: &str = "config.json";

/// Where producers write the quantization, next to `config.json`'s `quantization_config`.
const QUANT_FILES: [&str; 2] = ["quantize_config.json", "quant_config.json"];

/// `group_size`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupSize {
    /// −1: all rows of a module are one group.
    Whole,
    /// So many rows.
    Rows(usize),
}

impl GroupSize {
    /// Rows of a group of a module with `in_features` rows.
    pub const fn rows(self, in_features: usize) -> usize {
        match self {
            Self::Whole => in_features,
            Self::Rows(rows) => rows,
        }
    }
}

impl fmt::Display for GroupSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole => f.write_str("-1"),
            Self::Rows(rows) => rows.fmt(f),
        }
    }
}

/// What wrote the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Producer {
    /// `gptqmodel`, `auto_gptq`, `auto-round`, `optimum`, …
    pub name: String,
    /// Its version, as far as it is numbers.
    pub version: Option<[u32; 3]>,
    /// `packing_format` of auto-round.
    pub packing_format: Option<String>,
}

impl Producer {
    fn parse(text: &str) -> Self {
        let (name, version) = text.split_once(':').map_or((text, None), |(name, v)| (name, Some(v)));
        Self {
            name: name.trim().to_lowercase(),
            version: version.and_then(parse_version),
            packing_format: None,
        }
    }

    /// Whether it is `name` at or above a version. Unknown versions aren't.
    pub fn is_at_least(&self, name: &str, version: [u32; 3]) -> bool {
        self.name == name && self.version.is_some_and(|found| found >= version)
    }

    /// Whether it is `name` below a version. Unknown versions aren't.
    pub fn is_below(&self, name: &str, version: [u32; 3]) -> bool {
        self.name == name && self.version.is_some_and(|found| found < version)
    }
}

impl fmt::Display for Producer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if let Some([major, minor, patch]) = self.version {
            write!(f, " {major}.{minor}.{patch}")?;
        }
        Ok(())
    }
}

/// The leading numbers of a version: suffixes such as `-dev` and `+cu128` are common.
fn parse_version(text: &str) -> Option<[u32; 3]> {
    let mut version = [0; 3];
    for (i, (part, number)) in text.trim().trim_start_matches('v').split('.').zip(&mut version).enumerate() {
        let digits = part.bytes().take_while(u8::is_ascii_digit).count();
        match part[..digits].parse() {
            Ok(found) => *number = found,
            Err(_) if i == 0 => return None,
            Err(_) => break,
        }
        if digits < part.len() {
            break;
        }
    }
    Some(version)
}

/// The quantization as the configuration files state it (specs: keys of GPTQ configurations).
#[derive(Clone, Debug)]
pub struct QuantConfig {
    /// `quant_method`; `gptq` where absent.
    pub method: String,
    /// `bits`; for EXL2 a fraction, and not kept.
    pub bits: Option<Bits>,
    /// `group_size`.
    pub group_size: Option<GroupSize>,
    /// `desc_act`.
    pub desc_act: Option<bool>,
    /// `sym`, or `zero_point` negated.
    pub sym: Option<bool>,
    /// `checkpoint_format` or `format`, or what auto-round's `packing_format` stands for.
    pub label: Option<ZeroConvention>,
    /// What wrote it.
    pub producer: Option<Producer>,
    /// `dynamic`.
    pub dynamic: Rules,
    /// `lm_head`.
    pub lm_head: bool,
    /// `modules_in_block_to_quantize`, flattened: ends of the names of the modules that are quantized.
    pub listed_modules: Option<Vec<String>>,
}

/// All configuration files of a directory.
pub(super) struct Config {
    pub(super) model: Map<String, Value>,
    pub(super) quant: Option<QuantConfig>,
    pub(super) warnings: Vec<Warning>,
}

/// Reads the configuration files.
pub(super) fn read(dir: &Path) -> Result<Config, Error> {
    let path = dir.join(CONFIG);
    let Some(model) = read_object(&path)? else { return Err(Error::new(path, Fault::Missing)) };
    rope::check(&model).map_err(|fault| Error::new(&path, fault))?;
    let mut sources = Vec::new();
    match model.get("quantization_config") {
        Some(Value::Object(quant)) => sources.push(Source { file: CONFIG, keys: quant.clone() }),
        None | Some(Value::Null) => {}
        Some(other) => {
            let (key, expected) = ("quantization_config".into(), "an object");
            return Err(Error::new(path, Fault::ConfigValue { key, found: other.clone(), expected }));
        }
    }
    for file in QUANT_FILES {
        if let Some(keys) = read_object(&dir.join(file))? {
            sources.push(Source { file, keys });
        }
    }
    let mut warnings = Vec::new();
    let quant = QuantConfig::merge(dir, &sources, &mut warnings)?;
    Ok(Config { model, quant, warnings })
}

fn read_object(path: &Path) -> Result<Option<Map<String, Value>>, Error> {
    let text = match json::read(path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::new(path, e)),
    };
    // Windows editors leave a byte order mark.
    let text = text.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(&text);
    match serde_json::from_slice(text) {
        Ok(Value::Object(object)) => Ok(Some(object)),
        Ok(_) => Err(Error::new(path, Fault::ConfigNotJson { message: "another kind of value".into() })),
        Err(e) => Err(Error::new(path, Fault::ConfigNotJson { message: e.to_string() })),
    }
}

struct Source {
    file: &'static str,
    keys: Map<String, Value>,
}

/// Values of one file, checked.
struct Stated {
    file: &'static str,
    bits: Option<Bits>,
    group_size: Option<GroupSize>,
    desc_act: Option<bool>,
    sym: Option<bool>,
    label: Option<ZeroConvention>,
}

impl QuantConfig {
    fn merge(dir: &Path, sources: &[Source], warnings: &mut Vec<Warning>) -> Result<Option<Self>, Error> {
        let at = |source: &Source, fault| Error::new(dir.join(source.file), fault);
        for source in sources {
            source.refuse_foreign().map_err(|fault| at(source, fault))?;
        }
        let method = sources.iter().find_map(Source::method);
        let exl2 = method.as_deref() == Some("exl2");
        // Producers write quantize_config.json; config.json is the copy.
        let order = |source: &&Source| source.file == CONFIG;
        let (copy, own): (Vec<&Source>, Vec<&Source>) = sources.iter().partition(order);
        let mut stated = Vec::new();
        for source in own.into_iter().chain(copy) {
            stated.push(source.stated(exl2, warnings).map_err(|fault| at(source, fault))?);
        }
        // Where they disagree and tensors can't tell, config.json counts, as in most readers.
        stated.sort_by_key(|s| s.file != CONFIG);
        warn_disagreement(&stated, warnings);
        let mut dynamic = Rules::default();
        if let Some((source, rules)) = sources.iter().find_map(|s| Some((s, s.get(&["dynamic"])?))) {
            dynamic = Rules::parse(source.file, rules).map_err(|fault| at(source, fault))?;
        }
        if sources.is_empty() {
            return Ok(None);
        }
        Ok(Some(Self {
            method: method.unwrap_or_else(|| "gptq".into()),
            bits: stated.iter().find_map(|s| s.bits),
            group_size: stated.iter().find_map(|s| s.group_size),
            desc_act: stated.iter().find_map(|s| s.desc_act),
            sym: stated.iter().find_map(|s| s.sym),
            label: stated.iter().find_map(|s| s.label),
            producer: sources.iter().find_map(Source::producer),
            dynamic,
            listed_modules: sources.iter().find_map(Source::listed_modules),
            lm_head: sources.iter().find_map(|s| s.get(&["lm_head"])?.as_bool()).unwrap_or(false),
        }))
    }
}

/// The producer by `__metadata__` of the weights: AutoGPTQ and auto-round note themselves there, and it
/// stays when the configuration is lost.
pub(super) fn producer_of_file(metadata: &Map<String, Value>) -> Option<Producer> {
    let text = |key: &str| metadata.get(key).and_then(Value::as_str);
    let auto_gptq = text("auto_gptq_version").map(|version| Producer::parse(&format!("auto_gptq:{version}")));
    auto_gptq.or_else(|| text("autoround_version").map(|v| Producer::parse(&format!("auto-round:{v}"))))
}

/// The label by `__metadata__` of the weights.
pub(super) fn label_of_file(metadata: &Map<String, Value>) -> Option<ZeroConvention> {
    match metadata.get("gptq_checkpoint_format")?.as_str()? {
        "gptq" => Some(ZeroConvention::V1),
        "gptq_v2" => Some(ZeroConvention::V2),
        _ => None,
    }
}

fn warn_disagreement(stated: &[Stated], warnings: &mut Vec<Warning>) {
    let Some((first, others)) = stated.split_first() else { return };
    for other in others {
        let mut differences = Vec::new();
        let mut compare = |key: &str, used: Option<String>, other: Option<String>| {
            if let (Some(used), Some(other)) = (used, other)
                && used != other
            {
                differences.push(format!("{key} {other} instead of {used}"));
            }
        };
        let number = |bits: Option<Bits>| bits.map(|b| b.get().to_string());
        compare("bits", number(first.bits), number(other.bits));
        compare(
            "group_size",
            first.group_size.map(|g| g.to_string()),
            other.group_size.map(|g| g.to_string()),
        );
        compare("desc_act", first.desc_act.map(|d| d.to_string()), other.desc_act.map(|d| d.to_string()));
        compare("sym", first.sym.map(|s| s.to_string()), other.sym.map(|s| s.to_string()));
        compare("checkpoint_format", first.label.map(|l| l.to_string()), other.label.map(|l| l.to_string()));
        if !differences.is_empty() {
            warnings.push(Warning {
                code: WarningCode::ConfigsDisagree,
                subject: other.file.into(),
                message: format!(
                    "{} says {}, as {} does. The tensors decide; where they can't, {} does.",
                    other.file,
                    differences.join(", "),
                    first.file,
                    first.file
                ),
            });
        }
    }
}

impl Source {
    /// The first of some synonymous keys that isn't null.
    fn get(&self, keys: &[&str]) -> Option<&Value> {
        keys.iter().find_map(|&key| self.keys.get(key).filter(|value| !value.is_null()))
    }

    fn text(&self, keys: &[&str]) -> Option<String> {
        self.get(keys)?.as_str().map(str::to_lowercase)
    }

    fn method(&self) -> Option<String> {
        self.text(&["quant_method", "method"])
    }

    /// Names every layout that looks like GPTQ, or says it is, and isn't what requant reads.
    fn refuse_foreign(&self) -> Result<(), Fault> {
        let foreign =
            |method: &str, key: &str| Err(Fault::Foreign { method: method.into(), key: key.into() });
        match self.method().as_deref() {
            None | Some("gptq" | "exl2" | "auto-round" | "intel/auto-round") => {}
            Some(method) => return foreign(method, "quant_method"),
        }
        if self.method().is_none() && self.text(&["version"]).is_some_and(|v| v.starts_with("gem")) {
            return foreign("awq", "version");
        }
        if self.get(&["is_marlin_format"]) == Some(&Value::Bool(true)) {
            return foreign("marlin", "is_marlin_format");
        }
        for key in ["checkpoint_format", "format"] {
            match self.text(&[key]).as_deref() {
                None | Some("gptq" | "gptq_v2") => {}
                Some("gptq_p") => return foreign("gptq_p (planar packing)", key),
                Some(format) => return foreign(format, key),
            }
        }
        if let Some(rotation) = self.text(&["rotation"]) {
            // Its weights mean nothing without a Hadamard transform of their inputs.
            return foreign(&format!("rotated weights ({rotation})"), "rotation");
        }
        if let Some(packing) = self.packing_format()
            && packing.contains("awq")
        {
            return foreign("awq", "packing_format");
        }
        Ok(())
    }

    /// The list is flat or has a list for each part of a block.
    fn listed_modules(&self) -> Option<Vec<String>> {
        let list = self.get(&["modules_in_block_to_quantize"])?.as_array()?;
        let parts =
            list.iter().flat_map(|part| part.as_array().map_or(std::slice::from_ref(part), Vec::as_slice));
        Some(parts.filter_map(Value::as_str).map(str::to_owned).collect())
    }

    fn packing_format(&self) -> Option<String> {
        self.text(&["packing_format", "backend"]).filter(|p| p.starts_with("auto_round"))
    }

    fn stated(&self, exl2: bool, warnings: &mut Vec<Warning>) -> Result<Stated, Fault> {
        let mut stated = Stated {
            file: self.file,
            bits: None,
            group_size: None,
            desc_act: self.flag("desc_act")?,
            sym: self.flag("sym")?.or(self.flag("zero_point")?.map(|asymmetric| !asymmetric)),
            label: None,
        };
        if exl2 {
            return Ok(stated);
        }
        if self.get(&["pack_dtype"]).is_some_and(|dtype| dtype != "int32") {
            return Err(self.bad(&["pack_dtype"], "only int32 words are read"));
        }
        let overrides = Overrides::parse(&self.keys)?;
        (stated.bits, stated.group_size) = (overrides.bits, overrides.group_size);
        stated.label = self.label(warnings);
        if self.get(&["adapter"]).is_some() {
            warnings.push(Warning {
                code: WarningCode::AdapterIgnored,
                subject: self.file.into(),
                message:
                    "The configuration names an adapter. It is not applied: the weights are converted as \
                          they are stored."
                        .into(),
            });
        }
        Ok(stated)
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, Fault> {
        match self.get(&[key]) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(_) => Err(self.bad(&[key], "true or false")),
        }
    }

    fn bad(&self, keys: &[&str], expected: &'static str) -> Fault {
        let key = keys.iter().find(|&&key| self.keys.contains_key(key)).unwrap_or(&keys[0]);
        let found = self.keys.get(*key).cloned().unwrap_or_default();
        Fault::ConfigValue { key: (*key).into(), found, expected }
    }

    fn label(&self, warnings: &mut Vec<Warning>) -> Option<ZeroConvention> {
        let convention = |key| match self.text(&[key]).as_deref() {
            Some("gptq") => Some(ZeroConvention::V1),
            Some("gptq_v2") => Some(ZeroConvention::V2),
            _ => None,
        };
        let (format, checkpoint_format) = (convention("format"), convention("checkpoint_format"));
        if let (Some(format), Some(checkpoint_format)) = (format, checkpoint_format)
            && format != checkpoint_format
        {
            warnings.push(Warning {
                code: WarningCode::ConfigsDisagree,
                subject: self.file.into(),
                message: format!(
                    "`format` says {format}, `checkpoint_format` says {checkpoint_format}. The stored zero \
                     points decide; where they can't, `format` does, as in GPTQModel."
                ),
            });
        }
        format.or(checkpoint_format).or(match self.packing_format().as_deref() {
            Some("auto_round:auto_gptq" | "auto_round:gptq") => Some(ZeroConvention::V1),
            Some("auto_round" | "auto_round:gptqmodel") => Some(ZeroConvention::V2),
            _ => None,
        })
    }

    fn producer(&self) -> Option<Producer> {
        let meta = self.get(&["meta"]).and_then(Value::as_object);
        let quantizer = meta.and_then(|meta| meta.get("quantizer"));
        let named: Vec<Producer> = match quantizer {
            Some(Value::String(text)) => vec![Producer::parse(text)],
            Some(Value::Array(list)) => list.iter().filter_map(Value::as_str).map(Producer::parse).collect(),
            _ => Vec::new(),
        };
        // optimum lists itself before the library that packed the words.
        let gptqmodel = named.iter().find(|p| p.name == "gptqmodel").cloned();
        let auto_round = || {
            let version = self.text(&["autoround_version"]);
            let is = version.is_some()
                || self.text(&["provider"]).is_some_and(|p| p.contains("auto-round"))
                || self.method().is_some_and(|m| m.contains("auto-round"));
            is.then(|| Producer {
                name: "auto-round".into(),
                version: version.as_deref().and_then(parse_version),
                packing_format: self.packing_format(),
            })
        };
        gptqmodel.or_else(auto_round).or_else(|| named.into_iter().next())
    }
}

impl Overrides {
    /// The keys that a module's own rule can set, under all their names.
    pub(super) fn parse(keys: &Map<String, Value>) -> Result<Self, Fault> {
        let source = Source { file: CONFIG, keys: keys.clone() };
        let bits_keys = ["bits", "w_bit", "wbits"];
        let bits = match source.get(&bits_keys) {
            None => None,
            Some(value) => {
                let width = value.as_u64().and_then(|b| u32::try_from(b).ok());
                let bits = width.and_then(|b| Bits::try_from(b).ok());
                Some(bits.ok_or_else(|| source.bad(&bits_keys, "2, 3, 4 or 8"))?)
            }
        };
        let size_keys = ["group_size", "q_group_size", "groupsize"];
        let group_size = match source.get(&size_keys) {
            None => None,
            Some(value) => Some(match value.as_i64() {
                Some(-1) => GroupSize::Whole,
                Some(rows @ 1..=0x7FFF_FFFF) => GroupSize::Rows(rows as usize),
                _ => return Err(source.bad(&size_keys, "-1 or a positive number of rows")),
            }),
        };
        Ok(Self { bits, group_size, desc_act: source.flag("desc_act")?, sym: source.flag("sym")? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_keep_their_leading_numbers() {
        for (text, version) in [
            ("7.7.0", Some([7, 7, 0])),
            ("6.0.3-dev", Some([6, 0, 3])),
            ("5.0.0+cu128", Some([5, 0, 0])),
            ("v1.9", Some([1, 9, 0])),
            ("4.0rc1", Some([4, 0, 0])),
            ("main", None),
            ("", None),
        ] {
            assert_eq!(parse_version(text), version, "{text}");
        }
    }
}
