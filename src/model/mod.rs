//! Stands in for the forward pass until it is merged: Llama alone.
#![allow(missing_docs, dead_code, unused, clippy::unwrap_used, clippy::type_complexity)]
use crate::arch::Role;
use crate::checkpoint::{Checkpoint, Layout};
use requant_kernels::{Activation, Attention, Dense, DenseType, Error, Operations, Rope, Weight};
use std::collections::BTreeMap;
use std::sync::Arc;
#[derive(Debug)]
pub struct Model<'a>(&'a Checkpoint);
#[derive(Debug, thiserror::Error)]
#[error("unsupported")]
pub struct Unsupported;
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct LinearId {
    pub role: Role,
    pub expert: Option<usize>,
}
pub struct Linear<O: Operations> {
    w: O::Weight,
    b: Option<O::Tensor>,
}
pub struct Block<O: Operations> {
    l: BTreeMap<LinearId, Arc<Linear<O>>>,
    n1: Arc<O::Tensor>,
    n2: Arc<O::Tensor>,
    rope: Rope,
    d: crate::arch::Dims,
    eps: f32,
}
pub struct Head<O: Operations> {
    w: O::Weight,
    n: O::Tensor,
    eps: f32,
}
pub struct Embedding<O: Operations>(O::Weight);
impl<O: Operations> Embedding<O> {
    pub fn forward(&self, ops: &O, t: &[u32]) -> Result<O::Tensor, Error> {
        ops.embed(&self.0, t, 1.0)
    }
}
impl<O: Operations> Linear<O> {
    pub fn new(w: O::Weight, b: Option<O::Tensor>) -> Self {
        Self { w, b }
    }
    pub fn forward(&self, ops: &O, x: &O::Tensor) -> Result<O::Tensor, Error> {
        ops.matmul(x, &self.w, self.b.as_ref())
    }
}
impl<O: Operations> Head<O> {
    pub fn logits(&self, ops: &O, x: &O::Tensor) -> Result<O::Tensor, Error> {
        ops.matmul(&ops.rms_norm(x, &self.n, self.eps)?, &self.w, None)
    }
}
impl<O: Operations> Block<O> {
    pub fn linear(&self, id: LinearId) -> Option<&Arc<Linear<O>>> {
        self.l.get(&id)
    }
    pub fn with(&self, l: &[(LinearId, Arc<Linear<O>>)]) -> Self {
        let mut m = self.l.clone();
        for (i, x) in l {
            m.insert(*i, x.clone());
        }
        Self {
            l: m,
            n1: self.n1.clone(),
            n2: self.n2.clone(),
            rope: self.rope.clone(),
            d: self.d.clone(),
            eps: self.eps,
        }
    }
    pub fn forward(
        &self,
        ops: &O,
        x: &O::Tensor,
        window: usize,
        tap: &mut dyn FnMut(LinearId, &O::Tensor, &O::Tensor) -> Result<(), Error>,
    ) -> Result<O::Tensor, Error> {
        let mut go = |r: Role, x: &O::Tensor| -> Result<O::Tensor, Error> {
            let id = LinearId { role: r, expert: None };
            let y = self.l[&id].forward(ops, x)?;
            tap(id, x, &y)?;
            Ok(y)
        };
        let h = ops.rms_norm(x, &self.n1, self.eps)?;
        let (mut q, mut k, v) = (go(Role::Q, &h)?, go(Role::K, &h)?, go(Role::V, &h)?);
        ops.rotate(&mut q, self.d.head_dim, window, &self.rope)?;
        ops.rotate(&mut k, self.d.head_dim, window, &self.rope)?;
        let a = ops.attention(
            &q,
            &k,
            &v,
            &Attention {
                heads: self.d.heads,
                kv_heads: self.d.kv_heads,
                head_dim: self.d.head_dim,
                scale: 1.0 / (self.d.head_dim as f32).sqrt(),
                window,
                sliding: None,
                soft_cap: None,
            },
        )?;
        let o = go(Role::O, &a)?;
        let mut y = ops.copy(x)?;
        ops.add(&mut y, &o, 1.0)?;
        let h = ops.rms_norm(&y, &self.n2, self.eps)?;
        let g = ops.gate(&go(Role::Gate, &h)?, &go(Role::Up, &h)?, Activation::Silu)?;
        let d = go(Role::Down, &g)?;
        ops.add(&mut y, &d, 1.0)?;
        Ok(y)
    }
}
fn norm<O: Operations>(c: &Checkpoint, ops: &O, n: &str) -> Result<O::Tensor, crate::Error> {
    let f = c.tensor(n).unwrap().floats().unwrap();
    Ok(ops.upload(&f, f.len())?)
}
fn dense(c: &Checkpoint, n: &str) -> Weight {
    let t = c.tensor(n).unwrap();
    let f = t.floats().unwrap();
    let b: Vec<u8> = f.iter().flat_map(|x| x.to_le_bytes()).collect();
    Weight::Dense(Dense {
        dtype: DenseType::F32,
        out_features: t.shape()[0],
        in_features: t.shape()[1],
        bytes: Arc::new(b),
    })
}
fn weight(c: &Checkpoint, m: &crate::checkpoint::Module) -> Result<Weight, crate::Error> {
    Ok(match m.layout() {
        Layout::Gptq(_) => Weight::Gptq(Arc::new(c.gptq(m)?)),
        Layout::Exl2(_) => Weight::Exl2 { matrix: Arc::new(c.exl2(m)?), out_features: m.out_features() },
        _ => dense(c, &format!("{}.weight", m.name())),
    })
}
impl<'a> Model<'a> {
    pub fn new(c: &'a Checkpoint) -> Result<Self, Unsupported> {
        if c.architecture().is_some_and(|a| a.name == "LlamaForCausalLM") {
            Ok(Self(c))
        } else {
            Err(Unsupported)
        }
    }
    pub fn layers(&self) -> usize {
        self.0.dims().unwrap().layers
    }
    pub fn hidden(&self) -> usize {
        self.0.dims().unwrap().hidden
    }
    pub fn vocabulary(&self) -> usize {
        self.0.dims().unwrap().vocab
    }
    pub fn embedding<O: Operations>(&self, ops: &O) -> Result<Embedding<O>, crate::Error> {
        Ok(Embedding(ops.upload_weight(&dense(self.0, &self.0.naming().embedding_weight()))?))
    }
    fn eps(&self) -> f32 {
        self.0.config()["rms_norm_eps"].as_f64().unwrap() as f32
    }
    pub fn block<O: Operations>(&self, ops: &O, l: usize) -> Result<Block<O>, crate::Error> {
        let mut m = BTreeMap::new();
        for x in self.0.modules() {
            if let Some(lin) = x.linear().filter(|z| z.layer == l) {
                m.insert(
                    LinearId { role: lin.role, expert: None },
                    Arc::new(Linear { w: ops.upload_weight(&weight(self.0, x)?)?, b: None }),
                );
            }
        }
        let d = self.0.dims().unwrap().clone();
        let c = self.0.config();
        let theta = c
            .get("rope_theta")
            .and_then(|x| x.as_f64())
            .or_else(|| c.get("rope_parameters")?.get("rope_theta")?.as_f64())
            .unwrap_or(10000.0);
        let frequencies =
            (0..d.head_dim / 2).map(|i| theta.powf(-2.0 * i as f64 / d.head_dim as f64) as f32).collect();
        Ok(Block {
            l: m,
            n1: Arc::new(norm(self.0, ops, &format!("model.layers.{l}.input_layernorm.weight"))?),
            n2: Arc::new(norm(self.0, ops, &format!("model.layers.{l}.post_attention_layernorm.weight"))?),
            rope: Rope { frequencies, scale: 1.0 },
            d,
            eps: self.eps(),
        })
    }
    pub fn head<O: Operations>(&self, ops: &O) -> Result<Head<O>, crate::Error> {
        let w = match self.0.module("lm_head") {
            Some(m) => weight(self.0, m)?,
            None => dense(self.0, &self.0.naming().embedding_weight()),
        };
        Ok(Head { w: ops.upload_weight(&w)?, n: norm(self.0, ops, "model.norm.weight")?, eps: self.eps() })
    }
}
