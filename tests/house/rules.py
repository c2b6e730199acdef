#!/usr/bin/env python3
"""The rules of the tree that no compiler checks.

Who may include whom, every header compiles alone, file names are unique, no file is longer than 900 lines, every source
and test is listed in its CMakeLists.txt, every folder says what it is, no exit below main, no environment as
configuration, nothing left undone. One line per violation as file:line: text; exit 1 if there is any.
"""
import argparse
import concurrent.futures
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
MAX_LINES = 900
PRODUCT = ("engine", "jobs", "runner", "cuda")

# Header folders on the include path of each room, as the targets have them.
INCLUDE_PATH = {
    "engine": ["engine", "engine/model", "engine/text", "engine/cache", "engine/cpu"],
    "jobs": ["jobs", "engine"],
    "runner": ["runner", "jobs", "engine", "engine/model", "engine/text", "engine/cache"],
    "cuda": ["cuda", "engine", "engine/model"],
}
BASE = {"base.h", "exact_math.h"}
# What a room may take from the engine by name; a file's own room is always open to it.
ENGINE_FOR_JOBS = {"base.h", "sampler.h"}
ENGINE_FOR_CUDA = {"base.h", "kern.h", "comm.h", "quant.h", "partition.h", "lockstep.h", "lockstep_wait.h", "lockstep_segment.h"}
# engine.h is the boundary; lockstep.h and sampler.h are types of its signatures; state and prefix store both check an LMDB file; the
# runner removes the checkpoints of what is done.
ENGINE_FOR_RUNNER = {"base.h", "engine.h", "lockstep.h", "sampler.h", "model_file.h", "prefix_store.h", "checkpoint_store.h", "lmdb_check.h"}
# Where the backend is chosen and named; it alone sees all of the engine.
BACKEND_CHOOSERS = {"runner/rank_main.c", "runner/rank_backend.c", "runner/rank_backend.h",
                    "runner/bench_round.c", "runner/bench_kernel.c"}
# `tandem model` reports what each rank will hold of a model, shard stores it, and the identity names it: all read the engine's
# view.
MAY_SEE_MODEL = {"runner/cmd_model.c", "runner/cmd_shard.c", "runner/rank_identity.c"}
BACKEND = {"kern.h", "kern_cpu.h", "kern_cuda.h", "comm_shm.h", "comm_cuda.h"}
# exit statuses are decided in main; a fault injected on purpose may leave from inside a rank.
MAY_EXIT = {"runner/main.c", "engine/fault.c"}
MAY_READ_ENVIRONMENT = {"runner/progress.c": {"NO_COLOR"}, "runner/cmd_run.c": {"SLURM_JOB_END_TIME"}}
GENERATED = {"build_identity.h"}


def tracked_files():
    """Every file of the tree but build output and version control, relative to the root."""
    for path in sorted(ROOT.rglob("*")):
        relative = path.relative_to(ROOT)
        top = relative.parts[0]
        if top == ".git" or top == "build" or top.startswith("build-") or "__pycache__" in relative.parts:
            continue
        if path.is_file() and not path.is_symlink():
            yield relative


def allowed(file, header_path):
    """Whether a product file may include a header of the tree."""
    room, name = file.parts[0], header_path.name
    owner = header_path.parts[0]
    if file.stem in ("base", "exact_math") and room == "engine":
        return name in BASE
    if room == "engine":
        backend_file = file.parts[:2] == ("engine", "cpu")
        return owner == "engine" and (backend_file or header_path.parts[:2] != ("engine", "cpu"))
    if room == "jobs":
        return owner == "jobs" or name in ENGINE_FOR_JOBS
    if room == "cuda":
        return owner == "cuda" or name in ENGINE_FOR_CUDA
    if name in BACKEND:
        return file.as_posix() in BACKEND_CHOOSERS
    if owner == "cuda":
        return False
    if owner == "engine":
        chooser = file.as_posix() in BACKEND_CHOOSERS
        if file.as_posix() in MAY_SEE_MODEL and header_path.parts[:2] == ("engine", "model"):
            return True
        return chooser or name in ENGINE_FOR_RUNNER or header_path.parts[:2] == ("engine", "text")
    return owner in ("runner", "jobs")


def strip_comments(text):
    """C source with comments and string contents blanked, line numbers kept."""
    def blank(match):
        token = match.group(0)
        if token.startswith("/"):
            return "\n" * token.count("\n")
        return '""' if token[0] == '"' else "' '"
    return re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', blank, text, flags=re.S)


def check_includes(file, text, headers):
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
        if not match:
            continue
        name = match.group(1)
        if name in GENERATED:
            if file.parts[0] != "runner":
                yield f"{file}:{number}: {name} is the runner's alone"
        elif name not in headers:
            yield f'{file}:{number}: no header "{name}" in the tree (include by bare name)'
        elif not allowed(file, headers[name]):
            yield f"{file}:{number}: may not include {headers[name]}"


def check_words(file, text):
    code = strip_comments(text)
    name = file.as_posix()
    for number, (line, raw) in enumerate(zip(code.splitlines(), text.splitlines()), 1):
        if name not in MAY_EXIT and re.search(r"\b(exit|quick_exit|abort)\s*\(", line):
            yield f"{file}:{number}: leaves the process below main"
        for _ in re.finditer(r"\b(secure_)?getenv\s*\(", line):
            used = set(re.findall(r'getenv\s*\(\s*"([^"]*)"', raw))
            if not used or not used <= MAY_READ_ENVIRONMENT.get(name, set()):
                yield f"{file}:{number}: reads the environment"
        if re.search(r"\bsetlocale\s*\(", line):
            yield f"{file}:{number}: sets the locale"


def check_listed(files):
    """Sources and tests that no CMakeLists.txt names."""
    top = (ROOT / "CMakeLists.txt").read_text()
    cuda = (ROOT / "cuda/CMakeLists.txt").read_text()
    tests = (ROOT / "tests/CMakeLists.txt").read_text()
    for file in files:
        name = file.as_posix()
        if file.suffix in (".c", ".cu") and file.parts[0] in PRODUCT:
            listing = cuda if file.parts[0] == "cuda" else top
            wanted = file.name if file.parts[0] == "cuda" else name
            if not re.search(rf"(?m)^\s*{re.escape(wanted)}\)?\s*$", listing):
                yield f"{file}:1: is not listed in CMakeLists.txt"
        match = re.fullmatch(r"tests/(\w+)/test_(\w+)\.c", name)
        if match and not re.search(rf"tandem_ctest\({match[1]} {match[2]}\b", tests):
            yield f"{file}:1: is not listed in tests/CMakeLists.txt"
        match = re.fullmatch(r"tests/(\w+)/test_(\w+)\.cu", name)
        if match and not re.search(rf"tandem_cudatest\({match[1]} {match[2]}\b", tests):
            yield f"{file}:1: is not listed in tests/CMakeLists.txt"
        match = re.fullmatch(r"tests/fuzz/fuzz_(\w+)\.c", name)
        if match and not re.search(rf"tandem_fuzz\({match[1]}\)", tests):
            yield f"{file}:1: is not listed in tests/CMakeLists.txt"
        # Programs, not modules; what makes golden data or measures is run by hand.
        by_hand = file.name.startswith("make_") or name == "tests/golden/reference.py" or file.parts[:2] == ("tests", "bench")
        if file.suffix == ".py" and file.parts[0] == "tests" and not by_hand:
            runs = re.search(r"(?m)^(if __name__ == |sys\.exit\()", (ROOT / file).read_text(encoding="utf-8"))
            if runs and "/".join(file.parts[1:]) not in tests:
                yield f"{file}:1: is not listed in tests/CMakeLists.txt"


def check_names(files):
    seen = {}
    for file in files:
        if file.suffix in (".c", ".h", ".cu", ".cuh"):
            other = seen.setdefault(file.name, file)
            if other != file:
                yield f"{file}:1: has the name of {other}"


def check_folders(files):
    """Each folder that holds code says what lives in it."""
    for folder in sorted({file.parent for file in files if file.suffix in (".c", ".h", ".cu", ".py")}):
        if not (ROOT / folder / "README.md").is_file():
            yield f"{folder}:1: has no README.md"


def compile_alone(header, compiler):
    room = header.parts[0]
    command = [compiler, "-std=c17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    for folder in INCLUDE_PATH[room]:
        command += ["-I", str(ROOT / folder)]
    source = f'#include "{header.name}"\n#include "{header.name}"\nint only_a_header;\n'
    run = subprocess.run(command + ["-x", "c", "-"], input=source, text=True, capture_output=True)
    return f"{header}:1: does not compile alone:\n{run.stderr.rstrip()}" if run.returncode else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cc", default="cc", help="C compiler for the headers")
    options = parser.parse_args()

    files = list(tracked_files())
    code = [f for f in files if f.suffix in (".c", ".h", ".cu", ".cuh", ".py", ".sh", ".cmake")]
    headers = {f.name: f for f in files if f.suffix in (".h", ".cuh") and f.parts[0] in PRODUCT}
    found = []
    for file in code:
        text = (ROOT / file).read_text(encoding="utf-8")
        lines = text.count("\n")
        if lines > MAX_LINES:
            found.append(f"{file}:{lines}: has more than {MAX_LINES} lines")
        for number, line in enumerate(text.splitlines(), 1):
            if re.search(r"\b(TO" r"DO|FIX" r"ME)\b", line):
                found.append(f"{file}:{number}: leaves something undone")
        if file.parts[0] in PRODUCT and file.suffix in (".c", ".h", ".cu", ".cuh"):
            found += check_includes(file, text, headers)
            found += check_words(file, text)
    found += check_listed(files)
    found += check_names(files)
    found += check_folders(files)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        alone = pool.map(lambda h: compile_alone(h, options.cc), [h for h in headers.values() if h.parts[0] != "cuda"])
        found += [line for line in alone if line]

    for line in found:
        print(line)
    print(f"{len(code)} files, {len(headers)} headers compiled alone, {len(found)} violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
