#!/usr/bin/env python3
"""Greedy answers of the small hybrid model to the documents of jobs/examples/packages.jsonl, by transformers, and what its MTP
layer would have drafted for them. Writes hybrid_small_answers.json.

    python make_hybrid_small_answers.py [--device cuda]

Needs torch and transformers (made with those the result names). The target is transformers' own model in float32, eager
attention. It has no MTP layer; drafts come from a float64 numpy forward of that layer over transformers' final hidden rows:
row p takes the hidden row of p and token p + 1, sits at position p and predicts token p + 2; chained drafts sit at p + 1, p + 2,
take the layer's own normed output and see the rows 0 .. p and their own earlier steps.

A round drafts as many of K = 3 tokens as the answer still has, and accepts them up to the first wrong one.
"""

import argparse
import json
import pathlib

import numpy as np
import torch
import transformers
from safetensors.torch import load_file as load_torch

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MODEL = ROOT / "jobs/models/hybrid-small"
JOBS = ROOT / "jobs/examples/packages.jsonl"
K = 3


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


class Mtp:
    """The MTP layer in float64."""

    def __init__(self):
        self.c = json.loads((MODEL / "config.json").read_text())
        self.w = {n: t.double().numpy() for n, t in load_torch(str(MODEL / "model.safetensors")).items()}
        self.dim, self.heads, self.kv = self.c["head_dim"], self.c["num_attention_heads"], self.c["num_key_value_heads"]
        rope = self.c["rope_parameters"]
        self.rot = int(self.dim * rope["partial_rotary_factor"])
        self.frequency = rope["rope_theta"] ** (-2 * np.arange(self.rot // 2) / self.rot)

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c["rms_norm_eps"]) * (1 + self.w[name])

    def rotate(self, x, positions):
        half = self.rot // 2
        angle = positions[:, None] * self.frequency[None]
        c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
        y, a, b = x.copy(), x[..., :half], x[..., half:self.rot]
        y[..., :half], y[..., half:self.rot] = a * c - b * s, b * c + a * s
        return y

    def drafts(self, hidden, ids):
        """hidden [T, H] after the final norm, ids [T + 1] -> drafts [T, K]: row p drafts ids[p + 2], ids[p + 3], ..."""
        layer, n = "mtp.layers.0.", len(hidden)
        state, following, keys, values, out = hidden, np.array(ids[1:n + 1]), [], [], []
        for step in range(K):
            both = [self.norm(self.w["model.embed_tokens.weight"][following], "mtp.pre_fc_norm_embedding.weight"),
                    self.norm(state, "mtp.pre_fc_norm_hidden.weight")]
            x = np.concatenate(both, -1) @ self.w["mtp.fc.weight"].T
            h = self.norm(x, layer + "input_layernorm.weight")
            q = (h @ self.w[layer + "self_attn.q_proj.weight"].T).reshape(n, self.heads, 2 * self.dim)
            q, gate = q[..., :self.dim], q[..., self.dim:]
            k = (h @ self.w[layer + "self_attn.k_proj.weight"].T).reshape(n, self.kv, self.dim)
            v = (h @ self.w[layer + "self_attn.v_proj.weight"].T).reshape(n, self.kv, self.dim)
            positions = np.arange(n, dtype=np.float64) + step
            q = self.rotate(self.norm(q, layer + "self_attn.q_norm.weight"), positions)
            keys.append(self.rotate(self.norm(k, layer + "self_attn.k_norm.weight"), positions))
            values.append(v)
            o = np.zeros((n, self.heads, self.dim))
            for head in range(self.heads):
                kv = head // (self.heads // self.kv)
                past = q[:, head] @ keys[0][:, kv].T + np.triu(np.full((n, n), -np.inf), 1)
                own = [(q[:, head] * keys[i][:, kv]).sum(-1, keepdims=True) for i in range(1, step + 1)]
                score = np.concatenate([past] + own, -1) / np.sqrt(self.dim)
                score = np.exp(score - score.max(-1, keepdims=True))
                score /= score.sum(-1, keepdims=True)
                o[:, head] = score[:, :n] @ values[0][:, kv]
                for i in range(1, step + 1):
                    o[:, head] += score[:, n + i - 1:n + i] * values[i][:, kv]
            x = x + (o * sigmoid(gate)).reshape(n, -1) @ self.w[layer + "self_attn.o_proj.weight"].T
            h = self.norm(x, layer + "post_attention_layernorm.weight")
            up = h @ self.w[layer + "mlp.up_proj.weight"].T
            g = h @ self.w[layer + "mlp.gate_proj.weight"].T
            x = x + (g * sigmoid(g) * up) @ self.w[layer + "mlp.down_proj.weight"].T
            state = self.norm(x, "mtp.norm.weight")
            following = (state @ self.w["model.embed_tokens.weight"].T).argmax(-1)
            out.append(following)
        return np.stack(out, -1)


def play(drafts, ids, prompt_tokens):
    """Rounds, drafted and accepted tokens of greedy speculation over a known answer."""
    rounds = drafted = accepted = 0
    p = prompt_tokens - 1  # the target has seen 0 .. p and chosen ids[p + 1]
    while p + 2 < len(ids):
        right = 0
        offered = min(K, len(ids) - p - 2)
        while right < offered and drafts[p][right] == ids[p + 2 + right]:
            right += 1
        rounds += 1
        drafted += offered
        accepted += right
        p += right + 1
    return {"rounds": rounds, "drafted": drafted, "accepted": accepted}


def document_of(job):
    text, document = job["body"]["messages"][0]["content"]
    return text["text"] + "\n" + (JOBS.parent / document["path"]).read_text(encoding="utf-8")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", default=str(HERE / "hybrid_small_answers.json"))
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_grad_enabled(False)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager")
    model = model.to(args.device).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    ends = json.loads((MODEL / "generation_config.json").read_text())["eos_token_id"]
    ends = ends if isinstance(ends, list) else [ends]
    mtp, answers = Mtp(), []
    for line in open(JOBS, encoding="utf-8"):
        job = json.loads(line)
        prompt = f"<|im_start|>user\n{document_of(job)}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        prompt_tokens, margins = len(ids), []
        while len(ids) - prompt_tokens < job["body"]["max_tokens"] and (not margins or ids[-1] not in ends):
            top = model(torch.tensor([ids], device=args.device), use_cache=False).logits[0, -1].float().topk(2)
            ids.append(top.indices[0].item())
            margins.append((top.values[0] - top.values[1]).item())
        hidden = model.model(torch.tensor([ids[:-1]], device=args.device), use_cache=False).last_hidden_state[0]
        drafts = mtp.drafts(hidden.double().cpu().numpy(), ids)
        new = ids[prompt_tokens:]
        answers.append({"custom_id": job["custom_id"], "prompt_tokens": prompt_tokens, "tokens": new,
                        "text": tokenizer.decode(new, skip_special_tokens=True),
                        "margins": [round(m, 4) for m in margins], **play(drafts, ids, prompt_tokens)})
        print(answers[-1]["custom_id"], answers[-1]["text"], {k: answers[-1][k] for k in ("rounds", "drafted", "accepted")},
              flush=True)
    made_with = f"transformers {transformers.__version__}, torch {torch.__version__}, float32"
    with open(args.out, "w", encoding="utf-8") as f:
        f.write('{"made_with": ' + json.dumps(made_with) + ', "drafts": ' + str(K) + ', "answers": [\n')
        f.write(",\n".join(json.dumps(a, ensure_ascii=False) for a in answers))
        f.write("\n]}\n")


if __name__ == "__main__":
    main()
