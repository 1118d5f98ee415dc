"""Documents with passkeys: facts at random depths of a long context, and a question with its answer for each fact.

Words and filler are those of `vllm_evict.tools.eval`. A document depends on nothing but seed and number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...config.gates import HeadsError
from ..eval.tasks import ask, draw, lay_out, values
from ..eval.words import KEYS, MARKS, Filler

#: Range of the depths of facts, as in the paper.
DEPTHS = (0.05, 0.95)


@dataclass(frozen=True)
class Document:
    """A context, questions and right answers as one sequence of tokens.

    Attributes:
        ids: int64 [tokens], token ids.
        answers: for each question int64 [n], positions that predict the n tokens of its answer.
        facts: for each question int64 [m], positions of the m tokens of its fact.
    """

    ids: np.ndarray
    answers: list[np.ndarray]
    facts: list[np.ndarray]

    @property
    def predicting(self) -> np.ndarray:
        """All positions that predict a token of an answer: int64 [n]."""
        return np.concatenate(self.answers)


class Reader:
    """Converts texts to tokens by a model's tokenizer, with its chat template if it has one.

    Args:
        tokenizer: a fast tokenizer of transformers.

    Raises:
        HeadsError: the tokenizer is slow, so it has no offsets of tokens.
    """

    def __init__(self, tokenizer: Any):
        if not tokenizer.is_fast:
            raise HeadsError("passkeys need a fast tokenizer: a slow one has no offsets of tokens")
        self.tokenizer = tokenizer
        self.chat = bool(tokenizer.chat_template)

    def document(self, context: str, turns: Sequence[tuple[str, str]], facts: Sequence[str] = ()) -> Document:
        """Make a document.

        Args:
            context: text before the first question.
            turns: pairs of a question and its right answer.
            facts: for each question a sentence of the context, if the positions of facts are needed.
        """
        text = self._text(context, turns)
        encoded = self.tokenizer(text, add_special_tokens=not self.chat, return_offsets_mapping=True)
        begins, ends = np.array(encoded["offset_mapping"]).T

        def tokens(start: int, length: int) -> np.ndarray:
            return np.flatnonzero((begins < start + length) & (ends > start) & (ends > begins))

        first = text.index(context)
        answers, at = [], first + len(context)
        for question, answer in turns:
            at = text.index(answer, text.index(question, at) + len(question))
            answers.append(tokens(at, len(answer)) - 1)
            at += len(answer)
        return Document(
            np.array(encoded["input_ids"]), answers, [tokens(text.index(fact, first), len(fact)) for fact in facts]
        )

    def _text(self, context: str, turns: Sequence[tuple[str, str]]) -> str:
        if not self.chat:
            return " ".join([context, *(f"{question} {answer}" for question, answer in turns)])
        messages = []
        for i, (question, answer) in enumerate(turns):
            said = question if i else f"{context} {question}"
            messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
        return self.tokenizer.apply_chat_template(messages, tokenize=False)


class Passkeys:
    """Makes documents with passkeys.

    Args:
        reader: reader of the model.
        count: passkeys of a document.
        lengths: approximate fewest and most tokens of a document.
        seed: seed of the documents.

    Raises:
        HeadsError: count or lengths are out of range.
    """

    def __init__(self, reader: Reader, count: int, lengths: tuple[int, int], seed: int = 0):
        if not 1 <= count <= len(KEYS):
            raise HeadsError(f"passkeys must be between 1 and {len(KEYS)}, not {count}")
        if not 0 < lengths[0] <= lengths[1]:
            raise HeadsError(f"lengths must be the fewest and the most tokens, not {lengths[0]},{lengths[1]}")
        self.reader, self.count, self.lengths, self.seed = reader, count, lengths, seed
        self.filler = Filler()
        # Tokens of facts and questions, and of a word of filler, measured on this tokenizer.
        short, long = (len(self._make(np.random.default_rng(0), n).ids) for n in (16, 1040))
        self._per_word = (long - short) / 1024
        self._fixed = short - 16 * self._per_word
        if lengths[0] < short:
            raise HeadsError(
                f"length {lengths[0]} is too short for {count} passkeys: with questions they are {short} tokens"
            )

    def __call__(self, number: int) -> Document:
        """Return the document of this number. Its length is uniform in `lengths`."""
        rng = np.random.default_rng([self.seed, number])
        return self._make(rng, int((rng.integers(self.lengths[0], self.lengths[1] + 1) - self._fixed) / self._per_word))

    def _make(self, rng: np.random.Generator, n_words: int) -> Document:
        keys, codes = draw(rng, KEYS, self.count), values(rng, self.count)
        facts = [f"the code of {key} is {code}." for key, code in zip(keys, codes)]
        words = self.filler(rng, max(n_words, 16))
        # No text starts with a mark.
        words = ["and", *words[1:]] if words[0] in MARKS else words
        context = lay_out(facts, rng.uniform(*DEPTHS, self.count), words)
        order = rng.permutation(self.count)
        return self.reader.document(context, [(ask(keys[i]), codes[i]) for i in order], [facts[i] for i in order])
