#!/usr/bin/env python3
"""Makes fixtures/models: a tiny random model of each architecture and feature, and what transformers says of it.

usage: make_models.py FOLDER [NAME...]

Needs torch and transformers 5. Each folder gets what `save_pretrained` writes (model.safetensors, config.json), and

  config_v4.json  the same configuration with the keys of transformers 4 (`rope_theta`, `rope_scaling`,
                  `torch_dtype`, no `layer_types`); transformers has the same logits with it, or this stops
  expected.json   `cases`: the tokens of a text, and fp32 logits of some of its rows, by eager attention on a CPU

The weights are large, so that logits differ (their standard deviation is printed), and rounded to the type they are
saved in before anything is computed. The same versions give the same bytes.
"""
import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors import safe_open

TEXT = 96
BASE = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
            vocab_size=64, max_position_embeddings=256, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1,
            eos_token_id=2)
WIDE = dict(BASE, head_dim=16)
MOE = dict(moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2)


def rope(kind, theta=10000.0, **more):
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=theta, **more))


LONG = dict(short_factor=[1.0, 1.1, 1.3, 1.7, 2.0, 2.5], long_factor=[1.5, 2.0, 3.0, 4.5, 6.0, 8.0],
            original_max_position_embeddings=32)

# Name: class, its configuration, type of the weights.
MODELS = {
    "llama-rope-llama3": ("Llama", dict(WIDE, **rope("llama3", 500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                                     original_max_position_embeddings=32)), "float32"),
    "llama-rope-linear": ("Llama", dict(WIDE, **rope("linear", factor=4.0)), "float16"),
    "llama-rope-yarn": ("Llama", dict(WIDE, **rope("yarn", factor=8.0, original_max_position_embeddings=32)), "float16"),
    "llama-bias": ("Llama", dict(BASE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True), "float16"),
    "mistral-window": ("Mistral", dict(BASE, sliding_window=24), "bfloat16"),
    "qwen2-window": ("Qwen2", dict(BASE, num_hidden_layers=3, use_sliding_window=True, sliding_window=20,
                                   max_window_layers=1), "float16"),
    "qwen3-head-dim": ("Qwen3", WIDE, "float16"),
    "mixtral": ("Mixtral", dict(BASE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None), "float16"),
    "qwen2-moe": ("Qwen2Moe", dict(BASE, **MOE, num_hidden_layers=3, shared_expert_intermediate_size=40,
                                   mlp_only_layers=[0], decoder_sparse_step=1, norm_topk_prob=False), "float16"),
    "qwen2-moe-step": ("Qwen2Moe", dict(BASE, **MOE, shared_expert_intermediate_size=40, mlp_only_layers=[],
                                        decoder_sparse_step=2, norm_topk_prob=True), "float16"),
    "qwen3-moe": ("Qwen3Moe", dict(WIDE, **MOE, norm_topk_prob=True), "float16"),
    "qwen3-moe-unnormalised": ("Qwen3Moe", dict(WIDE, **MOE, norm_topk_prob=False), "float16"),
    "gemma": ("Gemma", dict(BASE, head_dim=16, tie_word_embeddings=True), "bfloat16"),
    "gemma2": ("Gemma2", dict(BASE, head_dim=16, tie_word_embeddings=True, num_hidden_layers=3, sliding_window=24,
                              query_pre_attn_scalar=10, attn_logit_softcapping=3.0, final_logit_softcapping=4.0), "float16"),
    "phi3": ("Phi3", dict(BASE, sliding_window=40), "float16"),
    "phi3-longrope": ("Phi3", dict(BASE, hidden_size=64, original_max_position_embeddings=32,
                                   **rope("longrope", partial_rotary_factor=0.75, **LONG)), "float16"),
}


def randomise(model, dtype):
    random = torch.Generator().manual_seed(11)
    for name, parameter in sorted(model.named_parameters()):
        normal = torch.randn(parameter.shape, generator=random)
        if name.endswith("norm.weight"):
            # Gemma adds 1 to its weights.
            value = normal * 0.2 + (0.0 if "Gemma" in type(model).__name__ else 1.0)
        elif name.endswith("bias"):
            value = normal * 0.3
        elif "embed_tokens" in name:
            value = normal * (0.4 if model.config.tie_word_embeddings else 1.0)
        else:
            value = normal * 1.5 / parameter.shape[-1] ** 0.5
        parameter.data = value.to(dtype)


def old_keys(config):
    """A configuration as transformers 4 wrote it."""
    config = dict(config)
    parameters = dict(config.pop("rope_parameters"))
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.51.0"
    config.pop("layer_types", None)
    config["rope_theta"] = parameters.pop("rope_theta")
    if config["model_type"] == "phi3":
        config["partial_rotary_factor"] = parameters.pop("partial_rotary_factor", 1.0)
    if parameters.get("rope_type") == "longrope":
        config["original_max_position_embeddings"] = parameters.pop("original_max_position_embeddings")
        # Phi-3's own configurations say `type`.
        parameters["type"] = parameters.pop("rope_type")
    config["rope_scaling"] = None if parameters.get("rope_type") == "default" else parameters
    return config


def logits(folder, config, tokens):
    eager = dict(attn_implementation="eager", dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, **eager).eval()
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


def make(parent, name):
    kind, settings, dtype = MODELS[name]
    config = getattr(transformers, kind + "Config")(**settings, dtype=dtype)
    config.architectures = [kind + "ForCausalLM"]
    model = getattr(transformers, kind + "ForCausalLM")(config)
    randomise(model, getattr(torch, dtype))
    model = model.to(getattr(torch, dtype))
    folder = parent / name
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    written = json.loads((folder / "config.json").read_text())
    old = old_keys(written)
    (folder / "config_v4.json").write_text(json.dumps(old, indent=2) + "\n")

    random = torch.Generator().manual_seed(5)
    text = torch.randint(3, settings["vocab_size"], (TEXT,), generator=random).tolist()
    cases, spread = [], 0.0
    for length in [24, TEXT] if name == "phi3-longrope" else [TEXT]:
        tokens = text[:length]
        found = logits(folder, None, tokens)
        of_old = logits(folder, type(config)(**old), tokens)
        assert torch.equal(found, of_old), f"{name}: other logits with the keys of transformers 4"
        rows = sorted({*range(0, length, 5), length - 1})
        cases.append(dict(tokens=tokens, rows=rows, logits=[found[row].tolist() for row in rows]))
        spread = found.std().item()
    assert spread >= 1.0, f"{name}: logits spread by {spread}"
    versions = dict(torch=torch.__version__, transformers=transformers.__version__)
    (folder / "expected.json").write_text(json.dumps(dict(made_by=versions, cases=cases)) + "\n")
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = list(file.keys())
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{name}: {size // 1024} KiB, {len(names)} tensors, logits spread by {spread:.2f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for chosen in sys.argv[2:] or MODELS:
        make(Path(sys.argv[1]), chosen)
