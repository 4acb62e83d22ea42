//! Weights on a device: packing them there, and decoding.
//!
//! GPTQ and EXL2 have one form there (`packed.cuh`): rows in units of 32, each of its own width. Rows of an
//! act-order module are sorted by group first, so that a unit mostly has one group.

use super::cubins::Kernel;
use super::launch::{Argument, Grid};
use super::memory::{Buffer, Tensor};
use super::{Cuda, shapes};
use crate::error::{Error, expect};
use crate::weight::{self, Dense, DenseType};
use half::{f16, vec::HalfBitsVecExt};
use requant_formats::{exl2, gptq};

/// A weight on a device.
pub struct Weight {
    pub(super) in_features: usize,
    /// Without padding.
    pub(super) out_features: usize,
    pub(super) stored: Stored,
}

pub(super) enum Stored {
    Packed(Box<PackedWeight>),
    /// `[out_features, stride]`, rows padded with zeros.
    Dense {
        dtype: DenseType,
        stride: usize,
        elements: Buffer,
    },
}

/// Kind of a packed weight, as kernels are instantiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// With scales that fp16 holds.
    GptqHalf,
    GptqFloat,
    Exl2,
}

pub(super) struct PackedWeight {
    pub(super) layout: Layout,
    /// Units of 32 rows.
    pub(super) units: usize,
    /// Columns as stored.
    columns: usize,
    /// All zero points, where they are the same.
    zero: u32,
    words: Buffer,
    unit_table: Buffer,
    row_group: Buffer,
    row_of: Buffer,
    /// Whether packed rows are the model's, in order.
    pub(super) in_order: bool,
    scales: Buffer,
    extra: Option<Buffer>,
}

/// `Packed` of `packed.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Packed {
    words: u64,
    units: u64,
    row_group: u64,
    row_of: u64,
    scales: u64,
    extra: u64,
    n: u32,
    zero: u32,
}

/// A unit's group where its rows differ, and the group and the row of what only fills up the last unit.
const NONE: u32 = u32::MAX;
/// Rows of a unit.
pub(super) const UNIT: usize = 32;

/// What a packed weight is made of, on the host.
struct Parts<'a> {
    layout: Layout,
    columns: usize,
    codes: &'a [u8],
    /// Row of `codes` of each packed row; none: they are in packed order.
    source: Option<&'a [u32]>,
    /// Row of the model of each packed row.
    row_of: Vec<u32>,
    /// Group of each packed row.
    row_group: Vec<u32>,
    /// Width of each unit.
    unit_bits: Vec<u32>,
    scales: Vec<u8>,
    extra: Option<Vec<u16>>,
    zero: u32,
}

impl PackedWeight {
    pub(super) fn argument(&self) -> Argument {
        Argument::Packed(Packed {
            words: self.words.address(),
            units: self.unit_table.address(),
            row_group: self.row_group.address(),
            row_of: self.row_of.address(),
            scales: self.scales.address(),
            extra: self.extra.as_ref().map_or(0, Buffer::address),
            n: self.columns as u32,
            zero: self.zero,
        })
    }

    /// Row of the model of each packed row, for kernels that gather; 0 where nothing is to be gathered.
    pub(super) fn source(&self) -> u64 {
        if self.in_order { 0 } else { self.row_of.address() }
    }
}

impl Cuda {
    pub(super) fn place_weight(&self, weight: &weight::Weight) -> Result<Weight, Error> {
        let stored = match weight {
            weight::Weight::Gptq(matrix) => self.place_gptq(matrix)?,
            weight::Weight::Exl2 { matrix, out_features } => {
                expect("upload_weight", *out_features <= matrix.out_features(), || {
                    (format!("{out_features} columns"), format!("at most {}", matrix.out_features()))
                })?;
                self.place_exl2(matrix)?
            }
            weight::Weight::Dense(dense) => self.place_dense(dense)?,
        };
        Ok(Weight { in_features: weight.in_features(), out_features: weight.out_features(), stored })
    }

    fn place_gptq(&self, matrix: &gptq::Matrix) -> Result<Stored, Error> {
        let shape = matrix.shape();
        let k = shape.in_features;
        let sorted = matrix.g_idx().is_act_order().then(|| matrix.g_idx().sorted_rows());
        let mut row_of: Vec<u32> = match &sorted {
            Some(sorted) => sorted.map().to_vec(),
            None => (0..k as u32).collect(),
        };
        let mut row_group: Vec<u32> =
            row_of.iter().map(|&row| matrix.g_idx().groups()[row as usize]).collect();
        let rows = k.next_multiple_of(UNIT);
        row_of.resize(rows, NONE);
        row_group.resize(rows, NONE);
        let scales = matrix.scales();
        let halves: Vec<f16> = scales.iter().map(|&scale| f16::from_f32(scale)).collect();
        // −0 is a value of its own: w = −0 · (q − z).
        let fit = halves.iter().zip(scales).all(|(half, scale)| half.to_f32().to_bits() == scale.to_bits());
        let zeros = matrix.zeros();
        let zero = zeros.first().copied().unwrap_or(0);
        let one_zero = zeros.iter().all(|&other| other == zero);
        let source = row_of.clone();
        self.place(&Parts {
            layout: if fit { Layout::GptqHalf } else { Layout::GptqFloat },
            columns: shape.out_features,
            codes: matrix.codes(),
            source: Some(&source),
            row_of,
            row_group,
            unit_bits: vec![shape.bits.get(); rows / UNIT],
            scales: if fit {
                bytemuck::cast_slice(&halves).to_vec()
            } else {
                bytemuck::cast_slice(scales).to_vec()
            },
            extra: (!one_zero).then(|| zeros.to_vec()),
            zero: zero.into(),
        })
    }

    fn place_exl2(&self, matrix: &exl2::Matrix) -> Result<Stored, Error> {
        let (mut row_group, mut unit_bits) = (Vec::new(), Vec::new());
        for (i, group) in matrix.groups().groups().iter().enumerate() {
            row_group.extend(std::iter::repeat_n(i as u32, group.rows));
            unit_bits.extend(std::iter::repeat_n(group.bits.get(), group.rows / UNIT));
        }
        // Eight indices a word, the first lowest: q_scale as stored.
        let index = matrix.scale_index().chunks_exact(8);
        let words: Vec<u32> = index
            .map(|eight| eight.iter().rev().fold(0, |word, &index| word << 4 | u32::from(index)))
            .collect();
        self.place(&Parts {
            layout: Layout::Exl2,
            columns: matrix.out_features(),
            codes: matrix.codes(),
            source: None,
            row_of: matrix.invperm().inverse().map().to_vec(),
            row_group,
            unit_bits,
            scales: bytemuck::cast_slice(&words).to_vec(),
            extra: Some(matrix.scale_max().iter().map(|ceiling| ceiling.to_bits()).collect()),
            zero: 0,
        })
    }

    /// Brings a weight to the device, where its codes are packed; they are there a byte each meanwhile.
    fn place(&self, parts: &Parts<'_>) -> Result<Stored, Error> {
        let operation = "upload_weight";
        let (units, n) = (parts.unit_bits.len(), parts.columns);
        let mut word = 0u32;
        let mut table: Vec<[u32; 2]> = Vec::with_capacity(units);
        for (unit, &bits) in parts.unit_bits.iter().enumerate() {
            let groups = &parts.row_group[unit * UNIT..][..UNIT];
            let one = groups.iter().all(|group| group == &groups[0]);
            table.push([bits + (word << 8), if one { groups[0] } else { NONE }]);
            word += bits;
        }
        expect(operation, word < 1 << 24, || (format!("{word} rows of words"), "fewer than 2^24".into()))?;
        let grid =
            Grid::new([shapes::blocks(operation, n, 128)?, shapes::few_blocks(operation, units, 1)?, 1], 128);
        let word_bytes = shapes::bytes(operation, word as usize, n, size_of::<u32>())?;
        self.expect_room(operation, word_bytes + parts.codes.len() + parts.scales.len())?;

        let words = self.allocate(operation, word_bytes)?;
        let unit_table = self.to_device(operation, bytemuck::cast_slice::<_, u32>(&table))?;
        let in_order = parts.row_of.iter().enumerate().all(|(i, &row)| row == i as u32);
        let row_of = self.to_device(operation, &parts.row_of)?;
        let codes = self.to_device(operation, parts.codes)?;
        let source = parts.source.map(|source| self.to_device(operation, source)).transpose()?;
        // SAFETY: the arguments of `pack`; `codes` is [k, n], each row of `source` below k or NONE, and without
        // `source` all units' rows are there; `words` has room for all units.
        unsafe {
            self.launch(
                operation,
                Kernel::Pack,
                grid,
                &mut [
                    Argument::Address(codes.address()),
                    Argument::Address(unit_table.address()),
                    Argument::Address(source.as_ref().map_or(0, Buffer::address)),
                    Argument::Address(words.address()),
                    Argument::U32(shapes::count(operation, n)?),
                ],
            )?;
        }
        Ok(Stored::Packed(Box::new(PackedWeight {
            layout: parts.layout,
            units,
            columns: n,
            zero: parts.zero,
            words,
            unit_table,
            row_group: self.to_device(operation, &parts.row_group)?,
            row_of,
            in_order,
            scales: self.to_device(operation, &parts.scales)?,
            extra: parts.extra.as_ref().map(|extra| self.to_device(operation, extra)).transpose()?,
        })))
    }

    fn place_dense(&self, dense: &Dense) -> Result<Stored, Error> {
        let operation = "upload_weight";
        dense.check(operation)?;
        let (n, k) = (dense.out_features, dense.in_features);
        let size = dense.dtype.size();
        let stride = k.next_multiple_of(UNIT);
        let bytes = (*dense.bytes).as_ref();
        let room = shapes::bytes(operation, n, stride, size)?;
        self.expect_room(operation, room)?;
        let elements = if stride == k {
            self.to_device(operation, bytes)?
        } else {
            let mut padded = vec![0u8; room];
            for (row, to) in bytes.chunks_exact((k * size).max(1)).zip(padded.chunks_exact_mut(stride * size))
            {
                to[..row.len()].copy_from_slice(row);
            }
            self.to_device(operation, &padded)?
        };
        Ok(Stored::Dense { dtype: dense.dtype, stride, elements })
    }

    /// Refuses what the device has no room for before any of it is allocated.
    fn expect_room(&self, operation: &'static str, needed: usize) -> Result<(), Error> {
        let free = self.memory_left()?;
        if needed as u64 > free {
            return Err(self.out_of_memory(operation, needed as u64 - free));
        }
        Ok(())
    }

    pub(super) fn decode_all(&self, weight: &Weight) -> Result<Vec<f16>, Error> {
        let operation = "dequantize";
        let (k, n) = (weight.in_features, weight.out_features);
        let decoded = self.allocate(operation, shapes::bytes(operation, k, n, size_of::<f16>())?)?;
        let columns = shapes::count(operation, n)?;
        match &weight.stored {
            Stored::Packed(packed) => {
                let kernel = match packed.layout {
                    Layout::GptqHalf => Kernel::DecodeAllGptqHalf,
                    Layout::GptqFloat => Kernel::DecodeAllGptqFloat,
                    Layout::Exl2 => Kernel::DecodeAllExl2,
                };
                let units = shapes::few_blocks(operation, packed.units, 1)?;
                let grid = Grid::new([shapes::blocks(operation, n, 128)?, units, 1], 128);
                // SAFETY: the arguments of `decode_all_*`; `decoded` is [k, n], and `row_of` names rows below k.
                unsafe {
                    self.launch(
                        operation,
                        kernel,
                        grid,
                        &mut [
                            packed.argument(),
                            Argument::U32(columns),
                            Argument::Address(decoded.address()),
                        ],
                    )?;
                }
            }
            Stored::Dense { dtype, stride, elements } => {
                let tiles = shapes::few_blocks(operation, n, 256)?;
                let grid = Grid::new([shapes::blocks(operation, k, 1)?, tiles, 1], 256);
                // SAFETY: the arguments of `dense_to_half`; `elements` is [n, stride], `decoded` [k, n].
                unsafe {
                    self.launch(
                        operation,
                        Kernel::DenseToHalf,
                        grid,
                        &mut [
                            Argument::Address(elements.address()),
                            Argument::U32(type_number(*dtype)),
                            Argument::U32(shapes::count(operation, *stride)?),
                            Argument::U32(columns),
                            Argument::Address(decoded.address()),
                        ],
                    )?;
                }
            }
        }
        let bits: Vec<u16> = self.to_host(operation, &decoded, k * n)?;
        Ok(bits.reinterpret_into::<f16>())
    }

    /// Columns `first..first + count` of a packed weight into `panel` `[count, 32 · units]`.
    pub(super) fn decode_panel(
        &self,
        operation: &'static str,
        packed: &PackedWeight,
        first: usize,
        count: usize,
        panel: &Buffer,
    ) -> Result<(), Error> {
        let kernel = match packed.layout {
            Layout::GptqHalf => Kernel::DecodePanelGptqHalf,
            Layout::GptqFloat => Kernel::DecodePanelGptqFloat,
            Layout::Exl2 => Kernel::DecodePanelExl2,
        };
        let units = shapes::few_blocks(operation, packed.units, 1)?;
        let grid = Grid::new([shapes::blocks(operation, count, 128)?, units, 1], 128);
        // SAFETY: the arguments of `decode_panel_*`; the caller's panel has the room, and the columns are the
        // weight's.
        unsafe {
            self.launch(
                operation,
                kernel,
                grid,
                &mut [
                    packed.argument(),
                    Argument::U32(shapes::count(operation, first)?),
                    Argument::U32(shapes::count(operation, count)?),
                    Argument::U32(units),
                    Argument::Address(panel.address()),
                ],
            )
        }
    }

    pub(super) fn look_up(&self, table: &Weight, tokens: &[u32], scale: f32) -> Result<Tensor, Error> {
        let operation = "embed";
        let Stored::Dense { dtype, stride, elements } = &table.stored else {
            let (found, expected) = ("a quantized table".into(), "a dense one".into());
            return Err(Error::Shape { operation, found, expected });
        };
        shapes::expect_rows(operation, tokens, table.out_features)?;
        let columns = table.in_features;
        let y = self.tensor(operation, tokens.len(), columns)?;
        let rows = self.to_device(operation, tokens)?;
        let tiles = shapes::few_blocks(operation, columns, 256)?;
        let grid = Grid::new([shapes::blocks(operation, tokens.len(), 1)?, tiles, 1], 256);
        // SAFETY: the arguments of `embed`; tokens are rows of the table, `y` is [tokens, columns].
        unsafe {
            self.launch(
                operation,
                Kernel::Embed,
                grid,
                &mut [
                    Argument::Address(elements.address()),
                    Argument::U32(type_number(*dtype)),
                    Argument::U32(shapes::count(operation, *stride)?),
                    Argument::Address(rows.address()),
                    Argument::F32(scale),
                    Argument::U32(shapes::count(operation, columns)?),
                    Argument::Address(y.address()),
                ],
            )?;
        }
        Ok(y)
    }
}

/// An element type as `decode.cu` numbers it.
fn type_number(dtype: DenseType) -> u32 {
    match dtype {
        DenseType::F16 => 0,
        DenseType::Bf16 => 1,
        DenseType::F32 => 2,
    }
}
