"""USR1 makes a run, also a quiet one, say how far it is, at any moment and while it stops; asking without end changes neither
its answers nor its exit, and no other command dies of it."""
import os
import pathlib
import re
import signal
import subprocess
import threading
import time

import fault_lib as lib

FIRST = re.compile(r"^tandem: (\d+) jobs: (\d+) done, (\d+) failed, (\d+) pending, (\d+) of them in flight; .* tok/s, .* left$", re.M)


def ignores_usr1(pid):
    """The process is in main: a signal before would end it, as it ends any program."""
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(("SigIgn:", "SigBlk:")) and int(line.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1:
            return True
    return False


def wait_until(condition, run):
    until = time.monotonic() + 60
    while run.process.poll() is None and time.monotonic() < until and not condition():
        time.sleep(0.01)
    lib.check(run.process.poll() is None, f"ended too early:\n{run.stderr()}")


def asked_without_end(bench, reference):
    out = bench.fresh()
    run = bench.start(out, "--quiet")
    wait_until(lambda: ignores_usr1(run.pid), run)
    while run.process.poll() is None:
        run.kill(signal.SIGUSR1)
        time.sleep(0.05)
    status = run.wait()
    lib.check(status == 0, f"exit {status}:\n{run.stderr()}")
    lib.same(out, reference, "asked without end")
    answers = [tuple(map(int, m)) for m in FIRST.findall(run.stderr())]
    lib.check(answers, f"no answer:\n{run.stderr()}")
    for jobs, done, failed, pending, in_flight in answers:
        lib.check(jobs == done + failed + pending and in_flight <= pending, f"counts do not add up: {answers}")
    lib.check(answers == sorted(answers, key=lambda a: a[1]), f"done goes back: {answers}")
    lib.check(max(a[4] for a in answers) > 0, "no job in flight was ever seen")
    lib.check(re.search(r"^tandem: job-\d+: runs in group 0 for ", run.stderr(), re.M), f"no job was seen:\n{run.stderr()}")
    lines = run.stderr().splitlines()
    lib.check(all(line.startswith("tandem: ") for line in lines), "a line is torn")


def asked_while_stopping(bench):
    """A rank hangs, so that the grace is not over at once."""
    out = bench.fresh()
    run = bench.start(out, "--grace", "3", "--checkpoint", "0", "--fault", "1:hang@12")
    wait_until(lambda: (bench.status(out) or {}).get("attempts", 0), run)
    run.kill(signal.SIGTERM)
    time.sleep(0.3)
    before = len(FIRST.findall(run.stderr()))
    run.kill(signal.SIGUSR1)
    status = run.wait()
    lib.check(status == 75, f"exit {status}:\n{run.stderr()}")
    lib.check(len(FIRST.findall(run.stderr())) == before + 1, f"no answer while stopping:\n{run.stderr()}")
    lib.no_leftovers(run.pid)


def another_command(bench):
    read, write = os.pipe()
    process = subprocess.Popen([bench.args.tandem, "tokenize", bench.args.model], stdin=read, stdout=subprocess.PIPE)
    os.close(read)
    until = time.monotonic() + 60
    while not ignores_usr1(process.pid) and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    threading.Timer(0.1, lambda: os.close(write)).start()
    process.communicate(timeout=60)
    lib.check(process.returncode == 0, f"tokenize: exit {process.returncode}")


def test(bench):
    reference = bench.fresh()
    bench.finish(reference)
    asked_without_end(bench, reference)
    asked_while_stopping(bench)
    another_command(bench)


if __name__ == "__main__":
    arguments = lib.arguments(__doc__)
    lib.main(test, lambda: lib.Bench(arguments, jobs=24, tokens=32))
