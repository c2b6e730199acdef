"""What runs is saved while it runs, and goes on from there: a long prompt whose rank or runner is killed late in it, answers that are
stopped, killed or lose a rank, checkpoints damaged between two nights, a deadline. Texts and traces are those of an undisturbed run,
timing.jsonl says what came from checkpoints, and when all is done none is left."""
import itertools
import json
import math
import os
import pathlib
import random
import shutil
import signal
import struct
import time

import fault_lib as lib

ACTIVE = 4
POSITION_OFFSET = 64  # in a point, see schemas/checkpoint_store.md
WORDS = "the of a pump valve reads opens closes before after seven night report shows that every second line was empty".split()


def write_jobs(path, contents, most_tokens):
    """One job for each content, half of them sampled, of these half with penalties, with answers of nearly the same length."""
    with open(path, "w", encoding="utf-8") as f:
        for i, content in enumerate(contents):
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": most_tokens - 3 * i,
                    "temperature": 0.8 if i % 2 else 0, "seed": 7 + i}
            if i % 4 == 3:
                body |= {"frequency_penalty": 0.1, "presence_penalty": 0.1}
            f.write(json.dumps({"custom_id": f"job-{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}) + "\n")


def folder_of(out):
    return pathlib.Path(f"{out}.state") / "checkpoints"


def points(out):
    """Positions that points say they are at, by key and rank, as far as their headers can be read."""
    found = {}
    for path in folder_of(out).glob("*.[ab]"):
        key, rank, _ = path.name.split(".")
        try:
            header = path.read_bytes()[:POSITION_OFFSET + 4]
        except OSError:
            continue
        if len(header) == POSITION_OFFSET + 4:
            found.setdefault(key, {}).setdefault(rank, []).append(struct.unpack_from("<I", header, POSITION_OFFSET)[0])
    return found


def saved_by_all(out, which=max, ranks=2):
    """By key: the least of the ranks' newer points; which=min: of their older ones, which are whole whatever strikes now."""
    found = points(out)
    return {key: min(which(p) if len(p) == 2 else 0 for p in found[key].values()) for key in found if len(found[key]) == ranks}


def wait_for(run, what, condition):
    until = time.monotonic() + 240
    while time.monotonic() < until and run.process.poll() is None:
        if condition():
            return
        time.sleep(0.01)
    raise lib.Failure(f"{what} was not to be seen:\n{run.stderr()}")


def resumed(out):
    return {t["custom_id"]: t["resumed_tokens"] for t in lib.timings(out)}


def done(bench, out, reference, what, *options):
    """Finishes what is there; all is as if nothing had happened, and nothing is left."""
    bench.finish(out, *options)
    finished(out, reference, what)


def finished(out, reference, what):
    lib.same(out, reference, what)
    lib.whole(out)
    lib.check(not folder_of(out).exists(), f"{what}: checkpoints are left: {list(folder_of(out).glob('*'))}")
    print(f"{what}: resumed {sorted(resumed(out).values())}", flush=True)


# ---- a long prompt ----

def long_prompt(bench):
    chance = random.Random(bench.args.seed)
    text = " ".join(chance.choice(WORDS) for _ in range(bench.args.words))
    write_jobs(bench.jobs, [text], 24)
    reference, _ = bench.undisturbed()
    prompt = lib.timings(reference)[0]["prompt_tokens"]
    step = round(0.8 * prompt / bench.args.rows)  # rows of whole steps before the one that fails
    print(f"a prompt of {prompt} tokens, killed after {step * bench.args.rows}", flush=True)

    out = bench.fresh()
    run = bench.finish(out, "--fault", f"1:kill@{step + 1}")
    lib.check(lib.restarts_logged(run) == 1, run.stderr())
    finished(out, reference, "a rank killed in the prompt")
    timing = lib.timings(out)[0]
    again = step * bench.args.rows - timing["resumed_tokens"]
    lib.check(timing["resumed_tokens"] > 0 and 0 <= again <= bench.args.again / 100 * prompt,
              f"{again} of {prompt} tokens were computed again: resumed at {timing['resumed_tokens']}")
    lib.check((timing["attempts"], timing["rank_restarts"]) == (2, 1), f"attempts and restarts: {timing}")

    out = bench.fresh()
    run = bench.start(out)
    wait_for(run, "a point in the prompt", lambda: any(p > 0.5 * prompt for p in saved_by_all(out).values()))
    run.kill()
    run.wait()
    lib.no_leftovers(run.pid)
    done(bench, out, reference, "the runner killed in the prompt")
    timing = lib.timings(out)[0]
    lib.check(0 < timing["resumed_tokens"] < prompt, f"resumed at {timing['resumed_tokens']} of {prompt}")
    lib.check((timing["attempts"], timing["rank_restarts"]) == (2, 0), f"attempts and restarts: {timing}")


# ---- answers ----

def longest(bench, everything):
    """Makes a job file of the four longest of all answers. Its reference, and the length of each key's prompt."""
    length = {t["custom_id"]: t["completion_tokens"] for t in lib.timings(everything)}
    lines = bench.jobs.read_text().splitlines(keepends=True)
    lines.sort(key=lambda line: -length[json.loads(line)["custom_id"]])
    bench.jobs = bench.folder / "longest.jsonl"
    bench.jobs.write_text("".join(lines[:ACTIVE]))
    reference, _ = bench.undisturbed()
    timings = {t["custom_id"]: t for t in lib.timings(reference)}
    lib.check(all(t["completion_tokens"] >= 200 for t in timings.values()), f"answers are short: {length}")
    answered = [json.loads(line) for line in lib.lines(reference, "output.jsonl")]
    return reference, {a["id"].removeprefix("batch_req_"): timings[a["custom_id"]]["prompt_tokens"] for a in answered}


def answering(out, prompts, least):
    """How many jobs have `least` tokens of their answers in both points of all ranks."""
    saved = saved_by_all(out, min)
    return sum(position >= prompts[key[:24]] + least for key, position in saved.items())


def disturbed(bench, out, prompts, how, *options):
    """Runs until some answers are on the disk, then strikes. The run has ended, or goes on until it does."""
    run = bench.start(out, "--checkpoint", "0.05", *options)
    wait_for(run, "points in answers", lambda: answering(out, prompts, 60) >= 3)
    if how == "rank":
        ranks = lib.ranks_of(run.pid)
        lib.check(len(ranks) == 2, "the ranks left before they were killed")
        os.kill(ranks[1][0], signal.SIGKILL)
    else:
        run.kill(signal.SIGTERM if how == "TERM" else signal.SIGKILL)
    status = run.wait()
    lib.no_leftovers(run.pid)
    expected = {"rank": 0, "TERM": 75, "KILL": -signal.SIGKILL}[how]
    lib.check(status == expected, f"{how}: exit {status}:\n{run.stderr()}")
    lib.check(lib.restarts_logged(run) == (how == "rank"), run.stderr())


def answers_go_on(bench, reference, prompts):
    for how, spec in itertools.product(("TERM", "KILL", "rank"), ("auto", "off")):
        out, what = bench.fresh(), f"{how} in the answers, drafts {spec}"
        disturbed(bench, out, prompts, how, "--spec", spec)
        if how == "rank":
            finished(out, reference, what)
        else:
            lib.whole(out)
            lib.check(folder_of(out).is_dir(), f"{what}: no checkpoints")
            done(bench, out, reference, what, "--spec", spec)
        again = [t for t in lib.timings(out) if t["attempts"] > 1]
        lib.check(all(t["attempts"] == 2 for t in again), f"{what}: attempts: {again}")
        lib.check(all(t["rank_restarts"] == (how == "rank") for t in again), f"{what}: restarts: {again}")
        inside = [t for t in again if t["resumed_tokens"] > t["prompt_tokens"]]
        lib.check(len(inside) >= 3, f"{what}: only {len(inside)} answers went on")
        lib.check(how != "TERM" or len(inside) == len(again), f"{what}: not all that ran was saved: {again}")


# ---- damage ----

def swap(one, other):
    spare = one.with_suffix(".spare")
    one.rename(spare)
    other.rename(one)
    spare.rename(other)


def damages(folder, keys, chance):
    """(what, what does it). Each to some or all files of the first key, or of all."""
    def of(key, rank="*", suffix="*"):
        return sorted(folder.glob(f"{key}.r{rank}.{suffix}"))

    def flip(paths):
        for path in paths:
            data = bytearray(path.read_bytes())
            for _ in range(3):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            path.write_bytes(data)

    def cut(paths):
        for path in paths:
            os.truncate(path, chance.randrange(path.stat().st_size))

    def exchange(suffixes):
        for suffix in suffixes:
            swap(folder / f"{keys[0]}.r0.{suffix}", folder / f"{keys[0]}.r1.{suffix}")

    def of_another(suffixes):
        for suffix in suffixes:
            swap(folder / f"{keys[0]}.r1.{suffix}", folder / f"{keys[1]}.r1.{suffix}")

    every = ("a", "b", "pages")
    return [("a bit of the points of a rank", lambda: flip(of(keys[0], "1", "[ab]"))),
            ("a bit of every file", lambda: flip(of("*"))),
            ("pages cut", lambda: cut(of(keys[0], "0", "pages"))),
            ("every file cut", lambda: cut(of("*"))),
            ("a rank's files gone", lambda: [p.unlink() for p in of("*", "1")]),
            ("pages gone", lambda: [p.unlink() for p in of(keys[0], "0", "pages")]),
            ("all emptied", lambda: [os.truncate(p, 0) for p in of("*")]),
            ("the ranks' files exchanged", lambda: exchange(every)),
            ("the ranks' pages exchanged", lambda: exchange(["pages"])),
            ("another job's files", lambda: of_another(every)),
            ("another job's pages", lambda: of_another(["pages"])),
            ("all gone", lambda: shutil.rmtree(folder))]


def damaged(bench, reference, prompts):
    chance = random.Random(bench.args.seed)
    stopped = bench.fresh()
    disturbed(bench, stopped, prompts, "TERM")
    whole, keys = saved_by_all(stopped), sorted(saved_by_all(stopped))
    lib.check(len(keys) >= 3, f"only {len(keys)} jobs have checkpoints")
    for i in range(len(damages(folder_of(stopped), keys, chance))):
        out = bench.fresh()
        shutil.copytree(f"{stopped}.state", f"{out}.state")
        what, strike = damages(folder_of(out), keys, chance)[i]
        strike()
        done(bench, out, reference, what)
        lib.check(sum(resumed(out).values()) < sum(whole.values()), f"{what}: and yet all of it was used")
        lib.check(all(t["attempts"] <= 2 and t["rank_restarts"] == 0 for t in lib.timings(out)), f"{what}: {lib.timings(out)}")


# ---- a deadline ----

def deadline(bench, reference, took):
    for share in (0.5, 0.35, 0.65, 0.25, 0.8):  # of an undisturbed run, tried one after another: machines are noisy
        out = bench.fresh()
        end = time.time() + share * took
        at = math.ceil(end) + 1  # of whole seconds; the grace before it makes the end exact, and is long enough to save
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
        run = bench.start(out, "--grace", f"{at - end:.3f}", "--deadline", stamp)
        while run.process.poll() is None:
            lib.check(len(points(out)) <= ACTIVE + 1, "checkpoints of what is done are kept")
            time.sleep(0.02)
        status = run.wait()
        lib.no_leftovers(run.pid)
        lib.whole(out)
        if status == 0 or not saved_by_all(out):
            continue
        lib.check(status == 75 and "ended by --deadline" in run.stderr(), f"exit {status}:\n{run.stderr()}")
        done(bench, out, reference, "a deadline")
        lib.check(any(resumed(out).values()), "nothing went on from before the deadline")
        lib.check(all(t["attempts"] <= 2 for t in lib.timings(out)), f"{lib.timings(out)}")
        return
    raise lib.Failure("no deadline came while jobs ran")


def test(bench):
    if bench.args.words:
        long_prompt(bench)
    if bench.args.tokens:
        stories = [f"Write a long story about {topic}, part {i}." for i in range(2) for topic in lib.TOPICS]
        write_jobs(bench.jobs, stories, bench.args.tokens)
        everything, took = bench.undisturbed()
        deadline(bench, everything, took)
        reference, prompts = longest(bench, everything)
        answers_go_on(bench, reference, prompts)
        damaged(bench, reference, prompts)


if __name__ == "__main__":
    # words: of the long prompt; rows: that a step computes of it; again: percent of it that may be computed again; tokens: of the
    # longest answer. 0 words, 0 tokens: without these.
    arguments = lib.arguments(__doc__, words=0, rows=512, again=15, tokens=0)
    rows = ["--prefill-rows", str(arguments.rows)]
    lib.main(test, lambda: lib.Bench(arguments, jobs=1, tokens=24, extra=rows))
