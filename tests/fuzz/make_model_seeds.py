#!/usr/bin/env python3
"""Writes the seeds of fuzz_safetensors, fuzz_config and fuzz_shard: corpus/{safetensors,config,shard}/*. Run by hand."""
import json
import pathlib
import struct

CORPUS = pathlib.Path(__file__).parent / "corpus"
SIZES = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I64": 8}


def safetensors(tensors, metadata=None):
    """tensors: (name, dtype, shape) or (name, "F32", shape, numbers)."""
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for name, dtype, shape, *numbers in tensors:
        n = SIZES[dtype]
        for dim in shape:
            n *= dim
        part = struct.pack(f"<{len(numbers[0])}f", *numbers[0]) if numbers else bytes(0x30 + i % 13 for i in range(n))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + n]}
        data += part
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def write(kind, name, content):
    path = CORPUS / kind / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


write("safetensors", "empty", struct.pack("<Q", 2) + b"{}")
write("safetensors", "plain", safetensors([
    ("a.weight", "BF16", [3, 5]), ("b.bias", "F16", [4]), ("scalar", "F32", []), ("conv", "F32", [4, 1, 3]),
    ("model.visual.patch", "BF16", [2, 1, 2, 2, 2]), ("ids", "I64", [2])], {"format": "pt"}))
write("safetensors", "fp8", safetensors([
    ("a.weight", "F8_E4M3", [2, 130]), ("a.weight_scale_inv", "BF16", [1, 2]),
    ("b.weight", "F8_E4M3", [3, 4]), ("b.weight_scale", "F32", [3, 1]),
    ("c.weight", "F8_E4M3", [3, 4]), ("c.weight_scale", "F32", []), ("c.input_scale", "F32", [])]))
write("safetensors", "fp4", safetensors([
    ("a.weight_packed", "U8", [2, 16]), ("a.weight_scale", "F8_E4M3", [2, 2]), ("a.weight_global_scale", "F32", [1], [8]),
    ("b.weight", "U8", [2, 16]), ("b.weight_scale", "F8_E4M3", [2, 2]), ("b.weight_scale_2", "F32", [], [0.5]),
    ("c.weight_packed", "U8", [2, 16]), ("c.weight_scale", "U8", [2, 1])]))
write("safetensors", "truncated", safetensors([("a.weight", "F32", [8])])[:-5])

HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 48, "intermediate_size": 96,
    "vocab_size": 8, "num_hidden_layers": 4, "full_attention_interval": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 32,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "attn_output_gate": True, "output_gate_type": "swish", "mamba_ssm_dtype": "float32", "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 512, "tie_word_embeddings": True, "mtp_num_hidden_layers": 1}
DENSE = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "rope_theta": 100000, "max_position_embeddings": 512,
    "rope_scaling": {"rope_type": "linear", "factor": 1.0}}


def folder(config, tokenizer=b"", index=b"", weights=b""):
    parts = [json.dumps(config, separators=(",", ":")).encode(), tokenizer, index, weights]
    while not parts[-1]:
        parts.pop()
    return b"\xff".join(parts)


write("config", "hybrid", folder(HYBRID))
write("config", "multimodal", folder({
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
    "text_config": {k: v for k, v in HYBRID.items() if k != "architectures"}}))
write("config", "llama", folder(DENSE, b'{"chat_template":[{"name":"default","template":"x"}]}'))
write("config", "qwen2", folder(dict(DENSE, model_type="qwen2", use_sliding_window=False, rope_scaling=None)))
WEIGHTS = safetensors([("model.embed_tokens.weight", "BF16", [4, 16]), ("lm_head.weight", "F8_E4M3", [4, 16]),
                       ("lm_head.weight_scale", "F32", [4])])
MAP = {name: "a.safetensors" for name in ("model.embed_tokens.weight", "lm_head.weight", "lm_head.weight_scale")}
write("config", "sharded", folder(dict(DENSE, hidden_size=16, num_attention_heads=1), b'{"chat_template":"t"}',
                                  json.dumps({"weight_map": MAP}).encode(), WEIGHTS))
write("config", "escaping", folder(DENSE, b"{}", b'{"weight_map":{"a":"../x.safetensors"}}', WEIGHTS))

CUT = {"version": 1, "source_digest": "0" * 64, "ranks": 2, "partition": "0123456789abcdef"}


def shard(tensors, blobs, **changes):
    """shard.json and the file of rank 0. tensors: entries of its metadata; blobs: (name, bytes)."""
    index = dict(CUT, format="tandem shard", layout="hf", synthetic=False, source="m",
                 files=[{"name": "rank-0-of-2.safetensors", "bytes": 9, "sha256": "0" * 64}])
    index.update(changes)
    own = dict(CUT, rank=0, tensors=[dict(t, xxh3="0" * 16) for t in tensors])
    file = safetensors([(name, "U8", [n]) for name, n in blobs], {"tandem_shard": json.dumps(own, separators=(",", ":"))})
    return json.dumps(index).encode() + b"\xff" + file


ROWS = {"name": "q", "format": "BF16", "dims": [16, 8], "rows": [[0, 2], [5, 1]], "cols": [[0, 16]]}
COLS = {"name": "d", "format": "Q8_0", "dims": [288, 3], "rows": [[0, 3]], "cols": [[128, 128]]}
FP8 = {"name": "f", "format": "FP8", "dims": [300, 4], "rows": [[1, 2]], "cols": [[256, 44]], "global": "0x1p+0", "divide": False,
       "scales": {"format": "F32", "row_block": 128, "col_block": 128, "cut_rows": False, "cut_cols": True}}
FP4 = {"name": "g", "format": "FP4", "dims": [256, 2], "rows": [[1, 1]], "cols": [[0, 128]], "global": "0x1.8p-3", "divide": True,
       "scales": {"format": "FP8", "row_block": 1, "col_block": 16, "cut_rows": True, "cut_cols": True}}
EMPTY = {"name": "e", "format": "F32", "dims": [16, 8], "rows": [], "cols": [[0, 16]]}
write("shard", "index", shard([], [], layout="gguf", synthetic=True)[:-20])
write("shard", "plain", shard([ROWS, COLS, EMPTY, {"name": "w", "format": "F16", "dims": [4]}],
                              [("q", 3 * 32), ("d", 3 * 4 * 34), ("e", 0), ("w", 8)]))
write("shard", "scales", shard([FP8, FP4], [("f", 2 * 44), ("f#scales", 4), ("g", 64), ("g#scales", 8)]))
