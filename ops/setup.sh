#!/usr/bin/env bash
# Makes or completes the environment: ops/setup.sh VENV. Safe to run again after an interruption: every step is repeated until it held.
# torch is installed first and pinned: with no torch there, somebody's dependency on a plain `torch` may fetch gigabytes of CUDA.
set -euo pipefail
venv=${1:-.venv}
bold='' plain=''
if [ -t 1 ]; then bold=$'\033[1m' plain=$'\033[0m'; fi
say() { printf '\n%s[setup %s]%s %s\n' "$bold" "$1" "$plain" "$2"; }
export PIP_DISABLE_PIP_VERSION_CHECK=1

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3; do
        if "$candidate" -c 'import sys; sys.exit(not (sys.version_info >= (3, 11)))' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    echo "setup: no Python 3.11 or newer found; install one, or name it: make setup PYTHON=/path/to/python3" >&2
    return 1
}

# An index in pip's configuration that lacks a package is said for each package and each index; where none has it, that is an error of its own.
install() {
    { "$venv/bin/python" -m pip install "$@" 2>&1 >&3 | sed -u '/^WARNING: Location .* is ignored: it is neither a file nor a directory\.$/d' >&2; } 3>&1
}

if ! "$venv/bin/python" -c 'import pip' >/dev/null 2>&1; then
    python=$(find_python)
    say 1/3 "environment in $venv, $("$python" --version)"
    if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        echo "setup: $python cannot make environments; on Debian and Ubuntu: apt install python3-venv" >&2
        exit 1
    fi
    "$python" -m venv --clear "$venv"
    # One that comes with Python 3.11 compares each file of an index with a thousand platforms: 26 s of a core for our packages instead of 10.
    install --quiet 'pip>=25,<27' || echo "setup: pip stays as it is; that only takes longer" >&2
else
    say 1/3 "environment in $venv is there, $("$venv/bin/python" --version)"
fi

torch=$(grep -E '^torch==' constraints.txt)
say 2/3 "$torch: the largest part. Its download shows how far it is; \"Installing collected packages\" then says nothing for a minute or two"
install --constraint constraints.txt "$torch" 'setuptools>=77'

say 3/3 "the other dependencies, and concordia itself; after \"Installing collected packages\" silent again for up to two minutes"
install --constraint constraints.txt --no-build-isolation --editable '.[dev]'
if ! "$venv/bin/python" -c 'import torch, transformers, lmdb, gateway, tiers, engine, ops' >/dev/null; then
    echo "setup: the environment is damaged, perhaps by an interrupted installation: rm -rf $venv, then make setup" >&2
    exit 1
fi
"$venv/bin/python" -m compileall -q tiers engine gateway ops bench
say done "$venv is ready: $venv/bin/concordia --help"
