#!/usr/bin/env python3
"""Compares GPTQ checkpoints as GPTQModel's own torch layer dequantizes them with requant's hashes.

    python3 -m venv ~/.cache/requant/gptqmodel
    BUILD_CUDA_EXT=0 ~/.cache/requant/gptqmodel/bin/pip install torch numpy gptqmodel==7.7.0
    cargo run --release --example decode_hashes -- DIR... > hashes.json
    ~/.cache/requant/gptqmodel/bin/python scripts/gptqmodel_check.py hashes.json DIR...

Runs on the CPU. Ends with 1 if any module differs or can't be loaded.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from gptqmodel import __version__ as gptqmodel_version
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.quantization import QuantizeConfig
from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module
from safetensors import safe_open


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            tensors.update({name: opened.get_tensor(name) for name in opened.keys()})
    return tensors


def dequantize(config: QuantizeConfig, name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weight `[in_features, out_features]`, by the layer that GPTQModel would choose on a CPU."""

    def stated(key, default):
        return config.dynamic_get(layer_name=name, key=key, default=default)

    qweight, g_idx = tensors[f"{name}.qweight"], tensors[f"{name}.g_idx"]
    layer = TorchLinear(
        bits=stated("bits", config.bits),
        group_size=stated("group_size", config.group_size),
        sym=stated("sym", config.sym),
        desc_act=config.desc_act,
        in_features=g_idx.numel(),
        out_features=qweight.shape[1],
        bias=False,
        register_buffers=True,
        format=config.format,
    )
    state = {key: tensors[f"{name}.{key}"] for key in ("qweight", "qzeros", "scales", "g_idx")}
    expected = {key: tuple(value.shape) for key, value in layer.named_buffers() if key in state}
    found = {key: tuple(value.shape) for key, value in state.items()}
    if found != expected:
        raise ValueError(f"shapes {found}, but the layer expects {expected}")
    layer.load_state_dict(state, strict=False)
    if config.format == "gptq":
        convert_gptq_v1_to_v2_format_module(layer, layer.bits, layer.pack_dtype)
    layer.post_init()
    return layer.dequantize_weight()


def check(directory: Path, hashes: dict[str, str]) -> bool:
    config = QuantizeConfig.from_pretrained(str(directory))
    tensors = tensors_of(directory)
    names = sorted(name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight"))
    wrong = [f"{name}: only in the hashes" for name in hashes if name not in names]
    for name in names:
        try:
            weight = dequantize(config, name, tensors).detach().to(torch.float16).contiguous()
        except Exception as error:  # Whatever keeps it from loading is what we want to know.
            wrong.append(f"{name}: {type(error).__name__}: {error}")
            continue
        if hashlib.sha256(weight.numpy().tobytes()).hexdigest() != hashes.get(name):
            wrong.append(f"{name}: other weights")
    print(f"{directory.name}: {len(names) - len(wrong)} of {len(names)} modules bit-equal")
    for line in wrong:
        print(f"  {line}")
    return not wrong and bool(names)


def main() -> int:
    hashes = json.loads(Path(sys.argv[1]).read_text())
    print(f"GPTQModel {gptqmodel_version}, torch {torch.__version__}, on the CPU")
    results = [check(Path(directory), hashes[Path(directory).name]) for directory in sys.argv[2:]]
    return 0 if results and all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
