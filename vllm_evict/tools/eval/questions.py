"""A user's own prompts, from JSONL: text, or the messages of a chat."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import EvalError
from .external import Origin, lines

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Question:
    """One prompt.

    Attributes:
        place: file and row, for messages.
        prompt: text, or the messages of a chat.
        max_tokens: most tokens of its answer.
    """

    place: str
    prompt: str | Messages
    max_tokens: int

    @property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps([self.prompt, self.max_tokens], sort_keys=True).encode()).hexdigest()

    @property
    def messages(self) -> Messages:
        """The messages of a chat; a text is one of the user."""
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt


def load(path: Path, max_tokens: int) -> list[Question]:
    """Return the prompts of a file, each once.

    A row has `prompt` (text) or `messages` (of an OpenAI chat), and may have `output_tokens`, as for `vllm bench`.

    Args:
        path: JSONL.
        max_tokens: most tokens of an answer, where a row does not say it.

    Raises:
        EvalError: there is no such file, it has fewer than two prompts, or a row is wrong; names the row.
    """
    if not path.is_file():
        raise EvalError(f"--prompts got {path}, which is no file; expected JSONL with a prompt in each row")
    found: dict[str, Question] = {}
    for number, row in lines(path):
        question = _question(row, Origin(f"{path}, row {number}", path), max_tokens)
        found.setdefault(question.sha256, question)
    if len(found) < 2:
        raise EvalError(f"{path} got {len(found)} prompts; expected 2 or more: one half is searched, one confirms")
    return list(found.values())


def _question(row: dict[str, Any], place: Origin, max_tokens: int) -> Question:
    most = row.get("output_tokens", max_tokens)
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise EvalError(f"{place.words}: output_tokens got {most!r}; expected a number of tokens, 1 or more")
    if "messages" not in row:
        prompt = place.field(row, "prompt", str, "'prompt' (text) or 'messages' (of a chat)")
        if not prompt.strip():
            raise EvalError(f"{place.words}: its prompt is empty")
        _check_text(prompt, place)
        return Question(place.words, prompt, most)
    messages = place.field(row, "messages", list)
    for message in messages:
        texts = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not texts:
            raise EvalError(f"{place.words}: a message got {message!r:.60}; expected a role and a content, both text")
        _check_text(message["role"] + message["content"], place)
    if not messages:
        raise EvalError(f"{place.words}: its messages are empty")
    return Question(place.words, messages, most)


def _check_text(text: str, place: Origin) -> None:
    """Refuse half of a surrogate pair, which JSON can say and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EvalError(
            f"{place.words}: character {error.start} is half of one ({text[error.start]!a}); expected Unicode text"
        ) from None


def halves(questions: list[Question]) -> tuple[list[Question], list[Question]]:
    """Return two halves that depend on the prompts alone, not on their order in the file."""
    shuffled = sorted(questions, key=lambda question: question.sha256)
    return shuffled[::2], shuffled[1::2]
