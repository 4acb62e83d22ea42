//! What exllamav2 0.3.2 assumes of a directory and mostly doesn't check: its table of mixtures, biases, names,
//! the GPTQ modules it reads, and the keys of `config.json` (formats/src/exl2/SPEC.md and the loader's code).
//!
//! Shapes, group tables, permutations, codes and scales of EXL2 modules are checked by opening and decoding.

use super::{Check, CheckKind, Fault};
use crate::arch::{Part, Role};
use crate::checkpoint::{Bias, Checkpoint, Gptq, Layout, Module};
use half::f16;
use requant_formats::Permutation;
use requant_formats::exl2::decode_ceiling;
use requant_formats::gptq::{GIdxKind, ZeroConvention};
use safetensors::Dtype;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// What exllamav2 takes where config.json has none at top level.
const DEFAULT_ROPE_THETA: f64 = 10_000.0;

/// Checks a directory that holds EXL2 modules.
pub(super) fn check(checkpoint: &Checkpoint, weights: &[String]) -> Check {
    let exl2 = checkpoint.modules().iter().any(|module| matches!(module.layout(), Layout::Exl2(_)));
    let zeros = match labelled_v2(checkpoint) && !exl2 {
        true => ZeroConvention::V2,
        false => ZeroConvention::V1,
    };
    let mut checker = Checker { checkpoint, zeros, check: Check::new(CheckKind::Exllamav2) };
    checker.files(weights);
    for module in checkpoint.modules() {
        checker.check.checked += 1;
        checker.module(module);
    }
    checker.mixtures();
    checker.dense_tensors();
    checker.head();
    checker.config();
    checker.check
}

struct Checker<'a> {
    checkpoint: &'a Checkpoint,
    /// The convention that GPTQ zero points must have. A label of v2 is obeyed where all modules are GPTQ; beside
    /// EXL2 modules, whose configuration has none, v1 is expected.
    zeros: ZeroConvention,
    check: Check,
}

impl Checker<'_> {
    fn fault(&mut self, tensor: &str, message: impl Into<String>) {
        self.check.faults.push(Fault::tensor(self.checkpoint, tensor, message));
    }

    fn config_fault(&mut self, message: impl Into<String>) {
        self.check.faults.push(Fault::file("config.json", message));
    }

    /// Every file of weights is loaded, whatever its name: one beside the model replaces tensors.
    fn files(&mut self, weights: &[String]) {
        let read = |name: &String| self.checkpoint.files().iter().any(|file| file.name() == name);
        let strays: Vec<&String> = weights.iter().filter(|name| !read(name)).collect();
        for name in strays {
            let message = "exllamav2 loads this file too, although it isn't part of the model";
            self.check.faults.push(Fault::file(name, message));
        }
    }

    fn module(&mut self, module: &Module) {
        let name = module.name();
        if let Some(linear) = module.linear() {
            if linear.exl2_name != name {
                self.fault(name, format!("exllamav2 looks for it as {}", linear.exl2_name));
            }
            match (linear.bias, module.bias()) {
                (true, None) => self.fault(&format!("{name}.bias"), "exllamav2 expects this bias"),
                // Of a GPTQ module it drops a bias of zeros.
                (false, Some(Bias::AllZero)) if matches!(module.layout(), Layout::Gptq(_)) => {}
                (false, Some(_)) => {
                    self.fault(&format!("{name}.bias"), "exllamav2 expects no bias here");
                }
                _ => {}
            }
        } else if !module.linears().is_empty() && module.layout().is_quantized() {
            self.fault(name, "exllamav2 can't split a fused linear that is quantized");
        } else if name == self.checkpoint.naming().head && module.bias().is_some() {
            self.fault(&format!("{name}.bias"), "exllamav2 expects no bias here");
        }
        let names: Vec<String> = module.tensor_names().collect();
        for name in names {
            let Some(tensor) = self.checkpoint.tensor(&name) else { continue };
            let known = [Dtype::I32, Dtype::I16, Dtype::F16, Dtype::BF16, Dtype::F32];
            if !known.contains(&tensor.dtype()) {
                self.fault(&name, format!("exllamav2 doesn't load {:?}", tensor.dtype()));
            }
            if name.ends_with(".bias") && module.layout().is_quantized() && tensor.dtype() != Dtype::F16 {
                self.fault(&name, format!("the bias is {:?}: F16 expected", tensor.dtype()));
            }
        }
        if let Layout::Gptq(gptq) = module.layout() {
            self.gptq(module, gptq);
        }
        let prescale = self.checkpoint.prescale(module);
        if prescale != 1.0 && matches!(module.layout(), Layout::Exl2(_)) {
            self.prescaled(module, prescale);
        }
    }

    /// Groups that vanish when exllamav2 multiplies their ceiling; those that vanish anyway don't unpack.
    fn prescaled(&mut self, module: &Module, prescale: f64) {
        let Ok(matrix) = self.checkpoint.exl2(module) else { return };
        let mut codes = matrix.codes().chunks_exact(matrix.out_features());
        for (group, table) in matrix.groups().groups().iter().enumerate() {
            let zero = table.bits.zero();
            // All rows of the group are taken, whatever is found in them.
            let rows = codes.by_ref().take(table.rows);
            let used = rows.fold(false, |used, row| used | row.iter().any(|&code| u32::from(code) != zero));
            if used && decode_ceiling(matrix.scale_max()[group], prescale) == f16::ZERO {
                let message = format!(
                    "the weights of group {group} vanish when exllamav2 multiplies its scales by {prescale}"
                );
                self.fault(&format!("{}.q_scale_max", module.name()), message);
                return;
            }
        }
    }

    /// A GPTQ module as exllamav2 reads it: 4 bits, its group size guessed by doubling.
    fn gptq(&mut self, module: &Module, gptq: &Gptq) {
        let (name, k) = (module.name(), module.in_features());
        let mut guessed = 1;
        while guessed * gptq.shape.groups < k {
            guessed *= 2;
        }
        let one_group = gptq.shape.groups == 1;
        let in_order = !matches!(gptq.g_idx, GIdxKind::ActOrder);
        if gptq.shape.bits.get() != 4 {
            self.fault(name, format!("{} bits; exllamav2 reads GPTQ of 4 only", gptq.shape.bits.get()));
        }
        if !k.is_multiple_of(32) || !module.out_features().is_multiple_of(32) {
            self.fault(name, format!("{k} × {}: multiples of 32 expected", module.out_features()));
        }
        if !one_group && (guessed != gptq.group_size || guessed < 32) {
            let size = gptq.group_size;
            self.fault(name, format!("groups of {size} rows: exllamav2 takes them for {guessed}"));
        }
        if !in_order && (!gptq.equal_groups || !k.is_multiple_of(gptq.group_size)) {
            self.fault(name, "act-order with unequal groups: exllamav2 finds a row's group by its place");
        }
        // Rows are counted in 16 bits, signed.
        if !in_order && gptq.group_size > i16::MAX as usize {
            self.fault(name, format!("act-order with groups of {} rows", gptq.group_size));
        }
        if gptq.zeros.convention != self.zeros {
            let (found, reads) = (gptq.zeros.convention, self.zeros);
            self.fault(
                &format!("{name}.qzeros"),
                format!("{found} zero points: exllamav2 reads them as {reads}"),
            );
        } else if let Ok(matrix) = self.checkpoint.gptq(module)
            && let Some(i) = matrix.zeros().iter().position(|&z| z == 0)
        {
            let (group, column) = (i / module.out_features(), i % module.out_features());
            let message = match self.zeros {
                ZeroConvention::V1 => {
                    format!("zero point 0 at group {group}, column {column}: exllamav2 reads 16")
                }
                // It takes 1 from each word, which borrows.
                ZeroConvention::V2 => format!(
                    "zero point 0 at group {group}, column {column}: exllamav2 misreads its neighbour, too"
                ),
            };
            self.fault(&format!("{name}.qzeros"), message);
        }
        if module.bias() == Some(Bias::AllZero) && module.linear().is_some_and(|linear| linear.bias) {
            self.fault(&format!("{name}.bias"), "exllamav2 drops a bias of zeros, then misses it");
        }
        let scales = format!("{name}.scales");
        let floats = self.checkpoint.tensor(&scales).and_then(|tensor| tensor.floats()).unwrap_or_default();
        if let Some(scale) = floats.iter().find(|&&s| f16::from_f32(s).to_f32() != s) {
            self.fault(&scales, format!("{scale} isn't an fp16 number, and exllamav2 rounds scales to fp16"));
        }
    }

    /// Which layouts may stand together.
    fn mixtures(&mut self) {
        let mut sets: BTreeMap<(usize, Part), Vec<&Module>> = BTreeMap::new();
        for module in self.checkpoint.modules() {
            if let Some(linear) = module.linear() {
                sets.entry((linear.layer, linear.role.part())).or_default().push(module);
            }
        }
        for ((_, part), set) in sets {
            let quantized = set.iter().filter(|m| m.layout().is_quantized()).count();
            if quantized != 0 && quantized != set.len() {
                let dense = set.iter().find(|m| !m.layout().is_quantized()).unwrap_or(&set[0]);
                let count = set.len();
                let message =
                    format!("dense, although {quantized} of the {count} linears loaded with it are not");
                self.fault(dense.name(), message);
            }
            let experts = set.iter().any(|m| m.linear().is_some_and(|linear| linear.expert.is_some()));
            if part == Part::Mlp && !experts {
                self.remap(&set);
            }
        }
    }

    /// An EXL2 down_proj has gate's and up's columns, but not their biases, put into its row order at load.
    fn remap(&mut self, set: &[&Module]) {
        let of = |role| set.iter().find(|m| m.linear().is_some_and(|linear| linear.role == role));
        let Some(down) = of(Role::Down).filter(|m| matches!(m.layout(), Layout::Exl2(_))) else { return };
        for module in [Role::Gate, Role::Up].into_iter().filter_map(of) {
            if matches!(module.layout(), Layout::Gptq(_)) {
                let message = "GPTQ beside an EXL2 down_proj: exllamav2 stops at it";
                self.fault(module.name(), message);
            }
            let moves = module.bias().is_some()
                && self
                    .checkpoint
                    .exl2(down)
                    .is_ok_and(|matrix| *matrix.invperm() != Permutation::identity(down.in_features()));
            if moves {
                let message =
                    format!("exllamav2 doesn't reorder this bias although {} reorders its rows", down.name());
                self.fault(&format!("{}.bias", module.name()), message);
            }
        }
    }

    /// Embedding, norms and routers under the names that exllamav2 looks for.
    fn dense_tensors(&mut self) {
        let (Some(arch), Some(dims)) = (self.checkpoint.architecture(), self.checkpoint.dims()) else {
            return;
        };
        for tensor in arch.dense_tensors(dims, self.checkpoint.naming()) {
            self.check.checked += 1;
            if self.checkpoint.tensor(&tensor.exl2_name).is_none() {
                self.fault(&tensor.name, format!("exllamav2 looks for it as {}", tensor.exl2_name));
            }
        }
    }

    fn head(&mut self) {
        let Some(dims) = self.checkpoint.dims() else { return };
        let head = self.checkpoint.naming().head;
        if !dims.tied && self.checkpoint.module(head).is_none() {
            self.fault(head, "there is no head, and the embedding isn't tied");
        }
    }

    fn config(&mut self) {
        let config = self.checkpoint.config();
        let architectures = config.get("architectures").and_then(Value::as_array).map_or(0, Vec::len);
        if architectures != 1 {
            self.config_fault(format!("architectures has {architectures} entries: exllamav2 loads one"));
        }
        if labelled_v2(self.checkpoint) && self.zeros == ZeroConvention::V1 {
            self.config_fault("checkpoint_format is gptq_v2: exllamav2 takes 1 from GPTQ zero points, then");
        }
        let object = |key: &str| config.get(key).and_then(Value::as_object).filter(|o| !o.is_empty());
        let (scaling, parameters) = (object("rope_scaling"), object("rope_parameters"));
        if scaling.is_some_and(|s| s.contains_key("type") && s.contains_key("rope_type")) {
            self.config_fault("rope_scaling has both type and rope_type: exllamav2 stops at that");
        }
        let Some(parameters) = parameters else { return };
        if let Some(theta) = parameters.get("rope_theta").filter(|theta| !theta.is_null()) {
            match config.get("rope_theta") {
                Some(top) if same_number(top, theta) => {}
                None if theta.as_f64() == Some(DEFAULT_ROPE_THETA) => {}
                None => self.config_fault(format!(
                    "rope_theta {theta} stands in rope_parameters only: exllamav2 takes {DEFAULT_ROPE_THETA}"
                )),
                Some(top) => self.config_fault(format!(
                    "rope_theta is {top}, but {theta} in rope_parameters: exllamav2 reads the first"
                )),
            }
        }
        match (kind(parameters).filter(|kind| *kind != "default"), scaling.and_then(kind)) {
            (Some(wanted), None) => self.config_fault(format!(
                "rope scaling ({wanted}) stands in rope_parameters only: exllamav2 doesn't scale"
            )),
            (Some(wanted), Some(found)) if wanted != found => self.config_fault(format!(
                "rope_scaling is {found}, but {wanted} in rope_parameters: exllamav2 reads the first"
            )),
            _ => {}
        }
    }
}

/// Whether config.json, where alone exllamav2 looks, says that zero points are v2.
fn labelled_v2(checkpoint: &Checkpoint) -> bool {
    let config = checkpoint.config();
    let quantization = config
        .get("quantization_config")
        .or_else(|| config.get("text_config").and_then(|text| text.get("quantization_config")));
    let format = quantization.and_then(|q| q.get("checkpoint_format")).and_then(Value::as_str);
    format == Some("gptq_v2")
}

fn same_number(a: &Value, b: &Value) -> bool {
    a == b || a.as_f64().is_some_and(|a| b.as_f64() == Some(a))
}

fn kind(rope: &Map<String, Value>) -> Option<&str> {
    ["rope_type", "type"].iter().find_map(|key| rope.get(*key)?.as_str())
}
