"""Kernels are compiled before requests come: all variants, as Triton tells them apart; without a GPU."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import test_device_backends
from engine import random_prompt
from test_device_backends import BASE, POLICIES, distinct_prompt, on
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import jit
from triton.runtime.interpreter import InterpretedFunction

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
backend, server = (getattr(test_device_backends, name) for name in ("backend", "server"))
#: vLLM warms up, and does not capture graphs.
WARM = {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "NONE"}}


class Variants:
    """Of the plugin's kernels that were launched: (kernel, Triton's key of what it would have compiled)."""

    def __init__(self):
        self.seen = set()
        self._binders = {}

    @contextmanager
    def noted(self):
        run = InterpretedFunction.run

        def noting(kernel, *args, grid, warmup, **kwargs):
            if kernel.fn.__module__.startswith("vllm_evict."):
                self.seen.add(self.key(kernel, args, kwargs))
            return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

        with patch.object(InterpretedFunction, "run", noting):
            yield self

    def key(self, kernel, args, kwargs):
        if kernel.fn not in self._binders:
            options = {name: kernel.kwargs.get(name) for name in ("do_not_specialize", "do_not_specialize_on_alignment")}
            compiled = jit.JITFunction(kernel.fn, **options)
            bind = jit.create_function_from_signature(compiled.signature, compiled.params, CUDABackend)
            self._binders[kernel.fn] = bind
        _, specialised, options = self._binders[kernel.fn](*args, **kwargs)
        return kernel.fn.__name__, jit.compute_cache_key({}, specialised, options)


@pytest.fixture
def warmed(server):
    """Engines, and the variants that their start launched and those that came later."""

    def make(policy, **kwargs):
        start, later = Variants(), Variants()
        with start.noted():
            subject = server(policy, **{**WARM, "max_num_seqs": 4, **kwargs})
        return subject, start, later

    return make


def requests(distinct=False):
    """Alone and together, prompts in chunks and whole, of a token, short and long answers."""
    prompt = distinct_prompt if distinct else random_prompt
    return [
        [(prompt(1), {"max_tokens": 3})],
        [(prompt(100), {"max_tokens": 6}), (prompt(61, 1), {"max_tokens": 8}), (prompt(7, 2), {"max_tokens": 12})],
        [(prompt(180, 3), {"max_tokens": 5})],
        [(prompt(length, length), {"max_tokens": 20}) for length in (2, 17, 33, 48)],
    ]


SERVED = {
    "h2o": POLICIES["h2o"],
    "h2o-max": {**POLICIES["h2o"], "heads": "max", "layers": "max"},
    "h2o-ema": {**POLICIES["h2o"], "accumulate": "ema", "decay": 0.8},
    "snapkv": {"name": "snapkv", **BASE, "window": 4},
    "sink-window": {**POLICIES["sink-window"], "allow": []},
    "scissorhands": {**POLICIES["scissorhands"], "allow": ["h2o"]},
    "token": {**POLICIES["h2o"], "granularity": "token", "allow": ["keydiff"]},
}
CASES = [on("triton", name) for name in SERVED] + [on("fa3", name) for name in ("h2o", "scissorhands")]


@pytest.mark.parametrize("backend, name", CASES, indirect=["backend"])
def test_nothing_is_compiled_for_a_request(warmed, name):
    subject, start, later = warmed(SERVED[name])
    with later.noted():
        for batch in requests(name == "token"):
            subject.traced(batch)
    assert later.seen, "requests launched nothing"
    assert not later.seen - start.seen
