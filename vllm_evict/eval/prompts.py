"""Token ids of samples, and the number of tokens before the question."""

import functools
from typing import Any

import jinja2

from . import EvalError
from .tasks import NLL, Sample

_MARK = "mark of the evaluation"


class Prompts:
    """A tokenizer and its chat template.

    Args:
        source: directory or Hub name of a tokenizer.
        chat: use the chat template if there is one; if False, prompts are the bare text.

    Raises:
        EvalError: the source has no tokenizer.
    """

    def __init__(self, source: str, chat: bool = True):
        from transformers import AutoTokenizer

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise EvalError(f"no tokenizer at {source}: {' '.join(str(error).split())}") from None
        self.chat = chat and bool(self.tokenizer.chat_template)
        self.before, self.after = "", ""
        if self.chat:
            message = [{"role": "user", "content": _MARK}]
            text = self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            self.before, _, self.after = text.partition(_MARK)

    def ids(self, sample: Sample) -> list[int]:
        """Return the token ids of the whole prompt, or of a later turn. If the text itself is measured, nothing follows
        it.
        """
        if sample.metric == NLL:
            return self._encode(self.before + sample.text)
        prefix = sample.prefix if self.chat or not sample.prefix else f" {sample.prefix}"
        if (sample.turn or 1) > 1:
            text = self.between + sample.question + self.after + prefix
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._encode(self.before + sample.text + self.after + prefix)

    def sent(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        """Return the token ids of a prompt as a server would make them: of text, or of the messages of a chat.

        Raises:
            EvalError: there is no chat template for messages, or it refuses them.
        """
        if isinstance(prompt, str):
            if not self.chat:
                return self._encode(prompt)
            prompt = [{"role": "user", "content": prompt}]
        if not self.tokenizer.chat_template:
            raise EvalError("messages got a model without a chat template; expected prompts as text")
        try:
            text = self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        except (TypeError, ValueError, jinja2.TemplateError) as error:
            raise EvalError(f"the model's chat template refuses messages: {error}") from None
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @functools.cached_property
    def between(self) -> str:
        """Text between an answer and the next question; it ends the answer, whose last token vLLM drops."""
        if not self.chat:
            return " "
        messages = [{"role": role, "content": _MARK} for role in ("user", "assistant", "user")]
        return self.tokenizer.apply_chat_template(messages, tokenize=False).split(_MARK)[2]

    def count(self, context: str) -> int:
        """Return the tokens before the question."""
        return len(self._encode(self.before + context))

    def _encode(self, text: str) -> list[int]:
        # A chat template adds the special tokens itself.
        return self.tokenizer(text, add_special_tokens=not self.chat)["input_ids"]
