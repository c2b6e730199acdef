"""Every fault kind on every rank, at a prefill step and at a decode step: found inside its bound, restarted, and the archive
holds the same texts and traces as an undisturbed run; no process and no shared memory is left.

--few: each kind once, on one rank at one of the steps, in turn."""
import re
import time

import fault_lib as lib

BOUNDS = ["--collective-timeout", "1", "--lockstep-timeout", "2", "--watchdog", "4"]
PREFILL_STEP, DECODE_STEP = 1, 8
# What the log must say, and how many seconds after an undisturbed run's time it may be over: the bound that finds it, the
# restart, and what was computed before.
KINDS = {
    "exit": (r"rank {r} left with status 70", 0),
    "kill": (r"rank {r} was killed by signal 9", 0),
    "stop": (r"lost its ranks: rank \d", 4),
    "hang": (r"lost its ranks: rank \d", 4),
    "token": (r"LOCKSTEP FAILURE step={s} field=token", 0),
    "state": (r"LOCKSTEP FAILURE step={s} field=", 0),
    "plan": (r"LOCKSTEP FAILURE step={s} field=plan", 0),
}


def test(bench):
    reference, undisturbed = bench.undisturbed()
    steps = max(t["steps"] for t in lib.timings(reference))
    lib.check(steps > DECODE_STEP, f"the jobs end after {steps} steps, before the fault")
    print(f"undisturbed: {steps} steps, {undisturbed:.1f} s", flush=True)
    places = [(rank, step) for rank in (0, 1) for step in (PREFILL_STEP, DECODE_STEP)]
    failed = []
    for i, kind in enumerate(bench.args.kinds.split(",")):
        for rank, step in [places[i % len(places)]] if bench.args.few else places:
            try:
                one(bench, reference, undisturbed, kind, rank, step)
            except lib.Failure as failure:
                failed.append(f"{rank}:{kind}@{step}: {failure}")
                print(failed[-1], flush=True)
    lib.check(not failed, f"{len(failed)} faults were not survived")


def one(bench, reference, undisturbed, kind, rank, step):
    says, bound = KINDS[kind]
    out = bench.fresh()
    start = time.monotonic()
    run = bench.finish(out, *BOUNDS, "--fault", f"{rank}:{kind}@{step}")
    took = time.monotonic() - start
    lib.check(lib.restarts_logged(run) >= 1, f"no restart was logged:\n{run.stderr()}")
    says = says.format(r=rank, s=step)
    lib.check(re.search(says, run.stderr()), f"the log does not say {says}:\n{run.stderr()}")
    lib.same(out, reference, "after the restart")
    lib.whole(out)
    lib.check(any(t["rank_restarts"] for t in lib.timings(out)), "no record tells of a rank restart")
    lib.check(took < 4 * undisturbed + bound + 10, f"took {took:.1f} s, undisturbed {undisturbed:.1f} s")
    print(f"{rank}:{kind}@{step}: {took:.1f} s", flush=True)


if __name__ == "__main__":
    arguments = lib.arguments(__doc__, kinds=",".join(KINDS), jobs=5, tokens=24, few=0)
    lib.main(test, lambda: lib.Bench(arguments, jobs=arguments.jobs, tokens=arguments.tokens))
