//! Finds out how one module is stored, and checks every value that can be checked without decoding it.

use super::config::{GroupSize, QuantConfig};
use super::dynamic::Verdict;
use super::error::Error;
use super::fault::Fault;
use super::module::Bias;
use super::shards::Shards;
use super::tensor::{TensorView, first_columns};
use crate::arch::Linear;
use requant_formats::exl2::{self, GroupTable};
use requant_formats::gptq::{self, Bits, GIdx, Shape, ZeroEncoding, ZeroSurvey};
use requant_formats::{NotAPermutation, Permutation};
use safetensors::Dtype;

/// A module to look for.
pub(super) struct Wanted {
    pub(super) name: String,
    /// `[in_features, out_features]` by the architecture.
    pub(super) sizes: Option<[usize; 2]>,
    /// Those of the architecture that it holds.
    pub(super) linears: Vec<Linear>,
}

/// A module as found; the convention of its zero points needs the whole model.
pub(super) struct Found {
    pub(super) in_features: usize,
    pub(super) out_features: usize,
    pub(super) stored: Stored,
    pub(super) bias: Option<Bias>,
    pub(super) stated: Stated,
}

/// How it is stored.
pub(super) enum Stored {
    Gptq(StoredGptq),
    Exl2 { groups: GroupTable, stored_out_features: usize },
    Dense { dtype: Dtype },
}

pub(super) struct StoredGptq {
    pub(super) shape: Shape,
    pub(super) g_idx: GIdx,
    pub(super) scales: Dtype,
    pub(super) survey: ZeroSurvey,
    /// Whether 3-bit zero points differ, but repeat as a fault of auto-round repeats them.
    pub(super) repeated_zeros: bool,
    /// n as stored: more than the shape's where columns were added to reach a multiple of 32.
    pub(super) stored_out_features: usize,
}

/// What the configuration says of a module, `dynamic` rules applied.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stated {
    pub(super) bits: Option<Bits>,
    pub(super) group_size: Option<GroupSize>,
    pub(super) desc_act: Option<bool>,
    pub(super) sym: Option<bool>,
    pub(super) dense: bool,
    pub(super) order_matters: bool,
}

impl Stated {
    pub(super) fn of(quant: &QuantConfig, module: &str) -> Result<Self, Fault> {
        let resolved = quant.dynamic.resolve(module)?;
        let (dense, over) = match resolved.verdict {
            Verdict::Base => (false, Default::default()),
            Verdict::Dense => (true, Default::default()),
            Verdict::Override(over) => (false, over),
        };
        Ok(Self {
            bits: over.bits.or(quant.bits),
            group_size: over.group_size.or(quant.group_size),
            desc_act: over.desc_act.or(quant.desc_act),
            sym: over.sym.or(quant.sym),
            dense,
            order_matters: resolved.order_matters,
        })
    }
}

/// Suffixes that tell a layout, the one that exllamav2 prefers first.
pub(super) const LAYOUTS: [&str; 3] = ["q_weight", "qweight", "weight"];

/// Suffixes of layouts that requant doesn't read.
const FOREIGN: [(&str, &str); 6] = [
    ("weight_packed", "compressed-tensors"),
    ("trellis", "exl3"),
    ("B", "marlin"),
    ("B_24", "marlin 2:4"),
    ("W_q", "hqq"),
    ("s_channel", "qqq"),
];

/// Examines a module. `None`: it has no weight at all.
pub(super) fn examine(shards: &Shards, wanted: &Wanted, stated: Stated) -> Result<Option<Found>, Error> {
    let module = Tensors { shards, name: &wanted.name };
    let present: Vec<TensorView<'_>> = LAYOUTS.iter().filter_map(|suffix| module.find(suffix)).collect();
    let (weight, rest) = match present.split_first() {
        Some((weight, rest)) => (*weight, rest),
        None => return module.refuse_remains().map(|()| None),
    };
    if let Some(other) = rest.first() {
        return Err(other.error(Fault::TwoLayouts { other: weight.name().into() }));
    }
    let (stored, [in_features, out_features]) = if module.find("q_weight").is_some() {
        module.exl2(weight, wanted.sizes)?
    } else if module.find("qweight").is_some() {
        module.gptq(weight, wanted.sizes, stated)?
    } else {
        module.dense(weight, wanted.sizes)?
    };
    let stored_columns = match &stored {
        Stored::Exl2 { stored_out_features, .. } => *stored_out_features,
        Stored::Gptq(stored) => stored.stored_out_features,
        Stored::Dense { .. } => out_features,
    };
    let bias = module.bias(stored_columns, out_features)?;
    Ok(Some(Found { in_features, out_features, stored, bias, stated }))
}

impl TensorView<'_> {
    pub(super) fn error(&self, fault: impl Into<Fault>) -> Error {
        Error::tensor(self.file(), self.name(), fault)
    }

    fn expect_dtype(&self, allowed: &[Dtype], expected: &'static str) -> Result<(), Error> {
        if allowed.contains(&self.dtype()) {
            return Ok(());
        }
        Err(self.error(Fault::TensorDtype { found: self.dtype(), expected }))
    }

    fn matrix(&self) -> Result<[usize; 2], Error> {
        self.shape().try_into().map_err(|_| self.wrong_rank(2))
    }

    fn vector(&self) -> Result<usize, Error> {
        let [len] = self.shape() else { return Err(self.wrong_rank(1)) };
        Ok(*len)
    }

    fn wrong_rank(&self, expected: usize) -> Error {
        self.error(Fault::TensorRank { found: self.shape().to_vec(), expected })
    }

    pub(super) fn expect_shape(&self, expected: &[usize]) -> Result<(), Error> {
        if self.shape() == expected {
            return Ok(());
        }
        Err(self.error(Fault::TensorShape { found: self.shape().to_vec(), expected: expected.to_vec() }))
    }

    /// The first element that is NaN or infinite, of floats.
    fn first_not_finite(&self) -> Option<usize> {
        let wide = |mask: u16| {
            let mut elements = self.bytes().chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
            elements.position(|bits| bits & mask == mask)
        };
        match self.dtype() {
            Dtype::F16 => wide(0x7C00),
            Dtype::BF16 => wide(0x7F80),
            _ => self.floats()?.iter().position(|f| !f.is_finite()),
        }
    }
}

const FLOATS: [Dtype; 3] = [Dtype::F16, Dtype::BF16, Dtype::F32];
const FLOATS_IN_WORDS: &str = "F16, BF16 or F32";

struct Tensors<'a> {
    shards: &'a Shards,
    name: &'a str,
}

impl<'a> Tensors<'a> {
    fn full(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.name)
    }

    fn find(&self, suffix: &str) -> Option<TensorView<'a>> {
        self.shards.tensor(&self.full(suffix))
    }

    fn need(&self, suffix: &str, beside: TensorView<'_>) -> Result<TensorView<'a>, Error> {
        self.find(suffix).ok_or_else(|| {
            let fault = Fault::TensorMissing { beside: beside.name().into() };
            Error::tensor(beside.file(), self.full(suffix), fault)
        })
    }

    /// Without a weight: says what the other tensors of that name are.
    fn refuse_remains(&self) -> Result<(), Error> {
        for (suffix, method) in FOREIGN {
            if let Some(tensor) = self.find(suffix) {
                let key = format!("tensor .{suffix}");
                return Err(tensor.error(Fault::Foreign { method: method.into(), key }));
            }
        }
        for (suffix, weight) in [("q_scale", "q_weight"), ("qzeros", "qweight"), ("scales", "qweight")] {
            if let Some(tensor) = self.find(suffix) {
                return self.need(weight, tensor).map(|_| ());
            }
        }
        Ok(())
    }

    fn dense(
        &self,
        weight: TensorView<'_>,
        sizes: Option<[usize; 2]>,
    ) -> Result<(Stored, [usize; 2]), Error> {
        weight.expect_dtype(&FLOATS, FLOATS_IN_WORDS)?;
        let [n, k] = weight.matrix()?;
        if let Some([k, n]) = sizes {
            weight.expect_shape(&[n, k])?;
        }
        Ok((Stored::Dense { dtype: weight.dtype() }, [k, n]))
    }

    /// A bias of as many columns as stored, of which those from `kept` on must pad, too.
    fn bias(&self, columns: usize, kept: usize) -> Result<Option<Bias>, Error> {
        let Some(bias) = self.find("bias") else { return Ok(None) };
        bias.expect_dtype(&FLOATS, FLOATS_IN_WORDS)?;
        bias.expect_shape(&[columns])?;
        let floats = bias.floats().unwrap_or_default();
        if floats[kept..].iter().any(|&f| f != 0.0) {
            bias.expect_shape(&[kept])?;
        }
        let zero = floats.iter().all(|&f| f == 0.0);
        Ok(Some(if zero { Bias::AllZero } else { Bias::NonZero }))
    }

    fn gptq(
        &self,
        qweight: TensorView<'_>,
        sizes: Option<[usize; 2]>,
        stated: Stated,
    ) -> Result<(Stored, [usize; 2]), Error> {
        let (qzeros, scales) = (self.need("qzeros", qweight)?, self.need("scales", qweight)?);
        for words in [qweight, qzeros] {
            words.expect_dtype(&[Dtype::I32, Dtype::U32], "I32 words")?;
        }
        scales.expect_dtype(&FLOATS, FLOATS_IN_WORDS)?;
        let g_idx = self.find("g_idx");
        let index = g_idx.map(|tensor| {
            tensor.vector()?;
            let fault = || Fault::TensorDtype { found: tensor.dtype(), expected: "I32 or I64" };
            tensor.integers().ok_or_else(|| tensor.error(fault()))
        });
        let index = index.transpose()?;
        let dimensions = [qweight.matrix()?, qzeros.matrix()?, scales.matrix()?];
        // Without elements the other dimension can be any number: nothing may be computed from it.
        if let Some(empty) = [qweight, qzeros, scales].into_iter().find(|t| t.bytes().is_empty()) {
            let expected = empty.shape().iter().map(|&size| size.max(1)).collect();
            return Err(empty.error(Fault::TensorShape { found: empty.shape().to_vec(), expected }));
        }
        let [packed, zero_words, [groups, columns]] = dimensions;
        if packed[1] == zero_words[1] && packed[1] != columns {
            let key = "qweight as wide as qzeros".into();
            return Err(qweight.error(Fault::Foreign { method: "awq".into(), key }));
        }
        let kept = match sizes {
            Some([_, n]) if is_padding(&scales, columns, n) => n,
            Some([_, n]) => {
                scales.expect_shape(&[groups, n])?;
                n
            }
            None => columns,
        };
        let k = match (sizes, &index) {
            (Some([k, _]), _) => k,
            (None, Some(index)) if !index.is_empty() => index.len(),
            (None, _) => rows_by_words(dimensions, stated.bits)
                .ok_or_else(|| qweight.error(no_width_fits(0, dimensions)))?,
        };
        let shape = Shape::from_dimensions(k, packed, zero_words, [groups, columns])
            .map_err(|e| self.blame(e, k, dimensions, stated.bits, qweight))?;
        let shape = Shape { out_features: kept, ..shape };
        let at = |suffix, fault: gptq::Error| match self.find(suffix) {
            Some(tensor) => tensor.error(fault),
            None => Error::tensor(qweight.file(), self.full(suffix), fault),
        };
        let stated_rows = stated.group_size.map(|size| size.rows(k));
        let g_idx = GIdx::new(index.as_deref(), k, groups, stated_rows).map_err(|e| match e {
            // Without an index the scales alone tell that no group size fits.
            gptq::Error::GroupSize { .. } | gptq::Error::GroupCount { .. } => at("scales", e),
            _ => at("g_idx", e),
        })?;
        if let Some(i) = scales.first_not_finite() {
            let found = scales.floats().map_or(f32::NAN, |floats| floats[i]);
            let (group, column) = (i / columns, i % columns);
            return Err(scales.error(gptq::Error::Scale { group, column, found }));
        }
        let words = first_columns(qzeros.words().unwrap_or_default(), zero_words[1], shape.qzeros()[1]);
        let survey = gptq::survey_zeros(&shape, &words).map_err(|e| qzeros.error(e))?;
        let repeated_zeros = survey.constant.is_none() && repeats(&shape, &words);
        let stored = StoredGptq {
            shape,
            g_idx,
            scales: scales.dtype(),
            survey,
            repeated_zeros,
            stored_out_features: columns,
        };
        Ok((Stored::Gptq(stored), [k, kept]))
    }

    /// Names the tensor that doesn't fit the others.
    fn blame(
        &self,
        error: gptq::Error,
        k: usize,
        [packed, zero_words, [groups, n]]: [[usize; 2]; 3],
        stated: Option<Bits>,
        qweight: TensorView<'_>,
    ) -> Error {
        let suffix = match &error {
            gptq::Error::Dimensions { tensor, .. } => *tensor,
            gptq::Error::GroupCount { .. } => "scales",
            gptq::Error::NoWidthFits { .. } => {
                let shape = |bits| Shape { in_features: k, out_features: n, bits, groups };
                let by_rows = Bits::ALL.into_iter().find(|&b| shape(b).qweight() == packed);
                let by_columns = Bits::ALL.into_iter().find(|&b| shape(b).qzeros() == zero_words);
                // Where each fits a width of its own, the one that the configuration gives is right.
                let qweight_is_right = match (by_rows, by_columns) {
                    (Some(rows), Some(_)) => stated == Some(rows),
                    (rows, _) => rows.is_some(),
                };
                if qweight_is_right { "qzeros" } else { "qweight" }
            }
            _ => "qweight",
        };
        let file = self.find(suffix).unwrap_or(qweight).file().to_owned();
        Error::tensor(file, self.full(suffix), error)
    }

    fn exl2(
        &self,
        q_weight: TensorView<'_>,
        sizes: Option<[usize; 2]>,
    ) -> Result<(Stored, [usize; 2]), Error> {
        let need = |suffix| self.need(suffix, q_weight);
        let (q_invperm, q_scale) = (need("q_invperm")?, need("q_scale")?);
        let (q_scale_max, q_groups) = (need("q_scale_max")?, need("q_groups")?);
        for words in [q_weight, q_scale, q_invperm] {
            words.expect_dtype(&[Dtype::I32], "I32")?;
        }
        q_scale_max.expect_dtype(&[Dtype::F16], "F16")?;
        q_groups.expect_dtype(&[Dtype::I16], "I16")?;
        let [word_rows, n] = q_weight.matrix()?;
        let (k, table) = (q_invperm.vector()?, q_groups.vector()?);
        let at = |e: exl2::Error| {
            let tensor = self.find(tensor_of(&e)).unwrap_or(q_weight);
            tensor.error(e)
        };
        let groups = GroupTable::parse(&q_groups.i16s().unwrap_or_default(), word_rows).map_err(at)?;
        if groups.rows() != k {
            return Err(at(exl2::Error::TotalRows { found: groups.rows(), expected: k }));
        }
        if n == 0 || !n.is_multiple_of(exl2::ROW_UNIT) {
            return Err(at(exl2::Error::Columns { found: n }));
        }
        q_scale.matrix()?;
        q_scale.expect_shape(&[table / 2, n / 8])?;
        q_scale_max.expect_shape(&[table / 2])?;
        let out_features = match sizes {
            None => n,
            Some([in_features, out_features]) => {
                q_invperm.expect_shape(&[in_features])?;
                q_weight.expect_shape(&[word_rows, out_features.next_multiple_of(exl2::ROW_UNIT)])?;
                out_features
            }
        };
        check_permutation(&q_invperm).map_err(|e| at(e.into()))?;
        let ceilings = q_scale_max.f16s().unwrap_or_default();
        if let Some(group) = ceilings.iter().position(|c| !c.is_finite() || c.to_f32() < 0.0) {
            return Err(at(exl2::Error::Ceiling { group, found: ceilings[group].to_f32() }));
        }
        Ok((Stored::Exl2 { groups, stored_out_features: n }, [k, out_features]))
    }
}

/// Whether the columns from `n` on only pad: all their scales are 0.
fn is_padding(scales: &TensorView<'_>, columns: usize, n: usize) -> bool {
    columns > n
        && scales.floats().is_some_and(|scales| {
            scales.chunks_exact(columns).all(|row| row[n..].iter().all(|&scale| scale == 0.0))
        })
}

/// auto-round's qlinear_torch wrote the zero points of columns 0 to 9 of each 32 for columns 11 to 20 and
/// 22 to 31 as well.
fn repeats(shape: &Shape, qzeros: &[u32]) -> bool {
    if shape.bits.get() != 3 || !shape.out_features.is_multiple_of(32) {
        return false;
    }
    let fields = gptq::decode_zeros(shape, qzeros, ZeroEncoding::V2).unwrap_or_default();
    fields.chunks_exact(32).all(|block| block[..10] == block[11..21] && block[..10] == block[22..])
}

/// k where no `g_idx` and no architecture tells it: the widest reading whose words are all full.
fn rows_by_words([packed, zero_words, [groups, n]]: [[usize; 2]; 3], stated: Option<Bits>) -> Option<usize> {
    let fits = |bits: &Bits| {
        let in_features = packed[0].checked_mul(32)? / bits.get() as usize;
        let shape = Shape { in_features, out_features: n, bits: *bits, groups };
        (shape.qweight() == packed && shape.qzeros() == zero_words).then_some(in_features)
    };
    stated.iter().chain(&Bits::ALL).find_map(fits)
}

fn no_width_fits(in_features: usize, [qweight, qzeros, [_, n]]: [[usize; 2]; 3]) -> gptq::Error {
    gptq::Error::NoWidthFits { in_features, out_features: n, qweight, qzeros }
}

fn check_permutation(q_invperm: &TensorView<'_>) -> Result<(), NotAPermutation> {
    Permutation::new(q_invperm.words().unwrap_or_default().into_owned()).map(|_| ())
}

/// The tensor that an EXL2 error is about.
pub(super) fn tensor_of(error: &exl2::Error) -> &'static str {
    use exl2::Error as E;
    match error {
        E::Bits { .. }
        | E::OddGroups { .. }
        | E::RisingWidth { .. }
        | E::Offset { .. }
        | E::GroupRows { .. }
        | E::LongGroup { .. }
        | E::TotalRows { .. } => "q_groups",
        E::Permutation(_) => "q_invperm",
        E::Ceiling { .. } | E::VanishingGroup { .. } | E::Overflow { .. } => "q_scale_max",
        E::ScaleIndex { .. } => "q_scale",
        E::Length { tensor, .. } => tensor,
        _ => "q_weight",
    }
}
