#!/usr/bin/env python3
"""Tries powercut on a program whose discipline is known: the good one survives every cut, each bad one is found out.

usage: powercut_selftest.py SHIM SAMPLE
"""
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile

import powercut_log as pc

WANTED = b"".join(bytes([ord("a") + i]) * 9000 + b"\n" for i in range(4))
BAD = ("early", "lazy_file", "lazy_folder", "in_place")
SUBSETS = 3


def run(sample, folder, mode, shim="", log="", die_at=0):
    env = dict(os.environ)
    if shim:
        pc.log_create(log)
        env.update(LD_PRELOAD=shim, POWERCUT_FOLDER=os.path.realpath(folder), POWERCUT_LOG=str(log),
                   POWERCUT_DIE_AT=str(die_at))
    return subprocess.run([sample, str(folder), mode], env=env, capture_output=True, timeout=30)


def broken_promises(folder, said):
    """What the folder after the cut lacks of what was said before it."""
    journal, out = folder / "journal", folder / "out"
    kept = journal.read_bytes() if journal.exists() else b""
    for number in map(int, re.findall(r"done (\d)", said)):
        result = WANTED[number * 9001:(number + 1) * 9001]
        if kept[number * 9001:(number + 1) * 9001] != result:
            yield f"result {number} was reported and is lost"
    if out.exists() and out.read_bytes() != WANTED:
        yield "the published file is not whole"
    if "published" in said and not out.exists():
        yield "the published file is lost"


def cut_everywhere(shim, sample, mode, scratch):
    """Runs once, then rebuilds and checks every prefix of the record. Returns (cuts, violations)."""
    folder = scratch / "live"
    folder.mkdir()
    disk, log = pc.Disk(folder), scratch / "log"
    done = run(sample, folder, mode, shim, log)
    if done.returncode:
        raise SystemExit(f"{mode}: exit {done.returncode}")
    records, said, cuts, violations = pc.log_read(log), "", 0, []
    for number, record in enumerate([None] + records):
        if record is not None:
            disk.apply(record)
            if record.op == pc.SAID:
                said += record.data.decode()
        source = random.Random(number)
        choices = [(pc.all_lost, pc.all_lost), (pc.all_kept, pc.all_kept), (pc.all_lost, pc.all_kept)]
        choices += [(pc.some(source, 0.5), pc.some(source, 0.5)) for _ in range(SUBSETS)]
        for index, (data, names) in enumerate(choices):
            after = scratch / f"cut{number}.{index}"
            disk.rebuild(after, data, names)
            cuts += 1
            violations += [f"{mode}: after {record}: {text}" for text in broken_promises(after, said)]
            if mode == "good":
                again = run(sample, after, mode)
                if again.returncode or (after / "out").read_bytes() != WANTED:
                    violations.append(f"{mode}: after {record}: the next run ends {again.returncode}")
    return cuts, violations, disk.unrecorded(folder)


def dies_as_recorded(shim, sample, scratch):
    """A real death at the n-th call leaves on this machine what the record up to there says."""
    for die_at in (1, 2, 5, 9, 14, 100000):
        folder = scratch / f"die{die_at}"
        folder.mkdir()
        disk, log = pc.Disk(folder), scratch / "log"
        done = run(sample, folder, "good", shim, log, die_at)
        records = pc.log_read(log)
        for record in records:
            disk.apply(record)
        counted = sum(r.op in pc.COUNTED for r in records)
        wanted = (0, None) if die_at == 100000 else (-9, die_at - 1)
        if done.returncode != wanted[0] or wanted[1] not in (None, counted) or disk.unrecorded(folder):
            return [f"death at call {die_at}: exit {done.returncode}, {counted} calls, {disk.unrecorded(folder)}"]
    return []


def main():
    shim, sample = os.path.realpath(sys.argv[1]), os.path.realpath(sys.argv[2])
    failed = []
    for mode in ("good",) + BAD:
        with tempfile.TemporaryDirectory() as scratch:
            cuts, violations, unrecorded = cut_everywhere(shim, sample, mode, pathlib.Path(scratch))
        print(f"{mode}: {cuts} cuts, {len(violations)} violations")
        failed += unrecorded
        if mode == "good":
            failed += violations
        elif not violations:
            failed.append(f"{mode}: its mistake was not found")
    with tempfile.TemporaryDirectory() as scratch:
        failed += dies_as_recorded(shim, sample, pathlib.Path(scratch))
    for line in failed:
        print(line)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
