"""The CPU engine's worker."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
from vllm.v1.worker.cpu_worker import CPUWorker

from ..seams import replaces
from .worker import EvictionWorkerMixin


@replaces(
    "vllm.v1.worker.cpu_worker:CPUWorker",
    methods="sample_tokens",
    why="generators of requests with a `seed` draw for tokens of answers alone: CPU generators cannot be set back",
    remove_when="vLLM draws no token that it drops",
)
class CPUEvictionWorker(EvictionWorkerMixin, CPUWorker):
    """vLLM's `CPUWorker` with eviction."""

    def sample_tokens(self, grammar_output: Any) -> Any:
        with nullcontext() if self.use_v2_model_runner else drawing_for_answers(self.model_runner):
            return super().sample_tokens(grammar_output)


@contextmanager
def drawing_for_answers(runner: Any) -> Iterator[None]:
    """Let generators of requests with a `seed` draw for tokens of answers alone, on Model Runner V1.

    A step that computes a part of a prompt samples a token for it, too, and drops the token. vLLM then sets the
    request's generator back by one draw, and torch's CPU generators refuse that ("CPU Generator does not use offset"),
    which ends the engine. A policy makes such steps where vLLM would compute a prompt at once. Here the dropped token
    is drawn without the request's generator, so there is nothing to set back. A GPU's generators can be set back.

    vLLM 0.33 sets them back still.
    """
    generators = runner.input_batch.generators
    dropped = np.flatnonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs]) if generators else ()
    kept = {row: generators.pop(row) for row in map(int, dropped) if row in generators}
    try:
        yield
    finally:
        generators.update(kept)
