#!/bin/sh
# cuda_without_nccl.sh CMAKE SOURCE BUILD: the program builds with a CUDA compiler and without NCCL, and says so.
set -eu
"$1" -S "$2" -B "$3" -DCMAKE_BUILD_TYPE=Release -DTANDEM_TESTS=OFF -DTANDEM_NCCL=OFF -DTANDEM_CUDA_ONE=ON >"$3.log"
grep -q 'without NCCL' "$3.log"
"$1" --build "$3" --target tandem >>"$3.log"
if ldd "$3/tandem" | grep -q nccl; then
    echo "linked with NCCL all the same" >&2
    exit 1
fi
"$3/tandem" --version
