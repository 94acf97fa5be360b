#!/usr/bin/env bash
# Makes .venv: `setup.sh run` for the console and training, `setup.sh dev` for the tests too.
# TORCH_INDEX=URL names an index with CPU builds of torch, if pip does not know one already.
set -euo pipefail
cd "$(dirname "$0")"
want=${1:-run}

find_python() {
    for python in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
        if "$python" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    echo "setup: no Python >= 3.11 with venv found; install one, or name it: make PYTHON=/path/to/python" >&2
    return 1
}

install() {
    .venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt "$@"
}

python=$(find_python)
if [ ! -x .venv/bin/pip ]; then
    echo "setup: making .venv with $("$python" --version)"
    "$python" -m venv .venv
fi

log=.venv/setup.log
torch=$(sed -n 's/^torch==//p' constraints.txt)
if [ -e /proc/driver/nvidia/version ] || .venv/bin/python -c 'import torch' 2>/dev/null; then
    :
elif install --only-binary=:all: --no-deps ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "torch==$torch+cpu" 2>"$log"; then
    echo "setup: no NVIDIA driver here: installed the CPU build of torch $torch"
else
    echo "setup: no NVIDIA driver here, and no index offers torch $torch+cpu (TORCH_INDEX=URL names one): taking the default build, several GB"
fi

echo "setup: installing what is pinned in constraints.txt"
if [ "$want" = dev ]; then target='.[dev]'; else target='.'; fi
if ! PIP_CONSTRAINT=$PWD/constraints.txt install --editable "$target" 2>"$log"; then
    cat "$log" >&2
    echo "setup: the installation failed; the reason stands above" >&2
    exit 1
fi
touch .venv/.run
[ "$want" = dev ] && touch .venv/.dev
echo "setup: done"
