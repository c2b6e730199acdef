#!/bin/sh
# Builds tandem and runs its tests.
#   sh tests/run.sh               the default tiers: everything but "slow"
#   sh tests/run.sh --sanitize    also unit, kern, cli, fault and fuzz under ASan+UBSan, rank and threads under TSan (as with CI=true)
#   sh tests/run.sh --slow        also the slow tier
# What is missing on a bare Debian 12 is installed first (need.sh says how). Builds go to build/release, build/asan and
# build/tsan, Python packages into build/venv. Exit status: 0 all passed, 69 something cannot be had, else a failure.
set -eu
cd "$(dirname "$0")/.."

sanitize=no
slow=no
werror=OFF
if [ "${CI:-}" = true ]; then
    sanitize=yes
    werror=ON
fi
for argument in "$@"; do
    case $argument in
    --sanitize) sanitize=yes ;;
    --slow) slow=yes ;;
    *)
        echo "usage: sh tests/run.sh [--sanitize] [--slow]" >&2
        exit 64
        ;;
    esac
done

. jobs/need.sh
need_build
need_module cmocka libcmocka-dev
need_python
need_install

# A virtual environment is remade when the list changes or when it was made for another place.
venv=build/venv
if ! cmp -s tests/requirements.txt "$venv/requirements.txt" || ! "$venv/bin/python3" -c pass 2>/dev/null; then
    rm -rf "$venv"
    mkdir -p build
    /usr/bin/python3 -m venv "$venv"
    "$venv/bin/python3" -m pip install --quiet --disable-pip-version-check --no-deps --requirement tests/requirements.txt ||
        exit 69
    cp tests/requirements.txt "$venv/requirements.txt"
fi
python=$PWD/$venv/bin/python3
model=$(sh jobs/get-model.sh)
cores=$(nproc)

# The thread sanitizer of gcc 12 cannot place its memory where the kernel spreads mappings over more than 28 bits.
run=""
without_spread=""
if [ "$(cat /proc/sys/vm/mmap_rnd_bits 2>/dev/null || echo 28)" -gt 28 ] && setarch -R true 2>/dev/null; then
    without_spread="setarch -R"
fi

# tier PRESET CTEST-OPTION...
tier() {
    preset=$1
    shift
    echo "== $preset"
    cmake --preset "$preset" -DTANDEM_WERROR="$werror" -DTANDEM_TESTS=ON -DTANDEM_TEST_MODEL="$model" \
        -DTANDEM_PYTHON="$python" -DTANDEM_CUDA_ONE="$one_card" -DCMAKE_RULE_MESSAGES=OFF >"build/$preset.log"
    grep '^-- CUDA' "build/$preset.log"
    cmake --build "build/$preset" --parallel "$cores" -- --no-print-directory
    status=0
    $run ctest --test-dir "build/$preset" --output-on-failure --no-tests=error --parallel "$cores" \
        --output-log "build/$preset.tests.log" "$@" || status=$?
    echo "== $preset: $(grep -c '\*\*\*Skipped' "build/$preset.tests.log" || :) tests skipped"
    return $status
}

# The CUDA backend is built for one kind of card, with the slow tier for all.
one_card=ON
if [ "$slow" = yes ]; then one_card=OFF; fi
if [ "$slow" = yes ]; then tier release; else tier release -LE slow; fi
if [ "$sanitize" = yes ]; then
    tier asan -L '^(unit|kern|cli|fault|fuzz)$' -LE slow
    run=$without_spread
    tier tsan -L '^(rank|threads)$' -LE slow
fi
