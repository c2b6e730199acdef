"""Two groups of one rank: both work, the records are those of one group; and ranks killed or stopped from outside, in either
group and at random moments, change nothing but the timing."""
import os
import random
import signal
import time

import fault_lib as lib

BOUNDS = ["--collective-timeout", "1", "--lockstep-timeout", "2", "--watchdog", "3"]


def disturb(bench, chance, reference, number, groups, ranks):
    out = bench.fresh()
    run = bench.start(out, "--groups", str(groups), "--ranks", str(ranks), *BOUNDS)
    until = time.monotonic() + 60
    while len(lib.ranks_of(run.pid)) < groups * ranks and time.monotonic() < until and run.process.poll() is None:
        time.sleep(0.01)
    time.sleep(chance.uniform(0.1, 1.5))
    victims = lib.ranks_of(run.pid)
    struck = False
    if victims:
        try:
            os.kill(chance.choice(victims)[0], number)
            struck = True
        except ProcessLookupError:
            pass
    status = run.wait()
    lib.check(status == 0, f"exit {status}:\n{run.stderr()}")
    lib.no_leftovers(run.pid)
    lib.same(out, reference, f"signal {number}, {groups} groups of {ranks}")
    return struck and lib.restarts_logged(run) > 0


def test(bench):
    chance = random.Random(bench.args.seed)
    one, two, pair = bench.fresh(), bench.fresh(), bench.fresh()
    bench.finish(one, "--ranks", "1")
    bench.finish(two, "--ranks", "1", "--groups", "2")
    lib.same(two, one, "two groups")
    used = {t["group"] for t in lib.timings(two)}
    lib.check(used == {0, 1}, f"groups that answered: {used}")
    bench.finish(pair, "--ranks", "2")
    restarted = 0
    for _ in range(bench.args.rounds):
        restarted += disturb(bench, chance, one, signal.SIGKILL, 2, 1)
        restarted += disturb(bench, chance, one, signal.SIGSTOP, 2, 1)
        restarted += disturb(bench, chance, pair, signal.SIGKILL, 1, 2)
        restarted += disturb(bench, chance, pair, signal.SIGSTOP, 1, 2)
    lib.check(restarted, "no disturbance struck a rank at work")
    print(f"{restarted} of {4 * bench.args.rounds} disturbances ended in a restart")


if __name__ == "__main__":
    arguments = lib.arguments(__doc__, rounds=2)
    lib.main(test, lambda: lib.Bench(arguments, jobs=10, tokens=24))
