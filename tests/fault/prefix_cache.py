"""Heads of prompts come from the cache or are computed, and nobody can tell from the texts: cold, warm, one job at a time and several,
in either order, with the cache damaged in every way that a file can be, and full. What disturbs a run: cache_matrix.py.

Every run is compared with one that has no cache, no drafts and one job at a time."""
import json
import pathlib
import random
import shutil

import fault_lib as lib

DOCUMENTS = 3
QUESTIONS = ["Summarize this in two sentences.", "Which names are there?", "What comes first?", "Is anything missing?"]


def write_jobs(bench):
    """Each question about each document, shuffled; half of the documents by path, half in the text. Two equal prompts as well."""
    chance = random.Random(bench.args.seed)
    words = "the of a pump valve reads opens closes before after seven night report shows that every second line was empty".split()
    jobs = []
    for d in range(DOCUMENTS):
        text = " ".join(chance.choice(words) for _ in range(380 + 40 * d)) + "."
        (bench.folder / f"document{d}.txt").write_text(text + "\n")
        for q, question in enumerate(QUESTIONS + QUESTIONS[:1]):
            content = f"{text}\n\n{question}" if d % 2 else [{"type": "document", "path": f"document{d}.txt"},
                                                             {"type": "text", "text": question}]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 12 + 3 * q, "temperature": 0.8 if q % 2 else 0}
            jobs.append({"custom_id": f"d{d}q{q}", "method": "POST", "url": "/v1/chat/completions", "body": body})
    chance.shuffle(jobs)
    bench.jobs.write_text("".join(json.dumps(job) + "\n" for job in jobs))


def texts(out):
    """Records in file order, without what depends on the cache."""
    found = []
    for name, line in lib.records(out):
        record = json.loads(line)
        usage = record["response"]["body"]["usage"]
        usage.pop("prompt_tokens_details")
        found.append((name, record))
    return found


class Comparison:
    def __init__(self, bench, *options):
        self.bench = bench
        self.reference = bench.fresh()
        self.options = options
        bench.finish(self.reference, "--active", "1", "--spec", "off", *options)
        lib.has_traces(self.reference)
        self.expected = texts(self.reference)

    def same(self, out, what):
        found = texts(out)
        lib.check([r["custom_id"] for _, r in found] == [r["custom_id"] for _, r in self.expected], f"{what}: other records, or in another order")
        for (_, a), (_, b) in zip(found, self.expected):
            lib.check(a == b, f"{what}: differs\n  {json.dumps(a)[:1500]}\n  {json.dumps(b)[:1500]}")
        lib.whole(out)

    def run(self, what, cache, *options):
        """Cached tokens of a run that must give the same texts."""
        out = self.bench.fresh()
        self.bench.finish(out, "--cache", str(cache), *self.options, *options)
        self.same(out, what)
        cached = cached_tokens(out)
        print(f"{what}: {cached} of {prompt_tokens(out)} prompt tokens from the cache", flush=True)
        return cached


def cached_tokens(out):
    return sum(t["cached_tokens"] for t in lib.timings(out))


def prompt_tokens(out):
    return sum(t["prompt_tokens"] for t in lib.timings(out))


def tree_tokens(out):
    """Prompt tokens when what two jobs of a document share is computed once, as far as the warm run `out` found it in the cache."""
    shared = {}
    for t in lib.timings(out):
        document = t["custom_id"][:2]
        shared[document] = min(shared.get(document, 1 << 30), t["cached_tokens"])
    return prompt_tokens(out) - sum(shared[t["custom_id"][:2]] for t in lib.timings(out)) + sum(shared.values())


def matrix(bench, c):
    for active in ("1", "4"):
        for order in ("input", "tree"):
            cache = bench.folder / f"cache-{active}-{order}"
            options = ["--active", active, "--order", order]
            cold = c.run(f"cold, {active} at once, order {order}", cache, *options)
            out = bench.fresh()
            bench.finish(out, "--cache", str(cache), *options)
            c.same(out, "warm")
            warm = cached_tokens(out)
            lib.check(warm > 0 and warm >= cold, f"warm: only {warm} tokens came from the cache")
            print(f"warm: {warm}", flush=True)
            if order == "input":
                continue
            lib.check(cold > 0, "cold: nothing came from the cache")
            ideal, computed = tree_tokens(out), prompt_tokens(out) - cold
            lib.check(computed <= 1.05 * ideal, f"cold: {computed} prompt tokens were computed, the tree of prompts has {ideal}")
            print(f"computed {computed}, tree {ideal}", flush=True)
    return cache


def spoil(path, chance):
    data = bytearray(path.read_bytes())
    how = chance.randrange(4)
    if how == 0 and data:
        for _ in range(1 + chance.randrange(8)):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif how == 1:
        data = data[:chance.randrange(len(data) + 1)]
    elif how == 2:
        data = bytearray()
    else:
        path.unlink()
        return
    path.write_bytes(data)


def damaged(bench, c, cache):
    chance = random.Random(bench.args.seed + 1)
    for i in range(bench.args.damages):
        copy = bench.folder / "cache-damaged"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(cache, copy)
        files = sorted(p for p in copy.rglob("*") if p.is_file())
        for path in chance.sample(files, min(len(files), 1 + chance.randrange(4))):
            spoil(path, chance)
        if i % 4 == 0:
            spoil(next(p for p in files if p.name == "index.mdb" and p.exists()), chance)
        if i % 2:
            c.run(f"damage {i}", copy)
        else:
            out = bench.fresh()
            bench.finish(out, "--cache", str(copy))
            c.same(out, f"damage {i}")
        lib.check(c.run(f"after damage {i}", copy) > 0, "the cache did not come back")


def other_groups(bench):
    """Three ranks, of which one has no heads of this model; two groups that share the folder, and a format of its own in it."""
    cache = bench.folder / "cache-groups"
    for options in (("--ranks", "3"), ("--ranks", "1", "--kv", "int8")):
        c = Comparison(bench, *options)
        groups = ["--groups", "2"] if "int8" in options else []
        c.run(f"{' '.join(options)}, cold", cache, *groups)
        lib.check(c.run(f"{' '.join(options)}, warm", cache, *groups) > 0, "nothing came from the cache")


def full(bench, c):
    """No room at all, and a folder that cannot be: the run goes on without."""
    lib.check(c.run("no room on the disk", bench.folder / "cache-full", "--cache-free-gib", "1000000") == 0, "something was kept")
    (bench.folder / "file").write_text("no folder")
    lib.check(c.run("no folder", bench.folder / "file") == 0, "something was kept")


def test(bench):
    write_jobs(bench)
    c = Comparison(bench)
    cache = matrix(bench, c)
    damaged(bench, c, cache)
    full(bench, c)
    if not bench.args.gpus:
        other_groups(bench)


if __name__ == "__main__":
    arguments = lib.arguments(__doc__, damages=8)
    lib.main(test, lambda: lib.Bench(arguments, jobs=1, tokens=24))
