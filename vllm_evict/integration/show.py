"""Runs one prompt under a policy and under full attention, and records what became of each block."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..compute.reach import Reach
from ..config import KVPolicyConfig, KVPolicyError
from ..core.actions import Action
from ..core.blocks import RequestBlocks
from ..core.mechanisms import Mechanism
from ..core.mechanisms.base import settled
from ..core.plan import EvictionPlan, Reports
from .engine.reconstruction import Scored
from .engine.shadows import ShadowRequests
from .engine.view import EngineView
from .start import attending

R = TypeVar("R")
#: Fates of a block in `ShownStep.fates`. A kept block with an importance has a digit, from 0 for the least important.
KEPT, GONE, HOST = "k", ".", "h"


class HeadSet(NamedTuple):
    """Heads that share what became of blocks.

    Attributes:
        name: layer and KV heads, for people.
        heads: their number, over all layers of the part.
        group: index of their KV group.
        layer: index of the layer in `ShownStep.reads`; None: its reads are not recorded.
    """

    name: str
    heads: int
    group: int
    layer: int | None = None


class ShownStep(NamedTuple):
    """A step after which blocks were elsewhere than before, or a decode that read some of the host.

    Attributes:
        computed: tokens of the request that were computed by then.
        fates: for each KV group a character for each block that there was (see `KEPT`).
        reads: for each layer the blocks of the host that the decode read.
    """

    computed: int
    fates: list[str]
    reads: list[list[int]]


class Shown(NamedTuple):
    """One prompt, its answers, and what became of its blocks.

    Attributes:
        prompt: text of each token of the prompt.
        answer: text of each token of the policy's answer.
        full: the same of full attention's answer.
        steps: in order.
        block_size: tokens.
        parts: all heads, by what became of their blocks.
    """

    prompt: list[str]
    answer: list[str]
    full: list[str]
    steps: list[ShownStep]
    block_size: int
    parts: Sequence[HeadSet] = (HeadSet("all layers and heads", 1, 0),)

    @property
    def same(self) -> int:
        """Leading tokens whose text both answers share."""
        pairs = enumerate(zip(self.answer, self.full))
        return next((at for at, (own, full) in pairs if own != full), min(len(self.answer), len(self.full)))


class Recorder(Mechanism):
    """Records where the blocks of client requests are after each step.

    Args:
        scheduler: an `EvictionMixin`.

    Attributes:
        steps: those after which something has changed.
        reads: layer -> blocks of the host that the step's decode read.
    """

    def __init__(self, scheduler: EngineView) -> None:
        super().__init__(scheduler)
        self._scheduler = scheduler
        self.steps: list[ShownStep] = []
        self.reads: dict[int, list[int]] = {}
        #: KV group -> block -> importance by the last decision, 0 to 9.
        self._importance: dict[int, dict[int, int]] = {}

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return False  # added by `run`

    def decide(self, plan: EvictionPlan, reports: Sequence[Reports]) -> Iterator[Action]:
        """Note the importance of blocks. The recorder comes first, so all blocks are there that decisions compare."""
        for group, request, blocks in self.due(plan):
            report = reports[group.number].get(request.request_id)
            if blocks.config.policy.reconstructs:
                report = blocks.of(Scored).scores
            if not blocks.config.reaches and (report is not None or not blocks.config.policy.measures):
                ranked, _ = blocks.rank(settled(request), report)
                self._importance[group.number] = {
                    block: 10 * at // len(ranked) for at, block in enumerate(ranked.tolist())
                }
        yield from ()

    def after_output(self, outputs: Mapping[int, Any]) -> None:
        """Record the step, if a block is elsewhere than before or was read."""
        reads, self.reads = self.reads, {}
        for req_id, request in self.view.requests.items():
            if any(shadows.owns(req_id) for shadows in self._scheduler.mechanisms.of(ShadowRequests)):
                continue
            computed = settled(request)
            fates = [self._fates(each.number, each.residents[req_id], computed) for each in self.view.groups]
            before = self.steps[-1].fates if self.steps else [""] * len(fates)
            if reads or any(_moved(*each) for each in zip(before, fates)):
                layers = [reads.get(layer, []) for layer in range(max(reads, default=-1) + 1)]
                self.steps.append(ShownStep(computed, fates, layers))

    def _fates(self, group: int, blocks: RequestBlocks, tokens: int) -> str:
        """Return the fates of the blocks of so many tokens."""
        importance, residence = self._importance.get(group, {}), blocks.residence
        known = [str(importance.get(block, KEPT)) for block in range(residence.known)]
        for block in residence.absent.tolist():
            known[block] = HOST if block in residence.host else GONE
        return "".join(known).ljust(-(-tokens // blocks.block_size), KEPT)


def _moved(before: str, after: str) -> bool:
    """Return whether a block is elsewhere; blocks that are new are kept."""
    places = [each if each in (GONE, HOST) else KEPT for each in after]
    known = [each if each in (GONE, HOST) else KEPT for each in before]
    return places[: len(known)] != known or any(each != KEPT for each in places[len(known) :])


def run(model: str, config: KVPolicyConfig, text: str, max_tokens: int, options: dict[str, Any]) -> Shown:
    """Answer a prompt greedily under a policy and under full attention, in engines inside this process.

    Args:
        model: directory or name.
        config: the policy; it has to evict whole blocks, or to move them to the host.
        text: the prompt.
        max_tokens: most tokens of an answer.
        options: further arguments of vLLM's `LLM`.

    Raises:
        KVPolicyError: the policy evicts in another way, or the prompt is too long.
    """
    for refused, what in (
        (config.keeps_all, "full, which evicts nothing"),
        (any(part.granularity == "token" for part in config.classes.values()), "granularity: token"),
        (config.context is not None, "a context"),
        (config.sparse_heads, "read, which full attention would follow too"),
    ):
        if refused:
            raise KVPolicyError(
                f"show got {what}; expected a policy that evicts whole blocks, or moves them to the host"
            )
    policy = config.to_dict()
    if not config.reaches:  # a request under full goes beside it
        policy |= {"allow": sorted({*(config.allow or ()), "full"})}
    caches = {"enable_prefix_caching": config.reconstructs}  # a second pass over the prompt hits its blocks

    def served(llm: Any) -> Shown:
        tokenizer = llm.get_tokenizer()
        ids = tokenizer(text)["input_ids"]
        longest = llm.llm_engine.model_config.max_model_len
        if not text.strip() or len(ids) + max_tokens > longest:
            raise KVPolicyError(
                f"show got a prompt of {len(ids)} tokens; expected some text of at most {longest - max_tokens}: "
                f"--max-model-len {longest} less --max-tokens {max_tokens}"
            )
        core = llm.llm_engine.engine_core.engine_core
        recorder = Recorder(core.scheduler)
        core.scheduler.mechanisms.add(recorder, last=False)
        if config.reaches:
            _watch(core.model_executor.driver_worker.worker.kv_evict.groups[0].source, recorder)
        answer = pieces(tokenizer, _answer(llm, ids, max_tokens))
        steps, recorder.steps = recorder.steps, []
        full = [] if config.reaches else pieces(tokenizer, _answer(llm, ids, max_tokens, {"kv_policy": "full"}))
        block_size, parts = core.scheduler.kv_managers[0].block_size, _parts(core.scheduler)
        return Shown(pieces(tokenizer, ids), answer, full, steps, block_size, parts)

    def plain(llm: Any) -> list[str]:
        tokenizer = llm.get_tokenizer()
        return pieces(tokenizer, _answer(llm, tokenizer(text)["input_ids"], max_tokens))

    shown = _in_engine(served, model, policy, caches | options)
    if config.reaches:
        shown = shown._replace(full=_in_engine(plain, model, {"name": "full", "allow": []}, caches | options))
    return shown


def _in_engine(use: Callable[[Any], R], model: str, policy: dict[str, Any], options: dict[str, Any]) -> R:
    """Return what a function returns of an engine inside this process, which ends before the next one begins."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(model, kv_policy=policy, **options)
    try:
        return use(llm)
    finally:
        del llm
        cleanup_dist_env_and_memory()


def _answer(llm: Any, ids: list[int], max_tokens: int, extra_args: dict[str, Any] | None = None) -> list[int]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, extra_args=extra_args)
    (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def _watch(source: Reach, recorder: Recorder) -> None:
    """Have a recorder hear what layers of decodes read of the host."""
    read = source.read

    def watched(call: Any, *args: Any) -> None:
        read(call, *args)
        (req_id,) = source.requests
        recorder.reads[call.place] = source.last_read(req_id, call.place)

    vars(source)["read"] = watched


def _parts(scheduler: Any) -> list[HeadSet]:
    """Return the parts of a model, of one rank."""
    of_layers = attending.kv_heads(scheduler.vllm_config.model_config)
    if scheduler.kv_policy.reaches:
        return [HeadSet(f"layer {layer}", heads, 0, layer) for layer, heads in enumerate(of_layers)]
    if (layout := attending.layout(scheduler.vllm_config, scheduler.kv_policy)) is None:
        groups = len(scheduler.kv_managers)
        names = ["all layers and heads"] if groups == 1 else [f"KV group {group}" for group in range(groups)]
        return [HeadSet(name, 1, group) for group, name in enumerate(names)]
    parts = []
    for layer, places in enumerate(layout.places[0]):
        heads = (np.arange(of_layers[layer]) if layout.order is None else layout.order[layer]).tolist()
        for place in (place for place in places if place.heads):
            own, heads = sorted(heads[: place.heads]), heads[place.heads :]
            named = f"KV head{'s' * (len(own) > 1)} {', '.join(map(str, own))}"
            parts.append(HeadSet(f"layer {layer}, {named} ({layout.groups[place.group]})", place.heads, place.group))
    return parts


def pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    """Return the text of each token. A character of several tokens stands with the last of them."""
    texts, done = [], ""
    for start in range(0, len(ids), 64):
        # Text before a token changes its own (spaces, accents), so a few tokens before it are decoded again.
        first = max(start - 8, 0)
        before = tokenizer.decode(ids[first:start])
        for end in range(start, min(start + 64, len(ids))):
            done = tokenizer.decode(ids[first : end + 1])
            whole = not done.endswith("�")
            texts.append(done[len(before) :] if whole else "")
            before = done if whole else before
    return texts
