#!/usr/bin/env python3
"""Runs the program from outside: one folder of tests/cli/cases a case.

    cmd      what to type, run by `sh -e` in a fresh copy of files/, with `tandem` on the PATH, a tiny model of random
             weights as $TINY, the real one as $MODEL, jobs/examples as $EXAMPLES
    files/   optional: what lies in the folder
    stdin    optional
    stdout   expected output and messages, exactly, after the replacements below; a missing file means none
    stderr
    exit     expected exit status; missing: 0
    replace  optional: lines "REGEX<tab>TEXT", applied to both outputs, for what differs from run to run (times)

Replaced everywhere: the scratch folder by SCRATCH, the paths of the models and examples by their names. A case whose cmd
speaks of $MODEL is skipped without one. --bless writes what came out as expected; look at the difference before it is committed.

usage: run.py --tandem PROGRAM --write-tiny PROGRAM [--model FILE] [--bless] [CASE…]
"""
import argparse
import concurrent.futures
import difflib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "jobs" / "examples"
CASES = pathlib.Path(__file__).resolve().parent / "cases"
TIMEOUT_S = 120


def expected(case, name, default=""):
    path = case / name
    return path.read_text(encoding="utf-8") if path.exists() else default


def normalize(text, places, replace):
    for name, path in places.items():
        text = text.replace(path, name) if path else text
    for line in replace.splitlines():
        pattern, _, value = line.partition("\t")
        text = re.sub(pattern, value, text, flags=re.M)
    return text


def run_case(case, tandem, places):
    """What came out: {"stdout": …, "stderr": …, "exit": …}."""
    with tempfile.TemporaryDirectory(prefix="tandem-cli-") as scratch:
        scratch = os.path.realpath(scratch)
        work = pathlib.Path(scratch, "work")
        if (case / "files").is_dir():
            shutil.copytree(case / "files", work)
        else:
            work.mkdir()
        bin_folder = pathlib.Path(scratch, "bin")
        bin_folder.mkdir()
        (bin_folder / "tandem").symlink_to(tandem)
        env = {"PATH": f"{bin_folder}:/usr/bin:/bin", "HOME": scratch, "LC_ALL": "C", **places}
        stdin = (case / "stdin").read_bytes() if (case / "stdin").exists() else b""
        try:
            done = subprocess.run(["sh", "-e", str(case / "cmd")], cwd=work, env=env, input=stdin, capture_output=True,
                                  timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return {"stdout": "", "stderr": f"no end within {TIMEOUT_S} s\n", "exit": "timeout\n"}
        replace = expected(case, "replace")
        out, err = (normalize(text.decode("utf-8", "backslashreplace"), {"SCRATCH": str(work), **places}, replace)
                    for text in (done.stdout, done.stderr))
        return {"stdout": out, "stderr": err, "exit": f"{done.returncode}\n"}


def differences(case, got):
    for name, default in (("stdout", ""), ("stderr", ""), ("exit", "0\n")):
        want = expected(case, name, default)
        if got[name] != want:
            yield from difflib.unified_diff(want.splitlines(), got[name].splitlines(), f"{case.name}/{name}", "got",
                                            lineterm="")


def bless(case, got):
    for name, default in (("stdout", ""), ("stderr", ""), ("exit", "0\n")):
        if got[name] == default:
            (case / name).unlink(missing_ok=True)
        else:
            (case / name).write_text(got[name], encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tandem", required=True)
    parser.add_argument("--write-tiny", required=True)
    parser.add_argument("--model", default="")
    parser.add_argument("--bless", action="store_true")
    parser.add_argument("cases", nargs="*")
    options = parser.parse_args()
    tandem = os.path.realpath(options.tandem)
    cases = [CASES / name for name in options.cases] or sorted(p for p in CASES.iterdir() if (p / "cmd").exists())
    runnable = [c for c in cases if options.model or "$MODEL" not in (c / "cmd").read_text(encoding="utf-8")]

    failed = 0
    with tempfile.TemporaryDirectory(prefix="tandem-cli-") as folder, \
            concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        places = {"TINY": os.path.join(os.path.realpath(folder), "tiny.gguf"), "MODEL": options.model,
                  "EXAMPLES": str(EXAMPLES)}
        subprocess.run([options.write_tiny, places["TINY"]], check=True)
        for case, got in zip(runnable, pool.map(lambda c: run_case(c, tandem, places), runnable)):
            if options.bless:
                bless(case, got)
            lines = list(differences(case, got))
            failed += bool(lines)
            print(f"{'FAILED' if lines else 'ok'}: {case.name}", *lines, sep="\n")
    print(f"{len(runnable) - failed} passed, {failed} failed, {len(cases) - len(runnable)} skipped")
    return 1 if failed or not runnable else 0


if __name__ == "__main__":
    sys.exit(main())
