//! The architectures, each a row.

/// An architecture that requant converts. Facts of exllamav2 0.3.2 are from its `architecture.py`.
#[derive(Debug)]
pub struct Architecture {
    /// `architectures[0]` of `config.json`.
    pub name: &'static str,
    /// Which attention linears have a bias.
    pub attention_bias: AttentionBias,
    /// Whether q and k are normalised per head (`self_attn.q_norm`, `k_norm`).
    pub qk_norm: bool,
    /// One MLP, or experts.
    pub mlp: MlpKind,
    /// The sliding window, which exllamav2 applies to none of these.
    pub window: Window,
}

/// When a model attends through a sliding window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// Never.
    None,
    /// Where `sliding_window` is a number.
    Always,
    /// Where `use_sliding_window` says so, too.
    IfUsed,
}

/// Which attention linears have a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionBias {
    /// q, k, v and o, if `attention_bias` of the configuration says so.
    ByConfig,
    /// q, k and v always, o never.
    Qkv,
}

/// What stands in the second half of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MlpKind {
    /// gate, up, down.
    Dense,
    /// Several of these and a router, under one of these names; the first is what exllamav2 expects.
    Experts {
        /// The namings in use.
        names: &'static [ExpertNames],
    },
}

/// How a family of files names the linears of an MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertNames {
    /// Module that holds the router (`gate`) and `experts`.
    pub module: &'static str,
    /// gate, up, down.
    pub projections: [&'static str; 3],
}

impl ExpertNames {
    /// The names of nearly all models.
    pub const MLP: Self = Self { module: "mlp", projections: ["gate_proj", "up_proj", "down_proj"] };
    /// Mixtral's own names.
    pub const MIXTRAL: Self = Self { module: "block_sparse_moe", projections: ["w1", "w3", "w2"] };
}

const LLAMA: Architecture = Architecture {
    name: "LlamaForCausalLM",
    attention_bias: AttentionBias::ByConfig,
    qk_norm: false,
    mlp: MlpKind::Dense,
    window: Window::None,
};

/// All architectures.
pub const ARCHITECTURES: &[Architecture] = &[
    LLAMA,
    Architecture { name: "MistralForCausalLM", window: Window::Always, ..LLAMA },
    Architecture {
        name: "Qwen2ForCausalLM",
        attention_bias: AttentionBias::Qkv,
        window: Window::IfUsed,
        ..LLAMA
    },
    Architecture { name: "Qwen3ForCausalLM", qk_norm: true, window: Window::IfUsed, ..LLAMA },
    Architecture {
        name: "MixtralForCausalLM",
        // GPTQModel since 7 writes the second names.
        mlp: MlpKind::Experts { names: &[ExpertNames::MIXTRAL, ExpertNames::MLP] },
        window: Window::Always,
        ..LLAMA
    },
    Architecture {
        name: "Qwen3MoeForCausalLM",
        qk_norm: true,
        mlp: MlpKind::Experts { names: &[ExpertNames::MLP] },
        window: Window::IfUsed,
        ..LLAMA
    },
];
