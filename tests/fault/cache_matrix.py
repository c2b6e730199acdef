"""{cold, warm, warm after a restart} x {1, 4 jobs at once} x {order of the input, of the tree} x {undisturbed, TERM, kill -9 of the
runner, of each rank, a lockstep failure}: whatever happened, texts and traces are those of a run without a cache, drafts or company,
and a warm run takes what it can from the cache.

Warm: on what a finished run left. After a restart: on what a run left whose runner was killed in the middle.
--every N: only every N-th of the product, from one drawn by the seed; 1: all of it."""
import itertools
import random
import shutil
import signal
import time

import fault_lib as lib
from prefix_cache import Comparison, cached_tokens

PATIENT = ["--job-failures", "1000", "--restarts", "50", "--grace", "0.2"]
CACHES, ACTIVE, ORDERS = ("cold", "warm", "restarted"), (1, 4), ("input", "tree")
SIGNALS = {"TERM": (signal.SIGTERM, 75), "KILL": (signal.SIGKILL, -signal.SIGKILL)}
NO_DRAFTS = ["--spec", "off"]
TRIES = 8


class Matrix:
    def __init__(self, bench):
        self.bench, self.chance = bench, random.Random(bench.args.seed)
        self.common = ["--ranks", str(bench.args.ranks)]
        lib.write_document_jobs(bench.jobs, self.chance, bench.args.jobs, bench.args.documents)
        self.comparison = Comparison(bench, *self.common)
        self.left = {"cold": None, "warm": bench.folder / "left-warm", "restarted": bench.folder / "left-restarted"}
        self.steps, self.took = {}, {}
        self.leave_caches()

    def options(self, cache, active, order):
        return ["--cache", str(cache), "--active", str(active), "--order", order, *self.common]

    def leave_caches(self):
        """And what the shortest undisturbed runs take, warm ones: in seconds, and in steps without drafts, of which there are now
        more, now fewer."""
        for active in ACTIVE:
            for what, *drafts in (("cold",), ("warm", *NO_DRAFTS)):
                out, start = self.bench.fresh(), time.monotonic()
                self.bench.finish(out, *self.options(self.left["warm"], active, "tree"), *drafts)
                self.took[active] = time.monotonic() - start
                self.comparison.same(out, f"first runs: {what}, {active} at once")
            self.steps[active] = sum(t["steps"] for t in lib.timings(out)) // active
        cache = self.left["restarted"]
        run = self.bench.start(self.bench.fresh(), *self.options(cache, 1, "tree"))
        until = time.monotonic() + 120
        while not self.served(cache) and run.process.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
        run.kill()
        run.wait()
        lib.no_leftovers(run.pid)

    def served(self, cache):
        """Every rank has finished a file of each kind that its model needs."""
        ranks = [{p.suffix for p in (cache / f"rank-{r}").glob("*.*")} for r in range(self.bench.args.ranks)]
        kinds = {p.suffix for p in self.left["warm"].rglob("*.*")} & {".kv", ".state"}
        return all(kinds <= found for found in ranks)

    def signalled(self, out, options, active, how):
        """A run that the signal met at work."""
        number, expected = SIGNALS[how]
        longest = 0.7 * self.took[active]
        for _ in range(TRIES):
            run = self.bench.start(out, *options, *PATIENT)
            lib.wait_for_work(run, f"{out}.state", self.bench.args.ranks)
            time.sleep(self.chance.uniform(0, longest))
            run.kill(number)
            status = run.wait()
            lib.no_leftovers(run.pid)
            if status == expected and (self.bench.status(out) or {}).get("attempts"):
                return
            shutil.rmtree(out, ignore_errors=True)
            shutil.rmtree(f"{out}.state", ignore_errors=True)
            longest /= 2
        raise lib.Failure(f"{how} never met a run at work")

    def one(self, cache_kind, active, order, how):
        what = f"{cache_kind}, {active} at once, order {order}, {how}"
        for _ in range(TRIES):
            cache, out = self.bench.folder / "cache", self.bench.fresh()
            shutil.rmtree(cache, ignore_errors=True)
            if self.left[cache_kind]:
                shutil.copytree(self.left[cache_kind], cache)
            options, fault = self.options(cache, active, order), []
            if how in SIGNALS:
                self.signalled(out, options, active, how)
            if ":" in how:
                fault = [*NO_DRAFTS, "--fault", f"{how}@{self.chance.randrange(2, max(4, self.steps[active] * 3 // 4))}"]
            run = self.bench.finish(out, *options, *PATIENT, *fault)
            self.comparison.same(out, what)
            cached = cached_tokens(out)
            resumed = sum(t["resumed_tokens"] for t in lib.timings(out)) # those have their heads from where they were
            lib.check(cached + resumed > 0 or cache_kind == "cold", f"{what}: nothing came from the cache")
            if not fault or lib.restarts_logged(run) == 1:
                print(f"{what}: {cached} tokens from the cache", flush=True)
                return
            # A step that computes nothing, but looks into the cache, is none to fail in.
        raise lib.Failure(f"{what}: no fault struck")


def test(bench):
    hows = ["undisturbed", "TERM", "KILL", "0:kill", "1:kill", "1:state"]
    if bench.args.ranks == 1:
        hows = ["undisturbed", "TERM", "KILL", "0:kill"]
    m = Matrix(bench)
    product = list(itertools.product(CACHES, ACTIVE, ORDERS, hows))
    print(f"seed {bench.args.seed}", flush=True)
    for place in product[random.Random(bench.args.seed).randrange(bench.args.every)::bench.args.every]:
        m.one(*place)


if __name__ == "__main__":
    arguments = lib.arguments(__doc__, ranks=2, jobs=8, documents=2, every=1)
    lib.main(test, lambda: lib.Bench(arguments, jobs=1, tokens=24))
