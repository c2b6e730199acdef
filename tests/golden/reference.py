"""An independent reference of the llama architecture on a GGUF file, in plain numpy.

    python reference.py logits MODEL --tokens FILE [--out FILE.npy]
    python reference.py greedy MODEL --tokens FILE [--count 32] [--stop ID ...]

FILE holds token ids separated by white space; `-` is standard input. `logits` prints a line for each position: its
token, the most probable next token, and the margin between its logit and the second one's; `greedy` prints the same for
each token it continues with. A small margin means that another order of summation may choose another token.

The weights are decoded by the `gguf` package to float32 and all arithmetic on them is float64 (--dtype float32 is
faster). Nothing is shared with the program under test. GGUF rows of q and k are permuted so that rotated pairs are
adjacent; several query heads share a key-value head; without output.weight the head is the embedding.
"""

import argparse
import sys

import gguf
import numpy as np


class Config:
    def __init__(self, reader):
        def value(name, fallback=None):
            field = reader.get_field(name)
            if field is None:
                if fallback is None:
                    raise KeyError(name)
                return fallback
            return field.contents()

        arch = value("general.architecture")
        if arch != "llama":
            raise ValueError(f"architecture {arch} is not llama")
        self.layers = value("llama.block_count")
        self.hidden = value("llama.embedding_length")
        self.heads = value("llama.attention.head_count")
        self.kv_heads = value("llama.attention.head_count_kv", self.heads)
        self.head_dim = value("llama.attention.key_length", self.hidden // self.heads)
        self.rope_dim = value("llama.rope.dimension_count", self.head_dim)
        self.rope_theta = value("llama.rope.freq_base", 10000.0)
        self.eps = value("llama.attention.layer_norm_rms_epsilon")
        self.context = value("llama.context_length")


class Cache:
    """Keys (rotated) and values of every layer, [positions, kv_heads, head_dim]."""

    def __init__(self, config, dtype):
        empty = np.zeros((0, config.kv_heads, config.head_dim), dtype)
        self.keys = [empty] * config.layers
        self.values = [empty] * config.layers

    @property
    def length(self):
        return len(self.keys[0])


class Model:
    """kv_dtype: what keys and values are rounded to when they are stored (None: not at all)."""

    def __init__(self, path, dtype=np.float64, kv_dtype=None):
        reader = gguf.GGUFReader(path)
        self.reader = reader
        self.config = Config(reader)
        self.dtype = dtype
        self.kv_dtype = kv_dtype
        self.weights = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(dtype) for t in reader.tensors}
        self.head = "output.weight" if "output.weight" in self.weights else "token_embd.weight"

    def linear(self, x, name):
        """x [rows, in] times the transposed weight [out, in]."""
        return x @ self.weights[name].T

    def norm(self, x, name):
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(mean_square + self.config.eps) * self.weights[name]

    def rotate(self, x, positions):
        """x [rows, heads, head_dim]: turns the pairs (2i, 2i+1) of the first rope_dim values."""
        n = self.config.rope_dim
        angle = positions[:, None] * self.config.rope_theta ** (-np.arange(0, n, 2, dtype=self.dtype) / n)
        cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]
        even, odd = x[..., 0:n:2], x[..., 1:n:2]
        out = x.copy()
        out[..., 0:n:2] = even * cos - odd * sin
        out[..., 1:n:2] = odd * cos + even * sin
        return out

    def attention(self, x, layer, cache, positions):
        c, p = self.config, f"blk.{layer}."
        q = self.linear(x, p + "attn_q.weight").reshape(len(x), c.heads, c.head_dim)
        k = self.linear(x, p + "attn_k.weight").reshape(len(x), c.kv_heads, c.head_dim)
        v = self.linear(x, p + "attn_v.weight").reshape(len(x), c.kv_heads, c.head_dim)
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        if self.kv_dtype:
            k, v = k.astype(self.kv_dtype).astype(self.dtype), v.astype(self.kv_dtype).astype(self.dtype)
        cache.keys[layer] = keys = np.concatenate([cache.keys[layer], k])
        cache.values[layer] = values = np.concatenate([cache.values[layer], v])
        hidden_from = np.arange(len(keys))[None, :] > positions[:, None].astype(int)
        out = np.empty_like(q)
        for h in range(c.heads):
            kv = h // (c.heads // c.kv_heads)
            scores = q[:, h] @ keys[:, kv].T / np.sqrt(self.dtype(c.head_dim))
            scores[hidden_from] = -np.inf
            weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[:, h] = (weight / weight.sum(axis=-1, keepdims=True)) @ values[:, kv]
        return self.linear(out.reshape(len(x), -1), p + "attn_output.weight")

    def mlp(self, x, layer):
        p = f"blk.{layer}."
        gate = self.linear(x, p + "ffn_gate.weight")
        return self.linear(gate / (1 + np.exp(-gate)) * self.linear(x, p + "ffn_up.weight"), p + "ffn_down.weight")

    def hidden_rows(self, tokens, cache):
        """Rows after the final norm; the cache grows by them."""
        positions = cache.length + np.arange(len(tokens), dtype=self.dtype)
        x = self.weights["token_embd.weight"][np.asarray(tokens)]
        for layer in range(self.config.layers):
            x = x + self.attention(self.norm(x, f"blk.{layer}.attn_norm.weight"), layer, cache, positions)
            x = x + self.mlp(self.norm(x, f"blk.{layer}.ffn_norm.weight"), layer)
        return self.norm(x, "output_norm.weight")

    def logits(self, tokens, cache=None):
        """[len(tokens), vocab]; continues `cache` if one is given."""
        return self.linear(self.hidden_rows(tokens, cache or Cache(self.config, self.dtype)), self.head)

    def greedy(self, prompt, count, stop=()):
        """Yields (token, margin); ends after `count` tokens or a token of `stop`, which is yielded too."""
        cache = Cache(self.config, self.dtype)
        row = self.linear(self.hidden_rows(prompt, cache)[-1:], self.head)[0]
        for _ in range(count):
            token, _, margin = top_two(row)
            yield token, margin
            if token in stop:
                return
            row = self.linear(self.hidden_rows([token], cache), self.head)[0]


def top_two(row):
    """(best id, second id, margin); of equal logits the lower id is the better one."""
    first = int(np.argmax(row))
    rest = row.copy()
    rest[first] = -np.inf
    second = int(np.argmax(rest))
    return first, second, float(row[first] - row[second])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["logits", "greedy"])
    parser.add_argument("model")
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--out")
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--stop", type=int, nargs="*", default=[])
    parser.add_argument("--dtype", choices=["float64", "float32"], default="float64")
    args = parser.parse_args()
    text = sys.stdin.read() if args.tokens == "-" else open(args.tokens).read()
    tokens = [int(t) for t in text.split()]
    model = Model(args.model, getattr(np, args.dtype))
    if args.what == "greedy":
        for token, margin in model.greedy(tokens, args.count, args.stop):
            print(token, f"{margin:.6f}")
        return
    logits = model.logits(tokens)
    for token, row in zip(tokens, logits):
        first, _, margin = top_two(row)
        print(token, first, f"{margin:.6f}")
    if args.out:
        np.save(args.out, logits.astype(np.float32))


if __name__ == "__main__":
    main()
