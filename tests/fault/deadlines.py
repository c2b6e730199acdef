"""A deadline in the middle of a run: 75, what was done is right, and the next run does the rest with the same bytes. --final
gives every job one record and changes nothing for the next run. A job's time limit ends that job and no other."""
import json
import math
import time

import fault_lib as lib

IN_THE_MIDDLE = (0.5, 0.35, 0.65, 0.25, 0.8)  # shares of an undisturbed run, tried one after another: machines are noisy


def utc(seconds):
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def ids(out, name):
    return [json.loads(line)["custom_id"] for line in lib.lines(out, name)]


def answers(out):
    """What was said, by custom_id: without ids, which depend on a line's time limit."""
    bodies = {r["custom_id"]: r["response"]["body"] for r in map(json.loads, lib.lines(out, "output.jsonl"))}
    return {name: (body["choices"], body["tandem_trace"]) for name, body in bodies.items()}


def files(out):
    return {p.name: p.read_bytes() for p in out.iterdir()}


def ended_in_the_middle(bench, reference, undisturbed, status, *options):
    """An output of a run that its deadline ended with some jobs done and some not; the options that did it; the deadline."""
    for share in IN_THE_MIDDLE:
        out = bench.fresh()
        end = time.time() + share * undisturbed
        deadline = math.ceil(end)  # of whole seconds; the grace before it makes the end exact
        options_now = ["--grace", f"{deadline - end:.3f}", "--deadline", utc(deadline), *options]
        run = bench.start(out, *options_now)
        got, late = run.wait(), time.time() - end
        lib.no_leftovers(run.pid)
        lib.whole(out)
        done = answers(out)
        if got == 0 or not done:
            continue
        lib.check(got == status, f"exit {got} instead of {status}:\n{run.stderr()}")
        lib.check(late < 3, f"ended {late:.1f} s after its time")
        lib.check("ended by --deadline" in run.stderr(), run.stderr())
        lib.check(lib.restarts_logged(run) == 0, run.stderr())
        expected = answers(reference)
        lib.check(len(done) < len(expected), "all is done, and yet it ended early")
        lib.check(all(done[name] == expected[name] for name in done), "an answer differs at the deadline")
        return out, options_now, deadline
    raise lib.Failure("no deadline came in the middle of a run")


def goes_on(bench, reference, undisturbed):
    out, _, _ = ended_in_the_middle(bench, reference, undisturbed, 75)
    lib.check(not lib.lines(out, "error.jsonl"), "an error record although nothing failed")
    before = files(out)
    now = time.time()
    window = "-".join(time.strftime("%H:%M", time.localtime(now + hours * 3600)) for hours in (2, 3))
    run = bench.finish(out, "--window", window, expect=75)
    lib.check("nothing was done" in run.stderr() and len(run.stderr().splitlines()) == 1, run.stderr())
    lib.check(files(out) == before, "a run outside its window changed the archive")
    bench.finish(out, "--deadline", utc(now + 86400))
    lib.same(out, reference, "continued after a deadline")
    lib.check(all(t["attempts"] <= 2 for t in lib.timings(out)), "more attempts than one deadline explains")


def final(bench, reference, undisturbed):
    out, options, deadline = ended_in_the_middle(bench, reference, undisturbed, 1, "--final")
    every = ids(reference, "output.jsonl")
    lib.check(sorted(ids(out, "output.jsonl") + ids(out, "error.jsonl")) == sorted(every), "not every job has one record")
    lib.check(ids(out, "timing.jsonl") == every, "not every job has one timing record, in order")
    for record in map(json.loads, lib.lines(out, "error.jsonl")):
        lib.check(record["response"] is None and record["error"]["code"] == "batch_expired", f"not expired: {record}")
    counts = bench.status(out)
    lib.check(counts["pending"] == len(lib.lines(out, "error.jsonl")) and not counts["failed"], f"to the state: {counts}")
    before = files(out)
    time.sleep(max(0.0, deadline - time.time()))  # a run whose last jobs would not have been done is over before it
    bench.finish(out, *options, expect=1)
    lib.check(files(out) == before, "the same command after its deadline changed the archive")
    bench.finish(out)
    lib.same(out, reference, "continued after --final")


def with_a_slow_job(bench, reference, others, slow):
    """The job file with one more job, third, which says very much; others and slow: what their lines hold beside the rest."""
    longest = max(lib.timings(reference), key=lambda t: t["completion_tokens"])["custom_id"]
    jobs = [json.loads(line) for line in bench.jobs.read_text().splitlines()]
    job = json.loads(json.dumps(next(j for j in jobs if j["custom_id"] == longest)))
    job["custom_id"] = "slow"
    job["body"]["max_tokens"] = 3500
    jobs = [j | others for j in jobs]
    jobs.insert(2, job | slow)
    path = bench.folder / f"slow{bench.count}.jsonl"
    path.write_text("".join(json.dumps(j) + "\n" for j in jobs), encoding="utf-8")
    return path


def one_times_out(bench, reference, others, slow, *options):
    jobs, bench.jobs = bench.jobs, with_a_slow_job(bench, reference, others, slow)
    out = bench.fresh()
    run = bench.finish(out, *options, expect=1)
    lib.check(ids(out, "error.jsonl") == ["slow"], f"failed: {ids(out, 'error.jsonl')}")
    response = json.loads(lib.lines(out, "error.jsonl")[0])["response"]
    lib.check(response["status_code"] == 408 and response["body"]["error"]["code"] == "request_timeout", f"{response}")
    lib.check(answers(out) == answers(reference), "an answer differs beside a job that was cancelled")
    lib.check(all(t["attempts"] == 1 and t["rank_restarts"] == 0 for t in lib.timings(out)), "a job was started again")
    lib.check(lib.restarts_logged(run) == 0, run.stderr())
    before = files(out)
    bench.finish(out, *options, expect=1)
    lib.check(files(out) == before, "the same command again changed the archive")
    bench.jobs = jobs


def test(bench):
    reference, undisturbed = bench.undisturbed()
    goes_on(bench, reference, undisturbed)
    final(bench, reference, undisturbed)
    one_times_out(bench, reference, {}, {"tandem": {"timeout_s": 0.1}})
    one_times_out(bench, reference, {"tandem": {"timeout_s": 3600}}, {}, "--job-timeout", "0.1")


if __name__ == "__main__":
    arguments = lib.arguments(__doc__, jobs=24, tokens=48)
    lib.main(test, lambda: lib.Bench(arguments, jobs=arguments.jobs, tokens=arguments.tokens))
