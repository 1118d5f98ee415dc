#!/usr/bin/env bash
# Makes .venv-peers-NAME with the versions of packaging/peers-NAME.txt: an environment for one peer of benchmarks/peers.
# If pip cannot install them here, the reason goes to `unavailable` in it, and the table names the peer with this reason.
#
#   scripts/peers-env.sh NAME [VENV]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

NAME=$1
BASE=${2:-.venv}
VENV=$BASE-peers-$NAME
PINS=packaging/peers-$NAME.txt
LOG=$VENV/setup.log
CPU_WHEELS=https://download.pytorch.org/whl/cpu

pip_install() { "$VENV/bin/python" -m pip install --disable-pip-version-check "$@" >>"$LOG" 2>&1; }

echo "set-up  $VENV: $(grep -E '^[a-z]' "$PINS" | head -n 1) and what it needs"
"$BASE/bin/python" -m venv --clear "$VENV"
: >"$LOG"
# As in setup.sh: PyTorch alone and first, from PyTorch's own index where pip's configuration does not have it.
torch=$(grep -E '^torch==' "$PINS")
index=()
pip_install "$torch" || index=(--extra-index-url "$CPU_WHEELS")
if pip_install ${index[@]+"${index[@]}"} --requirement "$PINS"; then
    # optimum may install a torchvision for CUDA, which does not import here. Text models load without it.
    if ! "$VENV/bin/python" -c 'import torchvision' >>"$LOG" 2>&1; then
        "$VENV/bin/python" -m pip uninstall --yes torchvision >>"$LOG" 2>&1
    fi
else
    { grep -E '^ERROR' "$LOG" || tail -n 1 "$LOG"; } | tail -n 1 | sed -E 's/^ERROR: //; s#(https?|file)://[^ ]*#(an index)#g' >"$VENV/unavailable"
    echo "set-up  $NAME cannot be installed here: $(cat "$VENV/unavailable") (all of it: $LOG)" >&2
fi
