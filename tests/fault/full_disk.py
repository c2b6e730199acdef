"""A disk that fills up while a run works: exit 74, a message that names the path, nothing lost; with room again the same command
completes, with the same texts. Small file systems in memory, in a mount namespace of this test alone; skipped where there can be
none.

What fills up: the state's disk (its commits, its checkpoints), the cache's (the store), the output's (the archive), and each before
the run begins."""
import ctypes
import os
import pathlib
import random
import sys
import time

import fault_lib as lib
from prefix_cache import Comparison

CLONE_NEWNS, CLONE_NEWUSER, MS_REC, MS_PRIVATE = 0x20000, 0x10000000, 0x4000, 1 << 18
SMALL_MIB, JOBS, DOCUMENTS = 32, 24, 6
NO_CACHE_FLOOR = ["--cache-free-gib", "0", "--cache-gib", "1"]
libc = ctypes.CDLL(None, use_errno=True)


def own_mounts():
    """From here on this process and its children see mounts that nobody else does. False: not allowed."""
    user, group = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWNS) != 0:
        if libc.unshare(CLONE_NEWNS | CLONE_NEWUSER) != 0:
            return False
        try:
            pathlib.Path("/proc/self/setgroups").write_text("deny")
            pathlib.Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            pathlib.Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        except OSError:
            return False
    return libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0


class Disk:
    """A file system of some MiB."""

    mounted = []

    def __init__(self, folder, mib=SMALL_MIB):
        self.folder = folder
        folder.mkdir()
        if libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, f"size={mib}m,mode=700".encode()) != 0:
            print(f"no mount of a tmpfs: {os.strerror(ctypes.get_errno())}: skipped")
            sys.exit(lib.SKIPPED)
        Disk.mounted.append(self)

    def fill(self, leave=0):
        with open(self.folder / "ballast", "ab", buffering=0) as f:
            while True:
                at = os.statvfs(self.folder)
                left = at.f_bavail * at.f_frsize - leave
                if left <= 0:
                    return
                try:
                    f.write(bytes(min(left, 1 << 20)))
                except OSError:
                    return

    def make_room(self):
        (self.folder / "ballast").unlink()

    def close(self):
        libc.umount2(str(self.folder).encode(), 2)
        Disk.mounted.remove(self)


def wait_for(run, what, condition):
    until = time.monotonic() + 120
    while time.monotonic() < until and run.process.poll() is None:
        if condition():
            return
        time.sleep(0.01)
    raise lib.Failure(f"{what} was not to be seen:\n{run.stderr()}")


def ended_by_the_disk(run, path, what):
    status = run.wait()
    lib.no_leftovers(run.pid)
    lib.check(status == 74, f"{what}: exit {status} instead of 74:\n{run.stderr()}")
    lib.check(str(path) in run.stderr(), f"{what}: the message does not name {path}:\n{run.stderr()}")
    print(f"{what}: {run.stderr().splitlines()[-1]}", flush=True)


class Case:
    """A run of which one part lies on a small disk; all other parts do not."""

    def __init__(self, bench, comparison, name):
        self.bench, self.comparison = bench, comparison
        self.out, self.options = bench.fresh(), []
        self.disk = Disk(bench.folder / f"disk-{name}-{bench.count}")
        if name == "state":
            self.options = ["--state", str(self.disk.folder / "state"), "--checkpoint", "0"]
        elif name == "checkpoint":
            self.options = ["--state", str(self.disk.folder / "state"), "--checkpoint", "0.1"]
        elif name == "cache":
            self.options = ["--cache", str(self.disk.folder / "cache"), *NO_CACHE_FLOOR]
        else:
            self.out, self.options = self.disk.folder / "out", ["--state", f"{self.out}.state"]

    def start(self):
        return self.bench.start(self.out, *self.options)

    def done(self):
        where = self.options[1] if "--state" in self.options else f"{self.out}.state"
        return (self.bench.status(where) or {}).get("done", 0)

    def completes(self, what):
        before = self.done()
        self.disk.make_room()
        lib.check(self.done() >= before, f"{what}: results are gone")
        self.bench.finish(self.out, *self.options)
        self.comparison.same(self.out, f"{what}, with room again")
        lib.check(all(t["rank_restarts"] <= 1 for t in lib.timings(self.out)), f"{what}: the ranks were started again and again")
        self.disk.close()


def before_the_run(bench, comparison):
    """No room from the beginning, or not enough to begin: nothing runs."""
    for name in ("state", "cache", "out"):
        for leave in (0, 200 << 10):
            if name == "cache" and leave:
                continue  # room enough for an index
            case = Case(bench, comparison, name)
            case.disk.fill(leave)
            run = case.start()
            ended_by_the_disk(run, case.disk.folder, f"{name} full from the beginning, {leave} bytes left")
            lib.check(not case.done(), "a job was run")
            case.completes(f"{name} full from the beginning")


def state_fills(bench, comparison):
    case = Case(bench, comparison, "state")
    run = case.start()
    wait_for(run, "an answer", lambda: case.done() >= 1)
    case.disk.fill()
    ended_by_the_disk(run, case.disk.folder, "state")
    lib.whole(case.out)
    lib.check(1 <= case.done() < len(lib.records(comparison.reference)), "the disk was not full in the middle")
    again = case.start()
    ended_by_the_disk(again, case.disk.folder, "state, still full")
    case.completes("state")


def checkpoints_fill(bench, comparison):
    case = Case(bench, comparison, "checkpoint")
    run = case.start()
    wait_for(run, "a checkpoint", lambda: list((case.disk.folder / "state" / "checkpoints").glob("*")))
    case.disk.fill()
    ended_by_the_disk(run, case.disk.folder / "state", "checkpoint")
    lib.whole(case.out)
    case.completes("checkpoint")


def cache_fills(bench, comparison):
    case = Case(bench, comparison, "cache")
    run = case.start()
    wait_for(run, "a payload file", lambda: list(case.disk.folder.rglob("*.kv")))
    case.disk.fill()
    ended_by_the_disk(run, case.disk.folder / "cache", "cache")
    lib.check("store_disk_full" in run.stderr() and lib.restarts_logged(run) == 1, f"not given up at once:\n{run.stderr()}")
    lib.whole(case.out)
    case.completes("cache")


def archive_fills(bench, comparison):
    """The disk of the output takes the preflight's least, and not the archive."""
    case = Case(bench, comparison, "out")
    run = case.start()
    wait_for(run, "an answer", lambda: case.done() >= 1)
    case.disk.fill()
    ended_by_the_disk(run, case.out, "archive")
    lib.check(sorted(p.name for p in case.disk.folder.iterdir()) == ["ballast"], "something unfinished was left")
    lib.check(case.done() == len(lib.records(comparison.reference)), "the answers are not in the state")
    case.completes("archive")


def test(bench):
    if not own_mounts():
        print("no mounts of one's own: skipped")
        sys.exit(lib.SKIPPED)
    lib.write_document_jobs(bench.jobs, random.Random(bench.args.seed), JOBS, DOCUMENTS)
    comparison = Comparison(bench)
    try:
        state_fills(bench, comparison)
        checkpoints_fill(bench, comparison)
        cache_fills(bench, comparison)
        archive_fills(bench, comparison)
        before_the_run(bench, comparison)
    finally:
        for disk in list(Disk.mounted):
            disk.close()


if __name__ == "__main__":
    arguments = lib.arguments(__doc__)
    lib.main(test, lambda: lib.Bench(arguments, jobs=1, tokens=24))
