#!/usr/bin/env bash
# Rewrites constraints.txt from what is installed: ops/pins.sh VENV. A local version suffix (+cpu, +cu130) is left out: it names a build, not a version.
# NVIDIA's packages are left out too: a CUDA build of torch pins its own.
set -euo pipefail
venv=${1:-.venv}
{
    grep '^#' constraints.txt
    {
        "$venv/bin/python" -m pip freeze --exclude-editable --exclude concordia | grep -v '^nvidia-' | sed -E 's/\+[A-Za-z0-9.]+$//'
        "$venv/bin/python" -m pip freeze --all | grep '^setuptools=='
        grep '^cupy-cuda12x==' constraints.txt
    } | sort -fu
} > constraints.txt.new
mv constraints.txt.new constraints.txt
