"""The backend that answers prompts by any OpenAI-compatible server."""

import os
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from ... import __version__
from . import EvalError
from .backends import Answer, one_line, second_half_nll, timed
from .policies import Contender
from .tasks import NLL, Sample

#: What a model's or a server's defaults may do to a greedy answer, switched off: an engine of `LLM` does not have it.
#: Limits of `LLM` stay: where an answer ends.
PLAIN = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


class Http:
    """An OpenAI-compatible server, which takes `kv_policy` and `kv_budget` per request in `vllm_xargs`.

    Args:
        url: of the server's API, such as http://localhost:8000/v1.
        model: name under which the server has it; None: its first.
        batch: requests at once.
        chat: use chat completions; if False, completions of the bare text.

    Raises:
        EvalError: no server answers, or it has no such model.
    """

    def __init__(self, url: str, model: str | None, *, batch: int, chat: bool = True):
        import openai

        self.url, self.batch, self.chat = url.rstrip("/"), batch, chat
        self.client = openai.OpenAI(base_url=self.url, api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=1)
        served = [entry.id for entry in self.ask(lambda: self.client.models.list().data, "its list of models")]
        if not served or model not in (None, *served):
            raise EvalError(f"{self.url} serves {', '.join(served) or 'no model'}, not {model!r}")
        self.model = model or served[0]
        self.about = {
            "server_policy": None,
            "engine": {"url": self.url, "concurrency": batch},
            "versions": {"vllm_evict": __version__, "vllm": self._version()},
            "hardware": None,
        }

    def count(self, context: str) -> int:
        """Return the tokens of a text, by vLLM's /tokenize."""
        import httpx

        root = self.url.removesuffix("/v1")
        try:
            reply = httpx.post(f"{root}/tokenize", json={"model": self.model, "prompt": context}, timeout=60)
            return int(reply.raise_for_status().json()["count"])
        except (httpx.HTTPError, KeyError, ValueError) as error:
            raise EvalError(f"{root} cannot count tokens ({one_line(error)}): give --tokenizer DIR") from None

    def answer(self, samples: Sequence[Sample], contender: Contender) -> list[Answer]:
        """Answers, in order. All requests run at once.

        Raises:
            EvalError: the server refuses a request, or stops.
        """
        start = time.perf_counter()
        with ThreadPoolExecutor(max_workers=self.batch) as pool:
            answers = list(pool.map(lambda sample: self._one(sample, contender), samples))
        return timed(answers, time.perf_counter() - start)

    def close(self) -> None:
        self.client.close()

    def _one(self, sample: Sample, contender: Contender) -> Answer:
        body: dict[str, Any] = PLAIN | {"vllm_xargs": contender.xargs | {"kv_usage": 1}, "cache_salt": uuid.uuid4().hex}
        common = {"model": self.model, "temperature": 0, "max_tokens": sample.max_tokens}
        ask = self._measure if sample.metric == NLL else self._generate
        answer, usage = self.ask(lambda: ask(sample, common, body), str(contender))
        kv_usage = getattr(usage, "kv_usage", None)
        if kv_usage is None:  # of a server without a policy
            return answer
        if kv_usage["policy"] != contender.config.name:
            raise EvalError(f"{self.url} ran {contender} under {kv_usage['policy']!r}: its log says why")
        blocks, tokens = kv_usage["peak_resident_blocks"], kv_usage["peak_resident_tokens"]
        # Blocks of all KV groups, and tokens as the mean over them: with one group a block has their quotient.
        alone = contender.config.allocator.splits == "" and blocks
        return replace(
            answer,
            budget_tokens=kv_usage["budget_tokens"],
            peak_blocks=blocks,
            evicted_tokens=kv_usage["evicted_tokens"],
            block_size=tokens // blocks if alone else None,
        )

    def _measure(self, sample: Sample, common: dict[str, Any], body: dict[str, Any]) -> tuple[Answer, Any]:
        reply = self.client.completions.create(**common, prompt=sample.text, echo=True, logprobs=1, extra_body=body)
        logprobs = reply.choices[0].logprobs
        if logprobs is None or not logprobs.token_logprobs:
            raise EvalError(f"{self.url} gives no probabilities of prompts: leave ppl out")
        usage = reply.usage
        nll = second_half_nll(logprobs.token_logprobs[: usage.prompt_tokens])
        return Answer("", nll, usage.prompt_tokens, usage.completion_tokens), usage

    def _generate(self, sample: Sample, common: dict[str, Any], body: dict[str, Any]) -> tuple[Answer, Any]:
        start, first, text, usage, why = time.perf_counter(), None, "", None, None
        streamed = common | {"stream": True, "stream_options": {"include_usage": True}}
        if self.chat:
            messages = [{"role": "user", "content": sample.text}]
            if sample.prefix:
                messages.append({"role": "assistant", "content": sample.prefix})
                body |= {"continue_final_message": True, "add_generation_prompt": False}
            stream = self.client.chat.completions.create(**streamed, messages=messages, extra_body=body)
        else:
            prompt = f"{sample.text} {sample.prefix}" if sample.prefix else sample.text
            stream = self.client.completions.create(**streamed, prompt=prompt, extra_body=body)
        for event in stream:
            usage = event.usage or usage
            for choice in event.choices:
                why = choice.finish_reason or why
                piece = choice.delta.content if self.chat else choice.text
                if piece and first is None:
                    first = time.perf_counter() - start
                text += piece or ""
        asked, said = (usage.prompt_tokens, usage.completion_tokens) if usage else (None, None)
        self.check_end(why, said, sample.max_tokens)
        return Answer(text, None, asked, said, ttft_s=first), usage

    def check_end(self, why: str | None, tokens: int | None, most: int) -> None:
        """Refuse a server that ends answers before they are as long as was asked for.

        Args:
            why: the answer ended.
            tokens: of the answer.
            most: that were asked for.

        Raises:
            EvalError: it does.
        """
        if why == "length" and tokens is not None and tokens < most:
            raise EvalError(
                f"{self.url} ended an answer at {tokens} of {most} tokens; expected all: serve with a larger "
                "--max-model-len, or without max_new_tokens in --override-generation-config, or ask for fewer"
            )

    def ask(self, call: Callable[[], Any], what: str) -> Any:
        """Return the result of a call; its errors become one message."""
        import openai

        try:
            return call()
        except openai.APIConnectionError as error:
            raise EvalError(f"nothing answers at {self.url} ({one_line(error)}): is the server up?") from None
        except openai.APIError as error:  # a status, or an event of the stream
            message = error.body.get("message") if isinstance(error.body, dict) else None
            raise EvalError(f"{self.url} refuses {what}: {message or one_line(error)}") from None

    def _version(self) -> str | None:
        import httpx

        try:
            return httpx.get(f"{self.url.removesuffix('/v1')}/version", timeout=10).json()["version"]
        except (httpx.HTTPError, KeyError, ValueError, TypeError):
            return None
