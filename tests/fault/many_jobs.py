#!/usr/bin/env python3
"""A million job lines of about 1,000 tokens: validated, planned and queued, asked about, and run again with nothing to do.

Queued means registered in the state, put in order and ready for ranks: a run whose deadline has passed does all of that and then
starts none. fill_state answers the jobs. Limits for a million jobs: 512 MiB for check, plan and queueing and 15 minutes for plan and
queueing together, 60 s for the run with nothing to do, a second for status. Time is the processor's, which others on the machine do not
lengthen; time on the clock is printed beside it. Memory of runs over answered jobs is printed only: it is the file of the state,
mapped, which the kernel takes back when it likes.

Where the disk is too small there are fewer jobs, and that is said.

usage: many_jobs.py --tandem PROGRAM --fill PROGRAM --model MODEL [--jobs N]
"""
import argparse
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time

LINE_BYTES = 4200
JOB_BYTES = 8000  # the line, its answer in the state with a page to spare, the archive
HEAD_JOBS = 8     # that share a document
WORDS = ("the report of a night says that every ship in harbour waited until rain had passed over hills and farms then sailed with "
         "grain wood iron copper salt cloth paper glass to ports along coast where people bought sold counted wrote letters about "
         "prices weather journeys storms losses gains friends enemies children houses roads bridges mills fields rivers").split()
PAST = "2020-01-01T00:00:00Z"


def write_jobs(path, n):
    rng = random.Random(7)
    sentences = [" ".join(rng.choice(WORDS) for _ in range(60)) + "." for _ in range(4000)]
    with open(path, "w", buffering=1 << 20, encoding="ascii") as out:
        for i in range(n):
            if i % HEAD_JOBS == 0:
                document = " ".join(rng.choice(sentences) for _ in range(9))[:2900]
            question = " ".join(rng.choice(sentences) for _ in range(4))[:LINE_BYTES - 3150]
            body = {"messages": [{"role": "user", "content": f"{document} Question {i}: {question}"}], "max_tokens": 64, "temperature": 0}
            out.write(json.dumps({"custom_id": f"job-{i:07d}", "method": "POST", "url": "/v1/chat/completions", "body": body}) + "\n")


class Measured:
    """One finished command: status, output, seconds on the clock, of the processor, and its largest memory in MiB."""

    def __init__(self, name, command):
        start = time.monotonic()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = subprocess.Popen(command, stdout=out, stderr=err)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = self.status = os.waitstatus_to_exitcode(status)
            out.seek(0), err.seek(0)
            self.stdout, self.stderr = out.read().decode(), err.read().decode()
        self.wall_s = time.monotonic() - start
        self.cpu_s = usage.ru_utime + usage.ru_stime
        self.mib = usage.ru_maxrss / 1024
        print(f"{name}: {self.wall_s:.1f} s, {self.cpu_s:.1f} s of the processor, {self.mib:.0f} MiB", flush=True)


def jobs_that_fit(folder, wanted):
    free = shutil.disk_usage(folder).free
    n = min(wanted, max(0, free - (4 << 30)) // JOB_BYTES)
    if n < wanted:
        print(f"{free >> 30} GiB are free in {folder}: {n} jobs instead of {wanted}")
    return n


class Test:
    def __init__(self, options, folder):
        self.tandem, self.fill, self.model = options.tandem, options.fill, options.model
        self.jobs, self.out = folder / "jobs.jsonl", folder / "out.tar.zst"
        self.state = folder / "out.tar.zst.state"
        self.n = jobs_that_fit(folder, options.jobs)
        self.share = self.n / 1e6
        self.wrong = []

    def expect(self, what, good):
        if not good:
            self.wrong.append(what)

    def within(self, what, measured, limit):
        self.expect(f"{what}: {measured:.1f}, more than {limit:.1f}", measured <= limit)

    def run(self, name):
        return Measured(name, [self.tandem, "run", self.jobs, "--model", self.model, "--backend", "cpu", "--out", self.out, "--deadline", PAST])

    def status(self, done):
        got = Measured("status", [self.tandem, "status", self.out, "--json"])
        counts = json.loads(got.stdout or "{}")
        self.expect(f"status says {counts}", counts.get("jobs") == self.n and counts.get("done") == done)
        self.within("seconds of status", got.cpu_s, 1)

    def queue(self):
        check = Measured("check", [self.tandem, "check", self.jobs])
        plan = Measured("plan", [self.tandem, "plan", self.jobs, "--model", self.model, "--json"])
        queued = self.run("queue")
        self.expect(f"check: {check.status}, plan: {plan.status}, queue: {queued.status}: {queued.stderr}",
                    (check.status, plan.status, queued.status) == (0, 0, 75))
        said = json.loads(plan.stdout or "{}")
        print({key: value for key, value in said.items() if key != "heads"})
        self.expect(f"plan: {said}", said.get("would_run") == self.n and said.get("saved_tokens", 0) > said.get("prompt_tokens", 0) / 3)
        for name, got in (("check", check), ("plan", plan), ("queue", queued)):
            self.within(f"MiB of {name}", got.mib, 512)
        self.within("seconds of plan and queue", plan.cpu_s + queued.cpu_s, 900 * self.share)
        self.status(0)

    def again(self):
        filled = Measured("fill", [self.fill, self.state])
        self.expect(f"fill: {filled.stderr}", filled.status == 0)
        first = self.run("archive")
        self.expect(f"archive: {first.status}: {first.stderr}", first.status == 0)
        before = [(path.stat().st_mtime_ns, path.stat().st_ino) for path in (self.out, self.state / "data.mdb")]
        got = []
        thread = threading.Thread(target=lambda: got.append(self.run("again")))
        thread.start()
        while thread.is_alive():
            self.status(self.n)
            time.sleep(5)
        thread.join()
        self.expect(f"again: {got[0].status}: {got[0].stderr}", got[0].status == 0)
        self.within("seconds of the run with nothing to do", got[0].cpu_s, 60 * self.share)
        after = [(path.stat().st_mtime_ns, path.stat().st_ino) for path in (self.out, self.state / "data.mdb")]
        self.expect("archive or state were written again", before == after)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tandem", required=True)
    parser.add_argument("--fill", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--jobs", type=int, default=1000000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-many-") as folder:
        test = Test(options, pathlib.Path(folder))
        if test.n < 1000:
            print("the disk is full")
            return 77
        write_jobs(test.jobs, test.n)
        print(f"{test.n} jobs, {test.jobs.stat().st_size >> 20} MiB", flush=True)
        test.queue()
        test.again()
    print(*test.wrong, sep="\n")
    return 1 if test.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
