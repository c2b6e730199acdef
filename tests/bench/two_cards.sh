#!/bin/sh
# What needs two GPUs of one machine, in one call of some minutes: sums on every path between two processes, the exactness matrix and
# the faults with a rank a card, rounds and prompts of a made-up 27 B model on both cards against one.
#   sh tests/bench/two_cards.sh [BUILD]     BUILD: the build folder, default build/release
# Prints everything, goes on after a failure, and ends with a line for each step and status 1 if one failed.
set -u
cd "$(dirname "$0")/../.."
build=${1:-build/release}
tandem=$build/tandem
model=synth:qwen3.8-27b
python=${PYTHON:-python3}
summary=
failed=0

step() {
    name=$1
    shift
    echo "== $name: $*"
    if "$@"; then summary="$summary$name: passed
"; else
        summary="$summary$name: FAILED
"
        failed=1
    fi
}

# bench WHAT PROMPT TOKENS RANKS CARDS
bench() {
    step "$1, prompt $2, $4 ranks" "$tandem" bench "$1" --model "$model" --ranks "$4" --gpus "$5" --kv int8 --spec mtp --active 1 \
        --prompt "$2" --tokens "$3" --repeats 1
}

step "sums and gathers" "$build/tests/test_comm_cuda"
step "sums in recorded rounds" "$build/tests/test_comm_cuda" bench
for model_path in synth:tiny-hybrid-agree jobs/models/hybrid-small synth:smollm2-135m; do
    set -- --set noise
    case $model_path in
    *hybrid-small) set -- --set extract --spec mtp ;;
    *smollm2*) set -- --set noise --jobs 4 ;;
    esac
    step "matrix, $model_path" "$python" tests/rank/run_matrix.py --tandem "$tandem" --backend cuda --gpus 0,1 --ranks 2 \
        --sum-paths host,peer,nccl --model $model_path "$@"
done
step "faults" "$python" tests/fault/fault_kinds.py --tandem "$tandem" --backend cuda --gpus 0,1 --model synth:tiny-hybrid --few 1 --jobs 3
step "runner killed" "$python" tests/fault/runner_killed.py --tandem "$tandem" --backend cuda --gpus 0,1 --model synth:tiny-hybrid --kills 8 --latest 1.0

for prompt in 8192 32768 131072 186368 261632; do bench decode $prompt 400 2 0,1; done
for prompt in 8192 186368; do bench decode $prompt 400 1 0; done
bench prefill 186368 1 2 0,1
# Two groups of one card against one group of both, after the same prompts; each load is some ten seconds.
step "groups" "$python" tests/bench/paired_runs.py --tandem "$tandem" --model $model --jobs 16 --words 1500 --tokens 250 --repeats 1 \
    --first "--groups 2 --ranks 1 --gpus 0,1" --second "--groups 1 --ranks 2 --gpus 0,1" -- --kv int8 --context 8192
printf '%s' "$summary"
exit $failed
