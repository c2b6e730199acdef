"""The exactness contract through the whole program on the real model: the same texts and traces however jobs are run.

    python run_matrix.py --tandem PROGRAM --model MODEL

The yardstick is each job on its own, without drafts (--active 1 --spec off). Against it: with drafts, four at once, the file
reversed, the prompt cut into 64 rows, so few KV tokens that jobs must be preempted, and two groups of one rank against one.
Sampled and greedy jobs both.
Without a model: exit 77.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent.parent / "jobs/examples"
TOKENS = 256


def job_lines():
    """The example jobs, half of them sampled, all long enough to cross several blocks of 64 positions."""
    lines = []
    for i, line in enumerate((EXAMPLES / "documents.jsonl").read_text(encoding="utf-8").splitlines()[:5]):
        job = json.loads(line)
        job["body"].update(max_tokens=TOKENS, temperature=0 if i % 2 else 0.8)
        lines.append(json.dumps(job))
    return lines


def run(args, lines, *options):
    with tempfile.TemporaryDirectory(prefix="tandem-matrix-") as folder:
        jobs = pathlib.Path(folder) / "jobs.jsonl"
        jobs.write_text("\n".join(lines) + "\n", encoding="utf-8")
        command = [args.tandem, "run", jobs, "--root", EXAMPLES, "--model", args.model, "--out", f"{folder}/out", "--trace"]
        subprocess.run(command + ["--quiet", *options], check=True)
        output = [json.loads(line) for line in open(f"{folder}/out/output.jsonl", encoding="utf-8")]
        timing = [json.loads(line) for line in open(f"{folder}/out/timing.jsonl", encoding="utf-8")]
    answers = {}
    for record in output:
        body = record["response"]["body"]
        answers[record["custom_id"]] = (body["choices"], body["usage"], body["tandem_trace"])
    return answers, timing


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tandem", required=True)
    parser.add_argument("--model", default="")
    args = parser.parse_args()
    if not args.model:
        print("SKIPPED: no model was given; jobs/get-model.sh fetches it")
        return 77
    lines = job_lines()
    alone, _ = run(args, lines, "--active", "1", "--spec", "off")
    assert len(alone) == len(lines)
    assert max(usage["completion_tokens"] for _, usage, _ in alone.values()) == TOKENS
    failures = 0

    def compare(name, base, result, feature):
        nonlocal failures
        same = sum(base[k] == result[k] for k in base)
        print(f"{name}: {same} of {len(base)} jobs have the same text and trace; {feature}", flush=True)
        failures += same != len(base) or not feature

    answers, timing = run(args, lines, "--active", "1", "--spec", "ngram")
    accepted, drafted = sum(t["accepted"] for t in timing), sum(t["drafted"] for t in timing)
    compare(f"drafts ({accepted} of {drafted} right)", alone, answers, 0 < accepted < drafted)
    answers, timing = run(args, lines)
    compare("four at once", alone, answers, max(t["sequences_in_step"] for t in timing) >= 3)
    answers, _ = run(args, lines[::-1])
    compare("reversed", alone, answers, True)
    answers, _ = run(args, lines, "--prefill-rows", "64")
    compare("prompt in pieces of 64", alone, answers, True)
    answers, timing = run(args, lines, "--kv-tokens", "1408", "--context", "1152")
    compare("few KV pages", alone, answers, sum(t["preemptions"] for t in timing) > 0)

    one, _ = run(args, lines, "--ranks", "1", "--active", "1", "--spec", "off")
    answers, timing = run(args, lines, "--ranks", "1", "--groups", "2")
    compare("two groups of one rank", one, answers, len({t["group"] for t in timing}) == 2)
    return 1 if failures else 0


sys.exit(main())
