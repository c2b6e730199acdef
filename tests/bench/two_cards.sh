#!/bin/sh
# What needs two GPUs of one machine, in one call of some minutes: sums on every path between two processes, the exactness matrix and
# the faults with a rank a card, and rounds of a made-up 27 B model on both cards against one.
#   sh tests/bench/two_cards.sh [BUILD]     BUILD: the build folder, default build/release
# Prints everything and ends with the first failure.
set -eu
cd "$(dirname "$0")/../.."
build=${1:-build/release}
tandem=$build/tandem
model=synth:qwen3.8-27b
python=${PYTHON:-python3}

"$build/tests/test_comm_cuda"
for path in peer host nccl; do "$tandem" bench sum --model "$model" --ranks 2 --gpus 0,1 --sum-path $path; done
for model_folder in synth:tiny-hybrid-agree jobs/models/hybrid-small; do
    "$python" tests/rank/run_matrix.py --tandem "$tandem" --backend cuda --gpus 0,1 --ranks 2 --sum-paths host,peer,nccl \
        --model $model_folder --set noise --brief
done
"$python" tests/fault/fault_kinds.py --tandem "$tandem" --backend cuda --gpus 0,1 --model synth:tiny-hybrid --few 1 --jobs 3

for prompt in 8192 32768 131072 186368; do
    for cards in "2 0,1" "1 0"; do
        set -- $cards
        "$tandem" bench decode --model "$model" --ranks "$1" --gpus "$2" --kv int8 --spec mtp --active 1 --prompt $prompt \
            --tokens 160 --repeats 1
    done
done
"$tandem" bench prefill --model "$model" --ranks 2 --gpus 0,1 --kv int8 --active 1 --prompt 186368 --repeats 1
