# shellcheck shell=sh
# need.sh: sourced by the shell programs of this repository. It finds out what is missing on this machine and installs it
# with apt, as root or through sudo, saying so; with neither it prints the line to type and leaves with 69.
#
# Things are looked for by what they do (a command, a pkg-config module), so that they count however they were installed.

need_missing=""

need_add() { need_missing="$need_missing $1"; }

# need_command COMMAND PACKAGE
need_command() { command -v "$1" >/dev/null 2>&1 || need_add "$2"; }

# need_module PKG-CONFIG-NAME PACKAGE
need_module() { pkg-config --exists "$1" 2>/dev/null || need_add "$2"; }

need_compiler() {
    need_command "${CC:-cc}" gcc
    echo '#include <stdio.h>' | "${CC:-cc}" -E - >/dev/null 2>&1 || need_add libc6-dev
}

# What building tandem takes.
need_build() {
    need_compiler
    need_command cmake cmake
    need_command make make
    need_command pkg-config pkg-config
    need_module jansson libjansson-dev
    need_module lmdb liblmdb-dev
    need_module libarchive libarchive-dev
    need_module libpcre2-8 libpcre2-dev
    need_module libutf8proc libutf8proc-dev
    need_module libxxhash libxxhash-dev
    need_module nettle nettle-dev
}

# The system's Python, able to make virtual environments (which bring pip).
need_python() {
    need_command /usr/bin/python3 python3
    /usr/bin/python3 -c 'import ensurepip, venv' >/dev/null 2>&1 || need_add python3-venv
    [ -s /etc/ssl/certs/ca-certificates.crt ] || need_add ca-certificates
}

# Installs what the calls above found missing.
need_install() {
    [ -n "$need_missing" ] || return 0
    need_line="apt-get install --yes --no-install-recommends$need_missing"
    if [ "$(id -u)" = 0 ]; then
        need_as=""
    elif command -v sudo >/dev/null 2>&1; then
        need_as=sudo
    else
        need_as=none
    fi
    if [ "$need_as" = none ] || ! command -v apt-get >/dev/null 2>&1; then
        echo "missing:$need_missing" >&2
        echo "as root: $need_line" >&2
        exit 69
    fi
    echo "missing:$need_missing; running: ${need_as:+$need_as }$need_line" >&2
    # shellcheck disable=SC2086
    if ! { $need_as apt-get update -qq && $need_as env DEBIAN_FRONTEND=noninteractive $need_line -qq; } >&2; then
        echo "the installation failed; as root: apt-get update && $need_line" >&2
        exit 69
    fi
    need_missing=""
}
