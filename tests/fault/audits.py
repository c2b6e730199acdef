"""--audit computes answers again. It agrees with all of them, also with those out of a cache and of a run that lost its ranks; it
finds what lockstep cannot, a single rank that computes wrongly, by the text and by the trace alone; it audits what was answered
in this run and no more; a signal skips what is left and changes nothing else."""
import json
import re
import signal
import time

import fault_lib as lib

NAMES = {"computed": "tandem_audits_total", "different": "tandem_audit_differences_total", "left": "tandem_audits_left"}


def figures(metrics):
    text = metrics.read_text()
    return {name: int(re.search(rf"^{metric}{{[^\n]*}} (\d+)$", text, re.M)[1]) for name, metric in NAMES.items()}


def expect(metrics, what, **expected):
    found = figures(metrics)
    lib.check(found == expected, f"{what}: {found} instead of {expected}")


def share_a_head(bench):
    """What the jobs begin with is longer than one step of a prompt: the cache keeps it."""
    lines = [json.loads(line) for line in bench.jobs.read_text().splitlines()]
    for job in lines:
        message = job["body"]["messages"][0]
        message["content"] = "The pump opens the valve before the night shift reads the report. " * 40 + message["content"]
    bench.jobs.write_text("".join(json.dumps(job) + "\n" for job in lines))


def agrees(bench, metrics, reference, jobs):
    run = bench.finish(reference, "--audit", "100", "--metrics", str(metrics))
    expect(metrics, "first night", computed=jobs, different=0, left=0)
    lib.check("audit of %d answers: 0 differ, 0 skipped" % jobs in run.stderr(), run.stderr())
    bench.finish(bench.fresh(), "--cache", str(bench.folder / "cache"))
    again = bench.fresh()
    bench.finish(again, "--audit", "100", "--metrics", str(metrics), "--cache", str(bench.folder / "cache"))
    lib.check(any(t["cached_tokens"] for t in lib.timings(again)), "the second night found nothing in the cache")
    expect(metrics, "out of the cache", computed=jobs, different=0, left=0)
    bench.finish(again, "--audit", "100", "--metrics", str(metrics))
    expect(metrics, "nothing to do", computed=0, different=0, left=0)
    lost = bench.fresh()
    run = bench.finish(lost, "--audit", "100", "--metrics", str(metrics), "--fault", "1:kill@12")
    lib.check(lib.restarts_logged(run) == 1, run.stderr())
    expect(metrics, "ranks lost", computed=jobs, different=0, left=0)
    lib.same(lost, reference, "ranks lost")
    some = bench.fresh()
    bench.finish(some, "--audit", "25", "--metrics", str(metrics))
    lib.check(0 < figures(metrics)["computed"] < jobs, f"a quarter of {jobs}: {figures(metrics)}")


def disagrees(bench, metrics, kind):
    out = bench.fresh()
    run = bench.finish(out, "--ranks", "1", "--fault", f"0:{kind}@30", "--audit", "100", "--metrics", str(metrics), expect=70)
    named = re.findall(r"^tandem: AUDIT FAILURE (job-\d+): computed again, the (?:text|trace|tokens|number of tokens) differs$",
                       run.stderr(), re.M)
    lib.check(named, f"{kind}: no job is named:\n{run.stderr()}")
    lib.check(figures(metrics)["different"] == len(named), f"{kind}: {figures(metrics)}:\n{run.stderr()}")
    lib.whole(out)
    right = bench.fresh()
    bench.finish(right, "--ranks", "1")
    wrong = [a for (_, a), (_, b) in zip(lib.records(out), lib.records(right)) if a != b]
    lib.check(len(wrong) == len(named), f"{kind}: {len(wrong)} wrong answers, {len(named)} found")


def interrupted(bench, metrics, reference, jobs):
    """TERM while jobs run, then TERM while the audit runs."""
    out = bench.fresh()
    run = bench.start(out, "--audit", "100", "--metrics", str(metrics), "--grace", "0")
    until = time.monotonic() + 120
    while (bench.status(out) or {}).get("done", 0) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    run.kill(signal.SIGTERM)
    lib.check(run.wait() == 75, run.stderr())
    done = bench.status(out)["done"]
    lib.check(2 <= done < jobs, f"{done} jobs were done")
    expect(metrics, "stopped", computed=0, different=0, left=done)
    run = bench.start(out, "--audit", "100", "--metrics", str(metrics), "--grace", "0")
    while len(lib.records(out)) < jobs and time.monotonic() < until:
        time.sleep(0.01)
    run.kill(signal.SIGTERM)
    status = run.wait()
    lib.check(status == 0, f"stopped in the audit: exit {status}:\n{run.stderr()}")
    found = figures(metrics)
    lib.check(found["left"] > 0 and found["different"] == 0 and found["computed"] + found["left"] == jobs - done,
              f"stopped in the audit: {found}, {jobs - done} were answered")
    lib.same(out, reference, "stopped in the audit")
    lib.no_leftovers(run.pid)


def test(bench):
    jobs, reference, metrics = len(bench.jobs.read_text().splitlines()), bench.fresh(), bench.folder / "tandem.prom"
    share_a_head(bench)
    agrees(bench, metrics, reference, jobs)
    disagrees(bench, metrics, "token")
    disagrees(bench, metrics, "state")
    interrupted(bench, metrics, reference, jobs)


if __name__ == "__main__":
    arguments = lib.arguments(__doc__)
    lib.main(test, lambda: lib.Bench(arguments, jobs=20, tokens=32))
