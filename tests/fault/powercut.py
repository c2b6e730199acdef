#!/usr/bin/env python3
"""Power cuts at every call by which `tandem run` changes its folder.

A run is recorded (powercut.c), on a tiny model. For each call, the folder is rebuilt as the disk could hold it if the power
had failed right after (powercut_log.py): nothing that was not synced, everything, or random parts. From each rebuild the
same command must end with 0 and give the archive of an undisturbed run; a job that was reported as done before the cut,
by the run itself or by `tandem status`, must not be computed again: its timing record is still the first one. Three
stories: a first run; a run over a grown job file that replaces an older archive; one whose process really dies at the
n-th call, again and again.

usage: powercut.py --tandem PROGRAM --shim LIBRARY --write-model PROGRAM [--cuts N] [--subsets N] [--deaths N]
"""
import argparse
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile

import fault_lib as lib
import powercut_log as pc

# Other processes' faults are not what is tested: no job may end as an error record because the power failed often.
OPTIONS = ["--trace", "--ranks", "2", "--threads", "1", "--job-failures", "1000"]


class Scene:
    """A scratch folder: the tiny model, job files, and the one folder (`disk`) that the power cuts hit."""

    def __init__(self, args, root, suffix):
        self.args, self.root, self.suffix = args, pathlib.Path(root), suffix
        self.model = self.root / "tiny.gguf"
        subprocess.run([args.write_model, str(self.model)], check=True)
        self.few, self.all = self.root / "few.jsonl", self.root / "all.jsonl"
        lib.write_jobs(self.few, 3, 8)
        lib.write_jobs(self.all, 6, 8)
        self.log = self.root / "log"

    def run(self, jobs, disk, die_at=None):
        """`tandem run`, recorded if die_at is given (0: lives). Returns exit status and standard error."""
        env = dict(os.environ)
        if die_at is not None:
            pc.log_create(self.log)
            env.update(LD_PRELOAD=self.args.shim, POWERCUT_FOLDER=os.path.realpath(disk), POWERCUT_LOG=str(self.log),
                       POWERCUT_DIE_AT=str(die_at))
        done = subprocess.run([self.args.tandem, "run", str(jobs), "--backend", "cpu", "--model", str(self.model), "--out",
                               str(disk / f"out{self.suffix}")] + OPTIONS,
                              env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
        return done.returncode, done.stderr.decode(errors="replace")

    def members(self, disk):
        """The members of the archive, {} when there is none; a damaged one is a failure."""
        out = disk / f"out{self.suffix}"
        if not out.exists():
            return {}
        if out.is_file():
            shutil.unpack_archive(out, self.root / "unpacked")
            out = self.root / "unpacked"
        lib.whole(out)
        found = {p.name: p.read_text(encoding="utf-8") for p in out.iterdir()}
        shutil.rmtree(self.root / "unpacked", ignore_errors=True)
        return found

    def reported(self, disk):
        """How many jobs `tandem status` calls done in this folder."""
        done = subprocess.run([self.args.tandem, "status", str(disk / f"out{self.suffix}.state"), "--json"],
                              capture_output=True, timeout=60)
        return json.loads(done.stdout)["done"] if done.returncode == 0 and done.stdout else 0


def answers(members):
    """Records without the time of their making, which alone differs between two runs."""
    found = []
    for name in ("output.jsonl", "error.jsonl"):
        for line in members[name].splitlines():
            record = json.loads(line)
            if isinstance((record.get("response") or {}).get("body"), dict):
                record["response"]["body"].pop("created", None)
            found.append(json.dumps(record, sort_keys=True))
    return found


def said_done(records):
    """The largest number of finished jobs that the program spoke of."""
    text = b"".join(r.data for r in records if r.op == pc.SAID).decode(errors="replace")
    return max([int(n) for n in re.findall(r"(\d+) (?:of \d+ jobs|done)", text)], default=0)


def after_the_cut(scene, jobs, disk, reference, first_timing, reported):
    """What is wrong with a rebuilt folder and with the run that follows."""
    if not reference["answers"] == answers(scene.members(disk) or reference["members"]) and \
            scene.members(disk) != reference["before"]:
        yield "the archive is neither the old nor the new one"
    status, text = scene.run(jobs, disk)
    if status:
        yield f"the next run ends {status}: {text.strip()}"
        return
    members = scene.members(disk)
    if answers(members) != reference["answers"]:
        yield "the next run gives other answers"
    kept = len(set(members["timing.jsonl"].splitlines()) & first_timing)
    if kept < reported:
        yield f"{reported} jobs were reported as done, {reported - kept} of them were computed again"
    left = {p.name for p in disk.iterdir()} - {f"out{scene.suffix}", f"out{scene.suffix}.state"}
    if left:
        yield f"left behind: {sorted(left)}"


def cut_points(args, n):
    """All of 0..n, or so many of them, spread evenly, the last always."""
    if not args.cuts or args.cuts > n:
        return set(range(n + 1))
    return {n - i * n // args.cuts for i in range(args.cuts)} | {0}


def story(args, name, suffix, grown):
    """Records one run and tries every chosen cut. Returns violations."""
    found, tries = [], 0
    with tempfile.TemporaryDirectory(prefix="tandem-powercut-") as root:
        scene = Scene(args, root, suffix)
        live = scene.root / "live"
        live.mkdir()
        if grown:
            lib.check(scene.run(scene.few, live)[0] == 0, "the run before the recorded one failed")
        before, disk = scene.members(live), pc.Disk(live)
        status, text = scene.run(scene.all, live, die_at=0)
        lib.check(status == 0, f"the recorded run ends {status}: {text}")
        records, members = pc.log_read(scene.log), scene.members(live)
        reference = {"members": members, "before": before, "answers": answers(members)}
        first_timing = set(members["timing.jsonl"].splitlines())
        points = cut_points(args, len(records))
        for number, record in enumerate([None] + records):
            if record:
                disk.apply(record)
            if number not in points:
                continue
            kept = scene.root / "kept"
            disk.rebuild(kept, pc.all_kept, pc.all_kept)
            reported = max(scene.reported(kept), said_done(records[:number]))
            shutil.rmtree(kept)
            source = random.Random(args.seed + number)
            choices = [("all lost", pc.all_lost, pc.all_lost), ("data lost", pc.all_lost, pc.all_kept),
                       ("all kept", pc.all_kept, pc.all_kept)]
            choices += [(f"subset {i}", pc.some(source, 0.5), pc.some(source, 0.5)) for i in range(args.subsets)]
            for what, data, names in choices:
                after = scene.root / "after"
                disk.rebuild(after, data, names)
                tries += 1
                try:
                    wrong = list(after_the_cut(scene, scene.all, after, reference, first_timing, reported))
                except (lib.Failure, OSError, ValueError, KeyError) as failure:
                    wrong = [f"{type(failure).__name__}: {failure}"]
                found += [f"{name}: cut after call {number} ({record}), {what}: {line}" for line in wrong]
                shutil.rmtree(after, ignore_errors=True)
        found += [f"{name}: {line}" for line in disk.unrecorded(live)]
    print(f"{name}: {len(records)} calls, {len(points)} cuts, {tries} rebuilds, {len(found)} violations")
    return found


def deaths(args):
    """The process dies at the n-th call for growing n, on one folder, each time resuming what the last death left."""
    found = []
    with tempfile.TemporaryDirectory(prefix="tandem-powercut-") as root:
        scene = Scene(args, root, "")
        reference, disk = scene.root / "reference", scene.root / "disk"
        reference.mkdir()
        disk.mkdir()
        lib.check(scene.run(scene.all, reference)[0] == 0, "the undisturbed run failed")
        source, died = random.Random(args.seed), 0
        for number in range(args.deaths):
            model = pc.Disk(disk)
            status, _ = scene.run(scene.all, disk, die_at=1 + number * 3)
            died += status == -9
            if status not in (0, -9):
                found.append(f"deaths: run {number} ends {status}")
            for record in pc.log_read(scene.log):
                model.apply(record)
            shutil.rmtree(disk)
            model.rebuild(disk, pc.some(source, 0.5), pc.some(source, 0.5))
        status, text = scene.run(scene.all, disk)
        if status or answers(scene.members(disk)) != answers(scene.members(reference)):
            found.append(f"deaths: the last run ends {status} with other answers: {text}")
    if args.deaths and not died:
        found.append("deaths: no run died")
    print(f"deaths: {died} of {args.deaths} runs died, {len(found)} violations")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("tandem", "shim", "write-model"):
        parser.add_argument("--" + name, required=True, type=os.path.realpath)
    parser.add_argument("--cuts", type=int, default=0, help="cuts a story, spread evenly; 0: at every call")
    parser.add_argument("--subsets", type=int, default=2, help="random subsets a cut")
    parser.add_argument("--deaths", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    found = []
    found += story(args, "first run", "", grown=False)
    found += story(args, "replaced archive", ".tar.gz", grown=True)
    found += story(args, "replaced folder", "", grown=True)
    found += deaths(args)
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
