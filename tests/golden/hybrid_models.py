"""Writes tiny random models of every family with their float64 results, for tests/rank/test_hybrid_forward.c.

    python hybrid_models.py OUTDIR

For each model NAME: OUTDIR/NAME/ with config.json and model.safetensors (F32), OUTDIR/NAME.gguf with the same weights as
GGUF has them (norms + 1, decay rates, tiled value heads, permuted llama rows), and OUTDIR/NAME.bin with what
hybrid_oracle.py computes, all little-endian: "TDMHYB01"; u32 tokens n, vocabulary v, first chained row s, chained rows k;
i32 tokens [n + 1]; f32 logits [n][v]; with MTP (k > 0) f32 MTP logits [n][v] and f32 logits of the chained rows [k][v].
OUTDIR/wide.w8.bin is the same for `wide` with its matrices as 8-bit integers. OUTDIR/NAME.theirs: f32 logits of every tenth
position and the last, as transformers computes them.

Every parameter is random, norms and decay biases included, so that nothing is hidden by a 0 or a 1.
"""
import json
import os
import pathlib
import struct
import sys

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy: on matrices this small, threads only wait for each other

import gguf
import numpy as np

from hybrid_oracle import Model

TOKENS, CHAIN_FIRST, CHAIN_ROWS = 150, 141, 3
LOGIT_DEVIATION = 2.5
TRANSFORMERS_TOLERANCE = 1e-4  # transformers computes the delta rule and the norms in float32 whatever it is asked for


def hybrid(layers, heads, kv_heads, head_dim, gdn, hidden, ffn):
    return {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": hidden,
            "intermediate_size": ffn, "vocab_size": 160, "num_hidden_layers": layers, "full_attention_interval": 4,
            "layer_types": ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)],
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
            "linear_num_key_heads": gdn[0], "linear_num_value_heads": gdn[1], "linear_key_head_dim": gdn[2],
            "linear_value_head_dim": gdn[3], "linear_conv_kernel_dim": 4, "hidden_act": "silu", "rms_norm_eps": 1e-6,
            "attn_output_gate": True, "output_gate_type": "swish", "mamba_ssm_dtype": "float32",
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                                "mrope_interleaved": True, "mrope_section": [3, 3, 2]},
            "max_position_embeddings": 512, "tie_word_embeddings": False, "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False}


def plain(family, tied, heads, kv_heads, head_dim, hidden):
    return {"architectures": [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family] + "ForCausalLM"],
            "model_type": family, "hidden_size": hidden, "intermediate_size": 96, "vocab_size": 160,
            "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
            "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 512,
            "tie_word_embeddings": tied}


# hybrid: three value heads a key head, so that grouped and tiled order are not each other's inverse. wide: the proportions
# of the 27B model, and a last layer that is not attention. A model's seed is one with which it is well conditioned: weights
# changed by a float32's last bit (1e-7) move no logit by more than 4e-5. (Some seeds give a row of nearly cancelled GDN
# output, whose norm makes 4e-4 of that.)
SEEDS = {"hybrid": 25, "wide": 2, "llama": 3, "qwen2": 4, "qwen3": 5}
MODELS = {
    "hybrid": hybrid(4, 6, 2, 64, (2, 6, 32, 32), 64, 96),
    "wide": hybrid(5, 12, 2, 256, (2, 6, 128, 128), 96, 160),
    "llama": plain("llama", False, 6, 3, 16, 96),
    "qwen2": plain("qwen2", True, 6, 3, 16, 96),
    "qwen3": plain("qwen3", False, 4, 2, 32, 64),
}


def shapes(c):
    """Hugging Face names to (shape, standard deviation)."""
    h, v, f = c["hidden_size"], c["vocab_size"], c["intermediate_size"]
    s = {"embed_tokens.weight": ((v, h), .25 if c["tie_word_embeddings"] else 1), "norm.weight": ((h,), .2)}
    if not c["tie_word_embeddings"]:
        s["lm_head.weight"] = ((v, h), .3)
    types = c.get("layer_types", ["full_attention"] * c["num_hidden_layers"])
    layers = [(f"layers.{i}.", kind) for i, kind in enumerate(types)]
    if "mtp_num_hidden_layers" in c:
        layers.append(("mtp.layers.0.", "full_attention"))
        s |= {"mtp.fc.weight": ((h, 2 * h), .2), "mtp.norm.weight": ((h,), .2),
              "mtp.pre_fc_norm_embedding.weight": ((h,), .2), "mtp.pre_fc_norm_hidden.weight": ((h,), .2)}
    for p, kind in layers:
        s |= {p + "input_layernorm.weight": ((h,), .2), p + "post_attention_layernorm.weight": ((h,), .2),
              p + "mlp.gate_proj.weight": ((f, h), .2), p + "mlp.up_proj.weight": ((f, h), .2),
              p + "mlp.down_proj.weight": ((h, f), .2)}
        s |= attention_shapes(c, p + "self_attn.") if kind == "full_attention" else gdn_shapes(c, p + "linear_attn.")
    return s


def attention_shapes(c, p):
    h, d, family = c["hidden_size"], c["head_dim"], c["model_type"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    wide = 2 * q if family == "qwen3_5_text" else q
    s = {p + "q_proj.weight": ((wide, h), .15), p + "k_proj.weight": ((kv, h), .15), p + "v_proj.weight": ((kv, h), .15),
         p + "o_proj.weight": ((h, q), .1)}
    if family == "qwen2":
        s |= {p + "q_proj.bias": ((q,), .5), p + "k_proj.bias": ((kv,), .5), p + "v_proj.bias": ((kv,), .5)}
    if family in ("qwen3", "qwen3_5_text"):
        s |= {p + "q_norm.weight": ((d,), .2), p + "k_norm.weight": ((d,), .2)}
    return s


def gdn_shapes(c, p):
    h, values = c["hidden_size"], c["linear_num_value_heads"]
    wide = values * c["linear_value_head_dim"]
    channels = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + wide
    return {p + "in_proj_qkv.weight": ((channels, h), .3), p + "in_proj_z.weight": ((wide, h), .3),
            p + "in_proj_b.weight": ((values, h), .3), p + "in_proj_a.weight": ((values, h), .3),
            p + "conv1d.weight": ((channels, 1, c["linear_conv_kernel_dim"]), .5), p + "A_log": ((values,), 1),
            p + "dt_bias": ((values,), .5), p + "norm.weight": ((c["linear_value_head_dim"],), .2),
            p + "out_proj.weight": ((h, wide), .1)}


def make_weights(c, seed):
    rng = np.random.default_rng(seed)
    weights = {}
    for name, (shape, deviation) in shapes(c).items():
        value = rng.standard_normal(shape) * deviation
        # Norms that hold the factor itself lie around 1, and so does GDN's in every family.
        if name.endswith("norm.weight") and (c["model_type"] != "qwen3_5_text" or "linear_attn" in name):
            value += 1
        if name.endswith("A_log"):
            value = np.log(rng.uniform(.01, 4, shape))
        weights[name] = value.astype(np.float32)
    return weights


# ---- containers ----


def write_safetensors(weights, c, folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(c, indent=1))
    header, blob = {}, b""
    for name, value in weights.items():
        stored = name if name.startswith(("mtp.", "lm_head.")) else "model." + name
        header[stored] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [len(blob), len(blob) + value.nbytes]}
        blob += value.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + blob)


GGUF_OF_LAYER = {
    "input_layernorm.weight": "attn_norm.weight", "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight", "mlp.down_proj.weight": "ffn_down.weight",
    "self_attn.o_proj.weight": "attn_output.weight", "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight", "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight", "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight", "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias", "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
} | {f"self_attn.{x}_proj.{kind}": f"attn_{x}.{kind}" for x in "qkv" for kind in ("weight", "bias")}
GGUF_OF_MTP = {"mtp.fc.weight": "eh_proj", "mtp.pre_fc_norm_embedding.weight": "enorm",
               "mtp.pre_fc_norm_hidden.weight": "hnorm", "mtp.norm.weight": "shared_head_norm"}
GGUF_OF_MODEL = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight",
                 "lm_head.weight": "output.weight"}


def gguf_name(name, c):
    if name in GGUF_OF_MODEL:
        return GGUF_OF_MODEL[name]
    if name in GGUF_OF_MTP:
        return f"blk.{c['num_hidden_layers']}.nextn.{GGUF_OF_MTP[name]}.weight"
    name = name.replace("mtp.layers.0.", f"layers.{c['num_hidden_layers']}.")
    layer, rest = name.removeprefix("layers.").split(".", 1)
    if rest == "post_attention_layernorm.weight":
        return f"blk.{layer}." + ("post_attention_norm.weight" if c["model_type"] == "qwen3_5_text" else "ffn_norm.weight")
    return f"blk.{layer}.{GGUF_OF_LAYER[rest]}"


def tiled(value, axis, c, first=0):
    """Value heads from grouped order (key head, repetition) to tiled (repetition, key head), from `first` on."""
    kept, moved = np.split(value, [first], axis)
    keys, each = c["linear_num_key_heads"], c["linear_num_value_heads"] // c["linear_num_key_heads"]
    shape = moved.shape
    moved = moved.reshape(shape[:axis] + (keys, each, -1) + shape[axis + 1:])
    return np.concatenate([kept, np.swapaxes(moved, axis, axis + 1).reshape(shape)], axis)


def gguf_value(name, value, c):
    family = c["model_type"]
    if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        halves = value.reshape(-1, 2, c["head_dim"] // 2, value.shape[1])
        return np.swapaxes(halves, 1, 2).reshape(value.shape)
    if family != "qwen3_5_text":
        return value
    if "linear_attn" not in name:
        return value + np.float32(1) if "norm.weight" in name or name == "norm.weight" or "pre_fc_norm" in name else value
    keys = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"]
    kind = name.split("linear_attn.")[1]
    if kind == "A_log":
        return tiled(-np.exp(value), 0, c)
    if kind == "conv1d.weight":
        return tiled(value[:, 0], 0, c, keys)
    if kind == "in_proj_qkv.weight":
        return tiled(value, 0, c, keys)
    if kind == "out_proj.weight":
        return tiled(value, 1, c)
    return value if kind == "norm.weight" else tiled(value, 0, c)


def write_gguf(weights, c, path):
    arch = {"qwen3_5_text": "qwen35"}.get(c["model_type"], c["model_type"])
    writer = gguf.GGUFWriter(path, arch)
    rope = c.get("rope_parameters", c)
    mtp = c.get("mtp_num_hidden_layers", 0)
    ints = {"block_count": c["num_hidden_layers"] + mtp, "context_length": c["max_position_embeddings"],
            "embedding_length": c["hidden_size"], "feed_forward_length": c["intermediate_size"],
            "attention.head_count": c["num_attention_heads"], "attention.head_count_kv": c["num_key_value_heads"],
            "attention.key_length": c["head_dim"], "attention.value_length": c["head_dim"], "vocab_size": c["vocab_size"],
            "rope.dimension_count": int(c["head_dim"] * rope.get("partial_rotary_factor", 1))}
    if arch == "qwen35":
        ints |= {"ssm.conv_kernel": c["linear_conv_kernel_dim"], "ssm.state_size": c["linear_key_head_dim"],
                 "ssm.group_count": c["linear_num_key_heads"], "ssm.time_step_rank": c["linear_num_value_heads"],
                 "ssm.inner_size": c["linear_num_value_heads"] * c["linear_value_head_dim"],
                 "full_attention_interval": c["full_attention_interval"], "nextn_predict_layers": mtp}
        writer.add_array(f"{arch}.rope.dimension_sections", [3, 3, 2, 0])
    for key, value in ints.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", c["rms_norm_eps"])
    writer.add_float32(f"{arch}.rope.freq_base", rope["rope_theta"])
    for name, value in weights.items():
        writer.add_tensor(gguf_name(name, c), np.ascontiguousarray(gguf_value(name, value, c)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---- results ----


def in_eight_bits(weights):
    """Matrices as 8-bit integers times one float32 for 128 columns; not the embedding, vectors, convolution, b and a."""
    out = {}
    for name, value in weights.items():
        out[name] = value
        if value.ndim != 2 or name == "embed_tokens.weight" or name.endswith(("in_proj_b.weight", "in_proj_a.weight")):
            continue
        columns = []
        for first in range(0, value.shape[1], 128):
            group = value[:, first:first + 128]
            scale = np.abs(group).max(1, keepdims=True) / np.float32(127)
            columns.append(np.rint(group / scale.astype(np.float64)) * scale)
        out[name] = np.concatenate(columns, 1)
    return out


def write_golden(model, path):
    vocab = model.config["vocab_size"]
    tokens = np.array([(i * 7 + 3 * i * i + 1) % vocab for i in range(TOKENS + 1)])
    hidden = model.hidden(tokens[:TOKENS])
    arrays, chained = [model.logits(hidden)], 0
    if "mtp_num_hidden_layers" in model.config:
        chained = CHAIN_ROWS
        arrays.append(model.logits(model.mtp(tokens[1:], hidden)))
        arrays.append(model.logits(model.mtp_chain(tokens, hidden, CHAIN_FIRST, CHAIN_ROWS)))
    with open(path, "wb") as out:
        out.write(b"TDMHYB01" + struct.pack("<4I", TOKENS, vocab, CHAIN_FIRST, chained))
        out.write(tokens.astype("<i4").tobytes())
        for array in arrays:
            out.write(array.astype("<f4").tobytes())
    return arrays[0]


def check_against_transformers(name, logits, path):
    """transformers_tiny.npz (make_transformers_tiny.py) has every tenth row and the last; they are written for the engine too."""
    theirs = np.load(pathlib.Path(__file__).resolve().parent / "transformers_tiny.npz")[name]
    difference = np.abs(np.concatenate([logits[::10], logits[-1:]]) - theirs).max()
    path.write_bytes(theirs.astype("<f4").tobytes())
    print(f"{name}: the oracle and transformers differ by {difference:.2g} at most")
    if not difference <= TRANSFORMERS_TOLERANCE:
        raise SystemExit(f"{name}: the oracle is not what transformers computes")


def main():
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for name, config in MODELS.items():
        weights = make_weights(config, SEEDS[name])
        head = weights["embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
        probe = Model(config, weights)
        if not config["tie_word_embeddings"]:
            head *= np.float32(LOGIT_DEVIATION / probe.logits(probe.hidden(range(64))).std())
        write_safetensors(weights, config, out / name)
        write_gguf(weights, config, out / f"{name}.gguf")
        check_against_transformers(name, write_golden(Model(config, weights), out / f"{name}.bin"), out / f"{name}.theirs")
        if name == "wide":
            write_golden(Model(config, in_eight_bits(weights)), out / "wide.w8.bin")


if __name__ == "__main__":
    main()
