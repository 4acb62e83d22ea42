"""Writes a Llama-shaped 4-bit GPTQ checkpoint (group 128, act-order, symmetric, v1 zeros) of random codes.

usage: synthetic_gptq.py OUT GIGABYTES

For timings and memory only: its logits mean nothing. Needs numpy. Tensors are made and written one at a time.
"""

import json
import pathlib
import struct
import sys

import numpy as np

HIDDEN, INTERMEDIATE, HEADS, VOCAB, GROUP = 4096, 11008, 32, 32000, 128
SHARD = 2 << 30
random = np.random.default_rng(1)


def linear(name, k, n):
    yield f"{name}.qweight", "I32", (k // 8, n), lambda: random.integers(0, 1 << 32, (k // 8, n), np.uint32)
    # A true zero of 8 is stored as 7.
    yield f"{name}.qzeros", "I32", (k // GROUP, n // 8), lambda: np.full((k // GROUP, n // 8), 0x77777777, np.uint32)
    yield f"{name}.scales", "F16", (k // GROUP, n), lambda: random.uniform(0.001, 0.01, (k // GROUP, n)).astype(np.float16)
    yield f"{name}.g_idx", "I32", (k,), lambda: random.permutation(np.repeat(np.arange(k // GROUP, dtype=np.int32), GROUP))


def dense(name, *shape):
    yield name, "F16", shape, lambda: random.uniform(-0.02, 0.02, shape).astype(np.float16)


def block(i):
    prefix = f"model.layers.{i}"
    for norm in ["input_layernorm", "post_attention_layernorm"]:
        yield from dense(f"{prefix}.{norm}.weight", HIDDEN)
    for name in "qkvo":
        yield from linear(f"{prefix}.self_attn.{name}_proj", HIDDEN, HIDDEN)
    for name, k, n in [("gate", HIDDEN, INTERMEDIATE), ("up", HIDDEN, INTERMEDIATE), ("down", INTERMEDIATE, HIDDEN)]:
        yield from linear(f"{prefix}.mlp.{name}_proj", k, n)


def size(dtype, shape):
    return int(np.prod(shape)) * {"I32": 4, "F16": 2}[dtype]


def main():
    out, limit = pathlib.Path(sys.argv[1]), float(sys.argv[2]) * 1e9
    out.mkdir(parents=True)
    ends = [*dense("model.embed_tokens.weight", VOCAB, HIDDEN), *dense("model.norm.weight", HIDDEN),
            *dense("lm_head.weight", VOCAB, HIDDEN)]
    total = sum(size(dtype, shape) for _, dtype, shape, _ in ends)
    of_block = sum(size(dtype, shape) for _, dtype, shape, _ in block(0))
    layers = max(1, round((limit - total) / of_block))
    shards, used = [[]], 0
    for tensor in [*ends, *(tensor for i in range(layers) for tensor in block(i))]:
        if used > SHARD:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += size(tensor[1], tensor[2])
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        header, offset = {"__metadata__": {"format": "pt"}}, 0
        for tensor, dtype, shape, _ in shard:
            end = offset + size(dtype, shape)
            header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
            weight_map[tensor], offset = name, end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(out / name, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for _, _, _, values in shard:
                values().tofile(file)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    quantization = {"bits": 4, "group_size": GROUP, "desc_act": True, "sym": True, "lm_head": False,
                    "quant_method": "gptq", "checkpoint_format": "gptq"}
    (out / "quantize_config.json").write_text(json.dumps(quantization))
    (out / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "num_hidden_layers": layers, "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "max_position_embeddings": 4096, "tie_word_embeddings": False, "torch_dtype": "float16",
        "rope_theta": 10000.0, "quantization_config": quantization}))


if __name__ == "__main__":
    main()
