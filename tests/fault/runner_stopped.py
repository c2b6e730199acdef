"""TERM, INT and HUP end a run with 75 and an archive of what is done, a second one at once; the same command continues. A rank
that hangs does not hold up the end. A held lock is 75 as well; ranks that cannot stay up are 69 with the state intact."""
import os
import signal
import time

import fault_lib as lib


def wait_for_done(bench, run, out, least):
    until = time.monotonic() + 120
    while time.monotonic() < until and run.process.poll() is None:
        status = bench.status(out)
        if status and status.get("done", 0) >= least:
            return
        time.sleep(0.05)
    raise lib.Failure(f"{least} jobs were not done in time:\n{run.stderr()}")


def stopped_within_the_grace(bench, reference, number, grace):
    out = bench.fresh()
    run = bench.start(out, "--grace", str(grace))
    wait_for_done(bench, run, out, 1)
    start = time.monotonic()
    run.kill(number)
    status = run.wait()
    took = time.monotonic() - start
    lib.check(status == 75, f"signal {number}: exit {status}:\n{run.stderr()}")
    lib.check(took < grace + 3, f"took {took:.1f} s with a grace of {grace} s")
    lib.no_leftovers(run.pid)
    lib.whole(out)
    some = lib.records(out)
    lib.check(1 <= len(some) < len(lib.records(reference)), f"{len(some)} records after the stop")
    lib.check(all(r in lib.records(reference) for r in some), "a record differs after the stop")
    bench.finish(out)
    lib.same(out, reference, "continued")
    failures = [t for t in lib.timings(out) if t["attempts"] > 2]
    lib.check(not failures, f"more attempts than one stop explains: {failures}")


def second_signal(bench):
    out = bench.fresh()
    run = bench.start(out, "--grace", "60", "--checkpoint", "0")
    wait_for_done(bench, run, out, 1)
    run.kill(signal.SIGTERM)
    time.sleep(0.7)
    if run.process.poll() is None:
        start = time.monotonic()
        run.kill(signal.SIGTERM)
        status = run.wait()
        lib.check(status == -signal.SIGTERM, f"the second signal: exit {status}")
        lib.check(time.monotonic() - start < 2, "the second signal did not end it at once")
    lib.no_leftovers(run.pid)
    return out


def stopped_beside_a_dead_end(bench, reference, *fault):
    """TERM to everybody, the process group and the ranks, as a terminal or a scheduler sends it, while a rank hangs or, without a
    fault, is stopped: nothing can finish."""
    out, grace = bench.fresh(), 1
    run = bench.start(out, "--grace", str(grace), *fault, process_group=0)
    if not fault:
        wait_for_done(bench, run, out, 1)
        os.kill(lib.ranks_of(run.pid)[1][0], signal.SIGSTOP)
    until = time.monotonic() + 60
    while run.process.poll() is None and time.monotonic() < until:
        before = bench.status(out)
        time.sleep(1)
        if before and before.get("attempts", 0) and bench.status(out) == before:
            break
    start = time.monotonic()
    for rank, _, _ in lib.ranks_of(run.pid):
        os.kill(rank, signal.SIGTERM)
    os.killpg(run.pid, signal.SIGTERM)
    status = run.wait()
    took, what = time.monotonic() - start, "beside a rank that hangs" if fault else "beside a stopped rank"
    print(f"{what}: {took:.1f} s after TERM with a grace of {grace} s", flush=True)
    lib.check(status == 75, f"{what}: exit {status}:\n{run.stderr()}")
    lib.check(took < grace + 2, f"{what}: took {took:.1f} s with a grace of {grace} s")
    lib.no_leftovers(run.pid)
    lib.whole(out)
    bench.finish(out)
    lib.same(out, reference, f"continued, {what}")


def locked(bench, out):
    first = bench.start(out)
    until = time.monotonic() + 60
    while not lib.ranks_of(first.pid) and first.process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    second = bench.finish(out, expect=75)
    lib.check(first.process.poll() is None, "the first run was over before the second was refused")
    lib.check(len(second.stderr().splitlines()) == 1, f"a held lock is not one line:\n{second.stderr()}")
    lib.check(first.wait() == 0, first.stderr())
    lib.no_leftovers(first.pid)


def gives_up(bench, reference):
    out = bench.fresh()
    run = bench.finish(out, "--restarts", "0", "--fault", "1:kill@12", expect=69)
    lib.check("gave up" in run.stderr(), run.stderr())
    lib.whole(out)
    bench.finish(out)
    lib.same(out, reference, "after giving up")


def test(bench):
    reference = bench.fresh()
    bench.finish(reference)
    stopped_within_the_grace(bench, reference, signal.SIGTERM, 0)
    stopped_within_the_grace(bench, reference, signal.SIGINT, 1)
    stopped_within_the_grace(bench, reference, signal.SIGHUP, 0)
    stopped_beside_a_dead_end(bench, reference, "--fault", "1:hang@12")
    stopped_beside_a_dead_end(bench, reference)
    out = second_signal(bench)
    locked(bench, out)
    lib.same(out, reference, "after a second signal and a lock")
    gives_up(bench, reference)


if __name__ == "__main__":
    arguments = lib.arguments(__doc__)
    lib.main(test, lambda: lib.Bench(arguments, jobs=24, tokens=32))
