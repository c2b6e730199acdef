#!/usr/bin/env python3
"""`tandem run --metrics FILE` against a strict reader of the Prometheus text format.

The file is whole whenever it is looked at, counters never go back, and its last figures are those of --json. A run that was
none (outside its window, beside another one) leaves it alone; a file that cannot be written is one warning, and the run goes on.

usage: metrics.py --tandem PROGRAM --write-tiny PROGRAM
"""
import argparse
import datetime
import fcntl
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*"'
SAMPLE = re.compile(rf"({NAME})\{{({LABEL}(?:,{LABEL})*)\}} ([+-]?\d+(?:\.\d+)?)")
HEAD = re.compile(rf"# (HELP|TYPE) ({NAME}) (.+)")
FINISHED = "tandem_finished"


def unescape(text):
    return re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], text)


def parse(text):
    """{(name, labels): value} and {name: type}; ValueError where the text breaks a rule of the format."""
    samples, types, helped, current = {}, {}, set(), None
    if not text.endswith("\n"):
        raise ValueError("the last line does not end")
    for line in text[:-1].split("\n"):
        head, sample = HEAD.fullmatch(line), SAMPLE.fullmatch(line)
        if head:
            kind, name, rest = head.groups()
            if (name in helped if kind == "HELP" else name in types):
                raise ValueError(f"a second {kind} of {name}")
            if kind == "HELP":
                helped.add(name)
            elif rest not in ("counter", "gauge"):
                raise ValueError(f"{name} has the type {rest}")
            else:
                types[name] = rest
            current = name
        elif sample:
            name, labels, value = sample.groups()
            if name != current or name not in types or name not in helped:
                raise ValueError(f"{name} is not below its HELP and TYPE")
            if (types[name] == "counter") != name.endswith("_total"):
                raise ValueError(f"{name} is a {types[name]}")
            pairs = [(p.split("=", 1)[0], unescape(p.split("=", 1)[1][1:-1])) for p in re.findall(LABEL, labels)]
            key = (name, tuple(sorted(pairs)))
            if key in samples or len(dict(pairs)) != len(pairs):
                raise ValueError(f"{key} is doubled")
            samples[key] = float(value)
        else:
            raise ValueError(f"neither comment nor sample: {line!r}")
    if set(types) != {name for name, _ in samples}:
        raise ValueError("a type without a sample")
    return samples, types


def selftest():
    good = '# HELP a x\n# TYPE a gauge\na{b="1"} 2\n'
    parse(good)
    for bad in ("", good[:-1], good + good, good.replace("gauge", "thing"), good.replace('{b="1"}', '{b="1\\x"}'),
                good.replace("# TYPE a gauge\n", ""), good.replace(" 2", " 2 1700000000"), good + 'a{b="1"} 3\n', good + "\n"):
        try:
            parse(bad)
        except ValueError:
            continue
        raise SystemExit(f"the reader takes {bad!r}")


class Bench:
    def __init__(self, tandem, folder, model):
        self.out, self.file = pathlib.Path(folder, 'o"u\\t'), pathlib.Path(folder, "tandem.prom")
        self.jobs = pathlib.Path(folder, "jobs.jsonl")
        self.command = [tandem, "run", self.jobs, "--backend", "cpu", "--model", model, "--out", self.out, "--json"]
        self.found = []

    def check(self, condition, text):
        if not condition:
            self.found.append(text)

    def write_jobs(self, n):
        line = '{"custom_id":"%d","method":"POST","url":"/v1/chat/completions","body":{"messages":[{"role":"user","content":"%s"}],' \
               '"max_tokens":12}}\n'
        bad = '{"custom_id":"bad","method":"POST","url":"/v1/chat/completions","body":{"max_tokens":12}}\n'
        self.jobs.write_text("".join(line % (i, i) for i in range(n)) + bad, encoding="utf-8")

    def read(self):
        samples, types = parse(self.file.read_text(encoding="utf-8"))
        self.check(all(dict(labels).get("out") == str(self.out) for _, labels in samples), "a sample without its label out")
        plain = {name: value for (name, labels), value in samples.items() if len(labels) == 1}
        plain.update({dict(labels)["state"]: value for (_, labels), value in samples.items() if len(labels) == 2})
        return plain, types

    def run(self, *more):
        done = subprocess.run([*self.command, *more], capture_output=True, text=True, timeout=100)
        return done, json.loads(done.stdout)


def check_a_run(bench):
    """Looks at the file as often as it can while the run goes on."""
    process = subprocess.Popen([*bench.command, "--metrics", bench.file], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    seen, last = 0, {}
    while process.poll() is None:
        if bench.file.exists():
            now, types = bench.read()
            seen += now[FINISHED] == 0
            back = [n for n, kind in types.items() if kind == "counter" and now[n] < last.get(n, 0)]
            bench.check(not back, f"counters went back: {back}")
            bench.check(now["done"] + now["failed"] + now["pending"] == 31, f"the jobs do not add up: {now}")
            last = now
        time.sleep(0.002)
    summary = json.loads(process.communicate()[0])
    now, _ = bench.read()
    bench.check(seen > 0, "the file was never seen while the run went on")
    bench.check(process.returncode == 1 and summary["failed"] == 1, f"exit {process.returncode}: {summary}")
    expected = {"done": 30, "failed": 1, "pending": 0, "tandem_jobs_in_flight": 0, "tandem_tokens_total": summary["tokens"],
                "tandem_cached_tokens_total": summary["cached_tokens"], "tandem_rank_restarts_total": summary["rank_restarts"],
                "tandem_deadline_timestamp_seconds": 0, FINISHED: 1, "tandem_exit_status": 1}
    for name, value in expected.items():
        bench.check(now[name] == value, f"{name} is {now[name]} instead of {value}")
    age = time.time() - now["tandem_start_timestamp_seconds"]
    bench.check(0 <= age < 1000 and now["tandem_last_update_timestamp_seconds"] >= now["tandem_start_timestamp_seconds"],
                f"the times are wrong: {now}")


def check_what_leaves_it_alone(bench):
    before = bench.file.read_bytes()
    now = datetime.datetime.now()
    window = "-".join((now + datetime.timedelta(hours=h)).strftime("%H:%M") for h in (2, 3))
    done, _ = bench.run("--metrics", bench.file, "--window", window)
    bench.check(done.returncode == 75 and bench.file.read_bytes() == before, "a run outside its window changed the file")
    with open(f"{bench.out}.state/lock", "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done, _ = bench.run("--metrics", bench.file)
    bench.check(done.returncode == 75 and bench.file.read_bytes() == before, "a run beside another one changed the file")


def check_ends(bench):
    done, _ = bench.run("--metrics", bench.file, "--deadline", "2026-01-02T06:00:00Z")
    now, _ = bench.read()
    bench.check(done.returncode == 1 and now["tandem_deadline_timestamp_seconds"] == 1767333600 and now["tandem_tokens_total"] == 0,
                f"nothing to do after a deadline: exit {done.returncode}, {now}")
    bench.jobs.write_text("{\n", encoding="utf-8")
    done, _ = bench.run("--metrics", bench.file)
    now, _ = bench.read()
    bench.check(done.returncode == 65 and now["tandem_exit_status"] == 65 and now[FINISHED] == 1, f"a bad line: {now}")


def check_failures(bench):
    bench.write_jobs(40)
    done, summary = bench.run("--metrics", bench.file.parent / "missing" / "tandem.prom", "--quiet")
    bench.check(done.returncode == 1 and summary["done"] == 40, f"a missing folder: exit {done.returncode}: {done.stderr}")
    bench.check(done.stderr.count("\n") == 1 and "going on without metrics: " in done.stderr, f"not one warning: {done.stderr!r}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tandem", required=True)
    parser.add_argument("--write-tiny", required=True)
    parser.add_argument("--model", help="not used")
    options = parser.parse_args()
    selftest()
    with tempfile.TemporaryDirectory(prefix="tandem-metrics-") as folder:
        model = pathlib.Path(folder, "tiny.gguf")
        subprocess.run([options.write_tiny, model], check=True)
        bench = Bench(options.tandem, folder, model)
        bench.write_jobs(30)
        check_a_run(bench)
        check_what_leaves_it_alone(bench)
        check_ends(bench)
        check_failures(bench)
        left = [p.name for p in pathlib.Path(folder).iterdir() if p.suffix == ".tmp"]
        bench.check(not left, f"left behind: {left}")
    for line in bench.found:
        print(line)
    return 1 if bench.found else 0


if __name__ == "__main__":
    sys.exit(main())
