"""Makes tests/golden/quant_vectors.txt: random stored blocks of every number format and the float32 values they stand
for, decoded by the `gguf` package, which shares no code with the program under test.

    python make_quant_vectors.py [OUT]

The file is text. For each format a line `NAME VALUES`, a line with the stored bytes in hexadecimal, and lines of eight
float32 bit patterns in hexadecimal. Codes are random bytes; the 16-bit factors are random finite numbers with the edge
cases (zeros, subnormals, largest, infinity) among them.
"""

import pathlib
import sys

import gguf
import numpy as np

# Format, blocks, byte offsets of the 16-bit factors within a block.
FORMATS = [
    ("F32", 64, []),
    ("F16", 192, []),
    ("BF16", 64, []),
    ("Q4_0", 12, [0]),
    ("Q4_1", 12, [0, 2]),
    ("Q5_0", 12, [0]),
    ("Q5_1", 12, [0, 2]),
    ("Q8_0", 12, [0]),
    ("Q4_K", 6, [0, 2]),
    ("Q5_K", 6, [0, 2]),
    ("Q6_K", 6, [208]),
]

# +0, -0, smallest and largest subnormals, smallest normal, one, largest of both signs, infinity.
FACTOR_EDGES = [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x3C00, 0x7BFF, 0xFBFF, 0x7C00]
F16_EDGES = FACTOR_EDGES + [0xFC00, 0x7E00, 0xFE01, 0x8001, 0x03FF, 0x0200, 0x0100, 0x0155]


def random_finite_f16(rng, n):
    """Any sign, any exponent but the one of infinities."""
    return (rng.integers(0, 2, n) << 15 | rng.integers(0, 31, n) << 10 | rng.integers(0, 1024, n)).astype("<u2")


def stored_blocks(rng, name, n_blocks, factor_offsets):
    kind = gguf.GGMLQuantizationType[name]
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    if name == "F32":
        return rng.standard_normal(n_blocks).astype("<f4").view(np.uint8)
    if name == "F16":
        values = random_finite_f16(rng, n_blocks)
        values[: len(F16_EDGES)] = F16_EDGES
        return values.view(np.uint8)
    if name == "BF16":
        return (rng.standard_normal(n_blocks).astype("<f4").view("<u4") >> 16).astype("<u2").view(np.uint8)
    blocks = rng.integers(0, 256, (n_blocks, block_bytes), dtype=np.uint8)
    for offset in factor_offsets:
        factors = random_finite_f16(rng, n_blocks)
        edges = rng.permutation(FACTOR_EDGES)[: n_blocks // 2]
        factors[: len(edges)] = edges
        blocks[:, offset : offset + 2] = factors.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(-1)


def main():
    out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).with_name("quant_vectors.txt"))
    rng = np.random.default_rng(20260101)
    lines = []
    for name, n_blocks, factor_offsets in FORMATS:
        stored = stored_blocks(rng, name, n_blocks, factor_offsets)
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[name])
        bits = np.ascontiguousarray(values, dtype="<f4").view("<u4").reshape(-1)
        lines.append(f"{name} {len(bits)}")
        lines.append(stored.tobytes().hex())
        lines += [" ".join(f"{b:08x}" for b in bits[i : i + 8]) for i in range(0, len(bits), 8)]
    out.write_text("\n".join(lines) + "\n")


main()
