"""The exactness contract through the whole program on a real model: the same texts and traces however jobs are run.

    python run_matrix.py --tandem PROGRAM --model MODEL [--backend cuda --gpus 0 --ranks 1]

The yardstick is each job on its own, without drafts (--active 1 --spec off). Against it: with drafts, several at once, the file
reversed, the prompt cut into 64 rows, so few KV tokens that jobs must be preempted, and two groups of one rank against one.
Sampled and greedy jobs both. On GPUs also: every kernel launched anew, and each way by which the ranks' sums can go.
Without a model, or a GPU where one was asked for: exit 77.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import typing

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent.parent / "jobs/examples"
SKIPPED, UNAVAILABLE = 77, 69


class JobSet(typing.NamedTuple):
    file: str
    picked: slice
    tokens: int      # of an answer at most
    longest: int     # what the longest answer has at least
    few_pages: list  # KV tokens too few for the jobs that run at once, and the context that still fits; empty: leaves it out


SETS = {
    "documents": JobSet("documents", slice(0, 5), 256, 256, ["--kv-tokens", "1408", "--context", "1152"]),
    # Extractions, which jobs/models/hybrid-small does well: answers that end by themselves, before they need more pages.
    "extract": JobSet("packages", slice(27, 35), 96, 40, []),
    # The same for a model whose answers are noise, and long.
    "noise": JobSet("packages", slice(27, 35), 200, 200, ["--kv-tokens", "832", "--context", "640"]),
}


def job_lines(args):
    """The example jobs, half of them sampled, long enough to cross blocks of 64 positions."""
    jobs = SETS[args.set]
    examples = (EXAMPLES / f"{jobs.file}.jsonl").read_text(encoding="utf-8").splitlines()[jobs.picked]
    lines = []
    for i, line in enumerate(examples[:args.jobs]):
        job = json.loads(line)
        job["body"].update(max_tokens=jobs.tokens, temperature=0 if i % 2 else 0.8)
        lines.append(json.dumps(job))
    return lines


def checked(command, args):
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    if args.backend == "cuda" and done.returncode == UNAVAILABLE and "no_gpu:" in done.stderr:
        print(f"SKIPPED: no CUDA device\n{done.stderr}")
        sys.exit(SKIPPED)
    if done.returncode:
        raise SystemExit(f"exit {done.returncode} of {' '.join(map(str, command))}\n{done.stderr}")


def run(args, lines, *options, ranks=None, groups=1):
    ranks = ranks or args.ranks
    command = [args.tandem, "run", "--root", EXAMPLES, "--model", args.model, "--trace", "--quiet", "--backend", args.backend]
    command += ["--ranks", str(ranks), "--groups", str(groups), *options]
    if args.gpus:  # the same cards for every rank and group that a run has
        cards = args.gpus.split(",")
        command += ["--gpus", ",".join(cards[i % len(cards)] for i in range(ranks * groups))]
    with tempfile.TemporaryDirectory(prefix="tandem-matrix-") as folder:
        jobs = pathlib.Path(folder) / "jobs.jsonl"
        jobs.write_text("\n".join(lines) + "\n", encoding="utf-8")
        checked(command + ["--out", f"{folder}/out", jobs], args)
        output = [json.loads(line) for line in open(f"{folder}/out/output.jsonl", encoding="utf-8")]
        timing = [json.loads(line) for line in open(f"{folder}/out/timing.jsonl", encoding="utf-8")]
    answers = {}
    for record in output:
        body = record["response"]["body"]
        answers[record["custom_id"]] = (body["choices"], body["usage"], body["tandem_trace"])
    return answers, timing


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tandem", required=True)
    parser.add_argument("--model", default="")
    parser.add_argument("--backend", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--gpus", default="", help="cards of the ranks, used again where there are more ranks")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sum-paths", default="auto", help="of GPUs: ways of the sums, each with rounds recorded and not")
    parser.add_argument("--spec", default="ngram", help="the source of drafts that has to be right now and then")
    parser.add_argument("--set", default="documents", choices=SETS)
    parser.add_argument("--jobs", type=int, default=99, help="at most so many of the set")
    parser.add_argument("--brief", action="store_true", help="leaves out what does not depend on the sums")
    return parser.parse_args()


class Matrix:
    def __init__(self):
        self.failures = 0

    def compare(self, name, base, result, feature):
        same = sum(base[k] == result.get(k) for k in base)
        print(f"{name}: {same} of {len(base)} jobs have the same text and trace; {feature}", flush=True)
        self.failures += same != len(base) or not feature


def main():
    args = arguments()
    if not args.model:
        print("SKIPPED: no model was given; jobs/get-model.sh fetches it")
        return SKIPPED
    lines = job_lines(args)
    matrix = Matrix()
    alone, _ = run(args, lines, "--active", "1", "--spec", "off")
    assert len(alone) == len(lines)
    assert max(usage["completion_tokens"] for _, usage, _ in alone.values()) >= SETS[args.set].longest

    answers, timing = run(args, lines, "--active", "1", "--spec", args.spec)
    accepted, drafted = sum(t["accepted"] for t in timing), sum(t["drafted"] for t in timing)
    matrix.compare(f"drafts ({accepted} of {drafted} right)", alone, answers, 0 < accepted < drafted)
    answers, timing = run(args, lines)
    matrix.compare("several at once", alone, answers, max(t["sequences_in_step"] for t in timing) >= 3)
    for path in args.sum_paths.split(",") if args.backend == "cuda" else []:
        for how in (["--spec", args.spec], ["--no-graphs", "--spec", args.spec], ["--no-graphs", "--spec", "off"]):
            answers, _ = run(args, lines, "--sum-path", path, *how)
            matrix.compare(" ".join(["sums", path, *how]), alone, answers, True)
    if args.brief:
        return 1 if matrix.failures else 0

    answers, _ = run(args, lines[::-1])
    matrix.compare("reversed", alone, answers, True)
    answers, _ = run(args, lines, "--prefill-rows", "64")
    matrix.compare("prompt in pieces of 64", alone, answers, True)
    few_pages = SETS[args.set].few_pages
    if few_pages:
        answers, timing = run(args, lines, *few_pages)
        matrix.compare("few KV pages", alone, answers, sum(t["preemptions"] for t in timing) > 0)
    one = alone if args.ranks == 1 else run(args, lines, "--active", "1", "--spec", "off", ranks=1)[0]
    answers, timing = run(args, lines, ranks=1, groups=2)
    matrix.compare("two groups of one rank", one, answers, len({t["group"] for t in timing}) == 2)
    return 1 if matrix.failures else 0


sys.exit(main())
