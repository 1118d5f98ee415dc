"""The worker's half: scores rows of a step, by how likely the model finds the token after each of them (`ScoredRows`),
and measures the attention that answers pay to blocks."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ...compute.mass import BlockMass
from ...compute.shape import Shape
from ...compute.step_parts import StepPart
from ...compute.sums import RunningSums
from ...compute.transfer import copied, to_device, to_host
from ...config import KVPolicyConfig
from ...core.plan import EvictionPlan
from ...integration.seams import replaces
from .plan import SCORED, AuditedRows, ScoredRows, Truncation

#: Rows whose logits are there at once.
AT_ONCE = 64
#: Of these, rows that are sorted at once, to find what top-k, top-p and min-p leave of them.
TRUNCATED_AT_ONCE = 4
#: Bytes for each of these logits: as the model gives them, in float32, and two intermediate results.
OF_LOGIT = 16


class AnswerMass(BlockMass):
    """Mass of an answer's shadow, added up over heads and layers, whatever the policy's are. One shadow runs at a time.

    Args:
        shape: sizes of the KV group.
    """

    optional = True

    def __init__(self, shape: Shape) -> None:
        sizes = 1, shape.kv_heads, shape.layers, shape.max_blocks, shape.block_size
        sums = RunningSums(*sizes, "sum", "sum", shape.device)
        super().__init__(sums, tests=False, tests_in_graphs=False, in_graphs=False, summed=True)


class Scorer(StepPart):
    """Scores rows of one model runner's steps, where vLLM computes log-probabilities of prompts.

    vLLM's own would make the logits of a whole chunk at once. Every tensor-parallel rank calls `compute_logits`.

    Args:
        worker: an `EvictionWorkerMixin` that has loaded its model.
    """

    def __init__(self, worker: Any) -> None:
        super().__init__(worker)
        self.rows: Mapping[str, ScoredRows] = {}
        self._scored: dict[str, np.ndarray] = {}
        runner = worker.model_runner
        self._device: torch.device = runner.device
        self.scratch = AT_ONCE * worker.vllm_config.model_config.get_vocab_size() * OF_LOGIT
        if not worker.use_v2_model_runner:
            score_v1.on(runner, self, runner)
        elif runner.prompt_logprobs_worker is not None:  # the last stage
            score_v2.on(runner.prompt_logprobs_worker, self)

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return config.audit > 0

    def after_orders(self, plan: EvictionPlan) -> None:
        told = AuditedRows.within(plan)
        self.rows, self._scored = {} if told is None else told.of_requests, {}

    def told(self) -> tuple[dict[str, Any], Any]:
        """Return the step's scored rows, request -> float32 [rows, 5] (see `StepPart.told`)."""
        scored, self._scored, self.rows = self._scored, {}, {}
        return ({SCORED: scored}, copied(self._device)) if scored else ({}, None)

    def score(self, compute_logits: Any, hidden_states: torch.Tensor, firsts: Mapping[str, int]) -> None:
        """Score the step's rows.

        Args:
            compute_logits: (hidden states [n, width]) -> logits [n, vocabulary]; None on some ranks.
            hidden_states: of all tokens of the step.
            firsts: request -> row of its first token.
        """
        for req_id, rows in self.rows.items():
            first = firsts[req_id] + rows.first
            hidden = hidden_states[first : first + len(rows.tokens)]
            tokens = to_device(np.array(rows.tokens, np.int64), hidden.device)
            pieces = zip(hidden.split(AT_ONCE), tokens.split(AT_ONCE))
            scored = list(_scores(compute_logits, pieces, rows.temperature, rows.truncation))
            if scored:
                self._scored[req_id] = to_host(torch.cat(scored))


@replaces(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict",
    why="V1: rows of audits are scored where the hidden states of a step are",
    remove_when="vLLM hands a step's hidden states to plugins",
)
def score_v1(prompt_logprobs: Callable[..., Any], scorer: Scorer, runner: Any) -> Callable[..., Any]:
    def _get_prompt_logprobs_dict(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if scorer.rows:
            starts, indices = runner.query_start_loc.np, runner.input_batch.req_id_to_index
            firsts = {req_id: int(starts[indices[req_id]]) for req_id in scorer.rows}
            scorer.score(runner.model.compute_logits, hidden_states, firsts)
        return prompt_logprobs(hidden_states, *args, **kwargs)

    return _get_prompt_logprobs_dict


@replaces(
    "vllm.v1.worker.gpu.sample.prompt_logprob:PromptLogprobsWorker.compute_prompt_logprobs",
    why="V2: the same",
    remove_when="vLLM hands a step's hidden states to plugins",
)
def score_v2(prompt_logprobs: Callable[..., Any], scorer: Scorer) -> Callable[..., Any]:
    def compute_prompt_logprobs(
        logits_fn: Callable[..., Any], hidden_states: torch.Tensor, input_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if scorer.rows:
            starts = dict(zip(input_batch.req_ids, input_batch.query_start_loc_np.tolist()))
            scorer.score(logits_fn, hidden_states, {req_id: starts[req_id] for req_id in scorer.rows})
        return prompt_logprobs(logits_fn, hidden_states, input_batch, *args, **kwargs)

    return compute_prompt_logprobs


def _scores(
    compute_logits: Any, pieces: Any, temperature: float, truncation: Truncation | None
) -> Iterator[torch.Tensor]:
    """Yield the scores of each piece of rows, float32 [n, 5]; nothing on ranks that get no logits."""
    for hidden, tokens in pieces:
        if (logits := compute_logits(hidden)) is not None:
            yield score(logits, tokens, temperature, truncation)


def score(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float, truncation: Truncation | None = None
) -> torch.Tensor:
    """Score the token after each row.

    Args:
        logits: [n, vocabulary].
        tokens: int64 [n].
        temperature: divides the logits.
        truncation: the tokens that could be sampled; None: all.

    Returns:
        float32 [n, 5]: log p(token), log p of the likeliest token, number of tokens that are likelier, entropy in nats,
        1 if the token can be sampled, else 0. Log p and entropy are those of sampling, but for a token that cannot be
        sampled, whose log p is that among all tokens.
    """
    log_p = torch.log_softmax(logits.float() / temperature, dim=-1)
    own, best = log_p.gather(1, tokens[:, None]), log_p.amax(1)
    likelier = (log_p > own).sum(1).float()
    if truncation is None:
        entropy, inside = torch.special.entr(log_p.exp()).sum(1), torch.ones_like(best)
        return torch.stack((own[:, 0], best, likelier, entropy, inside), 1)
    some = zip(log_p.split(TRUNCATED_AT_ONCE), tokens.split(TRUNCATED_AT_ONCE))
    own_sampled, entropy = torch.cat([_sampled(*each, truncation) for each in some]).T
    inside = own_sampled > -torch.inf
    return torch.stack((torch.where(inside, own_sampled, own[:, 0]), best, likelier, entropy, inside.float()), 1)


def _sampled(log_p: torch.Tensor, tokens: torch.Tensor, truncation: Truncation) -> torch.Tensor:
    """Return log p of each token, -inf if it cannot be sampled, and the entropy, of what is sampled: float32 [n, 2].

    vLLM truncates in this order, too. Tokens as likely as the last one that it leaves can all be sampled here.

    Args:
        log_p: float32 [n, vocabulary].
        tokens: int64 [n].
        truncation: of the request.
    """

    def cut(least: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(log_p.masked_fill(log_p < least, -torch.inf), -1)

    if truncation.min_p > 0:
        log_p = cut(log_p.amax(-1, keepdim=True) + math.log(truncation.min_p))
    if 0 < truncation.top_k < log_p.shape[-1]:
        log_p = cut(log_p.topk(truncation.top_k).values[:, -1:])
    if truncation.top_p < 1:
        falling = log_p.sort(-1, descending=True).values
        p = falling.exp()
        # A token stays if those before it have less than top-p; the first one always does.
        stays = (p.cumsum(-1) - p < truncation.top_p).sum(-1, keepdim=True).clamp(min=1)
        log_p = cut(falling.gather(-1, stays - 1))
    entropy = torch.special.entr(log_p.exp()).sum(-1)
    return torch.stack((log_p.gather(1, tokens[:, None])[:, 0], entropy), 1)
