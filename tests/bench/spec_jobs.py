#!/usr/bin/env python3
"""What drafts gain: 20 jobs with and without, alternating.

    python spec_jobs.py --tandem PROGRAM [--smollm2 MODEL.gguf] [--repeats 3]

MTP: 20 documents of jobs/examples/packages.jsonl (13 extractions, 7 summaries) with jobs/models/hybrid-small. n-gram: the example
documents with SmolLM2, cut into twenty pieces of five lines, each to be written out again. One job at
a time and four at once. Prints accepted drafts a round and the ratio of the medians of the whole runs' times, off to drafts.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "jobs/examples"


def mtp_jobs():
    lines = (EXAMPLES / "packages.jsonl").read_text(encoding="utf-8").splitlines()
    task = lambda name: [line for line in lines if json.loads(line)["custom_id"].startswith(name)]
    return task("extract") + task("summarize")[:7]


def rewriting_jobs():
    jobs = []
    for document in sorted((EXAMPLES / "documents").glob("*.txt")):
        lines = document.read_text(encoding="utf-8").splitlines()
        for first in range(0, len(lines) - 4, 5):
            piece = "\n".join(lines[first:first + 5])
            text = f"Write the following text again, word for word:\n\n{piece}"
            body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 160}
            jobs.append(json.dumps({"custom_id": f"{document.stem}-{first}", "method": "POST", "url": "/v1/chat/completions",
                                    "body": body}))
    return jobs[:20]


def run(tandem, model, jobs, active, spec):
    with tempfile.TemporaryDirectory(prefix="tandem-spec-") as folder:
        path = pathlib.Path(folder) / "jobs.jsonl"
        path.write_text("\n".join(jobs) + "\n", encoding="utf-8")
        start = time.monotonic()
        subprocess.run([tandem, "run", path, "--root", EXAMPLES, "--model", model, "--out", f"{folder}/out", "--active", str(active),
                        "--spec", spec, "--quiet"], check=True)
        seconds = time.monotonic() - start
        texts = [json.loads(line)["response"]["body"]["choices"] for line in open(f"{folder}/out/output.jsonl", encoding="utf-8")]
        return seconds, texts, [json.loads(line) for line in open(f"{folder}/out/timing.jsonl", encoding="utf-8")]


def measure(args, name, model, jobs, spec):
    for active in (1, 4):
        seconds = {"off": [], spec: []}
        for _ in range(args.repeats):
            for mode in seconds:
                t, texts, timings = run(args.tandem, model, jobs, active, mode)
                seconds[mode].append(t)
                if mode == "off":
                    plain = texts
        if texts != plain:
            raise SystemExit(f"{name}: drafts changed an answer")
        rounds, accepted = sum(t["rounds"] for t in timings), sum(t["accepted"] for t in timings)
        drafted, decode = sum(t["drafted"] for t in timings), statistics.median(seconds[spec])
        print(f"{name}, {len(jobs)} jobs, {active} at once: {accepted / rounds:.2f} drafts a round right ({accepted} of {drafted}), "
              f"{statistics.median(seconds['off']):.2f} s without, {decode:.2f} s with, "
              f"ratio {statistics.median(seconds['off']) / decode:.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tandem", required=True)
    parser.add_argument("--smollm2")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    hybrid = ROOT / "jobs/models/hybrid-small"
    measure(args, "MTP, always, hybrid-small", hybrid, mtp_jobs(), "mtp")
    measure(args, "whichever pays, hybrid-small", hybrid, mtp_jobs(), "auto")
    if args.smollm2:
        measure(args, "n-gram, SmolLM2", args.smollm2, rewriting_jobs(), "ngram")


if __name__ == "__main__":
    main()
