"""Guard tests: what vllm_evict relies on in vLLM (`touches`), and whether a release of vLLM still has it.

| module | what it does |
|---|---|
| `touches` | the table: each class, function and attribute of vLLM that the plugin touches, and why |
| `source` | reads Python sources, from a directory or a wheel, without importing them |
| `check` | takes from a release what a touch asks for, and says what is missing |
| `snapshot` | writes what was taken from a release to `snapshots/<version>.json` |

To look at a new release of vLLM, make its snapshot and read the difference to the one before:

    cd tests
    python -m guard.snapshot path/to/vllm-0.34.0-cp38-abi3-manylinux_2_28_x86_64.whl 0.34.0
    diff guard/snapshots/0.33.0.json guard/snapshots/0.34.0.json

A function whose `body` differs was changed by that release and has to be read, even where every touch holds.
"""
