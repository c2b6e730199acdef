#!/usr/bin/env python3
"""Real job files and real outputs against schemas/, with a real validator.

Job lines: every good line of the examples is valid, and every line that `tandem check` refuses for its envelope is not.
Plans: of all examples, with rates and without; and of prompts that share heads.
Outputs: a run over all examples on a tiny model, bad lines made into records, gives every kind of record but those of jobs that
a deadline left, which a run after its deadline gives. Each run's summary (--json) is checked as well, and those of runs that end
by an error.

usage: schemas.py --tandem PROGRAM --write-tiny PROGRAM
"""
import argparse
import datetime
import json
import pathlib
import subprocess
import sys
import tempfile

import jsonschema

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "jobs" / "examples").glob("*.jsonl"))


def validator(name):
    schema = json.loads((ROOT / "schemas" / f"{name}.schema.json").read_text(encoding="utf-8"))
    kind = jsonschema.validators.validator_for(schema, default=None)
    kind.check_schema(schema)
    return kind(schema)


def problems(checker, instance, where):
    return [f"{where}: {error.json_path}: {error.message[:200]}" for error in checker.iter_errors(instance)]


def check_job_lines(tandem):
    checker, found, valid, refused = validator("job_line"), [], 0, 0
    for file in EXAMPLES:
        done = subprocess.run([tandem, "check", file], capture_output=True, text=True)
        bad = {int(line[len(str(file)):].split(":")[1]) for line in done.stdout.splitlines()}
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            try:
                instance = json.loads(line)
            except ValueError:
                continue
            wrong = problems(checker, instance, f"{file.name}:{number}")
            if number not in bad:
                valid += 1
                found += wrong
            refused += bool(wrong)
    if not valid or not refused:
        found.append(f"{valid} lines valid, {refused} refused: the examples do not try the schema")
    return found, valid + refused


def check_summary(done, **expected):
    """The one line on standard output, by schema and by what it must say."""
    if done.stdout.count("\n") != 1:
        return [f"not one line: {done.stdout!r} {done.stderr!r}"]
    summary = json.loads(done.stdout)
    found = problems(validator("run"), summary, "--json")
    expected["exit_status"] = done.returncode
    found += [f"--json: {key} is {summary.get(key)!r} instead of {value!r}" for key, value in expected.items()
              if summary.get(key) != value]
    if summary["jobs"] != summary["done"] + summary["failed"] + summary["pending"]:
        found.append(f"--json: counts do not add up: {summary}")
    return found


def check_summaries_of_errors(tandem, write_tiny):
    """Runs that do not get far, in a folder whose name is not UTF-8."""
    found = []
    with tempfile.TemporaryDirectory(prefix=b"tandem-schemas-\xff".decode("utf-8", "surrogateescape")) as folder:
        model, jobs, out = (pathlib.Path(folder, name) for name in ("tiny.gguf", "jobs.jsonl", "out"))
        subprocess.run([write_tiny, model], check=True)
        jobs.write_text("{\n", encoding="utf-8")
        command = [tandem, "run", jobs, "--backend", "cpu", "--model", model, "--out", out, "--json"]

        def run(*more):
            return subprocess.run([*command, *more], capture_output=True, encoding="utf-8", errors="replace")

        bad_line = run()
        found += check_summary(bad_line, end="error", jobs=0)
        found += [] if bad_line.returncode == 65 else [f"a bad line: exit {bad_line.returncode}"]
        jobs.unlink()
        missing = run("--quiet")
        found += check_summary(missing, end="error", jobs=0)
        if missing.returncode != 66 or json.loads(missing.stdout)["error"]["code"] not in missing.stderr:
            found.append(f"a missing job file: exit {missing.returncode}: {missing.stdout} {missing.stderr}")
        now = datetime.datetime.now()
        window = "-".join((now + datetime.timedelta(hours=h)).strftime("%H:%M") for h in (2, 3))
        found += check_summary(run("--window", window), end="out_of_time", exit_status=75)
    return found


def check_records(tandem, write_tiny):
    found, counts = [], {}
    with tempfile.TemporaryDirectory(prefix="tandem-schemas-") as folder:
        model, out = pathlib.Path(folder, "tiny.gguf"), pathlib.Path(folder, "out")
        subprocess.run([write_tiny, model], check=True)
        command = [tandem, "run", *EXAMPLES, "--backend", "cpu", "--model", model, "--out", out, "--on-bad-line", "skip", "--trace",
                   "--json"]
        for end, more in (("out_of_time", ["--deadline", "2026-01-02T06:00:00Z", "--final"]), ("done", [])):
            done = subprocess.run(command + more, capture_output=True, text=True)
            if done.returncode != 1:
                return [f"run ends {done.returncode} instead of 1: {done.stderr}"], counts
            found += check_summary(done, end=end, archive=str(out), state=f"{out}.state", error=None)
            for name in ("output", "error", "timing"):
                checker = validator(name)
                lines = (out / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
                counts[name] = len(lines)
                for number, line in enumerate(lines, 1):
                    found += problems(checker, json.loads(line), f"{name}.jsonl:{number}")
            found += problems(validator("manifest"), json.loads((out / "manifest.json").read_text()), "manifest.json")
    found += [f"no record in {name}.jsonl" for name, n in counts.items() if not n]
    return found, counts


def check_plans(tandem, write_tiny):
    checker, found, heads, estimates = validator("plan"), [], 0, 0
    shared = ROOT / "tests" / "cli" / "cases" / "plan" / "files" / "jobs.jsonl"
    with tempfile.TemporaryDirectory(prefix="tandem-schemas-") as folder:
        model = pathlib.Path(folder, "tiny.gguf")
        subprocess.run([write_tiny, model], check=True)
        for files, more in (([*EXAMPLES], []), ([shared], ["--prefill-rate", "0.5", "--decode-rate", "1000"])):
            done = subprocess.run([tandem, "plan", *files, "--model", model, "--on-bad-line", "skip", "--json", *more],
                                  capture_output=True, text=True)
            if done.returncode != 1:
                return [f"plan ends {done.returncode} instead of 1: {done.stderr}"], 0
            plan = json.loads(done.stdout)
            found += problems(checker, plan, "plan")
            heads += len(plan["heads"])
            estimates += plan["estimate"] is not None
            if plan["tree_tokens"] + plan["saved_tokens"] != plan["prompt_tokens"]:
                found.append("plan: tree and saving are not all tokens")
    if not heads or estimates != 1:
        found.append(f"{heads} heads, {estimates} estimates: the plans do not try the schema")
    return found, 2


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tandem", required=True)
    parser.add_argument("--write-tiny", required=True)
    parser.add_argument("--model", help="not used")
    options = parser.parse_args()
    found, n_lines = check_job_lines(options.tandem)
    found += check_summaries_of_errors(options.tandem, options.write_tiny)
    more, counts = check_records(options.tandem, options.write_tiny)
    plans, n_plans = check_plans(options.tandem, options.write_tiny)
    print(f"{n_lines} job lines, records: {counts}, {n_plans} plans")
    for line in found + more + plans:
        print(line)
    return 1 if found + more + plans else 0


if __name__ == "__main__":
    sys.exit(main())
