"""What the fault tests share: a job file, runs of tandem, records without what may differ, and the hunt for leftovers."""
import argparse
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

SKIPPED = 77
UNAVAILABLE = 69
TOPICS = ["the sea", "old maps", "a clock tower", "bread", "winter birds", "a lighthouse", "rivers", "copper", "sleep",
          "gardens", "railways", "paper"]


def arguments(description, **more):
    """--tandem, --model, the backend and what `more` names (name=default); leaves with 77 when there is no model."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--tandem", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--backend", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--gpus", default="", help="as tandem's own: the card of every rank")
    parser.add_argument("--seed", type=int, default=20240611)
    for name, default in more.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    args = parser.parse_args()
    if not args.model or not (args.model.startswith("synth:") or os.path.exists(args.model)):
        print("no model: skipped")
        sys.exit(SKIPPED)
    args.tandem = os.path.abspath(args.tandem)
    if not args.model.startswith("synth:"):
        args.model = os.path.abspath(args.model)
    return args


def write_jobs(path, count, most_tokens):
    """Greedy and sampled jobs of different lengths, none of which depends on another."""
    with open(path, "w", encoding="utf-8") as f:
        for i in range(count):
            body = {"messages": [{"role": "user", "content": f"Write about {TOPICS[i % len(TOPICS)]}, part {i}."}],
                    "max_tokens": most_tokens // 2 + (i * 7) % (most_tokens // 2) + 1}
            body["temperature"] = 0 if i % 2 == 0 else 0.9
            if i % 2:
                body["seed"] = 100 + i
            f.write(json.dumps({"custom_id": f"job-{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}) +
                    "\n")


def write_document_jobs(path, chance, count, documents):
    """Jobs of which every documents-th asks about the same text, of some hundred tokens."""
    words = "the of a pump valve reads opens closes before after seven night report shows that every second line was empty".split()
    texts = [" ".join(chance.choice(words) for _ in range(240 + 20 * d)) + "." for d in range(documents)]
    jobs = []
    for i in range(count):
        body = {"messages": [{"role": "user", "content": f"{texts[i % documents]}\n\nQuestion {i}: what is seen first?"}],
                "max_tokens": 24 + i, "temperature": 0.8 if i % 3 else 0}
        jobs.append({"custom_id": f"job-{i}", "method": "POST", "url": "/v1/chat/completions", "body": body})
    pathlib.Path(path).write_text("".join(json.dumps(job) + "\n" for job in jobs), encoding="utf-8")


class Failure(Exception):
    pass


def check(condition, text):
    if not condition:
        raise Failure(text)


class Run:
    """One tandem process. Its standard error goes to a file, so that a full pipe never stops it."""

    def __init__(self, command, log, **popen):
        self.log = pathlib.Path(log)
        with open(self.log, "wb") as f:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=f, **popen)
        self.pid = self.process.pid

    def wait(self, timeout=300):
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise Failure(f"did not end within {timeout} s:\n{self.stderr()}") from None

    def kill(self, number=signal.SIGKILL):
        try:
            self.process.send_signal(number)
        except ProcessLookupError:
            pass

    def stderr(self):
        return self.log.read_text(errors="replace")


class Bench:
    """A temporary folder with a job file, and the command line that all runs share."""

    def __init__(self, args, jobs, tokens, extra=()):
        self.args = args
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="tandem-fault-"))
        self.jobs = self.folder / "jobs.jsonl"
        self.extra = ["--backend", args.backend, *(["--gpus", args.gpus] if args.gpus else []), *extra]
        self.count = 0
        write_jobs(self.jobs, jobs, tokens)

    def close(self):
        shutil.rmtree(self.folder, ignore_errors=True)

    def fresh(self):
        """A name for an output that is not there yet."""
        self.count += 1
        return self.folder / f"out{self.count}"

    def start(self, out, *options, **popen):
        command = [self.args.tandem, "run", str(self.jobs), "--model", self.args.model, "--out", str(out), "--trace"]
        self.count += 1
        return Run(command + self.extra + list(options), self.folder / f"log{self.count}", **popen)

    def finish(self, out, *options, expect=0, timeout=300):
        run = self.start(out, *options)
        status = run.wait(timeout)
        if self.args.backend == "cuda" and status == UNAVAILABLE and "no_gpu:" in run.stderr():
            print(f"SKIPPED: no CUDA device\n{run.stderr()}")
            sys.exit(SKIPPED)
        check(status == expect, f"exit {status} instead of {expect}:\n{run.stderr()}")
        no_leftovers(run.pid)
        return run

    def undisturbed(self):
        """A finished run with traces, to compare with, and the seconds that it took."""
        out = self.fresh()
        start = time.monotonic()
        self.finish(out)
        took = time.monotonic() - start
        has_traces(out)
        return out, took

    def status(self, out):
        done = subprocess.run([self.args.tandem, "status", str(out), "--json"], capture_output=True, check=False)
        return json.loads(done.stdout) if done.returncode == 0 and done.stdout else None


def lines(out, name):
    path = pathlib.Path(out) / name
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def records(out):
    """Output and error records in file order, without the time of their making."""
    found = []
    for name in ("output.jsonl", "error.jsonl"):
        for line in lines(out, name):
            record = json.loads(line)
            body = (record.get("response") or {}).get("body")
            if isinstance(body, dict):
                body.pop("created", None)
            found.append((name, json.dumps(record, sort_keys=True)))
    return found


def timings(out):
    return [json.loads(line) for line in lines(out, "timing.jsonl")]


def same(out, reference, what):
    found, expected = records(out), records(reference)
    if found == expected:
        return
    ids = [json.loads(r)["custom_id"] for _, r in found]
    check(len(ids) == len(set(ids)), f"{what}: a record is doubled: {ids}")
    check(len(found) == len(expected), f"{what}: {len(found)} records instead of {len(expected)}")
    for (_, a), (_, b) in zip(found, expected):
        check(a == b, f"{what}: differs\n  {a[:1500]}\n  {b[:1500]}")


def has_traces(out):
    for line in lines(out, "output.jsonl"):
        body = json.loads(line)["response"]["body"]
        check(len(body.get("tandem_trace") or []) == body["usage"]["completion_tokens"], "a record has no trace")


def whole(out):
    """The folder, if it is there, is a complete archive: its manifest agrees with every member."""
    if not pathlib.Path(out).exists():
        return
    manifest = json.loads((pathlib.Path(out) / "manifest.json").read_text())
    for member in manifest["members"]:
        data = (pathlib.Path(out) / member["name"]).read_bytes()
        check(len(data) == member["bytes"], f"{member['name']} has another length than its manifest says")
        check(hashlib.sha256(data).hexdigest() == member["sha256"], f"{member['name']} is not what its manifest says")


def ranks_of(runner):
    """(pid, group, rank) of the living rank processes that this runner started, whoever is their parent now."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            words = pathlib.Path("/proc", entry, "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if len(words) > 2 and words[1] == "rank" and "--runner" in words:
            value = dict(zip(words[2::2], words[3::2]))
            if value.get("--runner") == str(runner):
                found.append((int(entry), int(value["--group"]), int(value["--rank"])))
    return sorted(found, key=lambda x: x[1:])


def wait_for_work(run, state, n_ranks, gone=frozenset()):
    """Until ranks other than those that are gone have jobs: an attempt is committed before its job leaves. Their processes."""
    data, since, ranks = pathlib.Path(state) / "data.mdb", None, []
    until = time.monotonic() + 120
    while run.process.poll() is None and time.monotonic() < until:
        if since is None:
            ranks = [pid for pid, _, _ in ranks_of(run.pid)]
            if len(ranks) == n_ranks and not gone & set(ranks):
                since = data.stat().st_mtime_ns
        elif data.stat().st_mtime_ns != since:
            break
        time.sleep(0.01)
    return set(ranks)


def no_leftovers(runner, within=5.0):
    """No rank lives on, and with the ranks their memfd is gone; nothing was put into /dev/shm either."""
    until = time.monotonic() + within
    while ranks_of(runner):
        check(time.monotonic() < until, f"ranks of {runner} live on: {ranks_of(runner)}")
        time.sleep(0.02)
    left = [n for n in os.listdir("/dev/shm") if "tandem" in n] if os.path.isdir("/dev/shm") else []
    check(not left, f"left in /dev/shm: {left}")


def restarts_logged(run):
    return len(re.findall(r"group \d+ lost its ranks: ", run.stderr()))


def main(test, bench_of):
    """Runs test(bench); prints what failed and leaves with 1."""
    bench = bench_of()
    try:
        test(bench)
    except Failure as failure:
        print(f"FAILED: {failure}")
        sys.exit(1)
    finally:
        bench.close()
    print("passed")
