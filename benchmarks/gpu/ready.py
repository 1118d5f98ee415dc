"""Ends a script whose Python has no vLLM with this plugin, before an import fails; run or imported, at once."""

import sys
from importlib.metadata import entry_points
from importlib.util import find_spec

missing = [name for name in ("torch", "vllm", "rich") if find_spec(name) is None]
if not any(point.name == "vllm_evict" for point in entry_points(group="vllm.general_plugins")):
    missing.append("vllm_evict")
if missing:
    sys.exit(
        f"{sys.executable} has no {', '.join(missing)}; expected the Python of your vLLM, with this plugin installed; "
        "install it there (PYTHON -m pip install --no-build-isolation . in the checkout) and name that Python "
        "(make check-gpu GPU_PYTHON=PYTHON)"
    )
