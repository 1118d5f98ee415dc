"""Retrieval heads of `duo` whose decodes read less (LServe): against a dense model with a mask for each head."""

import math
import re

import numpy as np
import pytest
import torch
from engine import random_prompt, random_requests
from oracle.model import DenseLlama
from oracle.selection import BLOCK, Chooser
from oracle.tiny import make_tiny_llama
from parity import assert_logprobs
from parts import part_of

from vllm_evict.config import KVPolicyConfig, KVPolicyError
from vllm_evict.core.arrange import arrange
from vllm_evict.features.read.worker import Read

SINK, RECENT = 32, 96
#: Layers x KV heads; one layer has no retrieval head, one has nothing else.
PATTERN = ["0101", "1111", "0000", "1000", "0110"]
#: One KV group of retrieval heads, several of streaming heads.
FEW = ["1000", "0000", "0001", "0100", "0010"]
READ = {"read": 192, "sink": 32, "recent": 32}
RETRIEVAL = {
    "full": {"name": "full", **READ, "hold": 1},
    "lserve": {"name": "full", **READ, "dense_layers": 1, "hold": 4},
    "keydiff": {
        "name": "keydiff",
        "budget": 320,
        "buffer": 64,
        "sink": 32,
        "recent": 64,
        "read": 192,
        "dense_layers": 1,
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("lserve"), layers=5, heads=8, kv_heads=4)


def policy_of(retrieval, pattern=PATTERN):
    return {
        "name": "duo",
        "gates": "made up",
        "pattern": pattern,
        "sink": SINK,
        "recent": RECENT,
        "retrieval": RETRIEVAL[retrieval],
    }


class HeadChooser(Chooser):
    """Chooses for the retrieval heads of each layer; streaming heads see all that they have."""

    def __init__(self, model, pattern, **read):
        super().__init__(model, **read)
        group = model.heads // model.kv_heads
        order = arrange(np.array([list(map(int, row)) for row in pattern], bool), len(self.ranks)).order
        #: Of each layer the query heads of each rank's retrieval heads; ranks without one are left out.
        self.of_ranks = [
            [heads for own in np.split(order[layer], len(self.ranks)) if (heads := _queries(own, row, group))]
            for layer, row in enumerate(pattern)
        ]
        self.retrieval = [[digit == "1" for digit in row for _ in range(group)] for row in pattern]

    def mask(self, bases, resident):
        """bases: of retrieval and of streaming heads, bool [Q, N]; resident: blocks of retrieval heads."""
        less = len(bases[0]) == 1 and len(resident) > self.blocks
        if less:
            self.step(resident)
        else:
            self.held, self.steps = {}, 0

        def of_layer(layer, queries, keys):
            retrieval = torch.tensor(self.retrieval[layer])
            seen = bases[0].repeat(len(retrieval), 1, 1)
            ranks = self.of_ranks[layer]
            chosen = self.of_layer(layer, queries, keys, resident, ranks) if less and ranks else None
            if chosen is not None:
                of_block = torch.arange(seen.shape[2]) // BLOCK
                for heads, own in zip(ranks, chosen):
                    blocks = resident[: self.sinks] + own + resident[-self.recent :]
                    seen[heads] &= torch.isin(of_block, torch.tensor(blocks))
            return torch.where(retrieval[:, None, None], seen, bases[1])

        return of_layer


def _queries(kv_heads, row, group):
    """Query heads of those KV heads that a row of a pattern marks."""
    return [head * group + query for head in kv_heads.tolist() if row[head] == "1" for query in range(group)]


def assert_like_dense(model, pattern, prompt, output, trace, **read):
    """Log-probabilities of an answer are those of a dense model that chooses for itself. Returns its choices."""
    dense = DenseLlama(model)
    chooser, tokens = HeadChooser(dense, pattern, **read), [*prompt, *output.outputs[0].token_ids]
    cache, n, gone, logits = dense.new_cache(), 0, [set(), set()], []
    if trace.start:  # a hit without holes
        dense.forward(tokens[: trace.start], cache, torch.ones(trace.start, trace.start).tril().bool())
        n = trace.start
    streaming = trace.groups[-1].evicted
    assert all(group.evicted == streaming for group in trace.groups[1:])
    for count, evicted in zip(trace.steps, zip(trace.groups[0].evicted, streaming)):
        first, n = n, n + count
        causal = torch.arange(n) <= torch.arange(first, n)[:, None]
        resident = [[block for block in range(math.ceil(n / BLOCK)) if block not in lost] for lost in gone]
        bases = [causal & torch.isin(torch.arange(n) // BLOCK, torch.tensor(blocks)) for blocks in resident]
        logits.append(dense.forward(tokens[first:n], cache, chooser.mask(bases, resident[0]))[0])
        for lost, blocks in zip(gone, evicted):
            lost.update(blocks)
    assert chooser.closest > 1e-5, "rounding could choose another block: take another prompt"
    assert_logprobs(output, prompt, trace, torch.cat(logits))
    assert gone[1]
    return chooser.chosen


@pytest.mark.both_runners("lserve-many")
@pytest.mark.parametrize(
    "name, pattern",
    [pytest.param(name, PATTERN, id=f"{name}-many") for name in RETRIEVAL]
    + [pytest.param("lserve", FEW, id="lserve-few")],
)
def test_answers_are_those_of_a_dense_model_that_chooses_for_retrieval_heads(engine, model, poisoned, name, pattern):
    """Three requests in one batch; one is shorter than what is read at first."""
    server = engine(
        policy_of(name, pattern), model=model, blocks=256, max_num_batched_tokens=192, enable_prefix_caching=False
    )
    own = RETRIEVAL[name] | ({"recent": 1} if name == "keydiff" else {})  # a quarter of six blocks
    own = {field: own[field] for field in own.keys() & {*READ, "hold", "dense_layers"}}
    chosen = [
        assert_like_dense(model, pattern, *answer, **own)
        for answer in server.answered(random_requests((600, 40), (150, 70), (400, 30)))
    ]
    assert min(chosen) > 4
    server.assert_nothing_left()
    reads = (part_of(group, Read) for group in server.worker.kv_evict.groups)
    assert not any(list(read.requests) for read in reads if read)


def test_a_hit_has_the_index_of_retrieval_heads(engine, model):
    """A request that hits another one's prefix chooses among blocks that it has not computed."""
    prefix = random_prompt(480)
    prompts = [prefix + random_prompt(70, seed) for seed in (1, 2)]
    server = engine(policy_of("full"), model=model, blocks=256)
    server.generate([prefix], max_tokens=1)
    own = {field: value for field, value in RETRIEVAL["full"].items() if field != "name"}
    for prompt, output, trace in server.answered([(prompt, {"max_tokens": 30, "logprobs": 1}) for prompt in prompts]):
        assert trace.start >= 256
        assert assert_like_dense(model, PATTERN, prompt, output, trace, **own) > 100
    server.assert_nothing_left()


def test_layers_are_those_of_the_model():
    config = KVPolicyConfig.parse(policy_of("lserve") | {"retrieval": {**RETRIEVAL["lserve"], "dense_layers": 5}})
    with pytest.raises(KVPolicyError, match="dense_layers of a model with 5 layers, from 0 on, got 5"):
        config.check(BLOCK, 5, 4, 4096)
    assert config.sparse_heads and not KVPolicyConfig.parse(policy_of("lserve") | {"retrieval": None}).sparse_heads


def test_what_retrieval_heads_can_not_read_is_refused_by_name():
    for retrieval, message in (
        (
            {"name": "full", "read": 1024, "leaders": [1]},
            "retrieval: leaders choose for the layers after",
        ),
        ({"name": "h2o", "read": 1024}, "read: 'h2o' sees only what a decode attends to"),
    ):
        with pytest.raises(KVPolicyError, match=re.escape(message)):
            KVPolicyConfig.parse(policy_of("full") | {"retrieval": retrieval})
