"""Runs one prompt under a policy and under full attention, and records what became of each block."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ...compute.reach import Reach
from ...config import KVPolicyConfig, KVPolicyError
from ...core.actions import Action
from ...core.blocks import RequestBlocks
from ...core.mechanisms import Mechanism
from ...core.mechanisms.base import settled
from ...core.plan import EvictionPlan, Reports
from ...features.kvzip.engine import Scored
from ...integration.engine.shadows import ShadowRequests
from ...integration.engine.view import EngineView
from ...integration.start import attending
from ..eval.prompts import Prompts

R = TypeVar("R")
#: Most tokens that `pieces` decodes again for one of them.
WINDOW = 256
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
        ids: token ids of both answers; None: tokens are the same where their texts are.
    """

    prompt: list[str]
    answer: list[str]
    full: list[str]
    steps: list[ShownStep]
    block_size: int
    parts: Sequence[HeadSet] = (HeadSet("all layers and heads", 1, 0),)
    ids: tuple[Sequence[int], Sequence[int]] | None = None

    @property
    def same(self) -> int:
        """Leading tokens that both answers share. Unlike tokens may have the same text."""
        return _alike(*(self.ids or (self.answer, self.full)))


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


def run(
    model: str,
    config: KVPolicyConfig,
    text: str,
    max_tokens: int,
    options: dict[str, Any],
    say: Callable[[str], object] = lambda line: None,
    chat: bool = False,
) -> Shown:
    """Answer a prompt greedily under a policy and under full attention, in engines inside this process.

    Args:
        model: directory or name.
        config: the policy; it has to evict whole blocks, or to move them to the host.
        text: the prompt.
        max_tokens: most tokens of an answer.
        options: further arguments of vLLM's `LLM`.
        say: told a line before each part that takes time.
        chat: whether the prompt goes through the model's chat template.

    Raises:
        EvalError: the chat template refuses the prompt.
        KVPolicyError: the policy evicts in another way, the prompt is too long, or there is no chat template.
    """
    for refused, what in (
        (config.keeps_all, "full, which evicts nothing"),
        (any(part.granularity == "token" for part in config.classes.values()), "granularity: token"),
        (config.context is not None, "a context"),
        (config.sparse_heads, "read, which full attention would follow too"),
        (options.get("skip_tokenizer_init"), "skip_tokenizer_init, without which a page has no text"),
    ):
        if refused:
            raise KVPolicyError(
                f"show got {what}; expected a policy that evicts whole blocks, or moves them to the host"
            )
    policy = config.to_dict()
    if not config.reaches:  # a request under full goes beside it
        policy |= {"allow": sorted({*(config.allow or ()), "full"})}
    caches = {"enable_prefix_caching": config.reconstructs}  # a second pass over the prompt hits its blocks

    def answered(llm: Any, ids: list[int], under: str, extra_args: dict[str, Any] | None = None) -> list[int]:
        say(f"answering a prompt of {len(ids):,} tokens under {under}")
        return _answer(llm, ids, max_tokens, extra_args)

    def served(llm: Any) -> tuple[Any, list[int], list[int], Shown]:
        prompts = Prompts(llm.llm_engine.vllm_config, chat=chat)
        if chat and not prompts.chat:
            raise KVPolicyError("show got --chat and a model without a chat template; expected one: leave --chat out")
        tokenizer, ids = prompts.tokenizer, list(prompts.sent(text))
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
        own = answered(llm, ids, config.name)
        steps, recorder.steps = recorder.steps, []
        full = [] if config.reaches else answered(llm, ids, "full attention", {"kv_policy": "full"})
        shown = Shown([], [], [], steps, core.scheduler.kv_managers[0].block_size, _parts(core.scheduler), (own, full))
        return tokenizer, ids, own, shown

    say(f"starting vLLM on {model} under {config.name}{', the first of two engines' * config.reaches}")
    tokenizer, ids, own, shown = _in_engine(served, model, policy, caches | options)
    if config.reaches:
        say(f"starting vLLM on {model} again, for full attention: every request of the first engine moves blocks")
        plain = {"name": "full", "allow": []}
        full = _in_engine(lambda llm: answered(llm, ids, "full attention"), model, plain, caches | options)
        shown = shown._replace(ids=(own, full))
    assert shown.ids is not None
    # The prompt before an answer changes the text of its first token.
    answers = [pieces(tokenizer, [*ids, *each])[len(ids) :] for each in shown.ids]
    return shown._replace(prompt=pieces(tokenizer, ids), answer=answers[0], full=answers[1])


def _in_engine(use: Callable[[Any], R], model: str, policy: dict[str, Any], options: dict[str, Any]) -> R:
    """Return what a function returns of an engine inside this process, which ends before the next one begins.

    Raises:
        KVPolicyError: vLLM, or the plugin, refuses the model or an argument.
    """
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    try:
        llm = LLM(model, kv_policy=policy, **options)
    except KVPolicyError:
        raise
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise KVPolicyError(f"vLLM does not start on {model}: {' '.join(str(error).split())}") from None
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


def _alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many leading elements two sequences share."""
    return next((at for at, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other)))


def pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    """Return the text of each token; together they are the text of all tokens.

    A character of several tokens stands with the last of them, and so does a text that the next token changes.
    """
    text = tokenizer.decode(ids)
    texts: list[str] = []
    # Tokens of a window are decoded: those of the last piece, whose text is `before`, and those after it. What comes
    # first in a text is decoded otherwise than what follows (spaces, accents).
    at, first, start, before = 0, 0, 0, ""
    for end in range(1, len(ids) + 1):
        decoded = tokenizer.decode(ids[first:end])
        piece = decoded[len(before) :] if decoded.startswith(before) else ""
        if end - first > WINDOW:  # the window is decoded otherwise than the whole
            piece, first = text[at : _alike(text, tokenizer.decode(ids[:end]))], end - WINDOW // 4
        if end == len(ids):
            piece = text[at:]
        elif piece and text.startswith(piece, at):
            first, start = max(first, start), end
            before = tokenizer.decode(ids[first:end])
        else:
            piece = ""
        texts.append(piece)
        at += len(piece)
    return texts
