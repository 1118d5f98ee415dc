"""Triton kernels of vllm_evict, imported as `vllm_evict.triton_kernels`.

Nothing is imported here, since a CPU installation may lack Triton. Each module has one kernel and its launcher. Its
torch reference is there too, or in `compute.kernels` if a CPU kernel has the same contract. Launchers check shapes and
dtypes, not the contents of device memory (block ids, lengths), which would cost a synchronisation.

vLLM looks for a top-level `triton_kernels`, which is a package of the Triton project. Python finds this folder under
that name if a checkout is on `sys.path` (`python -m ...` in its root). Then the code below imports the package from the
rest of `sys.path`.
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
    # The import statement returns the entry of sys.modules once this module has run.
    sys.modules[__name__] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[__name__])
