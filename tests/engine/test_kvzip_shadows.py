"""Shadows of kvzip have parts of the requests whose prompts they repeat, and leave others out."""

from typing import ClassVar

import numpy as np
import pytest
from engine import V2, random_prompt
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor import LogitsProcessor as V1Processor

from vllm_evict.features.kvzip.engine import Reconstructions, Scores

if V2:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2Processor

SERVER = {"name": "kvzip", "budget": 192, "buffer": 64, "sink": 32, "recent": 64}


@pytest.fixture
def shadows(monkeypatch):
    """Requests of all shadows that are added."""
    made, add = [], Reconstructions._add

    def added(self, *args):
        add(self, *args)
        made.append(self._shadow.request)

    monkeypatch.setattr(Reconstructions, "_add", added)
    return made


class Liking(V2Processor if V2 else V1Processor):
    """Adds to the logit of a token that each request has to name. It relies on what it checked."""

    seen: ClassVar[list] = []

    def __init__(self, *_):
        pass

    @classmethod
    def validate_params(cls, params):
        if not isinstance((params.extra_args or {}).get("liked"), int) or not params.temperature:
            raise ValueError("expected a token in extra_args, liked, and a temperature")

    def add_request(self, _, params):
        self.seen.append(params.extra_args["liked"] / params.temperature)
        return True

    def is_argmax_invariant(self):
        return False

    def update_state(self, update):
        for row, params, *_ in update.added if update else ():
            self.add_request(row, params)

    def apply(self, logits, *_):
        return logits


@pytest.mark.both_runners
def test_a_shadow_has_what_the_front_end_checked(engine, shadows):
    """Custom logits processors meet it as they meet any other request."""
    server = engine(SERVER, logits_processors=[Liking], max_num_batched_tokens=128)
    Liking.seen.clear()
    server.generate([random_prompt(400)], max_tokens=60, temperature=0.5, seed=1, extra_args={"liked": 3})
    assert len(shadows) == 1 and Liking.seen == [6.0, 6.0]


ASKED = {
    "none": {},
    "scores": {"prompt_logprobs": 2, "logprobs": 3},
    "a prompt computed anew": {"skip_reading_prefix_cache": True},
    "limits": {
        "min_tokens": 60,
        "allowed_token_ids": list(range(9, 200)),
        "bad_words": ["t9"],
        "logit_bias": {10: 2.0},
    },
    "penalties": {
        "presence_penalty": 1.0,
        "repetition_penalty": 1.2,
        "stop_token_ids": [3],
        "temperature": 1.0,
        "seed": 2,
    },
    "a choice": {"structured_outputs": StructuredOutputsParams(regex="(t1|t2|t3){60,500}")},
    "a report of hits": {
        "extra_args": {"kv_cache_report_mode": "full", "kv_transfer_params": {"do_remote_decode": True}}
    },
}


@pytest.mark.parametrize("asked", ASKED)
def test_scores_do_not_depend_on_what_a_request_asks_for(engine, shadows, monkeypatch, asked):
    """A shadow of one token hits its original's blocks, whatever the original asks for, and has the same scores."""
    known = []
    monkeypatch.setattr(Scores, "put", lambda self, hashes, scores: known.append(scores))
    server = engine(SERVER, max_num_batched_tokens=128, structured_outputs_config={"backend": "xgrammar"})
    for params in ({}, ASKED[asked]):
        server.core.reset_prefix_cache()
        server.generate([random_prompt(400)], max_tokens=60, **params)
    plain, own = known
    np.testing.assert_allclose(own, plain, atol=1e-5)
    for shadow in shadows:
        assert shadow.num_output_tokens == 1 and shadow.kv_transfer_params is None
        assert shadow.kv_cache_report_mode == "incremental"
    server.assert_nothing_left()
