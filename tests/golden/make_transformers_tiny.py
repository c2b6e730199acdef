#!/usr/bin/env python3
"""Logits of the tiny models of hybrid_models.py by transformers, for hybrid_models.py to hold its oracle against.

    python hybrid_models.py MODELS; python make_transformers_tiny.py MODELS [--out transformers_tiny.npz]

Writes for each model float32 logits [16][160] of every tenth position and the last; float64 as far as transformers goes (norms and
the delta rule stay float32), eager attention. Made with torch 2.11.0 and transformers 5.17.0. transformers has no MTP layer: those
logits are the oracle's alone.
"""

import argparse
import pathlib
import struct

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).resolve().parent


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("models", type=pathlib.Path)
    parser.add_argument("--out", default=str(HERE / "transformers_tiny.npz"))
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    out = {}
    for golden in sorted(args.models.glob("*.bin")):
        name = golden.stem
        if not (args.models / name).is_dir():
            continue
        data = golden.read_bytes()
        (n, vocab) = struct.unpack_from("<II", data, 8)
        tokens = np.frombuffer(data, np.int32, n, 24)
        model = transformers.AutoModelForCausalLM.from_pretrained(args.models / name, dtype=torch.float64,
                                                                  attn_implementation="eager").eval()
        logits = model(torch.tensor(tokens[None].astype(np.int64)), use_cache=False).logits[0].float().numpy()
        own = np.frombuffer(data, np.float32, n * vocab, 24 + 4 * (n + 1)).reshape(n, vocab)
        out[name] = np.ascontiguousarray(np.concatenate([logits[::10], logits[-1:]]))
        print(name, out[name].shape, "largest difference from the oracle", np.abs(logits - own).max(), flush=True)
    np.savez_compressed(args.out, **out)


if __name__ == "__main__":
    main()
