#!/usr/bin/env bash
# For cibuildwheel, before a wheel is built and before it is tested: the torch that the constraints pin, and what builds.
set -euo pipefail
constraints=$(dirname "${BASH_SOURCE[0]}")/constraints.txt
index=https://download.pytorch.org/whl/cpu
python -m pip install --constraint "$constraints" --extra-index-url "$index" torch setuptools setuptools-scm wheel ninja numpy
