//! Writes small checkpoints, right or wrong in one place.

use half::{bf16, f16};
use requant::arch::{self, Dims};
use requant::formats::gptq::{Bits, Shape, ZeroConvention, encode_zeros, pack_codes};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use tempfile::TempDir;

/// A tensor as it will stand in the file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tensor {
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl Tensor {
    pub(crate) fn u32s(shape: &[usize], words: &[u32]) -> Self {
        Self::of("I32", shape, bytemuck::cast_slice(words))
    }

    pub(crate) fn i32s(shape: &[usize], numbers: &[i32]) -> Self {
        Self::of("I32", shape, bytemuck::cast_slice(numbers))
    }

    pub(crate) fn i64s(shape: &[usize], numbers: &[i64]) -> Self {
        Self::of("I64", shape, bytemuck::cast_slice(numbers))
    }

    pub(crate) fn f16s(shape: &[usize], numbers: &[f32]) -> Self {
        let halves: Vec<f16> = numbers.iter().map(|&f| f16::from_f32(f)).collect();
        Self::of("F16", shape, bytemuck::cast_slice(&halves))
    }

    pub(crate) fn bf16s(shape: &[usize], numbers: &[f32]) -> Self {
        let halves: Vec<bf16> = numbers.iter().map(|&f| bf16::from_f32(f)).collect();
        Self::of("BF16", shape, bytemuck::cast_slice(&halves))
    }

    pub(crate) fn f32s(shape: &[usize], numbers: &[f32]) -> Self {
        Self::of("F32", shape, bytemuck::cast_slice(numbers))
    }

    pub(crate) fn of(dtype: &'static str, shape: &[usize], bytes: &[u8]) -> Self {
        Self { dtype, shape: shape.to_vec(), bytes: bytes.to_vec() }
    }
}

/// Makes a float tensor of some type: [`Tensor::f16s`] and its like.
pub(crate) type MakeFloats = fn(&[usize], &[f32]) -> Tensor;

/// Tensors by name.
pub(crate) type Tensors = BTreeMap<String, Tensor>;

/// The bytes of a safetensors file, after `edit` had its way with the header.
pub(crate) fn safetensors(tensors: &Tensors, edit: impl FnOnce(&mut Map<String, Value>)) -> Vec<u8> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut data: Vec<u8> = Vec::new();
    for (name, tensor) in tensors {
        let begin = data.len();
        data.extend(&tensor.bytes);
        let offsets = [begin, data.len()];
        let entry = json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets});
        header.insert(name.clone(), entry);
    }
    edit(&mut header);
    let header = serde_json::to_vec(&header).unwrap();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend(data);
    file
}

/// How a GPTQ module is to be stored.
#[derive(Clone, Debug)]
pub(crate) struct Quantized {
    pub(crate) bits: u32,
    pub(crate) group_size: usize,
    pub(crate) convention: ZeroConvention,
    /// Zero point of a group and column.
    pub(crate) zero: fn(usize, usize) -> u16,
}

impl Default for Quantized {
    fn default() -> Self {
        Self { bits: 4, group_size: 32, convention: ZeroConvention::V1, zero: |_, _| 8 }
    }
}

/// The four tensors of a module `[k, n]`, its codes and scales derived from their places.
pub(crate) fn gptq_module(tensors: &mut Tensors, name: &str, k: usize, n: usize, how: &Quantized) {
    let bits = Bits::try_from(how.bits).unwrap();
    let groups = k.div_ceil(how.group_size);
    let shape = Shape { in_features: k, out_features: n, bits, groups };
    let codes: Vec<u8> = (0..k * n).map(|i| ((i * 7 + i / n * 3) as u32 & bits.max_code()) as u8).collect();
    let zeros: Vec<u16> = (0..groups * n).map(|i| (how.zero)(i / n, i % n)).collect();
    let scales: Vec<f32> = (0..groups * n).map(|i| 0.005 + 0.0001 * (i % 97) as f32).collect();
    let g_idx: Vec<i32> = (0..k).map(|row| (row / how.group_size) as i32).collect();
    let qzeros = encode_zeros(&shape, &zeros, how.convention).unwrap();
    let mut put = |suffix: &str, tensor| tensors.insert(format!("{name}.{suffix}"), tensor);
    put("qweight", Tensor::u32s(&shape.qweight(), &pack_codes(&shape, &codes).unwrap()));
    put("qzeros", Tensor::u32s(&shape.qzeros(), &qzeros));
    put("scales", Tensor::f16s(&shape.scales(), &scales));
    put("g_idx", Tensor::i32s(&[k], &g_idx));
}

/// Rows of the embedding.
pub(crate) const VOCAB: usize = 48;
/// Hidden size.
pub(crate) const HIDDEN: usize = 64;
/// Size between gate and down.
pub(crate) const INTERMEDIATE: usize = 96;

/// The module that tests break.
pub(crate) const Q: &str = "model.layers.0.self_attn.q_proj";
/// The module with another k than the others.
pub(crate) const DOWN: &str = "model.layers.0.mlp.down_proj";

/// The seven linears of the default sizes: name, k, n.
pub(crate) const LINEARS: [(&str, usize, usize); 7] = [
    ("model.layers.0.self_attn.q_proj", HIDDEN, HIDDEN),
    ("model.layers.0.self_attn.k_proj", HIDDEN, HIDDEN),
    ("model.layers.0.self_attn.v_proj", HIDDEN, HIDDEN),
    ("model.layers.0.self_attn.o_proj", HIDDEN, HIDDEN),
    ("model.layers.0.mlp.gate_proj", HIDDEN, INTERMEDIATE),
    ("model.layers.0.mlp.up_proj", HIDDEN, INTERMEDIATE),
    ("model.layers.0.mlp.down_proj", INTERMEDIATE, HIDDEN),
];

/// The sizes of a model; as many heads for keys and values as for queries.
#[derive(Clone, Debug)]
pub(crate) struct Sizes {
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
    pub(crate) heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) layers: usize,
    pub(crate) vocab: usize,
}

impl Default for Sizes {
    fn default() -> Self {
        Self { hidden: HIDDEN, intermediate: INTERMEDIATE, heads: 2, head_dim: 32, layers: 1, vocab: VOCAB }
    }
}

impl Sizes {
    /// The seven linears of the first block: name, k, n.
    pub(crate) fn linears(&self) -> [(&'static str, usize, usize); 7] {
        let (hidden, intermediate, q) = (self.hidden, self.intermediate, self.heads * self.head_dim);
        let sizes = [
            (hidden, q),
            (hidden, q),
            (hidden, q),
            (q, hidden),
            (hidden, intermediate),
            (hidden, intermediate),
            (intermediate, hidden),
        ];
        std::array::from_fn(|i| (LINEARS[i].0, sizes[i].0, sizes[i].1))
    }
}

/// A checkpoint of Llama blocks, to be changed and then written.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) config: Value,
    /// quantize_config.json, and `quantization_config` of config.json.
    pub(crate) quant: Option<Value>,
    pub(crate) tensors: Tensors,
}

impl Model {
    /// One block of the default sizes, all linears stored as `how` says.
    pub(crate) fn new(how: &Quantized) -> Self {
        Self::sized(how, &Sizes::default())
    }

    /// All linears stored as `how` says.
    pub(crate) fn sized(how: &Quantized, sizes: &Sizes) -> Self {
        let Sizes { hidden, intermediate, heads, head_dim, layers, vocab } = *sizes;
        let mut tensors = Tensors::new();
        let one = |size: usize| Tensor::f16s(&[size], &vec![1.0; size]);
        for layer in 0..layers {
            for (name, k, n) in sizes.linears() {
                gptq_module(&mut tensors, &name.replace(".0.", &format!(".{layer}.")), k, n, how);
            }
            for norm in ["input_layernorm", "post_attention_layernorm"] {
                tensors.insert(format!("model.layers.{layer}.{norm}.weight"), one(hidden));
            }
        }
        let ramp: Vec<f32> = (0..vocab * hidden).map(|i| (i % 31) as f32 * 0.01 - 0.15).collect();
        for name in ["model.embed_tokens.weight", "lm_head.weight"] {
            tensors.insert(name.into(), Tensor::f16s(&[vocab, hidden], &ramp));
        }
        tensors.insert("model.norm.weight".into(), one(hidden));
        let format = if how.convention == ZeroConvention::V1 { "gptq" } else { "gptq_v2" };
        let quant = json!({
            "bits": how.bits, "group_size": how.group_size, "desc_act": false, "sym": true,
            "quant_method": "gptq", "checkpoint_format": format
        });
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
            "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": heads, "head_dim": head_dim, "vocab_size": vocab,
            "tie_word_embeddings": false, "rope_theta": 10000.0
        });
        Self { config, quant: Some(quant), tensors }
    }

    /// What the architecture of a configuration has, its linears stored as `how` says, with a bias where one is
    /// expected, under the names that the model's own code has. An untied head is dense.
    pub(crate) fn of(config: Value, how: &Quantized) -> Self {
        let arch = arch::find(config.as_object().unwrap()).unwrap();
        let dims = Dims::read(arch, config.as_object().unwrap()).unwrap();
        let names = arch.names.get(1).unwrap_or(&arch.names[0]);
        let mut tensors = Tensors::new();
        for linears in arch.linears(&dims, names).chunk_by(|a, b| a.name == b.name) {
            let columns = linears.iter().map(|linear| linear.out_features).sum();
            let name = &linears[0].name;
            gptq_module(&mut tensors, name, linears[0].in_features, columns, how);
            if linears.iter().all(|linear| linear.bias) {
                tensors.insert(format!("{name}.bias"), Tensor::f16s(&[columns], &vec![0.1; columns]));
            }
        }
        let mut dense: Vec<_> =
            arch.dense_tensors(&dims, names).into_iter().map(|t| (t.name, t.shape)).collect();
        if !dims.tied {
            dense.push((format!("{}.weight", names.head), vec![dims.vocab, dims.hidden]));
        }
        for (name, shape) in dense {
            let size = shape.iter().product();
            tensors.insert(name, Tensor::f16s(&shape, &vec![0.5; size]));
        }
        let quant = Self::new(&Quantized::default()).quant;
        Self { config, quant, tensors }
    }

    /// What a directory holds, to be changed.
    pub(crate) fn read(dir: &Path) -> Self {
        let json = |name: &str| -> Value {
            serde_json::from_slice(&std::fs::read(dir.join(name)).unwrap()).unwrap()
        };
        let mut config = json("config.json");
        let stated = config.as_object_mut().unwrap().shift_remove("quantization_config");
        let beside = "quantize_config.json";
        let quant = stated.or_else(|| dir.join(beside).exists().then(|| json(beside)));
        let mut tensors = Tensors::new();
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "safetensors") {
                continue;
            }
            let bytes = std::fs::read(&path).unwrap();
            for (name, view) in safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors() {
                let dtype = match view.dtype() {
                    safetensors::Dtype::I32 => "I32",
                    safetensors::Dtype::F16 => "F16",
                    other => panic!("{name}: {other:?}"),
                };
                tensors.insert(name, Tensor::of(dtype, view.shape(), view.data()));
            }
        }
        Self { config, quant, tensors }
    }

    /// Gives each tensor the name that `rename` makes of its own.
    pub(crate) fn rename(&mut self, rename: impl Fn(&str) -> String) -> &mut Self {
        let tensors = std::mem::take(&mut self.tensors);
        self.tensors = tensors.into_iter().map(|(name, tensor)| (rename(&name), tensor)).collect();
        self
    }

    /// Replaces a quantized module by a plain fp16 one `[n, k]`, its values derived from their places.
    pub(crate) fn make_dense(&mut self, module: &str, k: usize, n: usize) -> &mut Self {
        for suffix in ["qweight", "qzeros", "scales", "g_idx"] {
            self.tensors.remove(&format!("{module}.{suffix}")).unwrap();
        }
        let values: Vec<f32> =
            (0..k * n).map(|i| ((i * 37 + i / k * 11) % 101) as f32 * 0.002 - 0.1).collect();
        self.put(module, "weight", Tensor::f16s(&[n, k], &values))
    }

    /// One key of the quantization's configuration.
    pub(crate) fn set(&mut self, key: &str, value: Value) -> &mut Self {
        self.quant.as_mut().unwrap()[key] = value;
        self
    }

    /// A tensor of a module.
    pub(crate) fn tensor(&mut self, module: &str, suffix: &str) -> &mut Tensor {
        self.tensors.get_mut(&format!("{module}.{suffix}")).unwrap()
    }

    /// Replaces a tensor of a module.
    pub(crate) fn put(&mut self, module: &str, suffix: &str, tensor: Tensor) -> &mut Self {
        self.tensors.insert(format!("{module}.{suffix}"), tensor);
        self
    }

    /// Removes a tensor of every module.
    pub(crate) fn remove_all(&mut self, suffix: &str) -> &mut Self {
        self.tensors.retain(|name, _| !name.ends_with(&format!(".{suffix}")));
        self
    }

    /// Pads a 4-bit module of `stored` columns by 32, with codes, scales and zero points of 0.
    pub(crate) fn pad_columns(&mut self, module: &str, stored: usize) -> &mut Self {
        for (suffix, stored, more) in
            [("qweight", stored, 32), ("qzeros", stored / 8, 4), ("scales", stored, 32)]
        {
            let tensor = self.tensor(module, suffix);
            let size = tensor.bytes.len() / tensor.shape.iter().product::<usize>();
            let rows = tensor.bytes.chunks_exact(stored * size);
            tensor.bytes = rows.flat_map(|row| [row, &vec![0; more * size]].concat()).collect();
            tensor.shape[1] += more;
        }
        self
    }

    /// Overwrites the first words of a module's qzeros.
    pub(crate) fn zero_words(&mut self, module: &str, words: &[u32]) -> &mut Self {
        let bytes = bytemuck::cast_slice(words);
        self.tensor(module, "qzeros").bytes[..bytes.len()].copy_from_slice(bytes);
        self
    }

    /// Writes the configuration.
    pub(crate) fn write_config(&self, dir: &Path) {
        let mut config = self.config.clone();
        if let Some(quant) = &self.quant {
            config["quantization_config"] = quant.clone();
            write_json(&dir.join("quantize_config.json"), quant);
        }
        write_json(&dir.join("config.json"), &config);
    }

    /// Writes everything, in one file.
    pub(crate) fn write(&self) -> TempDir {
        self.write_edited(|_| {})
    }

    /// Writes everything, the header edited.
    pub(crate) fn write_edited(&self, edit: impl FnOnce(&mut Map<String, Value>)) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        self.write_config(dir.path());
        std::fs::write(dir.path().join("model.safetensors"), safetensors(&self.tensors, edit)).unwrap();
        dir
    }

    /// Writes shards, each tensor into that which `shard_of` gives, with or without an index.
    pub(crate) fn write_shards(&self, shard_of: impl Fn(&str) -> &'static str, index: bool) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        self.write_config(dir.path());
        let mut shards: BTreeMap<&str, Tensors> = BTreeMap::new();
        for (name, tensor) in &self.tensors {
            shards.entry(shard_of(name)).or_default().insert(name.clone(), tensor.clone());
        }
        for (shard, tensors) in &shards {
            std::fs::write(dir.path().join(shard), safetensors(tensors, |_| {})).unwrap();
        }
        if index {
            let map: BTreeMap<&String, &str> =
                self.tensors.keys().map(|name| (name, shard_of(name))).collect();
            write_index(dir.path(), &json!(map));
        }
        dir
    }
}

/// Writes `model.safetensors.index.json`.
pub(crate) fn write_index(dir: &Path, weight_map: &Value) {
    let index = json!({"metadata": {"total_size": 0}, "weight_map": weight_map});
    write_json(&dir.join("model.safetensors.index.json"), &index);
}

/// Writes a JSON file.
pub(crate) fn write_json(path: &Path, value: &Value) {
    std::fs::write(path, serde_json::to_vec_pretty(value).unwrap()).unwrap();
}
