#!/usr/bin/env python3
"""Compares requant's narrower GPTQ with rounding to the nearest, both measured by numpy on the packed bytes.

    cargo build --release
    python scripts/requantized_check.py target/release/requant BITS CHECKPOINT...

Needs numpy and safetensors. Each checkpoint, EXL2 or GPTQ, is converted with `--to fp16` (what its weights are)
and with `--to gptq --bits BITS`, symmetric and with `--zeros v2`. Rounding to the nearest takes the same groups, a
scale of the largest weight over 2^(bits−1) − 1 or − ½, whichever is better for the module, or with zero points one
that spans the group's range. Ends with 1 where it is better than requant in any module, or the report states
another error.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def unpack(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """`count` fields along the first axis, a continuous stream of bits from the lowest of the first word on."""
    words = words.astype(np.uint32)
    stream = ((words[:, None] >> np.arange(32, dtype=np.uint32)[None, :, None]) & 1).reshape(-1, words.shape[1])
    fields = stream[: count * bits].reshape(count, bits, -1).astype(np.int64)
    return (fields << np.arange(bits)[None, :, None]).sum(1)


def decode(tensors: dict[str, np.ndarray], name: str, bits: int, v1: bool) -> tuple[np.ndarray, np.ndarray]:
    scales, g_idx = tensors[f"{name}.scales"].astype(np.float32), tensors[f"{name}.g_idx"]
    codes = unpack(tensors[f"{name}.qweight"], bits, len(g_idx))
    zeros = unpack(tensors[f"{name}.qzeros"].T, bits, scales.shape[1]).T + int(v1)
    return (scales[g_idx] * (codes - zeros[g_idx]).astype(np.float32)).astype(np.float16), g_idx


def relative(wanted: np.ndarray, found: np.ndarray) -> float:
    wanted, found = wanted.astype(np.float64), found.astype(np.float64)
    return float(np.sqrt(((wanted - found) ** 2).sum() / (wanted**2).sum()))


def nearest(wanted: np.ndarray, g_idx: np.ndarray, bits: int, symmetric: bool) -> float:
    wanted = wanted.astype(np.float32)
    groups = int(g_idx.max()) + 1
    high, low = (np.stack([pick(wanted[g_idx == g], 0) for g in range(groups)]) for pick in (np.max, np.min))
    high, low, most = np.maximum(high, 0), np.minimum(low, 0), 2**bits - 1
    if not symmetric:
        scales = [((high - low) / most, None)]
    else:
        largest = np.maximum(high, -low)
        scales = [(largest / (2 ** (bits - 1) - 1), 2 ** (bits - 1)), (largest * 2 / most, 2 ** (bits - 1))]
    errors = []
    for scale, zero in scales:
        scale = np.maximum(scale.astype(np.float16), np.float16(6e-8)).astype(np.float32)
        zero = np.clip(np.rint(-low / scale), 0, most) if zero is None else np.full_like(scale, zero)
        codes = np.clip(np.rint(wanted / scale[g_idx]) + zero[g_idx], 0, most)
        errors.append(relative(wanted, ((codes - zero[g_idx]) * scale[g_idx]).astype(np.float16)))
    return min(errors)


def check(requant: str, bits: int, directory: Path) -> bool:
    good = True
    with tempfile.TemporaryDirectory() as temporary:
        dense = Path(temporary, "fp16")
        subprocess.run([requant, "convert", directory, "--to", "fp16", "--out", dense], check=True, capture_output=True)
        weights = tensors_of(dense)
        for label, flags in [("symmetric", []), ("zeros v2", ["--zeros", "v2"])]:
            out = Path(temporary, label)
            flags = ["--to", "gptq", "--bits", str(bits), *flags, "--out", out]
            subprocess.run([requant, "convert", directory, *flags], check=True, capture_output=True)
            tensors, report = tensors_of(out), json.loads(Path(out, "report.json").read_text())
            ours, theirs = [], []
            for module in report["modules"]:
                if module["exactness"] != "requantized":
                    continue
                name, decision = module["name"], module["decision"]
                wanted = weights[f"{name}.weight"].T
                found, g_idx = decode(tensors, name, bits, decision["zeros"] == "v1")
                ours.append(relative(wanted, found))
                theirs.append(nearest(wanted, g_idx, bits, decision["symmetric"]))
                if ours[-1] > theirs[-1] or abs(ours[-1] - module["relative_error"]) > 1e-6 * ours[-1]:
                    good = False
                    print(f"  {name}: {ours[-1]:.6f}, nearest {theirs[-1]:.6f}, reported {module['relative_error']:.6f}")
            mean = lambda values: sum(values) / max(len(values), 1)
            print(f"{directory.name}, {bits} bits, {label}: {len(ours)} of {len(report['modules'])} modules "
                  f"requantized, mean relative error {mean(ours):.5f}, nearest {mean(theirs):.5f}", flush=True)
            good &= bool(ours)
    return good


if __name__ == "__main__":
    passed = [check(sys.argv[1], int(sys.argv[2]), Path(directory)) for directory in sys.argv[3:]]
    sys.exit(not passed or not all(passed))
