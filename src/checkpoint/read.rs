//! Reading a module's weight: unpacked, or decoded to numbers.

use super::Checkpoint;
use super::error::Error;
use super::examine::tensor_of;
use super::fault::Fault;
use super::module::{Gptq, Layout, Module};
use super::tensor::{TensorView, first_columns};
use half::{f16, slice::HalfFloatSliceExt};
use requant_formats::exl2;
use requant_formats::gptq::{self, GIdx, Shape};
use std::borrow::Cow;

impl Checkpoint {
    /// Checks that every module can be decoded: that no zero point is undecided or lost.
    ///
    /// # Errors
    /// [`Fault::Smear`] or [`Fault::AllOnes`], with all modules concerned; `tensor` is the first one's.
    pub fn require_decodable(&self) -> Result<(), Error> {
        self.require_decoded_zeros(&self.modules)
    }

    fn require_decoded_zeros<'a>(&self, modules: impl IntoIterator<Item = &'a Module>) -> Result<(), Error> {
        let undecoded: Vec<(&Module, &Gptq)> = modules
            .into_iter()
            .filter_map(|module| match &module.layout {
                Layout::Gptq(gptq) if gptq.zeros.encoding.is_none() => Some((module, gptq)),
                _ => None,
            })
            .collect();
        let lost: Vec<(&Module, &Gptq)> =
            undecoded.iter().copied().filter(|(_, gptq)| gptq.zeros.smears > 0).collect();
        let names = |list: &[(&Module, &Gptq)]| list.iter().map(|(module, _)| module.name.clone()).collect();
        let (first, fault) = match (lost.first(), undecoded.first()) {
            (Some((first, _)), _) => {
                let count = lost.iter().map(|(_, gptq)| gptq.zeros.smears).sum();
                (first, Fault::Smear { count, modules: names(&lost) })
            }
            (None, Some((first, _))) => {
                let count = undecoded.iter().map(|(_, gptq)| gptq.zeros.all_ones).sum();
                (first, Fault::AllOnes { count, modules: names(&undecoded) })
            }
            (None, None) => return Ok(()),
        };
        Err(self.need(first, "qzeros")?.error(fault))
    }

    /// Unpacks a GPTQ module.
    ///
    /// # Errors
    /// [`Fault::OtherLayout`] for another layout; [`Fault::AllOnes`], [`Fault::Smear`].
    pub fn gptq(&self, module: &Module) -> Result<gptq::Matrix, Error> {
        let Layout::Gptq(stored) = &module.layout else { return Err(self.other_layout(module, "gptq")) };
        let zeros = self.gptq_zeros(module)?;
        let (qweight, scales) = (self.need(module, "qweight")?, self.need(module, "scales")?);
        let shape = stored.shape;
        let words = columns_of_words(qweight, module.whole_out_features);
        let codes = gptq::unpack_codes(&shape, &module.cut(words)).map_err(|e| qweight.error(e))?;
        let floats = Cow::Owned(scales.floats().unwrap_or_default());
        let floats = first_columns(floats, scales.shape()[1], module.whole_out_features);
        let g_idx = self.gptq_g_idx(module)?;
        gptq::Matrix::new(shape, codes, zeros, module.cut(floats).into_owned(), g_idx)
            .map_err(|e| scales.error(e))
    }

    /// The zero points of a GPTQ module, `[groups, out_features]`.
    ///
    /// # Errors
    /// Those of [`gptq`](Self::gptq).
    pub fn gptq_zeros(&self, module: &Module) -> Result<Vec<u16>, Error> {
        let Layout::Gptq(stored) = &module.layout else { return Err(self.other_layout(module, "gptq")) };
        self.require_decoded_zeros([module])?;
        let Some(encoding) = stored.zeros.encoding else { unreachable!("refused above") };
        let qzeros = self.need(module, "qzeros")?;
        let whole = Shape { out_features: module.whole_out_features, ..stored.shape };
        // Parts need not begin at a word.
        let zeros = gptq::decode_zeros(&whole, &columns_of_words(qzeros, whole.qzeros()[1]), encoding);
        Ok(module.cut(Cow::Owned(zeros.map_err(|e| qzeros.error(e))?)).into_owned())
    }

    /// The groups of a GPTQ module's rows.
    ///
    /// # Errors
    /// [`Fault::OtherLayout`] for another layout.
    pub fn gptq_g_idx(&self, module: &Module) -> Result<GIdx, Error> {
        let Layout::Gptq(stored) = &module.layout else { return Err(self.other_layout(module, "gptq")) };
        let g_idx = self.tensor(&format!("{}.g_idx", module.name));
        let index = g_idx.and_then(|tensor| tensor.integers());
        let (shape, stated) = (stored.shape, module.stated_group_size);
        let tensor = g_idx.map_or_else(|| self.need(module, "scales"), Ok)?;
        GIdx::new(index.as_deref(), shape.in_features, shape.groups, stated).map_err(|e| tensor.error(e))
    }

    /// Unpacks an EXL2 module, and checks every code and scale of it.
    ///
    /// # Errors
    /// [`Fault::OtherLayout`] for another layout, [`Fault::Exl2`].
    pub fn exl2(&self, module: &Module) -> Result<exl2::Matrix, Error> {
        let Layout::Exl2(stored) = &module.layout else { return Err(self.other_layout(module, "exl2")) };
        let q_weight = self.need(module, "q_weight")?;
        let (q_invperm, q_scale) = (self.need(module, "q_invperm")?, self.need(module, "q_scale")?);
        let (q_scale_max, q_groups) = (self.need(module, "q_scale_max")?, self.need(module, "q_groups")?);
        let tensors = exl2::Tensors {
            q_weight: &q_weight.words().unwrap_or_default(),
            q_invperm: &q_invperm.words().unwrap_or_default(),
            q_scale: &q_scale.words().unwrap_or_default(),
            q_scale_max: &q_scale_max.f16s().unwrap_or_default(),
            q_groups: &q_groups.i16s().unwrap_or_default(),
        };
        let unpacked = exl2::Matrix::unpack(tensors, stored.stored_out_features).and_then(|matrix| {
            matrix.check_padding(module.whole_out_features)?;
            Ok(matrix)
        });
        unpacked.map_err(|e| match self.need(module, tensor_of(&e)) {
            Ok(tensor) => tensor.error(e),
            Err(missing) => missing,
        })
    }

    /// The weight of a dense module as `[in_features, out_features]`, exact.
    ///
    /// # Errors
    /// [`Fault::OtherLayout`] for another layout.
    pub fn dense(&self, module: &Module) -> Result<Vec<f32>, Error> {
        let Layout::Dense { .. } = &module.layout else { return Err(self.other_layout(module, "dense")) };
        let floats = module.cut_rows(self.need(module, "weight")?.floats().unwrap_or_default());
        Ok(transpose(&floats, module.out_features, module.in_features))
    }

    /// The weight of any module as `[in_features, out_features]` in fp16: what GPTQ and EXL2 decode to, this with a
    /// prescale of 1, as programs read it that multiply elsewhere; a dense one of another type is rounded.
    ///
    /// # Errors
    /// Those of [`gptq`](Self::gptq) and [`exl2`](Self::exl2).
    pub fn dequantize(&self, module: &Module) -> Result<Vec<f16>, Error> {
        match &module.layout {
            Layout::Gptq(_) => Ok(self.gptq(module)?.dequantize()),
            Layout::Exl2(stored) => {
                let weights = self.exl2(module)?.dequantize();
                let whole =
                    first_columns(Cow::Owned(weights), stored.stored_out_features, module.whole_out_features);
                Ok(module.cut(whole).into_owned())
            }
            Layout::Dense { .. } => {
                let weight = self.need(module, "weight")?;
                if let Some(halves) = weight.f16s() {
                    let halves = module.cut_rows(halves.into_owned());
                    return Ok(transpose(&halves, module.out_features, module.in_features));
                }
                let floats = self.dense(module)?;
                let mut halves = vec![f16::ZERO; floats.len()];
                halves.convert_from_f32_slice(&floats);
                Ok(halves)
            }
        }
    }

    /// A module as decoded, `[in_features, out_features]`: exact for dense weights, the fp16 values of quantized
    /// ones.
    ///
    /// # Errors
    /// Those of [`dequantize`](Self::dequantize).
    pub fn decoded(&self, module: &Module) -> Result<Vec<f32>, Error> {
        match module.layout() {
            Layout::Dense { .. } => self.dense(module),
            _ => Ok(self.dequantize(module)?.into_iter().map(f16::to_f32).collect()),
        }
    }

    /// What exllamav2 multiplies the weight of an EXL2 module by when it loads it; 1 of nearly all.
    pub fn prescale(&self, module: &Module) -> f64 {
        let Some(dims) = self.dims() else { return 1.0 };
        match module.linear() {
            Some(linear) => dims.prescale(linear),
            None if module.name() == self.naming().head => dims.logit_scale,
            None => 1.0,
        }
    }

    /// A module as exllamav2 computes with it, `[in_features, out_features]`, without the model's own factor: as
    /// [`decoded`](Self::decoded), but of EXL2 modules with a [`prescale`](Self::prescale) the exact weights of its
    /// kernel divided by it, rounded to fp32.
    ///
    /// # Errors
    /// Those of [`dequantize`](Self::dequantize).
    pub fn loaded(&self, module: &Module) -> Result<Vec<f32>, Error> {
        let prescale = self.prescale(module);
        match &module.layout {
            Layout::Exl2(stored) if prescale != 1.0 => {
                let weights = self.exl2(module)?.dequantize_prescaled(prescale);
                let whole =
                    first_columns(Cow::Owned(weights), stored.stored_out_features, module.whole_out_features);
                let divided = |w: &f16| (w.to_f64() / prescale) as f32;
                Ok(module.cut(whole).iter().map(divided).collect())
            }
            _ => self.decoded(module),
        }
    }

    /// What the stored bias of a module is the model's own times. exllamav2 multiplies the scales of an EXL2 module
    /// by its [`prescale`](Self::prescale), but adds the bias as it is, whereas the model multiplies the sum of both.
    pub fn bias_factor(&self, module: &Module) -> f64 {
        match module.layout {
            Layout::Exl2(_) => self.prescale(module),
            Layout::Gptq(_) | Layout::Dense { .. } => 1.0,
        }
    }

    /// The model's own bias `[out_features]`, if there is one: as stored, but for a
    /// [`bias_factor`](Self::bias_factor).
    ///
    /// # Errors
    /// None but a bug's: the tensor was checked on opening.
    pub fn bias(&self, module: &Module) -> Result<Option<Vec<f32>>, Error> {
        if module.bias.is_none() {
            return Ok(None);
        }
        let mut bias = self.need(module, "bias")?.floats().unwrap_or_default();
        bias.truncate(module.whole_out_features);
        let factor = self.bias_factor(module);
        if factor != 1.0 {
            bias.iter_mut().for_each(|b| *b = (f64::from(*b) / factor) as f32);
        }
        Ok(Some(module.cut(Cow::Owned(bias)).into_owned()))
    }

    fn need(&self, module: &Module, suffix: &str) -> Result<TensorView<'_>, Error> {
        let name = format!("{}.{suffix}", module.name);
        self.tensor(&name).ok_or_else(|| {
            let beside = module.name.clone();
            Error::tensor(self.shards.list_of_tensors(), name, Fault::TensorMissing { beside })
        })
    }

    fn other_layout(&self, module: &Module, asked: &'static str) -> Error {
        let fault = Fault::OtherLayout { found: module.layout.name(), asked };
        let name = format!("{}.{}", module.name, module.layout.suffixes()[0]);
        let file = self.tensor(&name).map_or(self.shards.list_of_tensors(), |tensor| tensor.file());
        Error::tensor(file, name, fault)
    }
}

/// The words of a tensor, of which a file can have more columns than the model has.
fn columns_of_words(tensor: TensorView<'_>, kept: usize) -> Cow<'_, [u32]> {
    first_columns(tensor.words().unwrap_or_default(), tensor.shape()[1], kept)
}

impl Module {
    /// Of rows as long as the stored module's, the elements that are this part's.
    pub(crate) fn cut<'a, T: Copy>(&self, rows: Cow<'a, [T]>) -> Cow<'a, [T]> {
        match &self.columns {
            None => rows,
            Some(columns) => Cow::Owned(columns.of(&rows, self.whole_out_features)),
        }
    }

    /// Of a dense weight, `[out_features, in_features]`, the rows that are this part's.
    fn cut_rows<T: Copy>(&self, weight: Vec<T>) -> Vec<T> {
        match &self.columns {
            None => weight,
            Some(columns) => columns.rows_of(&weight, self.in_features),
        }
    }
}

/// `[rows, columns]` to `[columns, rows]`, in blocks that stay in the cache.
pub(crate) fn transpose<T: Copy + Default>(matrix: &[T], rows: usize, columns: usize) -> Vec<T> {
    const BLOCK: usize = 32;
    let mut transposed = vec![T::default(); matrix.len()];
    for top in (0..rows).step_by(BLOCK) {
        for left in (0..columns).step_by(BLOCK) {
            for row in top..rows.min(top + BLOCK) {
                for column in left..columns.min(left + BLOCK) {
                    transposed[column * rows + row] = matrix[row * columns + column];
                }
            }
        }
    }
    transposed
}
