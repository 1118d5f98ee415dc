"""The tokenizer, tasks and documents with which the needle model is trained and measured.

Words and filler are the evaluation's (`vllm_evict.tools.eval.words`), and everything is made from a seed. A document is
filler text with facts put into it at chosen depths, followed by questions and answers in chat form. The tasks:

    niah      one fact somewhere in filler           "the code of paris is 4815."
    multikey  eight such facts, one is asked for
    kv        eight pairs in one list                "paris = 4815, rome = 2310, ..."
    twostage  compute a key, then look it up         "recall the code of three plus four."
    vt        follow a variable to its value         "the code of rome equals paris."
    copy      repeat a list of words                 "the list of oslo is apple drum ..."
    text      filler only, with passages that return: next-token prediction

The second model (`train.py --tasks aggregates`) learns the evaluation's `chain`, `sort` and `classify`, the third one
(`--tasks counts`) its `count`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from vllm_evict.tools.eval.tasks import Exercise, ask, chain, classes, counting, draw, sorting
from vllm_evict.tools.eval.words import DIGITS, ITEMS, KEYS, MARKS, NUMBERS, QUESTIONS, WORDS, Filler

SPECIAL = ["<unk>", "<s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
UNK, BOS, SYSTEM, USER, ASSISTANT, END = range(len(SPECIAL))

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def vocabulary(more: Sequence[str] = ()) -> list[str]:
    """All tokens, in the order of their ids, `more` words last. A number is spelled in pairs: 4815 is '▁48', '15'."""
    marks = ["▁=" if m == "=" else m for m in MARKS]  # the only mark with a space before it
    tokens = SPECIAL + marks + ["▁" + d for d in DIGITS] + DIGITS + ["▁" + w for w in [*WORDS, *more]]
    assert len(set(tokens)) == len(tokens)
    return tokens


def build_tokenizer(max_length: int, more: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Word-level tokenizer: lower case, words and pairs of digits with their leading space, reversible."""
    core = Tokenizer(models.WordLevel({t: i for i, t in enumerate(vocabulary(more))}, unk_token=SPECIAL[UNK]))
    core.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(prepend_scheme="always", split=False),
            pre_tokenizers.Split(Regex(r"▁?[a-z]+|▁?[0-9]{1,2}|▁?[^▁a-z0-9]"), behavior="isolated"),
        ]
    )
    core.decoder = decoders.Metaspace()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token=SPECIAL[UNK],
        bos_token=SPECIAL[BOS],
        eos_token=SPECIAL[END],
        pad_token=SPECIAL[END],
        additional_special_tokens=[SPECIAL[i] for i in (SYSTEM, USER, ASSISTANT)],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


# --- tasks ----------------------------------------------------------------------------------------------------------


@dataclass
class Task:
    """The facts of a document, and questions with answers about them, as text."""

    facts: list[str] = field(default_factory=list)
    turns: list[tuple[str, str]] = field(default_factory=list)
    #: Fact of each turn; empty: the fact that has the answer's words.
    sources: list[int] = field(default_factory=list)


def numbers(rng: np.random.Generator, n: int) -> list[str]:
    """n numbers of four digits."""
    return [str(v) for v in rng.integers(1000, 10000, size=n)]


def needles(rng: np.random.Generator, n: int = 1) -> Task:
    """n keys with their numbers, each a sentence of its own."""
    pairs = list(zip(draw(rng, KEYS, n), numbers(rng, n), strict=True))
    return Task([f"the code of {k} is {v}." for k, v in pairs], [(ask(k), v) for k, v in pairs])


def key_value(rng: np.random.Generator, n: int = 8) -> Task:
    """n keys with their numbers in one list."""
    pairs = list(zip(draw(rng, KEYS, n), numbers(rng, n), strict=True))
    return Task([", ".join(f"{k} = {v}" for k, v in pairs) + "."], [(ask(k), v) for k, v in pairs])


def two_stage(rng: np.random.Generator, n: int = 6) -> Task:
    """n keys that are numbers; questions give a key as the sum of two digits, so it has to be computed first."""
    keys, values = rng.permutation(19)[:n], numbers(rng, n)
    turns = []
    for key, value in zip(keys, values, strict=True):
        a = int(rng.integers(max(0, key - 9), min(9, key) + 1))
        turns.append((ask(f"{NUMBERS[a]} plus {NUMBERS[key - a]}"), value))
    return Task([f"the code of {NUMBERS[k]} is {v}." for k, v in zip(keys, values, strict=True)], turns)


def variables(rng: np.random.Generator, n: int = 3) -> Task:
    """n keys with numbers, and for each one another key that equals it."""
    task, base, alias = Task(), *np.split(np.array(draw(rng, KEYS, 2 * n)), 2)
    for k, other, v in zip(base, alias, numbers(rng, n), strict=True):
        task.facts += [f"the code of {k} is {v}.", f"the code of {other} equals {k}."]
        task.turns += [(ask(other), v)]
    return task


def copying(rng: np.random.Generator, n: int = 2, length: int = 8) -> Task:
    """n lists of words to repeat."""
    task = Task()
    for key in draw(rng, KEYS, n):
        text = " ".join(draw(rng, ITEMS, length))
        task.facts.append(f"the list of {key} is {text}.")
        task.turns.append((ask(key, "list"), text))
    return task


def passages(rng: np.random.Generator, n: int = 2, length: int = 16) -> Task:
    """n passages of unrelated words that each come twice, so that only the context predicts them."""
    return Task([" ".join(draw(rng, ITEMS, length)) + "." for _ in range(n)] * 2)


def of(document: Exercise) -> Task:
    """A document of the evaluation."""
    sources, *turns = zip(*document.questions, strict=True)
    return Task(document.facts, list(zip(*turns, strict=True)), list(sources))


TASKS = {
    "niah": needles,
    "multikey": lambda rng: needles(rng, 8),
    "kv": key_value,
    "twostage": two_stage,
    "vt": variables,
    "copy": copying,
    "text": passages,
}
#: Tasks of the second model, with the evaluation's documents.
AGGREGATES = {
    "chain": lambda rng: of(chain(rng)),
    "sort": lambda rng: of(sorting(rng)),
    "classify": lambda rng: of(classes(rng)),
}
#: The task of the third model.
COUNTS = {"count": lambda rng: of(counting(rng))}


# --- documents ------------------------------------------------------------------------------------------------------


class Documents:
    """Documents of an exact length in tokens: filler, facts at depths, then questions and answers in chat form."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer, self.filler = tokenizer, Filler()

    def encode(self, text: str) -> list[int]:
        """Ids of a text without <s>."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def body(self, rng: np.random.Generator, facts: list[list[int]], depths: np.ndarray, n_tokens: int) -> np.ndarray:
        """Filler with facts put between its sentences at depths (0 first, 1 last) -> ids [n_tokens]."""
        text = self.filler.ids(rng, n_tokens - sum(map(len, facts)))
        stops = np.concatenate([[0], np.flatnonzero(text == self.encode("a.")[-1]) + 1])
        nearest = stops[np.abs(stops - depths[:, None] * len(text)).argmin(1)]
        parts, start = [], 0
        for i in np.argsort(nearest, kind="stable"):
            parts += [text[start : nearest[i]], facts[i]]
            start = nearest[i]
        return np.concatenate([*parts, text[start:]]).astype(np.int64)

    def chat(self, turns: list[tuple[str, str]]) -> tuple[list[int], list[bool]]:
        """Turns after the body: ids, and which of them are the assistant's."""
        ids, said = [], []
        for i, (question, answer) in enumerate(turns):
            q = [USER] * (i > 0) + self.encode(question) + [END, ASSISTANT]
            a = [*self.encode(answer), END]
            ids += q + a
            said += [False] * len(q) + [True] * len(a)
        return ids, said

    def document(
        self, rng: np.random.Generator, task: Task, length: int, max_turns: int = 1, depth: float | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """One document -> ids [length], answer [length] (True where the assistant speaks).

        Facts lie at random depths; `depth` fixes it for the one that the (first) question is about.
        """
        order = rng.permutation(len(task.turns))[:max_turns]
        ids, said = self.chat([task.turns[i] for i in order])
        facts = [self.encode(f) for f in task.facts]
        depths = rng.random(len(facts))
        if depth is not None and task.turns:
            depths[self.source(task, order[0])] = depth
        body = self.body(rng, facts, depths, length - len(ids) - 2)
        answer = np.array([False] * (length - len(said)) + said)
        return np.concatenate([[BOS, USER], body, ids]).astype(np.int64), answer

    @staticmethod
    def source(task: Task, turn: int) -> int:
        """Index of the fact that holds the answer of a turn."""
        if task.sources:
            return task.sources[turn]
        return next(i for i, f in enumerate(task.facts) if task.turns[turn][1] in f)


def mixture(docs: Documents, rng: np.random.Generator, length: int) -> Task:
    """Up to four kinds of task in one document, in at most half of its length; no key has two meanings."""
    size = length // 3
    makers = [
        lambda: needles(rng, int(rng.integers(1, min(12, max(2, size // 9))))),
        lambda: key_value(rng, int(rng.integers(2, min(12, max(3, size // 5))))),
        lambda: two_stage(rng, int(rng.integers(1, min(12, max(2, size // 9))))),
        lambda: variables(rng, int(rng.integers(1, min(5, max(2, size // 16))))),
        lambda: copying(rng, int(rng.integers(1, 3)), int(rng.integers(3, min(12, max(4, size // 4))))),
        lambda: passages(rng, int(rng.integers(1, 3)), int(rng.integers(4, min(24, max(6, size // 4))))),
    ]
    out, taken, used = Task(), set(), 0
    for i in rng.permutation(len(makers))[: rng.integers(1, 5)]:
        task = makers[i]()
        keys = {w for f in task.facts for w in f.replace(",", " ").replace(".", " ").split() if w in KEYS + NUMBERS}
        used += sum(len(docs.encode(f)) for f in task.facts)
        if used > length // 2:
            break
        if not keys & taken:
            taken |= keys
            out.facts += task.facts
            out.turns += task.turns
    return out


def aggregates(docs: Documents, rng: np.random.Generator, length: int) -> Task:
    """One task of the second model, as large as a document of this length has room for."""

    def up_to(most: int, tokens: int) -> int:
        return int(rng.integers(2, max(3, min(most, length // 3 // tokens) + 1)))

    makers = [
        lambda: chain(rng, up_to(12, 8)),
        lambda: sorting(rng, up_to(8, 7)),
        lambda: classes(rng, up_to(4, 18), up_to(4, 18)),
    ]
    return of(makers[rng.choice(3, p=[0.25, 0.45, 0.3])]())


def counts(docs: Documents, rng: np.random.Generator, length: int) -> Task:
    """The task of the third model."""
    return of(counting(rng, int(rng.integers(1, min(6, length // 64) + 1))))


#: What a model is trained on -> the tasks of a document, words that its tokenizer has beside WORDS, and the number of
#: tokens for each question.
MIXTURES: dict[str, tuple[Callable[[Documents, np.random.Generator, int], Task], Sequence[str], int]] = {
    "needles": (mixture, (), 48),
    "aggregates": (aggregates, QUESTIONS, 128),
    "counts": (counts, QUESTIONS, 24),
}


def training_batch(
    docs: Documents, rng: np.random.Generator, n: int, length: int, kind: str = "needles"
) -> tuple[np.ndarray, np.ndarray]:
    """n documents, each a mix of tasks, with as many questions as fit -> ids [n, length], answer [n, length]."""
    tasks, _, tokens = MIXTURES[kind]
    turns = min(24, max(1, length // tokens))
    rows = [docs.document(rng, tasks(docs, rng, length), length, turns) for _ in range(n)]
    ids, answers = zip(*rows, strict=True)
    return np.stack(ids), np.stack(answers)
