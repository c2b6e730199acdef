#!/usr/bin/env python3
"""A folder of a Hugging Face model with its matrices rounded to FP8 or NVFP4, in the layout of public releases.

    python make_quantized_folder.py MODEL OUT --format fp8|nvfp4

fp8: E4M3 codes and one float32 scale an output row (compressed-tensors, channel strategy). nvfp4: E2M1 codes, an E4M3 scale for 16
columns and a float32 factor a matrix (ModelOpt: multiplied). Rounded to nearest; no calibration. What releases leave alone stays:
embedding, head, norms, the convolution, decay and time step, GDN's a and b, the MTP layer. Reads one BF16 safetensors file.
"""

import argparse
import json
import pathlib
import shutil
import struct

import numpy as np

from make_qwen35_gguf import read_safetensors, to_f32

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
LEFT_ALONE = ("embed_tokens", "lm_head", "norm", "conv1d", "A_log", "dt_bias", "in_proj_a", "in_proj_b", "mtp.")


def e4m3_values():
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)).astype(np.float32)


E4M3 = e4m3_values()


def nearest(magnitudes, values):
    """Index of the nearest of rising values; of two equally near the even index."""
    high = np.clip(np.searchsorted(values, magnitudes), 1, len(values) - 1)
    below, above = magnitudes - values[high - 1], values[high] - magnitudes
    down = (below < above) | ((below == above) & ((high - 1) % 2 == 0))
    return np.where(down, high - 1, high)


def to_e4m3(x):
    return (nearest(np.minimum(np.abs(x), 448), E4M3) | (x < 0) << 7).astype(np.uint8)


def fp8(w):
    scale = np.maximum(np.abs(w).max(1, keepdims=True), 1e-30) / 448
    return {".weight": ("F8_E4M3", to_e4m3(w / scale)), ".weight_scale": ("F32", scale.astype(np.float32))}


def nvfp4(w):
    rows, cols = w.shape
    factor = np.float32(np.abs(w).max() / (6 * 448))
    blocks = w.reshape(rows, cols // 16, 16)
    scale = to_e4m3(np.abs(blocks).max(2) / 6 / factor)
    step = np.maximum(E4M3[scale] * factor, 1e-30)[..., None]
    codes = (nearest(np.minimum(np.abs(blocks) / step, 6), E2M1) | (blocks < 0) << 3).astype(np.uint8).reshape(rows, cols)
    return {".weight": ("U8", codes[:, ::2] | codes[:, 1::2] << 4), ".weight_scale": ("F8_E4M3", scale),
            ".weight_scale_2": ("F32", factor.reshape(()))}


def write_safetensors(tensors, path):
    header, at = {}, 0
    for name, (dtype, a) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(a.shape), "data_offsets": [at, at + a.nbytes]}
        at += a.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(np.ascontiguousarray(a).tobytes() for _, a in tensors.values()))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--format", choices=("fp8", "nvfp4"), required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (args.model / name).exists():
            shutil.copy(args.model / name, args.out / name)
    tensors = {}
    for name, (dtype, a) in read_safetensors(args.model / "model.safetensors").items():
        if a.ndim != 2 or any(part in name for part in LEFT_ALONE):
            tensors[name] = (dtype, a)
            continue
        for suffix, tensor in (fp8 if args.format == "fp8" else nvfp4)(to_f32(dtype, a)).items():
            tensors[name.removesuffix(".weight") + suffix] = tensor
    write_safetensors(tensors, args.out / "model.safetensors")


if __name__ == "__main__":
    main()
