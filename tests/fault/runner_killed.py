"""kill -9 of the runner at random moments, then the same command again: the ranks are gone, nothing that was done is lost,
and the final archive holds every record once, equal to an undisturbed run's."""
import random
import time

import fault_lib as lib

# Kills are not the jobs' fault here: none of them may end as an error record.
PATIENT = ["--job-failures", "1000"]


def done(bench, out):
    status = bench.status(out)
    return (status or {}).get("done", 0)


def test(bench):
    chance = random.Random(bench.args.seed)
    reference, undisturbed = bench.undisturbed()
    out, before, whole_runs, in_the_middle = bench.fresh(), 0, 0, 0
    for kill in range(bench.args.kills):
        run = bench.start(out, *PATIENT)
        time.sleep(chance.uniform(0, bench.args.latest * undisturbed))
        run.kill()
        status = run.wait()
        lib.no_leftovers(run.pid)
        lib.whole(out)
        after = done(bench, out)
        lib.check(after >= before, f"kill {kill}: {after} jobs are done, {before} were")
        in_the_middle += status < 0 and 0 < after < len(lib.records(reference))
        before = after
        if status == 0:
            lib.same(out, reference, f"kill {kill} came too late")
            out, before, whole_runs = bench.fresh(), 0, whole_runs + 1
    bench.finish(out, *PATIENT)
    lib.same(out, reference, "after all kills")
    lib.whole(out)
    seed_bytes = {p.name: p.read_bytes() for p in out.iterdir()}
    bench.finish(out, *PATIENT)
    lib.check(seed_bytes == {p.name: p.read_bytes() for p in out.iterdir()}, "a run with nothing to do changed the archive")
    lib.check(in_the_middle or bench.args.kills < 5, "no kill struck between two results")
    print(f"{bench.args.kills} kills, {in_the_middle} between two results, {whole_runs} runs ended before their kill")


if __name__ == "__main__":
    # latest: when a kill strikes at the latest, of an undisturbed run's time.
    arguments = lib.arguments(__doc__, kills=20, latest=0.6)
    lib.main(test, lambda: lib.Bench(arguments, jobs=16, tokens=24))
