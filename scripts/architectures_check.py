#!/usr/bin/env python3
"""Converts a tiny random GPTQ model of every architecture to EXL2, and lets exllamav2 look for its keys.

usage: architectures_check.py REQUANT [NAME...]

Needs torch, transformers, numpy, safetensors and the pure-Python wheel of exllamav2 (`pip install --no-deps
exllamav2==0.3.2`), whose extension is stubbed: only `ExLlamaV2Config.prepare()` runs. For each model it prints

  prepare   exllamav2 finds every key that it wants of the architecture
  verify    `requant verify --against` the source
  weights   largest relative error, over the linears of the language model, of what the output decodes to
            against the source decoded here; at 6 bits about 0.02 to 0.05, near 1 where parts were mixed up

Models that transformers doesn't have are made of a Llama's tensors under their own names.
"""
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

GROUP = 32
H, I, HEADS, KV, D, LAYERS, VOCAB = 128, 192, 4, 2, 32, 2, 96
TEXT = dict(hidden_size=H, intermediate_size=I, num_attention_heads=HEADS, num_key_value_heads=KV, head_dim=D,
            num_hidden_layers=LAYERS, vocab_size=VOCAB, max_position_embeddings=256, tie_word_embeddings=False,
            pad_token_id=0, bos_token_id=1, eos_token_id=2)
MOE = dict(moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1)
TIED = dict(TEXT, tie_word_embeddings=True)

LINEAR = re.compile(r"(layers|h)\.\d+\..*(proj|c_attn|c_proj|c_fc|wqkv|wo|experts\.\d+\.w[123]|feed_forward\.w[123])"
                    r"\.weight$")
VISION = re.compile(r"vision|visual|multi_modal")


def model(cls, config):
    torch.manual_seed(0)
    return getattr(transformers, cls)(config)


def text(cls, config_cls, **more):
    return lambda: model(cls, getattr(transformers, config_cls)(**more))


def vision(cls, config_cls, inner, tower, text_type, **more):
    def make():
        config = getattr(transformers, config_cls)(text_config=dict(inner, model_type=text_type),
                                                   vision_config=tower, **more)
        return model(cls, config)
    return make


def random_norms(tensors):
    """Fresh norms are all ones and zeros."""
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if "norm" in name or name.endswith(".bias"):
            tensors[name] = tensor + 0.1 * torch.randn(tensor.shape, generator=generator)


def rename(pairs):
    def change(tensors, config):
        def new(name):
            for old, now in pairs:
                name = name.replace(old, now)
            return name
        return {new(name): tensor for name, tensor in tensors.items()}, config
    return change


def split_gate_up(tensors, config):
    out = {}
    for name, tensor in tensors.items():
        if "gate_up_proj" in name:
            gate, up = tensor.chunk(2)
            out[name.replace("gate_up_proj", "gate_proj")] = gate.contiguous()
            out[name.replace("gate_up_proj", "up_proj")] = up.contiguous()
        else:
            out[name] = tensor
    return out, config


def internlm2(tensors, config):
    """wqkv holds, for each key-value head, its query heads, its key and its value."""
    names = [("self_attn.o_proj", "attention.wo"), ("mlp.gate_proj", "feed_forward.w1"),
             ("mlp.up_proj", "feed_forward.w3"), ("mlp.down_proj", "feed_forward.w2"),
             ("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm"),
             ("model.embed_tokens", "model.tok_embeddings"), ("lm_head", "output")]
    tensors, config = rename(names)(tensors, config)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        q, k, v = (tensors.pop(f"{prefix}self_attn.{x}_proj.weight").view(KV, -1, D, H) for x in "qkv")
        tensors[f"{prefix}attention.wqkv.weight"] = torch.cat([q, k, v], 1).reshape(-1, H).contiguous()
    return tensors, config


def orion(tensors, config):
    biases = {name[:-6] + "bias": torch.zeros_like(tensor) for name, tensor in tensors.items()
              if name.endswith("norm.weight")}
    return {**tensors, **biases}, config


def gemmoe(tensors, config):
    tensors.pop("lm_head.weight", None)
    return tensors, dict(config, tie_word_embeddings=True)


def both(*changes):
    def change(tensors, config):
        for one in changes:
            tensors, config = one(tensors, config)
        return tensors, config
    return change


PIXTRAL = dict(model_type="pixtral", hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
               head_dim=32, image_size=32, patch_size=16)
SIGLIP = dict(model_type="siglip_vision_model", hidden_size=64, intermediate_size=96, num_hidden_layers=1,
              num_attention_heads=2, image_size=32, patch_size=16)
QWEN2VL = dict(depth=1, embed_dim=64, hidden_size=H, num_heads=2, mlp_ratio=2, patch_size=14)
QWEN25VL = dict(depth=1, hidden_size=64, out_hidden_size=H, intermediate_size=96, num_heads=2, patch_size=14)
MROPE = dict(rope_scaling=dict(type="mrope", mrope_section=[4, 6, 6]))
GPT2 = dict(n_embd=H, n_layer=LAYERS, n_head=HEADS, n_positions=256, vocab_size=VOCAB, bos_token_id=1, eos_token_id=2)
LLAMA = text("LlamaForCausalLM", "LlamaConfig", **TEXT)
MIXTRAL = text("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, **TEXT)
PHI3 = text("Phi3ForCausalLM", "Phi3Config", **TEXT)
RENAME_EXPERTS = rename([("block_sparse_moe", "mlp"), (".w1.", ".gate_proj."), (".w2.", ".down_proj."),
                         (".w3.", ".up_proj.")])

# name: (model, architecture where it isn't the model's own, change of tensors and configuration)
MODELS = {
    "Llama": (LLAMA, None, None),
    "Llama, attention and MLP biases": (text("LlamaForCausalLM", "LlamaConfig", attention_bias=True, mlp_bias=True,
                                             **TEXT), None, None),
    "Mistral": (text("MistralForCausalLM", "MistralConfig", **TEXT), None, None),
    "Qwen2": (text("Qwen2ForCausalLM", "Qwen2Config", **TEXT), None, None),
    "Qwen3": (text("Qwen3ForCausalLM", "Qwen3Config", **TEXT), None, None),
    "Mixtral": (MIXTRAL, None, None),
    "Mixtral, GPTQModel's names": (MIXTRAL, None, RENAME_EXPERTS),
    "Qwen3-MoE": (text("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **TEXT, **MOE), None, None),
    "Gemma": (text("GemmaForCausalLM", "GemmaConfig", **TIED), None, None),
    "Gemma 2": (text("Gemma2ForCausalLM", "Gemma2Config", **TIED), None, None),
    "Gemma 3": (vision("Gemma3ForConditionalGeneration", "Gemma3Config", TIED, SIGLIP, "gemma3_text",
                       mm_tokens_per_image=4), None, None),
    "Phi-3": (PHI3, None, None),
    "Phi-3, GPTQModel's split": (PHI3, None, split_gate_up),
    "GLM-4": (text("Glm4ForCausalLM", "Glm4Config", attention_bias=True, **TEXT), None, None),
    "GLM-4, split": (text("Glm4ForCausalLM", "Glm4Config", **TEXT), None, split_gate_up),
    "Granite": (text("GraniteForCausalLM", "GraniteConfig", residual_multiplier=0.22, logits_scaling=8.0,
                     embedding_multiplier=12.0, attention_multiplier=0.015, **TEXT), None, None),
    "Cohere": (text("CohereForCausalLM", "CohereConfig", use_qk_norm=True, logit_scale=0.0625, **TIED), None, None),
    "Cohere 2": (text("Cohere2ForCausalLM", "Cohere2Config", logit_scale=0.25, **TIED), None, None),
    "Starcoder2": (text("Starcoder2ForCausalLM", "Starcoder2Config", use_bias=True, **TIED), None, None),
    "GPT-2": (text("GPT2LMHeadModel", "GPT2Config", **GPT2), None, None),
    "GPT-2, names without transformer.": (text("GPT2LMHeadModel", "GPT2Config", **GPT2), None,
                                          rename([("transformer.", "")])),
    "GPTBigCode": (text("GPTBigCodeForCausalLM", "GPTBigCodeConfig", multi_query=True, **GPT2), None, None),
    "Llava (Pixtral)": (vision("LlavaForConditionalGeneration", "LlavaConfig", TEXT, PIXTRAL, "mistral"), None, None),
    "Mistral 3": (vision("Mistral3ForConditionalGeneration", "Mistral3Config", TEXT, PIXTRAL, "mistral"), None, None),
    "Qwen2-VL": (vision("Qwen2VLForConditionalGeneration", "Qwen2VLConfig", dict(TEXT, **MROPE), QWEN2VL,
                        "qwen2_vl_text"), None, None),
    "Qwen2.5-VL": (vision("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig", dict(TEXT, **MROPE), QWEN25VL,
                          "qwen2_5_vl_text"), None, None),
    "Yi (of a Llama)": (LLAMA, "YiForCausalLM",
                        rename([("input_layernorm", "ln1"), ("post_attention_layernorm", "ln2")])),
    "Orion (of a Llama)": (LLAMA, "OrionForCausalLM", orion),
    "MiniCPM (of a Llama)": (LLAMA, "MiniCPMForCausalLM",
                             lambda t, c: (t, dict(c, scale_depth=1.4, scale_emb=12, dim_model_base=64))),
    "Index (of a Llama)": (LLAMA, "IndexForCausalLM", None),
    "InternLM2 (of a Llama)": (LLAMA, "InternLM2ForCausalLM", internlm2),
    "Gemmoe (of a Mixtral)": (MIXTRAL, "GemmoeForCausalLM", gemmoe),
}


def pack(codes, axis):
    """Eight 4-bit codes a word, the lowest bits first."""
    codes = np.moveaxis(codes.astype(np.uint32), axis, -1)
    words = (codes.reshape(*codes.shape[:-1], -1, 8) << (4 * np.arange(8, dtype=np.uint32))).sum(-1, dtype=np.uint32)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def gptq(weight):
    """Asymmetric 4-bit GPTQ tensors of `[k, n]`, and what they decode to."""
    k, n = weight.shape
    groups = weight.reshape(k // GROUP, GROUP, n)
    low, high = np.minimum(groups.min(1), 0), np.maximum(groups.max(1), 0)
    scales = ((high - low) / 15).clip(1e-4).astype(np.float16)
    zeros = np.rint(-low / scales.astype(np.float32)).clip(1, 15)
    codes = (np.rint(groups / scales[:, None].astype(np.float32)) + zeros[:, None]).clip(0, 15)
    decoded = ((codes - zeros[:, None]) * scales[:, None].astype(np.float32)).reshape(k, n)
    tensors = {"qweight": pack(codes.reshape(k, n), 0), "qzeros": pack(zeros - 1, 1), "scales": scales,
               "g_idx": (np.arange(k) // GROUP).astype(np.int32)}
    return {suffix: torch.from_numpy(tensor) for suffix, tensor in tensors.items()}, decoded


def preprocessor(config):
    """What exllamav2 reads of it."""
    vision = config["vision_config"]
    patch = vision["patch_size"]
    keys = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3, resample=3, rescale_factor=1 / 255, patch_size=patch,
                size=dict(height=32, width=32, longest_edge=32))
    if config["architectures"][0].startswith("Qwen"):
        return dict(keys, image_processor_type="Qwen2VLImageProcessor", temporal_patch_size=2, min_pixels=3136,
                    merge_size=vision["spatial_merge_size"], max_pixels=12845056)
    kind = "PixtralImageProcessor" if vision["model_type"] == "pixtral" else "Gemma3ImageProcessor"
    return dict(keys, image_processor_type=kind)


def write_source(directory, make, architecture, change):
    """Writes a GPTQ checkpoint; gives the decoded weights `[k, n]` by module."""
    random_model = make()
    random_model.save_pretrained(directory)
    tensors = {}
    for file in Path(directory).glob("*.safetensors"):
        tensors.update(load_file(file))
        file.unlink()
    config = json.loads((Path(directory) / "config.json").read_text())
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    random_norms(tensors)
    conv1d = {id(m.weight) for m in random_model.modules() if type(m).__name__ == "Conv1D"}
    transposed = {n for n, p in random_model.named_parameters() if id(p) in conv1d}
    tensors = {name: tensor.T.contiguous() if name in transposed else tensor for name, tensor in tensors.items()}
    if architecture:
        config["architectures"] = [architecture]
    if change:
        tensors, config = change(tensors, config)
    stored, decoded = {}, {}
    for name, tensor in tensors.items():
        if LINEAR.search(name) and not VISION.search(name):
            module = name.removesuffix(".weight")
            parts, decoded[module] = gptq(tensor.numpy().T)
            stored.update({f"{module}.{suffix}": part for suffix, part in parts.items()})
        else:
            stored[name] = tensor.half()
    quantization = dict(quant_method="gptq", bits=4, group_size=GROUP, sym=False, desc_act=False,
                        checkpoint_format="gptq", meta=dict(quantizer=["gptqmodel:5.0.0"]))
    config["quantization_config"] = quantization
    (Path(directory) / "config.json").write_text(json.dumps(config))
    if "vision_config" in config:
        (Path(directory) / "preprocessor_config.json").write_text(json.dumps(preprocessor(config)))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, Path(directory) / "model.safetensors",
              metadata={"format": "pt"})
    return decoded, config


def expected(decoded, config):
    """The decoded weights under exllamav2's names."""
    out = {}
    for name, weight in decoded.items():
        name = re.sub(r"^(transformer\.)?h\.", "model.layers.", name)
        name = name.replace("model.language_model.layers", "language_model.model.layers"
                            if "Qwen" not in config["architectures"][0] else "model.layers")
        architecture = config["architectures"][0]
        kv = 1 if architecture.startswith("GPTBigCode") else HEADS if architecture.startswith("GPT2") else KV
        stem, last = name.rsplit(".", 1)
        stem = re.sub(r"(?<!self_)attn$", "self_attn", stem)
        if last in ("qkv_proj", "c_attn"):
            cuts = np.split(weight, [HEADS * D, (HEADS + kv) * D], axis=1)
            out.update({f"{stem}.{x}_proj": cut for x, cut in zip("qkv", cuts)})
        elif last == "wqkv":
            heads = weight.reshape(H, KV, -1, D)
            shared = HEADS // KV
            cuts = heads[:, :, :shared], heads[:, :, shared:shared + 1], heads[:, :, shared + 1:]
            stem = stem.replace("attention", "self_attn")
            out.update({f"{stem}.{x}_proj": cut.reshape(H, -1) for x, cut in zip("qkv", cuts)})
        elif last == "gate_up_proj":
            out.update({f"{stem}.{x}_proj": cut for x, cut in zip(("gate", "up"), np.split(weight, 2, axis=1))})
        elif last == "wo" or (last == "c_proj" and stem.endswith("attn")):
            out[f"{stem.replace('attention', 'self_attn')}.o_proj"] = weight
        elif architecture.startswith("Mixtral") and "mlp.experts" in stem:
            last = dict(gate_proj="w1", up_proj="w3", down_proj="w2")[last]
            out[f"{stem.replace('mlp', 'block_sparse_moe')}.{last}"] = weight
        else:
            out[f"{stem}.{last}"] = weight
    return out


def unpack(words, bits, rows):
    """Codes of a column: one stream of bits, the lowest first."""
    streams = np.unpackbits(np.ascontiguousarray(words.T).view(np.uint8), axis=1, bitorder="little")
    codes = streams[:, :rows * bits].reshape(words.shape[1], rows, bits)
    return (codes * (1 << np.arange(bits))).sum(-1).T


def prescale(config, module):
    """What exllamav2 multiplies the scales of a linear by when it loads it, and the model's own code its output."""
    if module.rsplit(".", 1)[1] not in ("o_proj", "down_proj"):
        return 1.0
    if "residual_multiplier" in config:
        return config["residual_multiplier"]
    return config.get("scale_depth", LAYERS ** 0.5) / LAYERS ** 0.5


def decode_exl2(tensors, module, factor):
    """An EXL2 module's weight `[k, n]`, by the format's description, as exllamav2 rounds it, without the factor."""
    part = {suffix: tensors[f"{module}.{suffix}"].numpy() for suffix in
            ("q_weight", "q_invperm", "q_scale", "q_scale_max", "q_groups")}
    table = part["q_groups"].reshape(-1, 2)
    ends = [*table[1:, 1], part["q_weight"].shape[0]]
    steps = (part["q_scale"].view(np.uint32)[:, :, None] >> (4 * np.arange(8, dtype=np.uint32)) & 15).reshape(
        len(table), -1)
    rows = []
    for group, ((bits, begin), end) in enumerate(zip(table, ends)):
        codes = unpack(part["q_weight"][begin:end], int(bits), (end - begin) * 32 // bits)
        largest = np.float16(part["q_scale_max"][group].astype(np.float32) * np.float32(factor / 256))
        scale = ((steps[group].astype(np.float32) + 1) ** 2 * np.float32(largest)).astype(np.float16)
        rows.append(((codes - (1 << (bits - 1))) * scale.astype(np.float32)).astype(np.float16))
    return np.concatenate(rows)[part["q_invperm"]].astype(np.float64) / factor


def stub_exllamav2():
    # Everything but the configuration needs the extension, or packages that the configuration doesn't.
    sys.modules["exllamav2_ext"] = MagicMock()
    package = types.ModuleType("exllamav2")
    package.__path__ = list(importlib.util.find_spec("exllamav2").submodule_search_locations)
    sys.modules["exllamav2"] = package
    from exllamav2.config import ExLlamaV2Config
    return ExLlamaV2Config


def check(requant, name, config_cls, root):
    make, architecture, change = MODELS[name]
    source, out = Path(root) / "source", Path(root) / "exl2"
    source.mkdir()
    decoded, config = write_source(source, make, architecture, change)
    result = dict(model=name, architecture=config["architectures"][0], linears=len(decoded), prepare="", verify="",
                  weights=float("nan"), columns=0)

    def run(*arguments):
        done = subprocess.run([requant, *arguments], capture_output=True, text=True)
        return "" if done.returncode == 0 else (done.stderr + done.stdout).strip()

    failed = run("convert", source, "--to", "exl2", "--bits", "6", "--group-size", "32", "--out", out)
    if failed:
        return dict(result, prepare="not converted: " + failed)
    try:
        exl2 = config_cls()
        exl2.model_dir = str(out)
        exl2.prepare()
        result["prepare"] = "ok" if exl2.arch.arch_string == config["architectures"][0] else "taken for Llama"
    except Exception as error:
        result["prepare"] = f"{type(error).__name__}: {error}"
    result["verify"] = run("verify", out, "--against", source) or "ok"
    tensors = {}
    for file in out.glob("*.safetensors"):
        tensors.update(load_file(file))
    wanted = expected(decoded, config)
    stored = {key.removesuffix(".q_weight") for key in tensors if key.endswith(".q_weight")}
    if stored != set(wanted):
        return dict(result, verify=f"linears differ: {sorted(stored ^ set(wanted))[:4]}")
    errors = [np.linalg.norm(decode_exl2(tensors, module, prescale(config, module)) - weight) / np.linalg.norm(weight)
              for module, weight in wanted.items()]
    report = json.loads((out / "report.json").read_text())
    return dict(result, weights=max(errors), columns=sum("columns" in module for module in report["modules"]))


def main():
    requant, names = sys.argv[1], sys.argv[2:] or list(MODELS)
    config_cls = stub_exllamav2()
    print(f"transformers {transformers.__version__}")
    print(f"{'model':36} {'linears':>7} {'cut':>4}  {'weights':>8}  {'verify':8} prepare")
    failures = 0
    for name in names:
        with tempfile.TemporaryDirectory() as root:
            try:
                r = check(requant, name, config_cls, root)
            except Exception as error:
                r = dict(linears=0, columns=0, weights=float("nan"), verify="", prepare=f"not made: "
                         f"{type(error).__name__}: {error}")
        good = r["prepare"] == "ok" and r["verify"] == "ok" and r["weights"] < 0.1
        failures += not good
        print(f"{name:36} {r['linears']:7} {r['columns']:4}  {r['weights']:8.4f}  {r['verify'][:600]:8} "
              f"{r['prepare'][:600]}", flush=True)
    print(f"{len(names) - failures} passed, {failures} failed")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
