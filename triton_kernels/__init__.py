"""Triton kernels of vllm_evict, imported as `vllm_evict.triton_kernels`.

Nothing is imported here: a CPU installation may lack Triton. Each module has one kernel, its launcher and its torch
reference, or the name of the one that the CPU kernel of the same contract has. Launchers check shapes and dtypes, which
cost no synchronisation; what lies in device memory (block ids, lengths) is the caller's to get right.

vLLM looks for a top-level `triton_kernels`, which is a package of the Triton project. Python finds this folder under
that name if a checkout is on `sys.path` (`python -m ...` in its root). The import then continues with the rest of
`sys.path`, as if the checkout were not on it.
"""

if __name__ == "triton_kernels":
    import sys
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec
    from pathlib import Path

    checkout = Path(__file__).resolve().parents[1]
    last = max((i for i, entry in enumerate(sys.path) if Path(entry).resolve() == checkout), default=-1)
    spec = PathFinder.find_spec(__name__, sys.path[last + 1 :])
    if spec is None or spec.origin is None:  # a folder without __init__.py has no origin
        raise ModuleNotFoundError(
            f"{checkout / __name__} has the kernels of vllm_evict; import them as vllm_evict.{__name__}", name=__name__
        )
    # Python returns what sys.modules has once this module has run.
    sys.modules[__name__] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[__name__])
