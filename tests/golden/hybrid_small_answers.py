"""The small hybrid model's answers to its 40 held-out documents against transformers' (hybrid_small_answers.json).

    python hybrid_small_answers.py --tandem PROGRAM

From safetensors and from a GGUF of them, on 1 and 2 ranks, with MTP drafts and without: greedy answers are transformers' up to
the first near-tie (a margin between the two best logits below the bound), texts are the same with drafts and without, and as
many drafts are right as in the golden's own play of the same rounds, within 0.03. (A right draft of the end token gains nothing: it
counts on neither side.)
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import tokenizers

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MODEL = ROOT / "jobs/models/hybrid-small"
JOBS = ROOT / "jobs/examples/packages.jsonl"
ACCEPTANCE = 0.03
# Largest margin at which an answer may part: logits differ by less than half of it.
NEAR_TIE = {"f32": 0.001, "f16": 0.02}


def run(tandem, model, ranks, kv, spec):
    with tempfile.TemporaryDirectory(prefix="tandem-hybrid-") as folder:
        command = [tandem, "run", JOBS, "--backend", "cpu", "--model", model, "--out", f"{folder}/out", "--ranks", str(ranks), "--kv", kv]
        subprocess.run(command + ["--spec", spec, "--drafts", "3", "--quiet"], check=True)
        read = lambda name: [json.loads(line) for line in open(f"{folder}/out/{name}.jsonl", encoding="utf-8")]
        if read("error"):
            raise SystemExit("jobs failed")
        texts = {r["custom_id"]: r["response"]["body"]["choices"][0]["message"]["content"] for r in read("output")}
        return texts, {t["custom_id"]: t for t in read("timing")}


def parts_at(text, golden, tokenizer):
    """Index of the first token whose text the answer does not go on with; None: the whole answer is there."""
    if text == golden["text"]:
        return None
    for i in range(len(golden["tokens"])):
        if not text.startswith(tokenizer.decode(golden["tokens"][:i + 1], skip_special_tokens=True).rstrip("\ufffd")):
            return i
    return len(golden["tokens"]) - 1


def check_texts(name, kv, texts, timings, golden, tokenizer):
    failures = equal = 0
    for g in golden["answers"]:
        text, timing = texts[g["custom_id"]], timings[g["custom_id"]]
        at = parts_at(text, g, tokenizer)
        equal += at is None
        if timing["prompt_tokens"] != g["prompt_tokens"] or (at is not None and g["margins"][at] >= NEAR_TIE[kv]):
            failures += 1
            print(f"FAILED {name}: {g['custom_id']} ({timing['prompt_tokens']} prompt tokens)\n"
                  f"  got      {text!r}\n  expected {g['text']!r}, parts at token {at}")
        elif at is not None:
            print(f"{name}: {g['custom_id']} parts at a near-tie (token {at}, margin {g['margins'][at]})")
    print(f"{name}: {equal} of {len(golden['answers'])} answers are transformers'", flush=True)
    return failures


def acceptance(rounds, tokens, drafts):
    """Tokens gained for each draft: all but the first and one a round."""
    return (sum(tokens) - len(tokens) - sum(rounds)) / (drafts * sum(rounds))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tandem", required=True)
    args = parser.parse_args()
    golden = json.loads((HERE / "hybrid_small_answers.json").read_text(encoding="utf-8"))
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    expected = acceptance([g["rounds"] for g in golden["answers"]], [len(g["tokens"]) for g in golden["answers"]], golden["drafts"])
    failures = 0
    with tempfile.TemporaryDirectory(prefix="tandem-hybrid-") as folder:
        converted = f"{folder}/hybrid-small.gguf"
        subprocess.run([sys.executable, ROOT / "tests/support/make_qwen35_gguf.py", MODEL, converted], check=True)
        for source, ranks, kv in ((MODEL, 1, "f32"), (MODEL, 2, "f32"), (converted, 1, "f32"), (converted, 2, "f16")):
            name = f"{'GGUF' if source == converted else 'safetensors'}, {ranks} ranks, {kv} KV"
            plain, timings = run(args.tandem, source, ranks, kv, "off")
            failures += check_texts(name, kv, plain, timings, golden, tokenizer)
            drafted, timings = run(args.tandem, source, ranks, kv, "mtp")
            if drafted != plain:
                failures += 1
                print(f"FAILED {name}: drafts changed {[i for i in plain if plain[i] != drafted[i]]}")
            rows = timings.values()
            got = acceptance([t["rounds"] for t in rows], [t["completion_tokens"] for t in rows], golden["drafts"])
            failures += any(t["completion_tokens"] != 1 + t["rounds"] + t["accepted"] for t in rows)
            print(f"{name}: {got:.3f} of the drafts a round are right, {expected:.3f} in the golden", flush=True)
            failures += abs(got - expected) > ACCEPTANCE
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
