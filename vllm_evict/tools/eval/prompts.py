"""Token ids of samples, and the number of tokens before the question."""

import functools
from typing import Any

import jinja2

from . import EvalError, one_line
from .questions import Messages
from .tasks import NLL, Sample

#: Stands in a chat template for what a user writes; of the two no token is the same at the start or the end.
_MARK, _OTHER = "mark of the evaluation", "11 other words 22"
#: What tokenizers and templates raise where they refuse something.
REFUSALS = (OSError, RuntimeError, TypeError, ValueError, jinja2.TemplateError)

#: A part of a prompt: text, or token ids where a chat template makes these.
Part = str | list[int]


class Prompts:
    """A tokenizer and its chat template, as vLLM has them.

    Args:
        source: vLLM's configuration of an engine (`VllmConfig`); or directory or Hub name of a tokenizer alone.
        chat: use the chat template if there is one; if False, prompts are the bare text.
        template: chat template, or its file, in place of the tokenizer's own.

    Raises:
        EvalError: the source has no tokenizer, or its chat template refuses a message of a user.
    """

    def __init__(self, source: Any, chat: bool = True, template: str | None = None):
        from vllm.renderers import renderer_from_config
        from vllm.renderers.hf import load_chat_template
        from vllm.tokenizers import get_tokenizer

        name = source if isinstance(source, str) else source.model_config.tokenizer
        try:
            self._renderer: Any = None if isinstance(source, str) else renderer_from_config(source)
            self.tokenizer: Any = get_tokenizer(source) if self._renderer is None else self._renderer.tokenizer
            self._template = load_chat_template(template)
        except REFUSALS as error:
            raise EvalError(f"no tokenizer at {name}: {one_line(error)}") from None
        if self.tokenizer is None:
            raise EvalError(f"{name} got skip_tokenizer_init; expected a tokenizer, which prompts need: leave it out")
        around = self._around() if chat else None
        self.chat = around is not None
        self.before, self.after = around or ("", "")
        #: Whether a tokenizer adds special tokens: a chat template has them.
        self._special = not self.chat and (
            self._renderer is None or self._renderer.default_cmpl_tok_params.add_special_tokens
        )

    def ids(self, sample: Sample) -> list[int]:
        """Return the token ids of the whole prompt, or of a later turn. If the text itself is measured, nothing follows
        it.
        """
        if sample.metric == NLL:
            return self._joined(self.before, sample.text)
        prefix = sample.prefix if self.chat or not sample.prefix else f" {sample.prefix}"
        if (sample.turn or 1) > 1:
            text = f"{self.between}{sample.question}{self.after}{prefix}"
            return self._encode(text, special=False)
        return self._joined(self.before, sample.text, self.after, prefix)

    def sent(self, prompt: str | Messages) -> list[int]:
        """Return the token ids of a prompt as a server would make them: of text, or of the messages of a chat.

        Raises:
            EvalError: there is no chat template for messages, or it refuses them.
        """
        if isinstance(prompt, str):
            if not self.chat:
                return self._encode(prompt)
            prompt = [{"role": "user", "content": prompt}]
        if not self.chat and not self._has_template:
            raise EvalError("messages got a model without a chat template; expected prompts as text")
        try:
            rendered = self._rendered(prompt)
        except REFUSALS as error:
            raise EvalError(f"the model's chat template refuses messages: {one_line(error)}") from None
        return self._encode(rendered, special=False) if isinstance(rendered, str) else rendered

    @functools.cached_property
    def between(self) -> str:
        """Text between an answer and the next question; it ends the answer, whose last token vLLM drops.

        Raises:
            EvalError: the chat template makes token ids and no text.
        """
        if not self.chat:
            return " "
        rendered = self._rendered(
            [{"role": role, "content": _MARK} for role in ("user", "assistant", "user")], begins=False
        )
        if not isinstance(rendered, str):
            raise EvalError("turns got a model whose chat template makes token ids; expected text: take --no-chat")
        return rendered.split(_MARK)[2]

    def count(self, context: str) -> int:
        """Return the tokens before the question."""
        return len(self._joined(self.before, context))

    @property
    def _has_template(self) -> bool:
        return bool(self._template or getattr(self.tokenizer, "chat_template", None))

    def _around(self) -> tuple[Part, Part] | None:
        """Return what a chat template has before and after a message; None if there is no template."""
        try:
            one, other = (self._rendered([{"role": "user", "content": mark}]) for mark in (_MARK, _OTHER))
        except REFUSALS as error:
            if self._has_template:
                raise EvalError(f"the model's chat template refuses messages: {one_line(error)}") from None
            return None
        if isinstance(one, str):
            before, _, after = one.partition(_MARK)
            return before, after
        assert isinstance(other, list)
        first, last = _alike(one, other), _alike(one[::-1], other[::-1])
        return one[:first], one[len(one) - last :]

    def _rendered(self, messages: Messages, begins: bool = True) -> Part:
        """Return a chat as its template has it; `begins`: with the beginning of an answer."""
        from vllm.renderers import ChatParams
        from vllm.utils.mistral import is_mistral_tokenizer

        # Mistral's tokenizers do not make control tokens of text.
        options = {"add_generation_prompt": begins, "tokenize": is_mistral_tokenizer(self.tokenizer)}
        if self._renderer is None:
            return self.tokenizer.apply_chat_template(messages, **options)
        params = ChatParams(chat_template=self._template, chat_template_kwargs=options)
        _, prompt = self._renderer.render_messages(messages, params)
        return prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]

    def _joined(self, *parts: Part) -> list[int]:
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return self._encode("".join(texts))
        ids = (self._encode(part, special=False) if isinstance(part, str) else part for part in parts)
        return [token for part in ids for token in part]

    def _encode(self, text: str, special: bool | None = None) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=self._special if special is None else special)


def _alike(one: list[int], other: list[int]) -> int:
    """Return how many leading tokens two lists share."""
    return next(at for at, pair in enumerate(zip(one, other)) if pair[0] != pair[1])
