"""kill -9 of the runner and of ranks, now and then a TERM or a stopped rank, at random moments, --kills times; the runner is
started again whenever it ended. A run that finishes in between is compared and another begins on what its cache left. At the
end: the texts of an undisturbed run, every custom_id once, and nothing left: no process, memory, lock or file.

--seed: the same draws again; what they hit depends on the machine."""
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import time

import fault_lib as lib
from prefix_cache import Comparison

JOBS, DOCUMENTS = 40, 8
# Kills are nobody's fault here, and a stopped rank must be found soon.
PATIENT = ["--job-failures", "1000", "--restarts", "1000", "--grace", "0.5", "--cache-gib", "1", "--cache-free-gib", "0",
           "--collective-timeout", "1", "--lockstep-timeout", "1.5", "--watchdog", "2"]
# Whom, with what, and how often of 20.
STROKES = [("runner", signal.SIGKILL, 7), ("rank 0", signal.SIGKILL, 5), ("rank 1", signal.SIGKILL, 5),
           ("runner", signal.SIGTERM, 2), ("a rank", signal.SIGSTOP, 1)]
STATE_FILES = {"id", "lock", "lock.mdb", "data.mdb"}


class Storm:
    def __init__(self, bench, chance):
        self.bench, self.chance = bench, chance
        self.cache = bench.folder / "cache"
        self.kills = self.at_work = self.finished = self.told = 0
        self.by_kind = {}
        start = time.monotonic()
        self.comparison = Comparison(bench)
        self.within = bench.args.within * (time.monotonic() - start)
        self.next_output()

    def next_output(self):
        self.out = self.bench.fresh()
        self.attempts = self.ended = 0
        if self.finished % 3 == 2:  # cold again
            shutil.rmtree(self.cache, ignore_errors=True)

    def start(self):
        """With checkpoints all the time, now and then, or never."""
        return self.bench.start(self.out, "--cache", str(self.cache), "--checkpoint", self.chance.choice(["0.1", "60", "0"]), *PATIENT)

    def in_flight(self, run):
        """Jobs that this life of the runner started and neither ended nor took back from lost ranks, from its state afterwards."""
        status = self.bench.status(self.out)
        if status is None:  # killed before there was a state
            return 0
        ended = status["done"] + status["failed"]
        lib.check(ended >= self.ended, f"{ended} jobs are done, {self.ended} were")
        taken_back = sum(int(n) for n in re.findall(r"; (\d+) jobs go back", run.stderr()))
        left = status["attempts"] - self.attempts - (ended - self.ended) - taken_back
        self.attempts, self.ended = status["attempts"], ended
        return left

    def strike(self, run):
        """One stroke; True when it ended the runner or is about to."""
        whom, number, _ = self.chance.choices(STROKES, [s[2] for s in STROKES])[0]
        if whom == "runner":
            run.kill(number)
        else:
            ranks = lib.ranks_of(run.pid)
            wanted = self.chance.randrange(2) if whom == "a rank" else int(whom[-1])
            victims = [pid for pid, _, rank in ranks if rank == wanted]
            if not victims:
                return False
            try:
                os.kill(victims[0], number)
            except ProcessLookupError:
                return False
        self.kills += 1
        kind = f"{signal.Signals(number).name} of {whom}"
        self.by_kind[kind] = self.by_kind.get(kind, 0) + 1
        return whom == "runner"

    def life(self):
        """From one start of the runner to its end."""
        run, ranks = self.start(), set()
        while self.kills < self.bench.args.kills and run.process.poll() is None:
            # A third of them at any time, while it loads as well; the others among the answers.
            if self.chance.randrange(3):
                ranks |= lib.wait_for_work(run, f"{self.out}.state", 2, ranks)
            # Most are soon, some leave time to get on.
            time.sleep(5 * self.within * self.chance.random() ** 4)
            if run.process.poll() is None and self.strike(run):
                break
        status = run.wait(600)
        lib.no_leftovers(run.pid)
        lib.check(status in (0, 75, -signal.SIGKILL, -signal.SIGTERM), f"exit {status}:\n{run.stderr()}")
        lost = re.findall(r"; (\d+) jobs go back", run.stderr())
        self.at_work += sum(int(n) > 0 for n in lost)
        left = self.in_flight(run)
        if status < 0:
            self.at_work += left > 0
        elif status == 75:
            self.at_work += 1
        if status == 0:
            self.end_of_run()

    def end_of_run(self):
        self.comparison.same(self.out, f"after {self.kills} kills")
        lib.check(not lib.lines(self.out, "error.jsonl"), "an error record")
        self.nothing_left()
        self.finished += 1
        self.last = self.out
        self.next_output()

    def nothing_left(self):
        """What a finished run may leave: its archive, its state, its cache."""
        state = pathlib.Path(f"{self.out}.state")
        extra = {str(p.relative_to(state)) for p in state.rglob("*") if p.is_file()} - STATE_FILES
        lib.check(not extra, f"left in the state: {extra}")
        logs = re.compile(r"log\d+$")
        known = {"jobs.jsonl", "cache", "nowhere", *(f"out{i}" + end for i in range(self.bench.count + 1) for end in ("", ".state"))}
        extra = {p.name for p in self.bench.folder.iterdir() if p.name not in known and not logs.match(p.name)}
        lib.check(not extra, f"left beside the archive: {extra}")
        lib.check(not os.listdir(self.bench.folder / "nowhere"), "a file in the working folder or TMPDIR")
        self.cache_whole()

    def cache_whole(self):
        """Every file is one that the index knows, of the right bytes."""
        done = subprocess.run([self.bench.args.tandem, "cache", "verify", str(self.cache)], capture_output=True, text=True, check=False)
        lib.check(done.returncode == 0, f"cache verify: {done.returncode}\n{done.stdout}{done.stderr}")
        for rank in self.cache.iterdir():
            extra = [p.name for p in rank.iterdir() if p.name not in ("lock", "index.mdb", "index.mdb-lock") and
                     not re.fullmatch(r"[0-9a-f]{16}\.(kv|state)", p.name)]
            lib.check(not extra, f"left in {rank}: {extra}")
        done = subprocess.run([self.bench.args.tandem, "cache", "stat", str(self.cache), "--json"], capture_output=True, text=True, check=True)
        known = sum(rank["bytes"] for rank in json.loads(done.stdout).values())
        there = sum(p.stat().st_size for p in self.cache.rglob("*") if p.suffix in (".kv", ".state"))
        lib.check(known == there, f"the cache's files have {there} bytes, its index says {known}")


def locks_on(folder):
    """Locks that anybody holds on a file below folder."""
    inodes = {p.stat().st_ino for p in folder.rglob("*") if p.is_file()}
    return [line for line in pathlib.Path("/proc/locks").read_text().splitlines() if int(line.split()[-3].split(":")[2]) in inodes]


def processes_in(folder):
    """Living processes, of whatever kind, that were started there; shared memory without a name lives with them."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if int(entry.name) != os.getpid() and os.readlink(entry / "cwd") == str(folder):
                found.append((entry / "cmdline").read_bytes())
        except OSError:
            pass
    return found


def strays():
    """What tandem could have left there; tests begin their names with tandem-."""
    return {name for name in os.listdir("/tmp") if name.lstrip(".").startswith("tandem") and not name.startswith("tandem-")}


def test(bench):
    print(f"seed {bench.args.seed}", flush=True)
    chance = random.Random(bench.args.seed)
    lib.write_document_jobs(bench.jobs, chance, JOBS, DOCUMENTS)
    nowhere = bench.folder / "nowhere"
    nowhere.mkdir()
    os.environ["TMPDIR"] = str(nowhere)
    os.chdir(nowhere)
    before = strays()
    storm, start = Storm(bench, chance), time.monotonic()
    while storm.kills < bench.args.kills:
        storm.life()
        if storm.kills // 100 > storm.told:
            storm.told = storm.kills // 100
            print(f"{storm.kills} kills, {storm.at_work} at work, {storm.finished} runs", flush=True)
    took = time.monotonic() - start
    if storm.attempts or not storm.finished:
        storm.life()  # nobody strikes any more
        lib.check(not storm.attempts, "the last run did not end")
    out = storm.last
    archive = {p.name: p.read_bytes() for p in out.iterdir()}
    bench.finish(out, "--cache", str(storm.cache), *PATIENT)
    lib.check(archive == {p.name: p.read_bytes() for p in out.iterdir()}, "a run with nothing to do changed the archive")
    lib.check(not locks_on(bench.folder), f"locks: {locks_on(bench.folder)}")
    lib.check(not processes_in(nowhere), f"processes: {processes_in(nowhere)}")
    lib.check(strays() <= before, f"left in /tmp: {strays() - before}")
    print(f"{storm.kills} kills in {took:.0f} s, {storm.at_work} of them struck running jobs; {storm.finished} runs finished among them")
    print(", ".join(f"{n} {kind}" for kind, n in sorted(storm.by_kind.items())), flush=True)
    lib.check(storm.at_work >= bench.args.kills * 2 // 5, "too few kills struck a running job")


if __name__ == "__main__":
    # within: when a stroke falls after its occasion, on average, of an undisturbed run's time.
    arguments = lib.arguments(__doc__, kills=40, within=0.04)
    lib.main(test, lambda: lib.Bench(arguments, jobs=1, tokens=24))
