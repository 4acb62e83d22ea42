#!/usr/bin/env python3
"""Logits of transformers in fp32 on what requant writes, against those on the source.

    cargo build --release
    ~/.cache/requant/gptqmodel/bin/python scripts/logits_check.py target/release/requant CHECKPOINT...

The Python is that of gptqmodel_check.py. Each GPTQ checkpoint is converted with `--to fp16`, which transformers
loads as it is, and with `--to gptq --zeros v2 --order sorted`, which folds down_proj's act-order into gate and up. Source and
folded output are decoded by GPTQModel's torch layer into a dense model. Ends with 1 where fp16 logits differ at
all, or folded ones by more than fp32 rounding: 1e-5 of the largest logit.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from gptqmodel.quantization import QuantizeConfig
from gptqmodel_check import dequantize, tensors_of
from transformers import AutoConfig, AutoModelForCausalLM

TOKENS, WINDOW = 512, 128
FOLDED_TOLERANCE = 1e-5


def dense_model(directory: Path) -> torch.nn.Module:
    """The model of a GPTQ checkpoint with dense weights, in fp32."""
    config, tensors = QuantizeConfig.from_pretrained(str(directory)), tensors_of(directory)
    names = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    state = {f"{name}.weight": dequantize(config, name, tensors).detach().T.half().float() for name in names}
    parts = tuple(f"{name}.{part}" for name in names for part in ("qweight", "qzeros", "scales", "g_idx"))
    state |= {name: tensor.float() for name, tensor in tensors.items() if name not in parts}
    with tempfile.TemporaryDirectory() as dense:
        # Loading through a file lets transformers rename and stack what its classes store in another way.
        model_config = AutoConfig.from_pretrained(directory)
        del model_config.quantization_config
        model_config.save_pretrained(dense)
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous() for name, tensor in state.items()}, f"{dense}/model.safetensors",
                  metadata={"format": "pt"})
        return AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)


def logits(model: torch.nn.Module) -> torch.Tensor:
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.randint(vocabulary, (TOKENS // WINDOW, WINDOW), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.eval()(tokens, use_cache=False).logits


def check(requant: str, directory: Path) -> bool:
    expected = logits(dense_model(directory))
    with tempfile.TemporaryDirectory() as temporary:
        fp16, folded = Path(temporary, "fp16"), Path(temporary, "folded")
        for out, flags in [(fp16, ["--to", "fp16"]), (folded, ["--to", "gptq", "--order", "sorted", "--zeros", "v2"])]:
            subprocess.run([requant, "convert", directory, *flags, "--out", out], check=True, capture_output=True)
        of_fp16 = (logits(AutoModelForCausalLM.from_pretrained(fp16, dtype=torch.float32)) - expected).abs().max()
        moved = sum(
            not torch.equal(tensor, before[name])
            for before in [tensors_of(directory)]
            for name, tensor in tensors_of(folded).items()
            if name.endswith(".g_idx") and name in before
        )
        of_folded = (logits(dense_model(folded)) - expected).abs().max()
    largest = expected.abs().max()
    print(f"{directory.name}: largest logit {largest:.3f}; fp16 off by {of_fp16:.1e}; "
          f"folded ({moved} orders) off by {of_folded:.1e}", flush=True)
    return of_fp16 == 0 and of_folded <= FOLDED_TOLERANCE * largest


if __name__ == "__main__":
    passed = [check(sys.argv[1], Path(directory)) for directory in sys.argv[2:]]
    sys.exit(not passed or not all(passed))
