//! Who loads a checkpoint as it is, and who doesn't, and why.
//!
//! What each program reads stands in one table, [`crate::plan::readers`]; here it meets the tensors and the
//! configuration of a checkpoint that somebody else made.

use super::Counted;
use crate::arch::MlpKind;
use crate::checkpoint::{Bias, CONFIG, Checkpoint, Gptq, GroupSize, Layout, Module, Verdict as Rule};
use crate::plan::readers::{Objection, Reader};
use crate::verify;
use requant_formats::gptq::{Bits, GIdxKind, ZeroConvention, ZeroEncoding};
use serde::Serialize;
use serde_json::Value;

/// Whether a program loads a checkpoint and computes what its tensors mean.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// The program, by its name in [`crate::plan::readers::READERS`].
    pub reader: &'static str,
    /// Whether it does.
    pub loads: bool,
    /// Why not.
    pub reasons: Vec<Counted>,
}

/// What the configuration says of a module, `dynamic` rules applied.
#[derive(Clone, Copy, Default)]
struct Stated {
    bits: Option<Bits>,
    group_size: Option<GroupSize>,
    desc_act: Option<bool>,
}

impl Verdict {
    /// Judges a checkpoint for one program.
    ///
    /// # Errors
    /// A directory that can't be listed.
    pub fn new(checkpoint: &Checkpoint, reader: &'static Reader) -> Result<Self, crate::Error> {
        let mut judge = Judge { checkpoint, reader, reasons: Vec::new() };
        judge.model()?;
        let reasons = judge.reasons;
        Ok(Self { reader: reader.name, loads: reasons.is_empty(), reasons })
    }
}

struct Judge<'a> {
    checkpoint: &'a Checkpoint,
    reader: &'static Reader,
    reasons: Vec<Counted>,
}

impl Judge<'_> {
    fn object(&mut self, subject: &str, message: impl Into<String>) {
        Counted::add(&mut self.reasons, subject, message.into());
    }

    fn model(&mut self) -> Result<(), crate::Error> {
        let checkpoint = self.checkpoint;
        let has = |wanted: fn(&Layout) -> bool| checkpoint.modules().iter().any(|m| wanted(m.layout()));
        let (exl2, gptq) = (has(|l| matches!(l, Layout::Exl2(_))), has(|l| matches!(l, Layout::Gptq(_))));
        if exl2 && !self.reader.exl2 {
            self.object(CONFIG, "it does not load EXL2");
            return Ok(());
        }
        if self.reader.is_exllamav2() {
            self.exllamav2()?;
            return Ok(());
        }
        if exl2 && gptq {
            self.object(CONFIG, "it loads EXL2 or GPTQ, not both in one model");
        }
        if exl2 {
            self.exl2();
        }
        if gptq {
            self.gptq();
        }
        Ok(())
    }

    /// Its tensors decide alone, so what it does with them is known best.
    fn exllamav2(&mut self) -> Result<(), crate::Error> {
        let checkpoint = self.checkpoint;
        if !checkpoint.architecture().is_some_and(|arch| arch.exllamav2) {
            let named = checkpoint.config().get("architectures").map_or("none".into(), Value::to_string);
            self.object(CONFIG, format!("it doesn't know the architecture {named} and takes it for a Llama"));
        }
        for fault in verify::exllamav2_reads(checkpoint)? {
            let subject = fault.tensor.or(fault.file).unwrap_or_default();
            self.object(&subject, fault.message);
        }
        Ok(())
    }

    /// EXL2 in TGI and Aphrodite, whose code for it is alike but for what is named here.
    fn exl2(&mut self) {
        if self.reader.name != "aphrodite" {
            return;
        }
        let checkpoint = self.checkpoint;
        if checkpoint.architecture().is_some_and(|arch| arch.mlp != MlpKind::Dense) {
            self.object(CONFIG, "it has no EXL2 for mixtures of experts");
        }
        let head = checkpoint.naming().head;
        if checkpoint.module(head).is_some_and(|head| head.layout().is_quantized()) {
            self.object(head, "it does not load a quantized head");
        }
        let config = checkpoint.config();
        let dtype = config.get("torch_dtype").or_else(|| config.get("dtype")).and_then(Value::as_str);
        if dtype == Some("bfloat16") {
            self.object(CONFIG, "it runs EXL2 in fp16 only, and the configuration says bfloat16");
        }
    }

    fn gptq(&mut self) {
        let checkpoint = self.checkpoint;
        match checkpoint.quant_config() {
            None => {
                self.object(CONFIG, "nothing configures the quantization, and it looks there, not at tensors")
            }
            Some(quant) => {
                let missing: Vec<&str> = [
                    (quant.bits.is_none(), "bits"),
                    (quant.group_size.is_none(), "group_size"),
                    (quant.desc_act.is_none() && self.reader.needs_keys, "desc_act"),
                    (quant.sym.is_none() && self.reader.symmetric_only, "sym"),
                ]
                .into_iter()
                .filter_map(|(missing, key)| missing.then_some(key))
                .filter(|_| self.reader.needs_keys)
                .collect();
                if !missing.is_empty() {
                    self.object(CONFIG, format!("its configuration must say {}", missing.join(", ")));
                }
                if quant.sym == Some(false) && self.reader.symmetric_only {
                    self.object(CONFIG, "it stops at a configuration that says sym: false");
                }
            }
        }
        for module in checkpoint.modules() {
            if let Layout::Gptq(gptq) = module.layout() {
                self.gptq_module(module, gptq);
            }
        }
        if let Some(module) = self.reader.objection_to_siblings(checkpoint) {
            self.object(&module, Objection::Siblings.to_string());
        }
        if let Some(module) = self.reader.objection_to_mixture(checkpoint) {
            self.object(&module, Objection::Mixed.to_string());
        }
        self.head();
    }

    fn gptq_module(&mut self, module: &Module, gptq: &Gptq) {
        let (checkpoint, reader, name) = (self.checkpoint, self.reader, module.name());
        if let Some(objection) = reader.objection_to(module, gptq) {
            let message = match objection {
                // What could be folded is of interest to who converts.
                Objection::ActOrder => "it ignores g_idx, and the rows are in act-order".into(),
                objection => objection.to_string(),
            };
            self.object(name, message);
        }
        let stated = self.stated(name);
        let k = module.in_features();
        if stated.bits.is_some_and(|bits| bits != gptq.shape.bits)
            || stated.group_size.is_some_and(|size| k.div_ceil(size.rows(k)) != gptq.shape.groups)
        {
            self.object(
                name,
                "it goes by the configuration, which gives other bits or groups than the tensors",
            );
        }
        if reader.act_order
            && reader.obeys_desc_act
            && gptq.g_idx == GIdxKind::ActOrder
            && stated.desc_act != Some(true)
        {
            self.object(name, "the configuration denies act-order, so it ignores g_idx and computes garbage");
        }
        let has_index = checkpoint.tensor(&format!("{name}.g_idx")).is_some_and(|t| !t.bytes().is_empty());
        if reader.needs_g_idx && !has_index {
            self.object(name, "it stops where there is no g_idx");
        }
        if let Some(message) = self.zeros(gptq) {
            self.object(name, message);
        }
        let unexpected = module.linears().iter().any(|linear| !linear.bias);
        if reader.needs_keys && module.bias() == Some(Bias::NonZero) && unexpected {
            self.object(name, "it has no place for the bias, which isn't zero, and leaves it out");
        }
    }

    fn zeros(&self, gptq: &Gptq) -> Option<String> {
        let (reader, zeros) = (self.reader, gptq.zeros);
        // One that ignores them can't misread them: what is asymmetric is objected to already.
        if reader.symmetric_only {
            return None;
        }
        let label = self.checkpoint.quant_config().and_then(|quant| quant.label);
        let read = match label {
            Some(label) if reader.zeros.contains(&label) => label,
            _ => ZeroConvention::V1,
        };
        if zeros.smears > 0 {
            return Some(
                "zero points were overwritten when the file was made: no program can read them".into(),
            );
        }
        if read != zeros.convention {
            return Some(format!(
                "its zero points are {}, and it reads {read}: every weight is a step off",
                zeros.convention
            ));
        }
        if zeros.encoding == Some(ZeroEncoding::V1ThreeBitSwapped) {
            return Some(
                "its 3-bit zero points are as GPTQModel wrote them before 7.0, and no other reads them"
                    .into(),
            );
        }
        let word_wise = zeros.encoding == Some(ZeroEncoding::V1WordWise) && reader.reads_word_wise();
        let plus_one = zeros.encoding == Some(ZeroEncoding::V1PlusOne) && !reader.reads_word_wise();
        (zeros.all_ones > 0 && !zeros.symmetric && !word_wise && !plus_one).then(|| {
            "some stored zero points are all ones, which it may take for another value than meant".into()
        })
    }

    fn stated(&self, module: &str) -> Stated {
        let Some(quant) = self.checkpoint.quant_config() else { return Stated::default() };
        let over = match quant.dynamic.resolve(module).map(|resolved| resolved.verdict) {
            Ok(Rule::Override(over)) if self.reader.mixes_widths => over,
            _ => Default::default(),
        };
        Stated {
            bits: over.bits.or(quant.bits),
            group_size: over.group_size.or(quant.group_size),
            desc_act: over.desc_act.or(quant.desc_act),
        }
    }

    fn head(&mut self) {
        let checkpoint = self.checkpoint;
        let head = checkpoint.naming().head;
        if !checkpoint.module(head).is_some_and(|head| head.layout().is_quantized()) {
            return;
        }
        if self.reader.needs_keys && !checkpoint.quant_config().is_some_and(|quant| quant.lm_head) {
            self.object(head, "the head is quantized, and the configuration doesn't say lm_head: true");
        }
        if checkpoint.dims().is_some_and(|dims| dims.tied) {
            self.object(
                head,
                "the configuration ties the head to the embedding, so it skips the quantized one",
            );
        }
    }
}
