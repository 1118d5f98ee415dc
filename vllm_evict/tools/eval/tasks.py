"""The built-in tasks: facts put into filler text at chosen depths, and a question about one of them.

    niah      one fact somewhere in filler       "the code of paris is 4815."  "recall the code of paris."
    multikey  eight such facts, one is asked for
    kv        eight pairs in one list            "paris = 4815, rome = 2310, ..."
    twostage  compute a key, then look it up     "recall the code of three plus four."
    vt        follow a variable to its value     "the code of rome equals paris."
    copy      repeat a list of words             "the list of oslo is apple drum ..."
    chain     walk from key to key               "the code of oslo is 4815, recall rome."
    count     how often a thing is found         "anna finds a lamp."  "how many times is a lamp found?"
    sort      put numbers in order               "the code of rome is seven."  "sort all codes."
    classify  label a new example as the others  "paris: apple drum lamp."  "what is drum spoon apple?"
    ppl       no question: text in which passages return, scored by the probability of its second half

A document depends on task, length, depth and seed only, so every policy and budget is asked the very same.
"""

import hashlib
import itertools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from . import EvalError
from .words import ITEMS, KEYS, MARKS, NAMES, NUMBERS, Filler, join

#: Metric of `ppl`: nats per token, the only metric where less is better.
NLL = "nll"


@dataclass(frozen=True)
class Sample:
    """One prompt and its right answers.

    Attributes:
        task: its name; for external benchmarks also the subset, as "ruler/niah_single_1".
        context: text that a policy compresses.
        question: text after it; empty if there is none, or if a benchmark's prompt has it inside the context.
        answers: expected answers; `metric` says whether one or all of them.
        metric: a name in `score.METRICS`, or `NLL`.
        max_tokens: most tokens of an answer.
        length: nominal tokens of the context.
        depth: of the fact, 0 (first) to 1 (last); None without a fact.
        index: number of the sample in its cell.
        seed: of the run.
        classes: all labels, for classification.
        prefix: beginning of the answer, given to the model.
        turn: number of the question in a session, from 1; None if there is only one question.
        later: of a session's first turn, the turns after it: other questions about the same context.
    """

    task: str
    context: str
    question: str
    answers: tuple[str, ...]
    metric: str
    max_tokens: int
    length: int
    depth: float | None = None
    index: int = 0
    seed: int = 0
    classes: tuple[str, ...] = ()
    prefix: str = ""
    turn: int | None = None
    later: tuple["Sample", ...] = ()

    @property
    def turns(self) -> tuple["Sample", ...]:
        """This question and those after it."""
        return self, *self.later

    @property
    def text(self) -> str:
        """The text of the user."""
        return f"{self.context} {self.question}" if self.question else self.context

    @property
    def sha256(self) -> str:
        """Hash of the whole prompt."""
        return hashlib.sha256(f"{self.text}\0{self.prefix}".encode()).hexdigest()


@dataclass
class Exercise:
    """Facts to hide, and for each question the fact that it is about (an index), its text and its answer."""

    facts: list[str]
    questions: list[tuple[int, str, str]] = field(default_factory=list)
    #: Depths of facts that no question asks for: index -> depth.
    depths: dict[int, float] = field(default_factory=dict)
    #: How answers are scored (`score.METRICS`).
    metric: str = "contains"


def draw(rng: np.random.Generator, words: list[str], n: int) -> list[str]:
    """n different words."""
    return [words[i] for i in rng.permutation(len(words))[:n]]


def values(rng: np.random.Generator, n: int) -> list[str]:
    """n different numbers of four digits."""
    return [str(v) for v in rng.choice(np.arange(1000, 10000), size=n, replace=False)]


def ask(key: str, what: str = "code") -> str:
    return f"recall the {what} of {key}."


def some(rng: np.random.Generator, n: int, turns: int) -> list[int]:
    """Choose `turns` different indices below n. The first one is the same for all `turns`."""
    first = int(rng.integers(n))
    return [(first + turn) % n for turn in range(turns)]


def needles(rng: np.random.Generator, n: int = 1, turns: int = 1) -> Exercise:
    keys, codes = draw(rng, KEYS, n), values(rng, n)
    facts = [f"the code of {k} is {v}." for k, v in zip(keys, codes, strict=True)]
    return Exercise(facts, [(i, ask(keys[i]), codes[i]) for i in some(rng, n, turns)])


def key_value(rng: np.random.Generator, n: int = 8) -> Exercise:
    keys, codes = draw(rng, KEYS, n), values(rng, n)
    asked = int(rng.integers(n))
    pairs = ", ".join(f"{k} = {v}" for k, v in zip(keys, codes, strict=True))
    return Exercise([pairs + "."], [(0, ask(keys[asked]), codes[asked])])


def two_stage(rng: np.random.Generator, n: int = 6, turns: int = 1) -> Exercise:
    keys, codes = [int(k) for k in rng.permutation(len(NUMBERS))[:n]], values(rng, n)
    facts = [f"the code of {NUMBERS[k]} is {v}." for k, v in zip(keys, codes, strict=True)]
    questions = []
    for i in some(rng, n, turns):
        first = int(rng.integers(max(0, keys[i] - 9), min(9, keys[i]) + 1))
        questions.append((i, ask(f"{NUMBERS[first]} plus {NUMBERS[keys[i] - first]}"), codes[i]))
    return Exercise(facts, questions)


def variables(rng: np.random.Generator, n: int = 3, turns: int = 1) -> Exercise:
    names, codes = draw(rng, KEYS, 2 * n), values(rng, n)
    facts = []
    for k, alias, v in zip(names[:n], names[n:], codes, strict=True):
        facts += [f"the code of {k} is {v}.", f"the code of {alias} equals {k}."]
    return Exercise(facts, [(2 * i, ask(names[n + i]), codes[i]) for i in some(rng, n, turns)])


def copying(rng: np.random.Generator, n: int = 2, length: int = 8) -> Exercise:
    keys = draw(rng, KEYS, n)
    lists = [" ".join(draw(rng, ITEMS, length)) for _ in keys]
    facts = [f"the list of {k} is {words}." for k, words in zip(keys, lists, strict=True)]
    asked = int(rng.integers(n))
    return Exercise(facts, [(asked, ask(keys[asked], "list"), lists[asked])])


def chain(rng: np.random.Generator, n: int = 12) -> Exercise:
    """n keys, each of which names the next: the answer is the walk from the first key to the last one."""
    keys, codes = draw(rng, KEYS, n), values(rng, n)
    links = [f"{k} is {v}" for k, v in zip(keys, codes, strict=True)]
    facts = [f"the code of {link}, recall {k}." for link, k in zip(links, keys[1:])] + [f"the code of {links[-1]}."]
    walks = [", recall ".join([codes[i], *links[i + 1 :]]) for i in range(n)]
    return Exercise(facts, [(i, ask(keys[i]), walks[i]) for i in range(n)], metric="steps")


def counting(rng: np.random.Generator, n: int = 4, most: int = 5) -> Exercise:
    """n things, each of which is found 1 to `most` times: the answer is the number of times of one."""
    things, times = draw(rng, ITEMS, n), rng.integers(1, most + 1, size=n)
    found = np.repeat(things, times)
    facts = [f"{NAMES[who]} finds a {thing}." for who, thing in zip(rng.integers(len(NAMES), size=len(found)), found)]
    first = np.cumsum(times) - times
    asked = zip(first.tolist(), things, times, strict=True)
    return Exercise(facts, [(i, f"how many times is a {thing} found?", NUMBERS[k]) for i, thing, k in asked])


def sorting(rng: np.random.Generator, n: int = 6) -> Exercise:
    """n keys with different small numbers: the answer is the numbers in ascending order."""
    keys, numbers = draw(rng, KEYS, n), rng.permutation(len(NUMBERS))[:n]
    facts = [f"the code of {k} is {NUMBERS[v]}." for k, v in zip(keys, numbers, strict=True)]
    answer = " ".join(NUMBERS[v] for v in sorted(numbers))
    return Exercise(facts, [(0, "sort all codes.", answer)], metric="steps")


def classes(rng: np.random.Generator, n: int = 4, shots: int = 4, pool: int = 8, size: int = 3) -> Exercise:
    """n labels with `shots` examples each: the answer is the label of a new example; each shot has one of its words."""
    labels, words = draw(rng, KEYS, n), draw(rng, ITEMS, n * pool)
    document = Exercise([])
    for i, label in enumerate(labels):
        own = words[i * pool : (i + 1) * pool]
        new, other = own[:size], own[size:]
        document.questions.append((len(document.facts), f"what is {' '.join(new)}?", label))
        for shot in range(shots):
            example = draw(rng, [new[shot % size], *draw(rng, other, size - 1)], size)
            document.facts.append(f"{label}: {' '.join(example)}.")
    return document


def passages(rng: np.random.Generator, n: int = 4, length: int = 16) -> Exercise:
    """n passages of unrelated words, in the first half and again in the second: only the context predicts them."""
    facts = [" ".join(draw(rng, ITEMS, length)) + "." for _ in range(n)]
    first, again = rng.random(n) * 0.45, 0.55 + rng.random(n) * 0.45
    return Exercise(facts * 2, depths=dict(enumerate(np.concatenate([first, again]).tolist())))


#: Task -> (maker, most tokens of its answer), with room for models that answer in a sentence.
TASKS: dict[str, tuple[Callable[..., Exercise], int]] = {
    "niah": (needles, 16),
    "multikey": (lambda rng, turns=1: needles(rng, max(8, turns), turns), 16),
    "kv": (key_value, 16),
    "twostage": (lambda rng, turns=1: two_stage(rng, max(6, turns), turns), 16),
    "vt": (lambda rng, turns=1: variables(rng, max(3, turns), turns), 16),
    "copy": (copying, 32),
    "chain": (chain, 160),
    "count": (counting, 16),
    "sort": (sorting, 32),
    "classify": (classes, 16),
    "ppl": (passages, 1),
}
#: Tasks of several facts, whose documents answer as many questions as asked for, and the most of these.
SEVERAL = ("multikey", "twostage", "vt")
#: Tasks whose documents have no second fact for a sentence.
ALONE = ("niah", "kv", "ppl")
MOST_TURNS = 16


def paired(document: Exercise) -> Exercise:
    """Put two facts in each sentence: one of the first half with one of the second."""
    facts, half = document.facts, (len(document.facts) + 1) // 2
    both = itertools.zip_longest(facts[:half], facts[half:])
    sentences = [f"{first[:-1]} and {second}" if second else first for first, second in both]
    questions = [(fact % half, question, answer) for fact, question, answer in document.questions]
    return replace(document, facts=sentences, questions=questions)


def lay_out(facts: list[str], depths: np.ndarray, filler: list[str]) -> str:
    """Filler with each fact between two sentences, as near to its depth as possible.

    Args:
        facts: sentences.
        depths: [len(facts)], 0 (before the first sentence) to 1 (after the last).
        filler: words and marks.
    """
    stops = np.concatenate([[0], np.flatnonzero(np.array(filler) == ".") + 1])
    nearest = stops[np.abs(stops - depths[:, None] * len(filler)).argmin(1)]
    parts, start = [], 0
    for i in np.argsort(nearest, kind="stable"):
        parts += [join(filler[start : nearest[i]]), facts[i]]
        start = nearest[i]
    return " ".join(part for part in [*parts, join(filler[start:])] if part)


def make(
    task: str,
    length: int,
    depth: float,
    index: int,
    seed: int,
    count: Callable[[str], int],
    filler: Filler,
    later: Sequence[float] | None = None,
    pairs: bool = False,
) -> Sample:
    """Return one sample of a built-in task, or the first turn of a session.

    Args:
        task: a name in `TASKS`.
        length: tokens before the question. Exact where a word is a token; else the shortest text that is not shorter.
        depth: of the asked fact; other facts have random depths, and `ppl` ignores it.
        index, seed: of the sample; another index or seed gives another document.
        count: tokens before the question for a context, those of the chat template included.
        filler: the filler generator.
        later: for a session (tasks in `SEVERAL`) the depths of the facts that its later turns ask for.
        pairs: lay out the facts as `paired` does.
    """
    maker, max_tokens = TASKS[task]
    rng = np.random.default_rng([seed, zlib.crc32(task.encode()), length, round(1000 * depth), index])
    document = maker(rng) if later is None else maker(rng, 1 + len(later))
    if pairs:
        document = paired(document)
    depths = rng.random(len(document.facts))
    is_text = not document.questions
    asked = [(*question, place) for question, place in zip(document.questions, (depth, *(later or ())))]
    for fact, place in (document.depths if is_text else {fact: place for fact, _, _, place in asked}).items():
        depths[fact] = place
    words = filler(rng, 2 * length + 64)  # enough if a mark shares a token with a word

    def context(n_words: int) -> str:
        part = words[-n_words:]
        # A word replaces a leading mark and keeps the count.
        return lay_out(document.facts, depths, ["and", *part[1:]] if part[0] in MARKS else part)

    smallest = count(context(1))
    if smallest > length:
        raise EvalError(f"length {length} is too short for task {task!r}: its facts alone are {smallest} tokens")
    sample = Sample(
        task=task,
        context=context(fit(lambda n: count(context(n)), length, len(words))),
        question="",
        answers=(),
        metric=NLL if is_text else document.metric,
        max_tokens=max_tokens,
        length=length,
        index=index,
        seed=seed,
    )
    if is_text:
        return sample
    turns = [
        replace(sample, question=question, answers=(answer,), depth=place, turn=None if later is None else turn)
        for turn, (_, question, answer, place) in enumerate(asked, 1)
    ]
    return replace(turns[0], later=tuple(turns[1:]))


def fit(tokens: Callable[[int], int], wanted: int, most: int) -> int:
    """Return the smallest n up to `most` with tokens(n) >= wanted, for a count that grows about evenly with n."""
    low, high, guess = 1, most, wanted
    while low < high:
        guess = min(max(guess, low), high - 1)
        have = tokens(guess)
        if have >= wanted:
            high = guess
            guess -= max(1, int((have - wanted) * guess / have))
        else:
            low = guess + 1
            guess += max(1, int((wanted - have) * guess / have))
    return low
