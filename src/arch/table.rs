//! The architectures, each a row.

use super::names::{AttentionNames, ExpertNames, MlpNames, Names};

/// An architecture that requant converts. Facts of exllamav2 0.3.2 are from its `architecture.py`.
#[derive(Debug)]
pub struct Architecture {
    /// `architectures[0]` of `config.json`.
    pub name: &'static str,
    /// The namings in use; the first is what exllamav2 expects of an EXL2 directory.
    pub names: &'static [Names],
    /// Which attention linears have a bias.
    pub attention_bias: AttentionBias,
    /// Whether the linears of the MLP have a bias whatever the configuration says.
    pub mlp_bias: bool,
    /// Whether norms have a bias.
    pub norm_bias: bool,
    /// Whether q and k are normalised per head (`self_attn.q_norm`, `k_norm`).
    pub qk_norm: QkNorm,
    /// One MLP, or experts.
    pub mlp: MlpKind,
    /// Whether the head is always the embedding.
    pub tied_head: bool,
    /// Whether all query heads share one key and one value.
    pub multi_query: bool,
    /// Whether positions are learned.
    pub learned_positions: bool,
    /// Whether dense linears are stored `[in_features, out_features]` (GPT-2's `Conv1D`).
    pub transposed: bool,
    /// The sliding window, which exllamav2 applies to none of those that have one here.
    pub window: Window,
    /// Whether exllamav2 knows the architecture.
    pub exllamav2: bool,
}

/// When a model attends through a sliding window that exllamav2 doesn't apply.
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
    /// q, k and v, if `attention_bias` says so; o never.
    QkvByConfig,
    /// q, k and v always, o never.
    Qkv,
    /// All four.
    All,
}

/// Whether q and k are normalised, and by what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// They aren't.
    Never,
    /// By `[head_dim]` for all heads.
    Always,
    /// By `[heads, head_dim]`, if `use_qk_norm` says so.
    EachHeadIfUsed,
}

/// What stands in the second half of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MlpKind {
    /// One MLP.
    Dense,
    /// Several MLPs and a router.
    Experts,
    /// Several MLPs and a router, and one MLP for all tokens with a gate of its own.
    ExpertsAndShared,
}

const LLAMA: Architecture = Architecture {
    name: "LlamaForCausalLM",
    names: &[Names::LLAMA],
    attention_bias: AttentionBias::ByConfig,
    mlp_bias: false,
    norm_bias: false,
    qk_norm: QkNorm::Never,
    mlp: MlpKind::Dense,
    tied_head: false,
    multi_query: false,
    learned_positions: false,
    transposed: false,
    window: Window::None,
    exllamav2: true,
};

/// The row by which exllamav2 loads what it doesn't know.
pub const FALLBACK: &Architecture = &LLAMA;

const MIXTRAL: Names = Names { experts: ExpertNames::MIXTRAL, ..Names::LLAMA };
const FOUR_NORMS: Names = Names {
    block_norms: &[
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ],
    ..Names::LLAMA
};
const GLM4: Names = Names {
    block_norms: &[
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ],
    ..Names::LLAMA
};
const YI: Names = Names { block_norms: &["ln1", "ln2"], ..Names::LLAMA };
const COHERE: Names = Names { block_norms: &["input_layernorm"], ..Names::LLAMA };
const FUSED_QKV: AttentionNames = AttentionNames::Fused(["self_attn.qkv_proj", "self_attn.o_proj"]);
const FUSED_GATE_UP: MlpNames = MlpNames::Fused(["mlp.gate_up_proj", "mlp.down_proj"]);
const STARCODER: Names = Names { mlp: MlpNames::Plain(["mlp.c_fc", "mlp.c_proj"]), ..Names::LLAMA };
const GPT2: Names = Names { block_norms: &["ln_1", "ln_2"], ..STARCODER };
const GPT2_SOURCE: Names = Names {
    blocks: "transformer.h.",
    embedding: "transformer.wte",
    positions: "transformer.wpe",
    norm: "transformer.ln_f",
    attention: AttentionNames::Fused(["attn.c_attn", "attn.c_proj"]),
    ..GPT2
};
const INTERNLM2: Names = Names {
    block_norms: &["attention_norm", "ffn_norm"],
    mlp: MlpNames::Gated(["feed_forward.w1", "feed_forward.w3", "feed_forward.w2"]),
    ..Names::LLAMA
};
/// With the language model inside another; newer files turn the two words round.
const INNER: Names = Names {
    blocks: "language_model.model.layers.",
    embedding: "language_model.model.embed_tokens",
    norm: "language_model.model.norm",
    head: "language_model.lm_head",
    others: &["vision_tower.", "multi_modal_projector."],
    ..Names::LLAMA
};
const INNER_TURNED: Names = Names {
    blocks: "model.language_model.layers.",
    embedding: "model.language_model.embed_tokens",
    norm: "model.language_model.norm",
    head: super::HEAD,
    others: &["model.vision_tower.", "model.multi_modal_projector."],
    ..Names::LLAMA
};
const GEMMA3: Names = Names { block_norms: FOUR_NORMS.block_norms, ..INNER };
const GEMMA3_TURNED: Names = Names { block_norms: FOUR_NORMS.block_norms, ..INNER_TURNED };
const QWEN_VL: Names = Names { others: &["visual."], ..Names::LLAMA };
const QWEN_VL_TURNED: Names = Names { others: &["model.visual."], ..INNER_TURNED };

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
    Architecture { name: "Qwen3ForCausalLM", qk_norm: QkNorm::Always, window: Window::IfUsed, ..LLAMA },
    Architecture {
        name: "MixtralForCausalLM",
        // GPTQModel since 7 writes the second names.
        names: &[MIXTRAL, Names::LLAMA],
        mlp: MlpKind::Experts,
        window: Window::Always,
        ..LLAMA
    },
    Architecture {
        name: "Qwen3MoeForCausalLM",
        qk_norm: QkNorm::Always,
        mlp: MlpKind::Experts,
        window: Window::IfUsed,
        ..LLAMA
    },
    Architecture {
        name: "Qwen2MoeForCausalLM",
        attention_bias: AttentionBias::Qkv,
        mlp: MlpKind::ExpertsAndShared,
        window: Window::IfUsed,
        exllamav2: false,
        ..LLAMA
    },
    Architecture { name: "GemmaForCausalLM", tied_head: true, ..LLAMA },
    Architecture { name: "Gemma2ForCausalLM", names: &[FOUR_NORMS], tied_head: true, ..LLAMA },
    Architecture {
        name: "Gemma3ForConditionalGeneration",
        names: &[GEMMA3, GEMMA3_TURNED],
        qk_norm: QkNorm::Always,
        tied_head: true,
        ..LLAMA
    },
    Architecture {
        name: "Phi3ForCausalLM",
        // As exllamav2 writes it, as transformers does, as GPTQModel does.
        names: &[
            Names::LLAMA,
            Names { attention: FUSED_QKV, mlp: FUSED_GATE_UP, ..Names::LLAMA },
            Names { attention: FUSED_QKV, ..Names::LLAMA },
        ],
        window: Window::Always,
        ..LLAMA
    },
    Architecture {
        name: "Glm4ForCausalLM",
        names: &[GLM4, Names { mlp: FUSED_GATE_UP, ..GLM4 }],
        attention_bias: AttentionBias::QkvByConfig,
        ..LLAMA
    },
    Architecture { name: "GraniteForCausalLM", ..LLAMA },
    Architecture { name: "MiniCPMForCausalLM", ..LLAMA },
    Architecture { name: "IndexForCausalLM", ..LLAMA },
    Architecture { name: "OrionForCausalLM", norm_bias: true, ..LLAMA },
    Architecture { name: "YiForCausalLM", names: &[YI, Names::LLAMA], ..LLAMA },
    Architecture {
        name: "CohereForCausalLM",
        names: &[COHERE],
        qk_norm: QkNorm::EachHeadIfUsed,
        tied_head: true,
        ..LLAMA
    },
    Architecture { name: "Cohere2ForCausalLM", names: &[COHERE], tied_head: true, ..LLAMA },
    Architecture {
        name: "Starcoder2ForCausalLM",
        names: &[STARCODER],
        attention_bias: AttentionBias::All,
        mlp_bias: true,
        norm_bias: true,
        tied_head: true,
        window: Window::Always,
        ..LLAMA
    },
    Architecture {
        name: "GPT2LMHeadModel",
        names: &[
            GPT2,
            GPT2_SOURCE,
            Names { blocks: "h.", embedding: "wte", positions: "wpe", norm: "ln_f", ..GPT2_SOURCE },
        ],
        attention_bias: AttentionBias::All,
        mlp_bias: true,
        norm_bias: true,
        tied_head: true,
        learned_positions: true,
        transposed: true,
        ..LLAMA
    },
    Architecture {
        name: "GPTBigCodeForCausalLM",
        names: &[GPT2, GPT2_SOURCE],
        attention_bias: AttentionBias::All,
        mlp_bias: true,
        norm_bias: true,
        tied_head: true,
        multi_query: true,
        learned_positions: true,
        ..LLAMA
    },
    Architecture {
        name: "InternLM2ForCausalLM",
        names: &[
            INTERNLM2,
            Names {
                embedding: "model.tok_embeddings",
                head: "output",
                attention: AttentionNames::Interleaved(["attention.wqkv", "attention.wo"]),
                ..INTERNLM2
            },
        ],
        ..LLAMA
    },
    Architecture {
        name: "GemmoeForCausalLM",
        names: &[MIXTRAL],
        mlp: MlpKind::Experts,
        tied_head: true,
        ..LLAMA
    },
    Architecture { name: "LlavaForConditionalGeneration", names: &[INNER, INNER_TURNED], ..LLAMA },
    Architecture { name: "Mistral3ForConditionalGeneration", names: &[INNER, INNER_TURNED], ..LLAMA },
    Architecture {
        name: "Qwen2VLForConditionalGeneration",
        names: &[QWEN_VL, QWEN_VL_TURNED],
        attention_bias: AttentionBias::Qkv,
        window: Window::IfUsed,
        ..LLAMA
    },
    Architecture {
        name: "Qwen2_5_VLForConditionalGeneration",
        names: &[QWEN_VL, QWEN_VL_TURNED],
        attention_bias: AttentionBias::Qkv,
        window: Window::IfUsed,
        ..LLAMA
    },
];
