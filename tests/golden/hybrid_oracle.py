"""An independent reference of the hybrid family and its plain relatives, in numpy and float64.

Model(config, weights): `config` holds the fields of a config.json, `weights` maps Hugging Face names (without their
"model." prefix) to arrays. Families, by model_type: llama, qwen2 (biases on q, k, v), qwen3 (q and k normed), and
qwen3_5_text: layers of gated attention and of Gated DeltaNet, norms that hold w of (1 + w), one multi-token-prediction
(MTP) layer. Nothing is shared with the program under test: Gated DeltaNet is the recurrence, token by token; attention is
one softmax over all scores.
"""
import json
import pathlib
import struct

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


class Model:
    def __init__(self, config, weights):
        self.config = config
        self.weights = {name: np.asarray(value, np.float64) for name, value in weights.items()}
        self.hybrid = config["model_type"].startswith("qwen3_5")
        self.layers = config["num_hidden_layers"]
        self.eps = config["rms_norm_eps"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.heads
        rope = config.get("rope_parameters", config)
        self.theta = rope["rope_theta"]
        self.rotary = int(self.head_dim * rope.get("partial_rotary_factor", 1))
        self.head = self.weights["embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]

    def linear(self, x, name):
        y = x @ self.weights[name + ".weight"].T
        return y + self.weights[name + ".bias"] if name + ".bias" in self.weights else y

    def normed(self, x):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps)

    def norm(self, x, name):
        return self.normed(x) * (self.weights[name + ".weight"] + (1 if self.hybrid else 0))

    def rotate(self, x, positions):
        """x [rows, heads, head_dim]: pairs (i, i + rotary / 2)."""
        half = self.rotary // 2
        angle = positions[:, None] * self.theta ** (-2 * np.arange(half) / self.rotary)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        y, a, b = x.copy(), x[..., :half], x[..., half:self.rotary]
        y[..., :half], y[..., half:self.rotary] = a * cos - b * sin, b * cos + a * sin
        return y

    def attention(self, x, p):
        rows, d = len(x), self.head_dim
        q = self.linear(x, p + "q_proj").reshape(rows, self.heads, -1)
        q, gate = q[..., :d], q[..., d:]
        k = self.linear(x, p + "k_proj").reshape(rows, self.kv_heads, d)
        v = self.linear(x, p + "v_proj").reshape(rows, self.kv_heads, d)
        if p + "q_norm.weight" in self.weights:
            q, k = self.norm(q, p + "q_norm"), self.norm(k, p + "k_norm")
        positions = np.arange(rows, dtype=np.float64)
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        later = np.triu(np.full((rows, rows), -np.inf), 1)
        out = np.empty_like(q)
        for h in range(self.heads):
            kv = h // (self.heads // self.kv_heads)
            scores = q[:, h] @ k[:, kv].T / np.sqrt(d) + later
            weight = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, h] = weight / weight.sum(-1, keepdims=True) @ v[:, kv]
        if self.hybrid:
            out = out * sigmoid(gate)
        return self.linear(out.reshape(rows, -1), p + "o_proj")

    def gated_deltanet(self, x, p):
        c, rows = self.config, len(x)
        k_heads, v_heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
        k_dim, v_dim, width = c["linear_key_head_dim"], c["linear_value_head_dim"], c["linear_conv_kernel_dim"]
        raw = self.linear(x, p + "in_proj_qkv")
        conv = self.weights[p + "conv1d.weight"].reshape(-1, width)
        before = np.concatenate([np.zeros((width - 1, raw.shape[1])), raw])
        mixed = silu(sum(before[j:j + rows] * conv[:, j] for j in range(width)))
        unit = lambda y: y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6)
        q = unit(mixed[:, :k_heads * k_dim].reshape(rows, k_heads, k_dim)) / np.sqrt(k_dim)
        k = unit(mixed[:, k_heads * k_dim:2 * k_heads * k_dim].reshape(rows, k_heads, k_dim))
        v = mixed[:, 2 * k_heads * k_dim:].reshape(rows, v_heads, v_dim)
        beta = sigmoid(self.linear(x, p + "in_proj_b"))
        rate = -np.exp(self.weights[p + "A_log"])
        decay = np.exp(rate * np.logaddexp(0, self.linear(x, p + "in_proj_a") + self.weights[p + "dt_bias"]))
        out, of_key = np.empty((rows, v_heads, v_dim)), np.arange(v_heads) // (v_heads // k_heads)
        state = np.zeros((v_heads, k_dim, v_dim))
        for t in range(rows):
            state *= decay[t][:, None, None]
            key, query = k[t][of_key], q[t][of_key]
            change = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, key))
            state += key[:, :, None] * change[:, None, :]
            out[t] = np.einsum("hkv,hk->hv", state, query)
        z = self.linear(x, p + "in_proj_z").reshape(rows, v_heads, v_dim)
        out = self.normed(out) * self.weights[p + "norm.weight"] * silu(z)
        return self.linear(out.reshape(rows, -1), p + "out_proj")

    def layer(self, x, p):
        h = self.norm(x, p + "input_layernorm")
        if p + "linear_attn.A_log" in self.weights:
            x = x + self.gated_deltanet(h, p + "linear_attn.")
        else:
            x = x + self.attention(h, p + "self_attn.")
        h = self.norm(x, p + "post_attention_layernorm")
        return x + self.linear(silu(self.linear(h, p + "mlp.gate_proj")) * self.linear(h, p + "mlp.up_proj"), p + "mlp.down_proj")

    def hidden(self, tokens):
        """Rows after the final norm."""
        x = self.weights["embed_tokens.weight"][np.asarray(tokens)]
        for layer in range(self.layers):
            x = self.layer(x, f"layers.{layer}.")
        return self.norm(x, "norm")

    def logits(self, hidden):
        return hidden @ self.head.T

    def mtp(self, next_tokens, hidden):
        """The MTP's own rows: row p pairs the target's hidden row p with the token at p + 1."""
        e = self.norm(self.weights["embed_tokens.weight"][np.asarray(next_tokens)], "mtp.pre_fc_norm_embedding")
        pair = np.concatenate([e, self.norm(hidden, "mtp.pre_fc_norm_hidden")], -1)
        return self.norm(self.layer(self.linear(pair, "mtp.fc"), "mtp.layers.0."), "mtp.norm")

    def mtp_chain(self, tokens, hidden, start, steps):
        """Rows start .. start + steps - 1, each of which takes the MTP's own row before it in place of the target's."""
        hidden = hidden[:start].copy()
        for step in range(steps):
            own = self.mtp(tokens[1:start + step + 1], hidden)[-1:]
            hidden = np.concatenate([hidden, own])
        return self.mtp(tokens[1:start + steps + 1], hidden)[start:]


def read_folder(path):
    """A Model of a folder with config.json and one model.safetensors of BF16 or F32."""
    path = pathlib.Path(path)
    config = json.loads((path / "config.json").read_text())
    data = (path / "model.safetensors").read_bytes()
    header_bytes = struct.unpack("<Q", data[:8])[0]
    weights = {}
    for name, entry in json.loads(data[8:8 + header_bytes]).items():
        if name == "__metadata__":
            continue
        first, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            value = (np.frombuffer(data[first:end], "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            value = np.frombuffer(data[first:end], {"F32": "<f4"}[entry["dtype"]])
        weights[name.removeprefix("model.").removeprefix("language_model.")] = value.reshape(entry["shape"])
    return Model(config, weights)
