"""Whole runs of the same jobs with some options and with others, in turn.

    python paired_runs.py --tandem PROGRAM --model MODEL --first OPTIONS --second OPTIONS
                          [--jobs 12] [--words 900] [--tokens 300] [--repeats 5] [-- OPTION...]

What checkpoints cost: --first "--checkpoint 60" --second "--checkpoint 0". Two groups of one rank against one of two: --first
"--groups 2 --ranks 1" --second "--groups 1 --ranks 2". Prints times and processor times of all, the answers' tokens a second, and the
medians of the pairs' ratios. Runs should take 20 s at least."""
import argparse
import json
import pathlib
import random
import shlex
import statistics
import subprocess
import tempfile
import time

WORDS = "the of a pump valve reads opens closes before after seven night report shows that every second line was empty".split()


def write_jobs(path, args):
    chance = random.Random(7)
    with open(path, "w", encoding="utf-8") as f:
        for i in range(args.jobs):
            text = " ".join(chance.choice(WORDS) for _ in range(args.words))
            body = {"messages": [{"role": "user", "content": f"Write a very long story of these words.\n\n{text}"}],
                    "max_tokens": args.tokens, "temperature": 0.8, "seed": i}
            f.write(json.dumps({"custom_id": f"job-{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}) + "\n")


def processor_seconds(pid):
    """Of a process and its children that it has waited for, once it has ended and before it is waited for."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(f) for f in fields[11:15]) / 100


def run(args, folder, name, *options):
    command = [args.tandem, "run", folder / "jobs.jsonl", "--model", args.model, "--out", folder / name, "--quiet", *options, *args.more]
    start = time.monotonic()
    process = subprocess.Popen(command)
    while pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    seconds, processor = time.monotonic() - start, processor_seconds(process.pid)
    if process.wait():
        raise SystemExit(f"exit {process.returncode}")
    times = [json.loads(line) for line in (folder / name / "timing.jsonl").read_text().splitlines()]
    return seconds, processor, sum(t["prompt_tokens"] for t in times), sum(t["completion_tokens"] for t in times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tandem", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--first", type=shlex.split, required=True)
    parser.add_argument("--second", type=shlex.split, required=True)
    for name, standard in (("jobs", 12), ("words", 900), ("tokens", 300), ("repeats", 5)):
        parser.add_argument("--" + name, type=int, default=standard)
    parser.add_argument("more", nargs="*", help="further options of the runs")
    args = parser.parse_args()
    kinds = {"first": args.first, "second": args.second}
    wall, processor = {kind: [] for kind in kinds}, {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory(prefix="tandem-paired-") as name:
        folder = pathlib.Path(name)
        write_jobs(folder / "jobs.jsonl", args)
        for i in range(args.repeats):
            for kind in sorted(kinds, reverse=i % 2 == 1):
                seconds, cpu, prompt, answer = run(args, folder, f"{kind}{i}", *kinds[kind])
                wall[kind].append(seconds)
                processor[kind].append(cpu)
                print(f"{shlex.join(kinds[kind])}: {seconds:.2f} s, {cpu:.2f} s of processors; {prompt} prompt tokens, {answer} of answers,"
                      f" {answer / seconds:.1f} a second", flush=True)
    for what, values in (("time", wall), ("processor time", processor)):
        ratios = [a / b for a, b in zip(values["first"], values["second"])]
        print(f"{what}, first / second: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


main()
