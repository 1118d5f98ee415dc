"""Subclasses of vLLM's scheduler, managers, specs and workers, and every patch; all that the product imports of vLLM.

Its rooms are vLLM's processes, and each has a table of what it touches:

- `start` runs before the engine, in each process.
- `engine` runs in the engine core, `worker` in each worker, `frontend` in the API process.

`plugin` puts them together. What a configuration of vLLM can name, or what vLLM registers, is
subclassed: scheduler, managers, specs and workers. tests/compat/test_guard.py holds what is replaced and called against
the sources of every release in `start.versions`.
"""
