//! A block on a device, and what stands before the first and after the last.

use super::LinearId;
use super::spec::{Routing, Spec};
use crate::arch::Role;
use requant_kernels::{Attention, Error, Operations};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The token embedding.
pub struct Embedding<O: Operations> {
    pub(super) table: O::Weight,
    pub(super) scale: f32,
}

impl<O: Operations> Embedding<O> {
    /// Hidden states `[tokens, hidden]` before the first block.
    ///
    /// # Errors
    /// A token outside the vocabulary; those of the device.
    pub fn forward(&self, ops: &O, tokens: &[u32]) -> Result<O::Tensor, Error> {
        ops.embed(&self.table, tokens, self.scale)
    }
}

/// A linear: a weight in any layout, and perhaps a bias.
pub struct Linear<O: Operations> {
    weight: O::Weight,
    bias: Option<O::Tensor>,
}

impl<O: Operations> Linear<O> {
    /// Of an uploaded weight `[k, n]` and a bias `[1, n]`.
    pub fn new(weight: O::Weight, bias: Option<O::Tensor>) -> Self {
        Self { weight, bias }
    }

    /// `[m, k]` to `[m, n]`.
    ///
    /// # Errors
    /// Those of the device.
    pub fn forward(&self, ops: &O, x: &O::Tensor) -> Result<O::Tensor, Error> {
        ops.matmul(x, &self.weight, self.bias.as_ref())
    }
}

/// The last norm and the output head.
pub struct Head<O: Operations> {
    pub(super) norm: O::Tensor,
    pub(super) linear: Linear<O>,
    pub(super) epsilon: f32,
    pub(super) cap: Option<f32>,
}

impl<O: Operations> Head<O> {
    /// Logits `[m, vocabulary]` of hidden states after the last block.
    ///
    /// # Errors
    /// Those of the device.
    pub fn logits(&self, ops: &O, hidden: &O::Tensor) -> Result<O::Tensor, Error> {
        let mut logits = self.linear.forward(ops, &ops.rms_norm(hidden, &self.norm, self.epsilon)?)?;
        if let Some(cap) = self.cap {
            ops.soft_cap(&mut logits, cap)?;
        }
        Ok(logits)
    }
}

/// What chooses the experts of a token.
pub(super) struct Router<O: Operations> {
    /// `[hidden, experts]`.
    pub(super) weight: O::Weight,
    /// `[hidden, 1]`: how much of the shared expert a token takes.
    pub(super) shared: Option<O::Weight>,
    pub(super) experts: usize,
    pub(super) routing: Routing,
}

/// A decoder block.
pub struct Block<O: Operations> {
    pub(super) spec: Arc<Spec>,
    pub(super) layer: usize,
    pub(super) linears: BTreeMap<LinearId, Arc<Linear<O>>>,
    /// In the order of [`Names::block_norms`](crate::arch::Names::block_norms).
    pub(super) norms: Vec<Arc<O::Tensor>>,
    /// Of q and k.
    pub(super) qk_norms: Option<[Arc<O::Tensor>; 2]>,
    pub(super) router: Option<Arc<Router<O>>>,
}

/// Sees each linear's input and output; of an expert, the rows that chose it.
pub type Tap<'a, T> = dyn FnMut(LinearId, &T, &T) -> Result<(), Error> + 'a;

impl<O: Operations> Block<O> {
    /// A linear by its place.
    pub fn linear(&self, id: LinearId) -> Option<&Arc<Linear<O>>> {
        self.linears.get(&id)
    }

    /// The block with other linears in some places; all else is shared.
    pub fn with(&self, others: &[(LinearId, Arc<Linear<O>>)]) -> Self {
        let mut linears = self.linears.clone();
        linears.extend(others.iter().cloned());
        Self {
            spec: self.spec.clone(),
            layer: self.layer,
            linears,
            norms: self.norms.clone(),
            qk_norms: self.qk_norms.clone(),
            router: self.router.clone(),
        }
    }

    /// Hidden states `[m, hidden]` after the block, of those before it: windows of `window` rows each.
    ///
    /// # Errors
    /// Those of the device and of `tap`.
    pub fn forward(
        &self,
        ops: &O,
        hidden: &O::Tensor,
        window: usize,
        tap: &mut Tap<'_, O::Tensor>,
    ) -> Result<O::Tensor, Error> {
        let norm = |x: &O::Tensor, i: usize| ops.rms_norm(x, &self.norms[i], self.spec.epsilon);
        // Either [before attention, before the MLP], or with a norm behind each as well.
        let behind = self.norms.len() == 4;
        let mut hidden = ops.copy(hidden)?;
        let mut attention = self.attention(ops, &norm(&hidden, 0)?, window, tap)?;
        if behind {
            attention = norm(&attention, 1)?;
        }
        ops.add(&mut hidden, &attention, 1.0)?;
        drop(attention);
        let input = norm(&hidden, if behind { 2 } else { 1 })?;
        let mut mlp = match &self.router {
            None => self.mlp(ops, &input, None, tap)?,
            Some(router) => self.experts(ops, router, &input, tap)?,
        };
        if behind {
            mlp = norm(&mlp, 3)?;
        }
        ops.add(&mut hidden, &mlp, 1.0)?;
        Ok(hidden)
    }

    fn apply(
        &self,
        ops: &O,
        role: Role,
        expert: Option<usize>,
        x: &O::Tensor,
        tap: &mut Tap<'_, O::Tensor>,
    ) -> Result<O::Tensor, Error> {
        let id = LinearId { role, expert };
        let linear = self.linears.get(&id).ok_or_else(|| Error::Shape {
            operation: "forward",
            found: format!("a block without {id:?}"),
            expected: "all linears of the architecture".into(),
        })?;
        let y = linear.forward(ops, x)?;
        tap(id, x, &y)?;
        Ok(y)
    }

    fn attention(
        &self,
        ops: &O,
        x: &O::Tensor,
        window: usize,
        tap: &mut Tap<'_, O::Tensor>,
    ) -> Result<O::Tensor, Error> {
        let (spec, dims) = (&*self.spec, &self.spec.dims);
        let mut q = self.apply(ops, Role::Q, None, x, tap)?;
        let mut k = self.apply(ops, Role::K, None, x, tap)?;
        let v = self.apply(ops, Role::V, None, x, tap)?;
        if let Some([q_norm, k_norm]) = &self.qk_norms {
            q = ops.rms_norm(&q, q_norm, spec.epsilon)?;
            k = ops.rms_norm(&k, k_norm, spec.epsilon)?;
        }
        let rope = spec.rope.of_window(window);
        ops.rotate(&mut q, dims.head_dim, window, &rope)?;
        ops.rotate(&mut k, dims.head_dim, window, &rope)?;
        let shape = Attention {
            heads: dims.heads,
            kv_heads: dims.kv_heads,
            head_dim: dims.head_dim,
            scale: spec.attention_scale,
            window,
            sliding: spec.sliding[self.layer],
            soft_cap: spec.attention_cap,
        };
        let attention = ops.attention(&q, &k, &v, &shape)?;
        self.apply(ops, Role::O, None, &attention, tap)
    }

    fn mlp(
        &self,
        ops: &O,
        x: &O::Tensor,
        expert: Option<usize>,
        tap: &mut Tap<'_, O::Tensor>,
    ) -> Result<O::Tensor, Error> {
        let gate = self.apply(ops, Role::Gate, expert, x, tap)?;
        let up = self.apply(ops, Role::Up, expert, x, tap)?;
        let gated = ops.gate(&gate, &up, self.spec.activation)?;
        self.apply(ops, Role::Down, expert, &gated, tap)
    }

    fn experts(
        &self,
        ops: &O,
        router: &Router<O>,
        x: &O::Tensor,
        tap: &mut Tap<'_, O::Tensor>,
    ) -> Result<O::Tensor, Error> {
        let (rows, columns) = ops.shape(x);
        let logits = ops.download(&ops.matmul(x, &router.weight, None)?)?;
        let chosen = router.choose(&logits);
        let mut result = ops.upload(&vec![0.0; rows * columns], columns)?;
        for (expert, chosen) in chosen.iter().enumerate() {
            if chosen.is_empty() {
                continue;
            }
            let (rows, weights): (Vec<u32>, Vec<f32>) = chosen.iter().copied().unzip();
            let output = self.mlp(ops, &ops.select_rows(x, &rows)?, Some(expert), tap)?;
            ops.add_rows(&mut result, &rows, &weights, &output)?;
        }
        if let Some(gate) = &router.shared {
            let shares = ops.download(&ops.matmul(x, gate, None)?)?;
            let weights: Vec<f32> = shares.iter().map(|&share| 1.0 / (1.0 + (-share).exp())).collect();
            let all: Vec<u32> = (0..rows as u32).collect();
            ops.add_rows(&mut result, &all, &weights, &self.mlp(ops, x, None, tap)?)?;
        }
        Ok(result)
    }
}

impl<O: Operations> Router<O> {
    /// The rows that each expert gets, and with what weight.
    fn choose(&self, logits: &[f32]) -> Vec<Vec<(u32, f32)>> {
        let mut chosen = vec![Vec::new(); self.experts];
        for (row, logits) in logits.chunks_exact(self.experts.max(1)).enumerate() {
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let powers: Vec<f32> = logits.iter().map(|logit| (logit - largest).exp()).collect();
            let sum: f32 = powers.iter().sum();
            let mut order: Vec<usize> = (0..self.experts).collect();
            order.sort_by(|&a, &b| powers[b].total_cmp(&powers[a]));
            order.truncate(self.routing.top_k);
            let total = if self.routing.normalised { order.iter().map(|&e| powers[e]).sum() } else { sum };
            for expert in order {
                chosen[expert].push((row as u32, powers[expert] / total));
            }
        }
        chosen
    }
}
