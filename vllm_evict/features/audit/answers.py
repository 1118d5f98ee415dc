"""Answers of requests that have ended, as audits take them: what clients got, what was lost, and what is left out."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.request import Request, RequestStatus

from ...config import BEAM
from ...core.residence import NO_BLOCKS
from .plan import Truncation
from .verdicts import kept_label

#: Ends of requests whose answers are no whole ones.
CUT_OFF = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_IGNORED, RequestStatus.FINISHED_ERROR)


class Loss(NamedTuple):
    """Blocks that a request holds and has lost, when it ends or starts over.

    Attributes:
        held: blocks that it holds.
        blocks: blocks that its tokens fill.
        gone: int64 [n], logical blocks that it lost.
    """

    held: int = 0
    blocks: int = 0
    gone: np.ndarray = NO_BLOCKS

    @property
    def share(self) -> float:
        """Share of its blocks that it holds; 0 if it has none."""
        return self.held / self.blocks if self.blocks else 0.0


@dataclass(slots=True, eq=False)
class AuditedAnswer:
    """An answer that waits for its audit.

    Attributes:
        request: vLLM's request, which has ended.
        policy: name of the request's policy.
        kept: label of the share of its blocks that it kept (`verdicts.kept_label`).
        gone: int64 [n], logical blocks that were gone at its end; None: their mass cannot be measured.
        since: when it ended, of `monotonic`.
        token_ids: of prompt and answer, without what was generated after a stop string.
        tries: shadows of it so far.
        computed: tokens that these have computed.
    """

    request: Request
    policy: str
    kept: str
    gone: np.ndarray | None
    since: float
    token_ids: list[int] = field(default_factory=list)
    tries: int = 0
    computed: int = 0

    @property
    def greedy(self) -> bool:
        return self.request.sampling_params.temperature == 0

    @property
    def truncation(self) -> Truncation | None:
        """The tokens that the request was sampled from; None: from all, or the likeliest alone."""
        params = self.request.sampling_params
        limits = Truncation(max(params.top_k, 0), params.top_p, params.min_p)
        return None if self.greedy or limits == Truncation() else limits

    @property
    def first(self) -> int:
        """Row after which the answer's first token comes."""
        return int(self.request.num_prompt_tokens) - 1

    @property
    def tokens(self) -> int:
        """Tokens of the answer."""
        return len(self.token_ids) - 1 - self.first


class Losses:
    """Blocks that requests lost before they started over: an answer may end before they compute its tokens again."""

    def __init__(self) -> None:
        self._before: dict[str, Loss] = {}

    def start_over(self, req_id: str, loss: Loss) -> None:
        """Note what a request holds that starts over, and has lost blocks."""
        self._before[req_id] = min(self._before.get(req_id, loss), loss, key=lambda each: each.share)

    def end(self, req_id: str, evicted: int, loss: Loss) -> tuple[str, np.ndarray]:
        """Return the label of the share of its blocks that a request kept at the worst time, and what is gone.

        Args:
            req_id: a request that ends.
            evicted: blocks that it lost, those before it started over included.
            loss: what it holds; without blocks if it has been preempted.
        """
        before = self._before.pop(req_id, None)
        now = loss if loss.blocks or before is None else before
        worst = now if before is None else min(before, now, key=lambda each: each.share)
        return kept_label(evicted, worst.held, worst.blocks), now.gone


def unfit(request: Request) -> str | None:
    """Return why the answer of a request is not audited, whatever its end; None if it is."""
    params = request.sampling_params
    reasons = {
        # Its requests are tokens of one answer, and vLLM chooses between them.
        "beam": (params.extra_args or {}).get(BEAM),
        "empty": not request.num_output_tokens,
        "session": request.resumable,
        "media": request.prompt_token_ids is None or request.prompt_embeds is not None or request.mm_features,
        "grammar": params.structured_outputs is not None,
        "penalties": params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1,
        "bias": params.logit_bias
        or params.allowed_token_ids
        or params.bad_words
        or params.min_tokens
        or getattr(params, "thinking_token_budget", None) is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def served_tokens(request: Request, tokenizer: Any) -> int | None:
    """Return how many tokens of its answer a request's client got; None if the answer was cut off.

    The front end finds stop strings, and aborts the request: the engine may have generated more by then, and does not
    hear why. So the text is made here once more, by vLLM's own detokenizer.

    Args:
        request: has ended.
        tokenizer: vLLM's; None: no request has stop strings.
    """
    tokens, status = list(request.output_token_ids), request.status
    if request.sampling_params.stop:
        detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
        for count, token in enumerate(tokens, 1):
            if detokenizer.update([token], status == RequestStatus.FINISHED_STOPPED and count == len(tokens)):
                return count
    return None if status in CUT_OFF else len(tokens)
