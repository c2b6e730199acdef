#!/usr/bin/env python3
"""A qwen35 GGUF of a Hugging Face folder of the Qwen3.5 family, as converters write it: norms + 1, value heads tiled, A_log as
-exp(A_log), the MTP layer as one more block.

    python make_qwen35_gguf.py MODEL OUT.gguf

Matrices keep their BF16 bits; vectors and the convolution become F32. For tests: reads one safetensors file.
"""

import json
import pathlib
import struct
import sys

import gguf
import numpy as np


def read_safetensors(path):
    """name -> (dtype, array); BF16 as uint16."""
    data = path.read_bytes()
    (n,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + n])
    kinds = {"BF16": np.uint16, "F32": np.float32, "F16": np.float16}
    out = {}
    for name, t in header.items():
        if name == "__metadata__":
            continue
        begin, end = t["data_offsets"]
        out[name] = (t["dtype"], np.frombuffer(data[8 + n + begin:8 + n + end], kinds[t["dtype"]]).reshape(t["shape"]))
    return out


def to_f32(dtype, a):
    return (a.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else a.astype(np.float32)


class Converter:
    def __init__(self, folder, out):
        self.c = json.loads((folder / "config.json").read_text())
        self.t = read_safetensors(folder / "model.safetensors")
        self.w = gguf.GGUFWriter(out, "qwen35")
        self.k_heads, self.v_heads = self.c["linear_num_key_heads"], self.c["linear_num_value_heads"]
        self.dim = self.c["linear_value_head_dim"]
        self.keys = 2 * self.k_heads * self.c["linear_key_head_dim"]

    def tiled(self, a, axis, width):
        """Value heads from grouped (key head, repetition) to tiled (repetition, key head) order along one axis."""
        shape = list(a.shape)
        split = a.reshape(shape[:axis] + [self.k_heads, self.v_heads // self.k_heads, width] + shape[axis + 1:])
        return np.ascontiguousarray(np.swapaxes(split, axis, axis + 1)).reshape(shape)

    def matrix(self, name, source, change=lambda a: a):
        dtype, a = self.t.pop(source)
        kinds = {"BF16": gguf.GGMLQuantizationType.BF16, "F32": gguf.GGMLQuantizationType.F32}
        a = np.ascontiguousarray(change(a))
        if dtype == "BF16":
            self.w.add_tensor(name, a.view(np.uint8), raw_dtype=kinds[dtype])
        else:
            self.w.add_tensor(name, a.astype(np.float32))

    def vector(self, name, source, change=lambda a: a):
        self.w.add_tensor(name, np.ascontiguousarray(change(to_f32(*self.t.pop(source)))).astype(np.float32))

    def attention(self, source, to):
        for theirs, ours in (("q", "attn_q"), ("k", "attn_k"), ("v", "attn_v"), ("o", "attn_output")):
            self.matrix(f"{to}{ours}.weight", f"{source}self_attn.{theirs}_proj.weight")
        for n in "qk":
            self.vector(f"{to}attn_{n}_norm.weight", f"{source}self_attn.{n}_norm.weight", lambda a: a + 1)

    def gdn(self, source, to):
        mixed = lambda a: np.concatenate([a[:self.keys], self.tiled(a[self.keys:], 0, self.dim)])
        p = source + "linear_attn."
        self.matrix(to + "attn_qkv.weight", p + "in_proj_qkv.weight", mixed)
        self.matrix(to + "attn_gate.weight", p + "in_proj_z.weight", lambda a: self.tiled(a, 0, self.dim))
        self.matrix(to + "ssm_beta.weight", p + "in_proj_b.weight", lambda a: self.tiled(a, 0, 1))
        self.matrix(to + "ssm_alpha.weight", p + "in_proj_a.weight", lambda a: self.tiled(a, 0, 1))
        self.vector(to + "ssm_conv1d.weight", p + "conv1d.weight", lambda a: mixed(a[:, 0, :]))
        self.vector(to + "ssm_a", p + "A_log", lambda a: self.tiled(-np.exp(a.astype(np.float64)), 0, 1))
        self.vector(to + "ssm_dt.bias", p + "dt_bias", lambda a: self.tiled(a, 0, 1))
        self.vector(to + "ssm_norm.weight", p + "norm.weight")
        self.matrix(to + "ssm_out.weight", p + "out_proj.weight", lambda a: self.tiled(a, 1, self.dim))

    def layer(self, source, to, full):
        self.vector(to + "attn_norm.weight", source + "input_layernorm.weight", lambda a: a + 1)
        self.vector(to + "post_attention_norm.weight", source + "post_attention_layernorm.weight", lambda a: a + 1)
        for n in ("gate", "up", "down"):
            self.matrix(f"{to}ffn_{n}.weight", f"{source}mlp.{n}_proj.weight")
        (self.attention if full else self.gdn)(source, to)

    def tensors(self):
        layers = self.c["num_hidden_layers"]
        self.matrix("token_embd.weight", "model.embed_tokens.weight")
        self.vector("output_norm.weight", "model.norm.weight", lambda a: a + 1)
        if "lm_head.weight" in self.t:
            self.matrix("output.weight", "lm_head.weight")
        for i, kind in enumerate(self.c["layer_types"]):
            self.layer(f"model.layers.{i}.", f"blk.{i}.", kind == "full_attention")
        self.layer("mtp.layers.0.", f"blk.{layers}.", True)
        to = f"blk.{layers}.nextn."
        self.matrix(to + "eh_proj.weight", "mtp.fc.weight")
        self.vector(to + "enorm.weight", "mtp.pre_fc_norm_embedding.weight", lambda a: a + 1)
        self.vector(to + "hnorm.weight", "mtp.pre_fc_norm_hidden.weight", lambda a: a + 1)
        self.vector(to + "shared_head_norm.weight", "mtp.norm.weight", lambda a: a + 1)
        if self.t:
            raise SystemExit(f"not converted: {sorted(self.t)}")

    def metadata(self, folder):
        c, w, rope = self.c, self.w, self.c["rope_parameters"]
        w.add_block_count(c["num_hidden_layers"] + 1)
        w.add_uint32("qwen35.nextn_predict_layers", 1)
        w.add_context_length(c["max_position_embeddings"])
        w.add_embedding_length(c["hidden_size"])
        w.add_feed_forward_length(c["intermediate_size"])
        w.add_head_count(c["num_attention_heads"])
        w.add_head_count_kv(c["num_key_value_heads"])
        w.add_key_length(c["head_dim"])
        w.add_value_length(c["head_dim"])
        w.add_layer_norm_rms_eps(c["rms_norm_eps"])
        w.add_rope_freq_base(rope["rope_theta"])
        w.add_rope_dimension_count(int(c["head_dim"] * rope["partial_rotary_factor"]))
        w.add_array("qwen35.rope.dimension_sections", rope["mrope_section"] + [0])
        w.add_vocab_size(c["vocab_size"])
        for key, value in (("conv_kernel", c["linear_conv_kernel_dim"]), ("state_size", c["linear_key_head_dim"]),
                           ("group_count", self.k_heads), ("time_step_rank", self.v_heads),
                           ("inner_size", self.v_heads * self.dim)):
            w.add_uint32(f"qwen35.ssm.{key}", value)
        w.add_uint32("qwen35.full_attention_interval", c["full_attention_interval"])
        if (folder / "tokenizer.json").exists():
            self.tokenizer(folder)

    def tokenizer(self, folder):
        t = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        generation = json.loads((folder / "generation_config.json").read_text())
        tokens, kinds = [None] * self.c["vocab_size"], [int(gguf.TokenType.UNUSED)] * self.c["vocab_size"]
        for text, i in t["model"]["vocab"].items():
            tokens[i], kinds[i] = text, int(gguf.TokenType.NORMAL)
        for a in t["added_tokens"]:
            tokens[a["id"]] = a["content"]
            kinds[a["id"]] = int(gguf.TokenType.CONTROL if a["special"] else gguf.TokenType.USER_DEFINED)
        w = self.w
        w.add_tokenizer_model("gpt2")
        w.add_tokenizer_pre("qwen35")
        w.add_token_list([x if x is not None else f"[PAD{i}]" for i, x in enumerate(tokens)])
        w.add_token_types(kinds)
        w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in t["model"]["merges"]])
        ends = generation["eos_token_id"]
        w.add_eos_token_id(ends[0] if isinstance(ends, list) else ends)
        w.add_add_bos_token(False)
        if settings.get("chat_template"):
            w.add_chat_template(settings["chat_template"])


def main():
    folder, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    c = Converter(folder, out)
    c.metadata(folder)
    c.tensors()
    c.w.write_header_to_file()
    c.w.write_kv_data_to_file()
    c.w.write_tensors_to_file()
    c.w.close()


if __name__ == "__main__":
    main()
