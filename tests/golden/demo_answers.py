"""The demo's answers against an independent float64 reference (demo_answers.json), on 1, 2 and 3 ranks.

    python demo_answers.py --tandem PROGRAM --model MODEL

With KV in F32 the first 32 greedy tokens of every answer are the reference's. With half-precision KV, the default, they
are up to the first near-tie the golden lists; where an answer parts there is printed. Without a model: exit 77.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
JOBS = HERE.parent.parent / "jobs/examples/documents.jsonl"


def answers_of(args, ranks, kv):
    with tempfile.TemporaryDirectory(prefix="tandem-demo-") as folder:
        command = [args.tandem, "run", JOBS, "--backend", "cpu", "--model", args.model, "--out", f"{folder}/out", "--ranks", str(ranks)]
        subprocess.run(command + ["--kv", kv, "--quiet"], check=True)
        records = [json.loads(line) for line in open(f"{folder}/out/output.jsonl", encoding="utf-8")]
        timings = [json.loads(line) for line in open(f"{folder}/out/timing.jsonl", encoding="utf-8")]
        if (pathlib.Path(folder) / "out/error.jsonl").read_text():
            raise SystemExit("the demo has failed jobs")
    prompts = {t["custom_id"]: t["prompt_tokens"] for t in timings}
    return {r["custom_id"]: (r["response"]["body"]["choices"][0]["message"]["content"], prompts[r["custom_id"]])
            for r in records}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tandem", required=True)
    parser.add_argument("--model", default="")
    args = parser.parse_args()
    if not args.model:
        print("SKIPPED: no model was given; jobs/get-model.sh fetches it")
        return 77
    golden = json.loads((HERE / "demo_answers.json").read_text(encoding="utf-8"))["answers"]
    failures = 0
    for ranks in (1, 2, 3):
        for kv in ("f32", "f16"):
            answers = answers_of(args, ranks, kv)
            if set(answers) != {g["custom_id"] for g in golden}:
                raise SystemExit(f"{ranks} ranks: one record per job was expected, got {sorted(answers)}")
            equal = 0
            for g in golden:
                text, prompt_tokens = answers[g["custom_id"]]
                whole = text.startswith(g["text"])
                equal += whole
                good = prompt_tokens == g["prompt_tokens"] and text.startswith(g["text_before_ties"])
                if not good or (kv == "f32" and not whole):
                    failures += 1
                    print(f"FAILED {ranks} ranks, {kv} KV, {g['custom_id']}: {prompt_tokens} prompt tokens,\n"
                          f"  got      {text[:len(g['text']) + 20]!r}\n  expected {g['text']!r}")
                elif not whole:
                    print(f"{ranks} ranks, {kv} KV: {g['custom_id']} parts at a near-tie {g['near_ties']}")
            print(f"{ranks} ranks, {kv} KV: {equal} of {len(golden)} answers begin with the reference's 32 tokens", flush=True)
    return 1 if failures else 0


sys.exit(main())
