"""Runs one prompt under a policy and under full attention, and records what became of each block."""

from typing import Any, NamedTuple

from ..config import KVPolicyConfig, KVPolicyError
from ..core.actions import Applied
from ..core.mechanisms import Mechanism
from ..core.mechanisms.base import settled


class Decision(NamedTuple):
    """Blocks that a request lost at once.

    Attributes:
        computed: tokens of the request that were computed by then.
        blocks: logical blocks.
    """

    computed: int
    blocks: list[int]


class Shown(NamedTuple):
    """One prompt, its answers, and what became of its blocks.

    Attributes:
        prompt: text of each token of the prompt.
        answer: text of each token of the policy's answer.
        full: the same of full attention's answer.
        same: leading tokens that both answers share.
        decisions: in order.
        block_size: tokens.
    """

    prompt: list[str]
    answer: list[str]
    full: list[str]
    same: int
    decisions: list[Decision]
    block_size: int


class Recorder(Mechanism):
    """Records the decisions on all requests."""

    def __init__(self, view: Any) -> None:
        super().__init__(view)
        self.decisions: list[Decision] = []

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return False  # added by `run`

    def on_applied(self, applied: Applied) -> None:
        if len(applied.action.holes):
            computed = settled(self.view.requests[applied.action.req_id])
            self.decisions.append(Decision(computed, applied.action.holes.tolist()))


def run(model: str, config: KVPolicyConfig, text: str, max_tokens: int, options: dict[str, Any]) -> Shown:
    """Answer a prompt greedily under a policy and under full attention, in an engine inside this process.

    Args:
        model: directory or name.
        config: the policy; it has to evict whole blocks, for all heads, for good.
        text: the prompt.
        max_tokens: most tokens of an answer.
        options: further arguments of vLLM's `LLM`.

    Raises:
        KVPolicyError: the policy evicts in another way, or the prompt is too long.
    """
    for refused, what in (
        (config.name == "full", "full, which evicts nothing"),
        (config.allocator.splits, "a policy that splits heads"),
        (config.granularity == "token", "granularity: token"),
        (config.evict == "host", "evict: host"),
        (config.context is not None, "a context"),
        (config.selects, "select, which full attention would follow too"),
    ):
        if refused:
            raise KVPolicyError(f"show got {what}; expected a policy that evicts whole blocks for all heads")
    from vllm import LLM, SamplingParams

    allow = sorted({*(config.allow or ()), "full"})
    caches = {"enable_prefix_caching": config.reconstructs}  # a second pass over the prompt hits its blocks
    llm = LLM(model, kv_policy=config.to_dict() | {"allow": allow}, **(caches | options))
    try:
        tokenizer = llm.get_tokenizer()
        ids = tokenizer(text)["input_ids"]
        longest = llm.llm_engine.model_config.max_model_len
        if not text.strip() or len(ids) + max_tokens > longest:
            raise KVPolicyError(
                f"show got a prompt of {len(ids)} tokens; expected some text of at most {longest - max_tokens}: "
                f"--max-model-len {longest} less --max-tokens {max_tokens}"
            )
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        recorder = Recorder(scheduler)
        scheduler.mechanisms.add(recorder)
        answers = []
        for asked in (None, {"kv_policy": "full"}):
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, extra_args=asked)
            (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
            answers.append(list(output.outputs[0].token_ids))
        same = next((at for at, pair in enumerate(zip(*answers)) if len(set(pair)) > 1), min(map(len, answers)))
        own, full = (pieces(tokenizer, answer) for answer in answers)
        block_size = scheduler.kv_managers[0].block_size
        return Shown(pieces(tokenizer, ids), own, full, same, recorder.decisions, block_size)
    finally:
        from vllm.distributed import cleanup_dist_env_and_memory

        del llm
        cleanup_dist_env_and_memory()


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
