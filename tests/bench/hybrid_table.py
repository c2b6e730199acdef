#!/usr/bin/env python3
"""What storage formats cost the small hybrid model: task figures and draft acceptance on its 40 held-out documents.

    python hybrid_table.py --tandem PROGRAM        a table in Markdown; needs the packages of tests/requirements.txt

summarize: F1 of words and ROUGE-L F1 against the package's own short description; classify: share of right sections; extract:
share of answers equal to the reference, and of valid JSON objects with its three keys. Acceptance: drafts that were right of
those that were verified, K = 3, MTP layer, always drafting. Greedy.
"""

import argparse
import collections
import json
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
MODEL = ROOT / "jobs/models/hybrid-small"
JOBS = ROOT / "jobs/examples/packages.jsonl"


def words(text):
    return re.findall(r"\w+", text.lower())


def word_f1(a, b):
    a, b = collections.Counter(words(a)), collections.Counter(words(b))
    common = sum((a & b).values())
    return 2 * common / (sum(a.values()) + sum(b.values())) if common else 0.0


def rouge_l(a, b):
    a, b = words(a), words(b)
    row = [0] * (len(b) + 1)
    for x in a:
        previous = 0
        for j, y in enumerate(b):
            previous, row[j + 1] = row[j + 1], previous + 1 if x == y else max(row[j + 1], row[j])
    return 2 * row[-1] / (len(a) + len(b)) if row[-1] else 0.0


def has_keys(text):
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and set(value) == {"package", "section", "depends"}


def run(tandem, model, kv, weights):
    with tempfile.TemporaryDirectory(prefix="tandem-table-") as folder:
        subprocess.run([tandem, "run", JOBS, "--model", model, "--out", f"{folder}/out", "--kv", kv, "--weights", weights, "--spec",
                        "mtp", "--drafts", "3", "--quiet"], check=True)
        read = lambda name: [json.loads(line) for line in open(f"{folder}/out/{name}.jsonl", encoding="utf-8")]
        texts = {r["custom_id"]: r["response"]["body"]["choices"][0]["message"]["content"] for r in read("output")}
        return texts, read("timing")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tandem", required=True)
    args = parser.parse_args()
    held = [json.loads(line) for line in open(MODEL / "heldout.jsonl", encoding="utf-8")]
    of = lambda task: [h for h in held if h["task"] == task]
    mean = lambda values: sum(values) / len(values)
    print("| weights | KV | summaries: F1 | ROUGE-L | sections right | extracts equal | valid JSON | drafts right | tokens a round |")
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="tandem-table-") as folder:
        for f in ("fp8", "nvfp4"):
            subprocess.run([sys.executable, ROOT / "tests/support/make_quantized_folder.py", MODEL, f"{folder}/{f}", "--format", f],
                           check=True)
        sources = (("BF16", MODEL, "native"), ("W8", MODEL, "w8"), ("FP8", f"{folder}/fp8", "native"),
                   ("NVFP4", f"{folder}/nvfp4", "native"))
        for name, model, weights in sources:
            for kv in ("f16", "int8"):
                texts, timings = run(args.tandem, model, kv, weights)
                said = lambda task: [(texts[h["id"]], h["answer"]) for h in of(task)]
                rounds = sum(t["rounds"] for t in timings)
                accepted, drafted = sum(t["accepted"] for t in timings), sum(t["drafted"] for t in timings)
                figures = (mean([word_f1(*s) for s in said("summarize")]), mean([rouge_l(*s) for s in said("summarize")]),
                           mean([a == b for a, b in said("classify")]), mean([a == b for a, b in said("extract")]),
                           mean([has_keys(a) for a, _ in said("extract")]), accepted / max(1, drafted), 1 + accepted / max(1, rounds))
                print(f"| {name} | {kv} | " + " | ".join(f"{x:.3f}" for x in figures) + " |", flush=True)


if __name__ == "__main__":
    main()
