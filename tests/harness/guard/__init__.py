"""Facts of vLLM on which vllm_evict relies, and whether a release of vLLM still has them.

| module | what it does |
|---|---|
| `names` | the functions of vLLM that the plugin replaces and calls, by name |
| `invariants` | what vLLM's code does that no run would tell, each with its releases and why it matters |
| `source` | reads Python sources, from a directory or a wheel, without importing them |
| `check` | takes all this from a release, and says what is missing or does not fit |
| `snapshot` | writes what was taken from a release to `facts.json`, and digests of code to `touched.json` |

To look at a new release of vLLM, write what it has, and read what changed:

    cd tests/harness
    python -m guard.snapshot path/to/vllm-0.34.0-cp38-abi3-manylinux_2_28_x86_64.whl
    git diff

`facts.json` gets an entry "0.34.0" where a signature or a statement differs from the release before. `touched.json` has a
column a release: a function whose digest differs was changed, and has to be read. Then the end-to-end tests run on it.
"""
