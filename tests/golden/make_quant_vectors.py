"""Makes tests/golden/quant_vectors.txt: random stored blocks of every number format and the float32 values they stand
for, decoded by the `gguf` package, which shares no code with the program under test (MXFP4 and NVFP4, which its
pinned version does not know, by their definition in numpy).

    python make_quant_vectors.py [OUT]

The file is text. For each format a line `NAME VALUES`, a line with the stored bytes in hexadecimal, and lines of eight
float32 bit patterns in hexadecimal. Codes are random bytes; the 16-bit factors are random finite numbers with the edge
cases (zeros, subnormals, largest, infinity) among them. Scales of one byte are never NaN's.
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
    ("MXFP4", 32, []),
    ("NVFP4", 32, []),
]

# +0, -0, smallest and largest subnormals, smallest normal, one, largest of both signs, infinity.
FACTOR_EDGES = [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x3C00, 0x7BFF, 0xFBFF, 0x7C00]
E8M0_EDGES = [0, 1, 2, 126, 127, 128, 252, 253, 254]
F16_EDGES = FACTOR_EDGES + [0xFC00, 0x7E00, 0xFE01, 0x8001, 0x03FF, 0x0200, 0x0100, 0x0155]


def random_finite_f16(rng, n):
    """Any sign, any exponent but the one of infinities."""
    return (rng.integers(0, 2, n) << 15 | rng.integers(0, 31, n) << 10 | rng.integers(0, 1024, n)).astype("<u2")


def stored_blocks(rng, name, n_blocks, factor_offsets):
    if name == "MXFP4":
        blocks = rng.integers(0, 256, (n_blocks, 17), dtype=np.uint8)
        blocks[:, 0] = np.concatenate([E8M0_EDGES, rng.integers(3, 252, n_blocks - len(E8M0_EDGES))])
        return blocks.reshape(-1)
    if name == "NVFP4":
        blocks = rng.integers(0, 256, (n_blocks, 36), dtype=np.uint8)
        scales = np.arange(4 * n_blocks) % 127
        blocks[:, :4] = (scales | (np.arange(len(scales)) % 5 == 4) << 7).reshape(-1, 4)  # the sign does not count
        return blocks.reshape(-1)
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


def e2m1_values(low_high):
    """Numbers of E2M1 codes; minus zero is zero."""
    magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[low_high & 7]
    return np.where((low_high >> 3 == 1) & (magnitude != 0), -magnitude, magnitude)


def mxfp4_values(stored):
    """32 values a block: a power of two, then 16 bytes, whose low halves come first."""
    blocks = stored.reshape(-1, 17)
    scale = np.ldexp(1.0, blocks[:, :1].astype(int) - 127)
    return e2m1_values(np.concatenate([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], axis=1)) * scale


def nvfp4_values(stored):
    """64 values a block: four E4M3 scales, then four times eight bytes, whose low halves come first."""
    blocks = stored.reshape(-1, 36)
    exponent, mantissa = (blocks[:, :4] >> 3 & 15).astype(int), (blocks[:, :4] & 7).astype(float)
    scale = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10))
    codes = blocks[:, 4:].reshape(-1, 4, 8)
    return e2m1_values(np.concatenate([codes & 15, codes >> 4], axis=2)) * scale[:, :, None]


OWN_DECODERS = {"MXFP4": mxfp4_values, "NVFP4": nvfp4_values}


def decoded(stored, name):
    if name in OWN_DECODERS:
        return OWN_DECODERS[name](stored)
    return gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[name])


def main():
    out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).with_name("quant_vectors.txt"))
    rng = np.random.default_rng(20260101)
    lines = []
    for name, n_blocks, factor_offsets in FORMATS:
        stored = stored_blocks(rng, name, n_blocks, factor_offsets)
        with np.errstate(all="ignore"):
            values = decoded(stored, name).astype("<f4")
        bits = np.ascontiguousarray(values, dtype="<f4").view("<u4").reshape(-1)
        lines.append(f"{name} {len(bits)}")
        lines.append(stored.tobytes().hex())
        lines += [" ".join(f"{b:08x}" for b in bits[i : i + 8]) for i in range(0, len(bits), 8)]
    out.write_text("\n".join(lines) + "\n")


main()
