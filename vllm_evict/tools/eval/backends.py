"""The backend that answers prompts by vLLM's `LLM` in this process; `served` has the one for servers.

The tokens that policies have seen when they decide are a setting. Results of two settings are never mixed:

    agnostic   decisions over the context are taken before the question. Prompts are prefilled in chunks, the context
               ends with a chunk, and the question comes in the next. By then a request holds at most its budget.
    aware      decisions see the question: the whole prompt is one chunk, and the first decision follows it.
    turns      several questions about one context, in one session of vLLM (streaming input): the first as in
               `agnostic`, each other one after the model's own answer before it, which stays in the cache.
    served     the server chooses chunks: decisions over the last chunk see the question, all others do not. Users get
               this setting; it lies between the other two.

For `agnostic` a second request that hits the prefix of a first one would not work: blocks that were computed before the
first eviction stay in the prefix cache when they are evicted, so the second request would hit them.

In `served` a server that evicts whole prompts only (`prompt: whole`) computes a prompt once for all its contenders.
They hit the beginning of it in the prefix cache, and compute the last `TAIL` tokens. Contenders that score by older
queries than these compute all of it. Under other servers prompts never share a prefix cache: a policy would hit blocks
that the policy before it had computed.

A policy that reconstructs prompts (`kvzip`) first gets the context alone (or the whole prompt, if the setting shows the
question) and repeats it. Then the prompt is computed again from its first token, chunk by chunk, and blocks are evicted
by the scores of the repetition.
"""

import gc
import math
import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ... import __version__
from ...config import KVPolicyConfig
from ...policies.base import RUNNING
from . import EvalError, one_line
from .policies import Contender, brief
from .prompts import Prompts
from .sessions import Sessions
from .tasks import NLL, Sample

SETTINGS = ("agnostic", "aware", "turns", "served")
#: Tokens at the end of a prompt that each contender computes itself.
TAIL = 64
#: Bytes of KV cache on a CPU, if the user gives none.
CPU_CACHE = 1 << 30


@dataclass(frozen=True)
class Answer:
    """The answer to one sample, and its costs.

    Attributes:
        text: the answer.
        nll: nats per token over the second half of the prompt, for the metric of that name.
        prompt_tokens, output_tokens: of this request.
        budget_tokens: the request's budget in whole blocks; None if it kept all blocks. Of a server without a KV policy
            this and the following three are None.
        peak_blocks: most KV blocks held at once, where heads are split the mean over KV groups.
        evicted_tokens: tokens whose blocks were evicted.
        block_size: tokens of a KV block; None if heads are split, over HTTP.
        ttft_s: seconds from the request's arrival to its first token, waiting included.
        tokens_per_s: prompt and answer tokens per second of the batch that the request ran in.
        later: answers to a session's later turns. Tokens and times are those of a turn; budget, blocks and evicted
            tokens those of the session up to it.
    """

    text: str
    nll: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    budget_tokens: int | None = None
    peak_blocks: float | None = None
    evicted_tokens: int | None = None
    block_size: int | None = None
    ttft_s: float | None = None
    tokens_per_s: float | None = None
    later: tuple["Answer", ...] = ()

    @property
    def turns(self) -> tuple["Answer", ...]:
        """This answer and those after it."""
        return self, *self.later


def second_half_nll(logprobs: Sequence[float | None]) -> float:
    """Nats per token over the second half of a text."""
    half = [p for p in logprobs[len(logprobs) // 2 :] if p is not None]
    return -sum(half) / len(half)


def timed(answers: list[Answer], seconds: float) -> list[Answer]:
    """Note the batch's throughput on each of its answers."""
    tokens = sum((a.prompt_tokens or 0) + (a.output_tokens or 0) for a in answers)
    return [replace(a, tokens_per_s=tokens / seconds if tokens else None) for a in answers]


class Offline:
    """One vLLM engine in this process, for every contender whose options it can serve.

    Args:
        model: directory or Hub name.
        server: the engine's own policy.
        setting: one of `SETTINGS`.
        prompts: the model's tokenizer.
        chunk: tokens of a prefill chunk, for `agnostic` and `turns`.
        batch: requests at once.
        block_size: tokens of a KV block.
        longest: most tokens of a request, for `aware`.
        engine_args: further arguments of `LLM`.

    Raises:
        EvalError: the engine does not start.
    """

    def __init__(
        self,
        model: str,
        server: KVPolicyConfig,
        setting: str,
        prompts: Prompts,
        *,
        chunk: int,
        batch: int,
        block_size: int,
        longest: int | None = None,
        engine_args: dict[str, Any],
    ):
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import LLM
        from vllm.platforms import current_platform

        self.prompts, self.setting = prompts, setting
        #: Whether contenders share the beginnings of prompts.
        self.shares = setting == "served" and server.prompt == "whole" and "full" in server.allowed
        #: Salts of the prompts that were reconstructed.
        self._known: set[str] = set()
        options: dict[str, Any] = {
            "block_size": block_size,
            # A session holds its place between two turns.
            "max_num_seqs": max(batch, 2) if server.reconstructs or setting == "turns" else batch,
            # Prompts are reconstructed from the prefix cache. Measured requests read it where they share.
            "enable_prefix_caching": server.reconstructs or self.shares,
            "disable_log_stats": False,
            "seed": 0,
            **self.chunking(setting, chunk, batch, longest),
            # By default vLLM takes nearly all of a CPU's memory, which other processes need too.
            **({"kv_cache_memory_bytes": CPU_CACHE} if current_platform.is_cpu() else {}),
            **engine_args,
        }
        try:
            self.llm = LLM(model, kv_policy=server.to_dict(), **options)
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            raise EvalError(f"vLLM does not start on {model}: {one_line(error)}") from None
        config = self.llm.llm_engine.vllm_config
        self.block_size = config.cache_config.block_size
        self.about = {
            "server_policy": brief(server),
            "engine": options
            | {"max_model_len": config.model_config.max_model_len, "dtype": str(config.model_config.dtype)},
            "versions": versions(),
            "hardware": hardware(),
        }

    @staticmethod
    def chunking(setting: str, chunk: int, batch: int, longest: int | None) -> dict[str, Any]:
        """Engine arguments for a setting."""
        if setting in ("agnostic", "turns"):
            # A step has room for a chunk of every request, so that no chunk is cut short.
            return {"long_prefill_token_threshold": chunk, "max_num_batched_tokens": batch * chunk}
        if setting == "aware":
            room = {"max_num_batched_tokens": max(longest, batch)} if longest else {}
            return {"enable_chunked_prefill": False, **room}
        return {}

    def answer(self, samples: Sequence[Sample], contender: Contender) -> list[Answer]:
        """Answers, in order. All requests run at once.

        Raises:
            EvalError: the engine refuses a request.
        """
        from vllm import SamplingParams

        if self.setting in ("agnostic", "turns") and len(samples) == 1:
            # vLLM does not cut the prompt of a single request into chunks.
            return self.answer([*samples, *samples], contender)[:1]
        prompts = [{"prompt_token_ids": self.prompts.ids(sample)} for sample in samples]
        shares = self.shares and _asks_last(contender.config)
        if shares:
            self._compute_once(prompts)
        params = [
            SamplingParams(
                temperature=0,
                max_tokens=sample.max_tokens,
                prompt_logprobs=0 if sample.metric == NLL else None,
                extra_args=contender.xargs,
                skip_reading_prefix_cache=not shares or sample.metric == NLL,
            )
            for sample in samples
        ]
        with _refusals(contender):
            if self.setting == "turns":
                return self._converse(samples, params)
            if contender.config.policy.reconstructs:
                prompts = [self._reconstructed(*each, contender) for each in zip(samples, prompts, strict=True)]
            start = time.perf_counter()
            outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return timed([self._read(output) for output in outputs], time.perf_counter() - start)

    def _compute_once(self, prompts: Sequence[dict[str, Any]]) -> None:
        """Put the prompts without their last `TAIL` tokens into the prefix cache, those that are not there."""
        from vllm import SamplingParams

        beginnings = [prompt["prompt_token_ids"][:-TAIL] for prompt in prompts]
        params = SamplingParams(temperature=0, max_tokens=1, extra_args={"kv_policy": "full"})
        wanted = [{"prompt_token_ids": ids} for ids in beginnings if ids]
        if wanted:
            self.llm.generate(wanted, params, use_tqdm=False)

    def generate(self, prompts: Sequence[Any], most: Sequence[int], contender: Contender) -> list[Any]:
        """Return vLLM's outputs of greedy requests that run at once, when the engine has no work left, audits included.

        Args:
            prompts: as `LLM` takes them.
            most: most tokens of each answer.
            contender: what they run under.

        Raises:
            EvalError: the engine refuses a request.
        """
        from vllm import SamplingParams

        params = [SamplingParams(temperature=0, max_tokens=each, extra_args=contender.xargs) for each in most]
        with _refusals(contender):
            outputs = self.llm.generate(prompts, params, use_tqdm=False)
        while self.scheduler is not None and self.scheduler.has_requests():
            self.llm.llm_engine.step()
        return outputs

    def _converse(self, samples: Sequence[Sample], params: Sequence[Any]) -> list[Answer]:
        """Answers to all turns of a session for each sample."""
        sessions, rounds = Sessions(self.llm), []
        try:
            for turn in zip(*(sample.turns for sample in samples), strict=True):
                start = time.perf_counter()
                prompts = {f"session {i}": self.prompts.ids(sample) for i, sample in enumerate(turn)}
                outputs = sessions.turn(prompts, params[0])
                answers = [replace(self._read(outputs[name]), prompt_tokens=len(prompts[name])) for name in prompts]
                rounds.append(timed(answers, time.perf_counter() - start))
        finally:
            sessions.end()
        return [replace(first, later=tuple(later)) for first, *later in zip(*rounds, strict=True)]

    def _reconstructed(self, sample: Sample, prompt: dict[str, Any], contender: Contender) -> dict[str, Any]:
        """Return the prompt with a salt under which its context has been reconstructed.

        Raises:
            EvalError: the context was not reconstructed; the answer would be that of another policy.
        """
        from vllm import SamplingParams

        from ...features.kvzip.engine import parts

        salted = prompt | {"cache_salt": sample.sha256}
        if sample.sha256 in self._known:
            return salted
        ids, config = prompt["prompt_token_ids"], contender.config
        context = ids[: sample.length] if self.setting == "agnostic" else ids
        longest = self.about["engine"]["max_model_len"]
        if not parts(len(context), config.chunk, len(config.instruction), longest):
            raise EvalError(
                f"{contender}: {longest} tokens (max_model_len) have no room for a context of {len(context)} and its "
                "repetition: take a shorter length"
            )
        # The request has to run until its repetition is computed, and for the first decision after it.
        chunk = self.about["engine"].get("long_prefill_token_threshold") or 256
        steps = 4 * (math.ceil(len(context) / chunk) + 8)
        params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True, extra_args=contender.xargs)
        (output,) = self.llm.generate([salted | {"prompt_token_ids": context}], params, use_tqdm=False)
        if not output.kv_usage.evicted_tokens and contender.needs_eviction(len(context), self.block_size):
            raise EvalError(f"{contender}: a context of {len(context)} tokens was not reconstructed in {steps} steps")
        self._known.add(sample.sha256)
        return salted

    def _read(self, output: Any) -> Answer:
        usage, nll = output.kv_usage, None
        if output.prompt_logprobs:
            ids = output.prompt_token_ids
            found = [row and row[token].logprob for row, token in zip(output.prompt_logprobs, ids, strict=True)]
            nll = second_half_nll(found)
        return Answer(
            text=output.outputs[0].text,
            nll=nll,
            prompt_tokens=len(output.prompt_token_ids),
            output_tokens=len(output.outputs[0].token_ids),
            budget_tokens=usage and usage.budget_tokens,
            peak_blocks=usage and usage.peak_resident_tokens / self.block_size,
            evicted_tokens=usage and usage.evicted_tokens,
            block_size=self.block_size,
            ttft_s=output.metrics and output.metrics.first_token_latency,
        )

    @property
    def scheduler(self) -> Any | None:
        """The engine's scheduler; None if the engine has a process of its own."""
        core = getattr(self.llm.llm_engine.engine_core, "engine_core", None)
        return core and core.scheduler

    @contextmanager
    def pool_of(self, tokens: int) -> Iterator[None]:
        """Hold back KV blocks, so that all requests together have room for this number of tokens."""
        scheduler: Any = self.scheduler
        pool, groups = scheduler.kv_cache_manager.block_pool, len(scheduler.kv_cache_config.kv_cache_groups)
        spare = pool.get_num_free_blocks() - math.ceil(tokens / self.block_size) * groups
        held = pool.get_new_blocks(max(0, spare))
        try:
            yield
        finally:
            pool.free_blocks(held)

    def close(self) -> None:
        """Give the engine's memory back, so that another can start."""
        from vllm.distributed import cleanup_dist_env_and_memory

        del self.llm
        cleanup_dist_env_and_memory()
        gc.collect()


@contextmanager
def _refusals(contender: Contender) -> Iterator[None]:
    """Make one message of what an engine says to a request."""
    from vllm.exceptions import VLLMValidationError

    try:
        yield
    except (ValueError, VLLMValidationError) as error:  # vLLM 0.32: no ValueError
        raise EvalError(f"{contender}: {one_line(error)}") from None


def _asks_last(config: KVPolicyConfig) -> bool:
    """Return whether scores depend on nothing but the cache and the queries of the last `TAIL` tokens of a prompt."""
    measured = config.policy.measures & RUNNING
    return not measured or (config.accumulate == "last" and config.window <= TAIL)


def engine_config(model: str, engine_args: dict[str, Any]) -> Any:
    """Return the configuration that vLLM makes of arguments for a server.

    Args:
        model: directory or Hub name.
        engine_args: further arguments of `LLM`.

    Raises:
        EvalError: there is no such model, or vLLM, or the plugin, refuses the arguments.
    """
    import vllm
    from vllm.usage.usage_lib import UsageContext

    if model.startswith((".", "/")) and not Path(model).exists():
        raise EvalError(f"no model at {model}")
    try:
        # Of the arguments of `LLM` the engine has all but this one.
        arguments = vllm.EngineArgs(model=model, **{k: v for k, v in engine_args.items() if k != "chat_template"})
        return arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        said = f"vLLM does not start on {model}: {one_line(error)}"
        if "trust_remote_code" in said and not engine_args.get("trust_remote_code"):
            said += """; if you trust it: --engine-args '{"trust_remote_code": true}'"""
        raise EvalError(said) from None


def versions() -> dict[str, str]:
    import torch
    import vllm

    return {"vllm_evict": __version__, "vllm": vllm.__version__, "torch": torch.__version__}


def hardware() -> dict[str, Any]:
    """Return the hardware of this machine."""
    import torch

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = lines[0].split(":", 1)[1].strip() if lines else cpu
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "gpus": gpus}
