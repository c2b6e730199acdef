"""What the cache saves: questions about the same documents, whole runs without a cache, with an empty one and with a warm one, in turn.

    python shared_heads.py --tandem PROGRAM --model MODEL [--documents 4] [--questions 8] [--words 2200] [--repeats 3] [-- OPTION...]

Prints prompt tokens, those that were computed, and the ratios of the median times."""
import argparse
import json
import pathlib
import random
import statistics
import subprocess
import tempfile
import time

WORDS = "the of a pump valve reads opens closes before after seven night report shows that every second line was empty".split()


def write_jobs(path, args):
    chance = random.Random(7)
    jobs = []
    for d in range(args.documents):
        text = " ".join(chance.choice(WORDS) for _ in range(args.words))
        for q in range(args.questions):
            body = {"messages": [{"role": "user", "content": f"{text}\n\nQuestion {q}: which word comes next?"}], "max_tokens": 16,
                    "temperature": 0}
            jobs.append({"custom_id": f"d{d}q{q}", "method": "POST", "url": "/v1/chat/completions", "body": body})
    chance.shuffle(jobs)
    path.write_text("".join(json.dumps(job) + "\n" for job in jobs))


def run(args, folder, name, *options):
    out = folder / name
    start = time.monotonic()
    subprocess.run([args.tandem, "run", folder / "jobs.jsonl", "--model", args.model, "--out", out, "--quiet", *options, *args.more], check=True)
    seconds = time.monotonic() - start
    times = [json.loads(line) for line in (out / "timing.jsonl").read_text().splitlines()]
    return seconds, sum(t["prompt_tokens"] for t in times), sum(t["cached_tokens"] for t in times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tandem", required=True)
    parser.add_argument("--model", required=True)
    for name, standard in (("documents", 4), ("questions", 8), ("words", 2200), ("repeats", 3)):
        parser.add_argument("--" + name, type=int, default=standard)
    parser.add_argument("more", nargs="*", help="further options of the runs")
    args = parser.parse_args()
    seconds = {"none": [], "cold": [], "warm": []}
    with tempfile.TemporaryDirectory(prefix="tandem-heads-") as name:
        folder = pathlib.Path(name)
        write_jobs(folder / "jobs.jsonl", args)
        for i in range(args.repeats):
            for kind in seconds:
                options = ["--order", "input"] if kind == "none" else ["--cache", folder / f"cache{i}"]
                took, prompt, cached = run(args, folder, f"{kind}{i}", *options)
                seconds[kind].append(took)
                print(f"{kind}: {took:.1f} s, {prompt - cached} of {prompt} prompt tokens computed", flush=True)
    median = {kind: statistics.median(values) for kind, values in seconds.items()}
    print(f"time without a cache / with an empty one: {median['none'] / median['cold']:.2f}; / with a warm one: {median['none'] / median['warm']:.2f}")


main()
