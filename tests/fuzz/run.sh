#!/bin/sh
# Searches with every fuzz target for SECONDS each (default 60), with address and undefined-behaviour sanitizers.
#   sh tests/fuzz/run.sh [SECONDS [NAME…]]
# New inputs go to build/fuzz/found/NAME, a crash to build/fuzz/crash-…; the committed corpus is only read.
set -eu
cd "$(dirname "$0")/../.."
seconds=${1:-60}
[ $# -gt 0 ] && shift
command -v clang >/dev/null || { echo "fuzz/run.sh: clang is needed (apt-get install clang)" >&2; exit 69; }
cmake --preset fuzz >/dev/null
if [ $# -eq 0 ]; then
    for target in tests/fuzz/fuzz_*.c; do
        name=${target##*/fuzz_}
        set -- "$@" "${name%.c}"
    done
fi
for name in "$@"; do
    cmake --build --preset fuzz --target "fuzz_$name"
    found=build/fuzz/found/$name
    mkdir -p "$found"
    echo "fuzz: $name, $seconds s"
    build/fuzz/tests/fuzz_"$name" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
        -artifact_prefix="build/fuzz/crash-$name-" "$found" "tests/fuzz/corpus/$name"
done
