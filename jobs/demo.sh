#!/bin/sh
# From nothing to answers: builds tandem, runs jobs/examples/packages.jsonl (40 documents) with the small model of this
# repository on two ranks and shows what came out. Nothing is downloaded but build tools.
#   sh jobs/demo.sh [OUT]     the archive goes to OUT: a .tar.zst, .tar.gz, .tar.xz, .tar or .zip file, or a folder; without
#                             it to a new temporary folder, which is named at the end
#   sh jobs/demo.sh --smollm2 [OUT]
#                             downloads SmolLM2-135M-Instruct (91 MB) and runs jobs/examples/documents.jsonl with it as well; its
#                             archive lies beside the other, named smollm2-...
# What is missing on a bare Debian 12 is installed first (need.sh says how). Exit status: that of the first step that failed.
set -eu
smollm2=no
if [ "${1:-}" = --smollm2 ]; then
    smollm2=yes
    shift
fi
if [ $# -gt 1 ]; then
    echo "usage: sh jobs/demo.sh [--smollm2] [OUT]" >&2
    exit 64
fi
case ${1:-/} in
/*) out=${1:-} ;;
*) out=$PWD/$1 ;;
esac
cd "$(dirname "$0")/.."

. jobs/need.sh
need_build
need_python
case $out in
*.tar.zst | '') need_command zstd zstd ;;
*.tar.xz) need_command xz xz-utils ;;
esac
need_install

# archive_list FILE, archive_member FILE NAME: with what every system has, so that nothing but tandem wrote it and
# something else reads it.
archive_list() {
    case $1 in
    *.zip) /usr/bin/python3 -m zipfile --list "$1" ;;
    *.tar | *.tar.*) tar -tvf "$1" ;;
    *) ls -l "$1" ;;
    esac
}
archive_member() {
    case $1 in
    *.zip) /usr/bin/python3 -c 'import sys, zipfile
sys.stdout.buffer.write(zipfile.ZipFile(sys.argv[1]).read(sys.argv[2]))' "$1" "$2" ;;
    *.tar | *.tar.*) tar -xOf "$1" "$2" ;;
    *) cat "$1/$2" ;;
    esac
}

echo "demo: building" >&2
cmake --preset release -DTANDEM_TESTS=OFF -DCMAKE_RULE_MESSAGES=OFF >/dev/null
cmake --build build/release --parallel "$(nproc)" -- --no-print-directory
[ -n "$out" ] || out=$(mktemp -d "${TMPDIR:-/tmp}/tandem-demo.XXXXXX")/demo-output.tar.zst

# show FILE: what the archive holds, its first answer and that answer's timing.
show() {
    echo
    archive_list "$1"
    echo
    echo "the first answer:"
    archive_member "$1" output.jsonl | head -n 1 | /usr/bin/python3 -c 'import json, sys
record = json.loads(sys.stdin.readline())
body = record["response"]["body"]
print(record["custom_id"] + ":", body["choices"][0]["message"]["content"])'
    echo
    echo "and its timing:"
    archive_member "$1" timing.jsonl | head -n 1
    echo
    echo "the archive is $1"
}

set -x
build/release/tandem run jobs/examples/packages.jsonl --model jobs/models/hybrid-small --ranks 2 --out "$out"
{ set +x; } 2>/dev/null
show "$out"

if [ $smollm2 = yes ]; then
    model=$(sh jobs/get-model.sh)
    second=$(dirname "$out")/smollm2-$(basename "$out")
    set -x
    build/release/tandem run jobs/examples/documents.jsonl --model "$model" --ranks 2 --out "$second"
    { set +x; } 2>/dev/null
    show "$second"
fi
