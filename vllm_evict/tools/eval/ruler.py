"""RULER's tasks (Hsieh et al. 2024, arXiv:2404.06654), made from a folder of texts by its published recipe.

    niah_single_2     one number in essays
    niah_single_3     one UUID in essays
    niah_multikey_1   four numbers with a key each; one is asked for
    niah_multivalue   four numbers with one key; all are asked for
    niah_multiquery   four numbers with a key each; all are asked for
    vt                a chain of five variables in essays; a worked example stands before it
    cwe               a numbered list of words, of which ten return; a worked example stands before it
    fwe               a text of made-up words, of which three are frequent

Templates, answers and metrics are RULER's. Four things differ. A document begins at a sentence of the texts that its
seed draws, where RULER's all begin with the first. Keys and the words of `cwe` are words of the texts, where RULER has
lists of another package. Chains of `vt` stand in essays, where RULER repeats a few sentences. Haystacks without essays
(`niah_single_1`, `niah_multikey_2` and `_3`) and questions of other data sets (`qa`) are left out.
"""

import functools
import hashlib
import re
import string
import uuid
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import EvalError
from .external import RULER_TOKENS
from .tasks import Sample, fit

NIAH = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {query} mentioned in the provided "
    "text?",
    "The special magic {kind} for {query} mentioned in the provided text are",
)
VT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find "
    "all variables that are assigned the value {query} in the text above.",
    "Answer: According to the chain(s) of variable assignment in the text above, {number} variables are assigned the "
    "value {query}, they are:",
)
CWE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?",
    "Answer: The top 10 words that appear most often in the list are:",
)
FWE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text?",
    "Answer: According to the coded text above, the three most frequently appeared words are:",
)
#: Depths of needles, as shares of the sentences.
DEPTHS = np.round(np.linspace(0, 1, 40), 2)
HOPS = 4
#: Tokens of the worked example of `vt`.
EXAMPLE = 500
Random = np.random.Generator


@dataclass(frozen=True)
class Texts:
    """A haystack.

    Attributes:
        sentences: all sentences of a folder's files, in the order of their names.
        words: its different plain words of 4 to 9 letters, sorted.
        sha256: hash of the text.
    """

    sentences: list[str]
    words: list[str]
    sha256: str

    def some(self, rng: Random, number: int) -> list[str]:
        """Return different words."""
        return [self.words[i] for i in rng.choice(len(self.words), number, replace=False)]

    def from_sentence(self, start: int, number: int) -> list[str]:
        """Return sentences from one on; the first follows the last."""
        return [self.sentences[(start + i) % len(self.sentences)] for i in range(number)]


def is_texts(source: str) -> bool:
    """Return whether a source is a folder of texts, no rows of a benchmark."""
    path = Path(source)
    return path.is_dir() and any(path.glob("*.txt")) and not any(path.rglob("*.jsonl"))


@functools.cache
def read(folder: str) -> Texts:
    """Return the texts of a folder.

    Raises:
        EvalError: its files are too small to make documents of.
    """
    files = sorted(Path(folder).glob("*.txt"))
    text = " ".join(" ".join(file.read_text(encoding="utf-8", errors="replace").split()) for file in files)
    sentences = [sentence for sentence in re.split(r"(?<=[.!?]) +", text) if 20 <= len(sentence) <= 400]
    words = sorted(set(re.findall(r"(?<![\w'’])[a-z]{4,9}(?![\w'’])", text)))
    if len(sentences) < 100 or len(words) < 500:
        raise EvalError(
            f"{folder} got {len(sentences)} sentences and {len(words)} words; expected 100 and 500 or more: give a "
            "folder of longer texts"
        )
    return Texts(sentences, words, hashlib.sha256(text.encode()).hexdigest())


#: Text of a document with n units (sentences or words), or of its question, its answers and the answer's beginning.
Document = tuple[Callable[[int], str], list[str], str]


def _needles(rng: Random, texts: Texts, keys: int, values: int, asked: int, kind: str = "numbers") -> Document:
    """Needles of `keys` keys with `values` values each, of which `asked` keys are asked for."""
    names = ["-".join(texts.some(rng, 2)) for _ in range(keys)]
    drawn = {name: [_value(rng, kind) for _ in range(values)] for name in names}
    needles = [
        f"One of the special magic {kind} for {name} is: {value}." for name, its in drawn.items() for value in its
    ]
    needles = [needles[i] for i in rng.permutation(len(needles))]
    depths = np.sort(rng.choice(DEPTHS, len(needles), replace=False))
    start = int(rng.integers(len(texts.sentences)))
    queried = [names[i] for i in rng.permutation(keys)[:asked]]
    query = queried[0] if asked == 1 else ", ".join(queried[:-1]) + f", and {queried[-1]}"
    question, prefix = NIAH
    if asked * values == 1:
        kind = kind[:-1]
        question = question.replace("Some", "A").replace("are all", "is").replace("are", "is")
        prefix = prefix.replace("are", "is")

    def text(number: int) -> str:
        return question.format(
            kind=kind, query=query, context=_lay_out(texts.from_sentence(start, number), needles, depths * number)
        )

    return text, [value for name in queried for value in drawn[name]], prefix.format(kind=kind, query=query)


def _value(rng: Random, kind: str) -> str:
    if kind == "uuids":
        return str(uuid.UUID(bytes=rng.bytes(16), version=4))
    return str(rng.integers(1_000_000, 10_000_000))


def _lay_out(sentences: list[str], facts: list[str], places: np.ndarray) -> str:
    """Return the sentences as text, each fact before the sentence whose number is its place, in ascending order."""
    parts, start = [], 0
    for fact, place in zip(facts, places.astype(int).tolist(), strict=True):
        parts += [*sentences[start:place], fact]
        start = place
    return " ".join([*parts, *sentences[start:]])


def _chain(rng: Random, texts: Texts, letters: int) -> Document:
    """A number that one variable gets, and each next variable from the one before it."""
    names: list[str] = []
    while len(names) < HOPS + 1:
        name = "".join(rng.choice(list(string.ascii_uppercase), letters))
        names += [name] if name not in names else []
    value = str(rng.integers(10_000, 100_000)) if letters > 3 else "12345"
    facts = [f"VAR {names[0]} = {value}"]
    facts += [f"VAR {name} = VAR {before}" for before, name in zip(names, names[1:])]
    places, start = np.sort(rng.random(len(facts))), int(rng.integers(len(texts.sentences)))
    question, prefix = VT

    def text(number: int) -> str:
        context = _lay_out(texts.from_sentence(start, number), facts, places * number)
        return question.format(query=value, context=context)

    return text, names, prefix.format(number=len(names), query=value)


def _worked(document: Document, units: int, numbered: bool = False) -> str:
    """Return a document with its answer, to stand before another."""
    text, answers, prefix = document
    said = [f"{i}. {answer}" for i, answer in enumerate(answers, 1)] if numbered else answers
    return f"{text(units)} {prefix} {' '.join(said)}\n"


def _common(rng: Random, texts: Texts, often: int, rarely: int, common: int = 10) -> Document:
    """A list in which `common` words occur `often` times, and each other one of n words `rarely` times."""
    words = texts.some(rng, len(texts.words))
    order = rng.random(len(words) * rarely + common * often)

    def text(number: int) -> str:
        listed = words[:common] * often + words[common:number] * rarely
        shuffled = [listed[i] for i in np.argsort(order[: len(listed)])]
        context = " ".join(f"{i}. {word}" for i, word in enumerate(shuffled, 1))
        return CWE[0].format(context=context)

    return text, words[:common], CWE[1]


def _frequent(rng: Random, length: int) -> Document:
    """Made-up words whose numbers fall with the square of their rank; the first is dots."""
    letters = list(string.ascii_lowercase)
    words = ["...", *dict.fromkeys("".join(rng.choice(letters, 6)) for _ in range(max(length // 50, 8)))]
    shares = np.arange(1, len(words) + 1.0) ** -2 / (np.pi**2 / 6)
    seed = int(rng.integers(1 << 32))

    def text(number: int) -> str:
        listed = np.repeat(np.array(words, dtype=object), (number * shares).astype(int))
        return FWE[0].format(context=" ".join(np.random.default_rng(seed).permutation(listed)))

    return text, words[1:4], FWE[1]


def _vt(rng: Random, texts: Texts, length: int, count: Callable[[str], int]) -> Document:
    example = _chain(rng, texts, 3)
    before = _worked(example, fit(lambda n: count(example[0](n)), min(EXAMPLE, length // 4), len(texts.sentences)))
    text, answers, prefix = _chain(rng, texts, 5)
    return lambda n: before + text(n), answers, prefix


def _cwe(rng: Random, texts: Texts, length: int, count: Callable[[str], int]) -> Document:
    (its_units, *its_times), times = ((20, 3, 1), (6, 1)) if length < 4096 else ((40, 10, 3), (30, 3))
    before = _worked(_common(rng, texts, *its_times), its_units, numbered=True)
    text, answers, prefix = _common(rng, texts, *times)
    return lambda n: before + text(max(n, 10)), answers, prefix


Maker = Callable[[Random, Texts, int, Callable[[str], int]], Document]
SUBSETS: dict[str, Maker] = {
    "niah_single_2": lambda rng, texts, length, count: _needles(rng, texts, 1, 1, 1),
    "niah_single_3": lambda rng, texts, length, count: _needles(rng, texts, 1, 1, 1, "uuids"),
    "niah_multikey_1": lambda rng, texts, length, count: _needles(rng, texts, 4, 1, 1),
    "niah_multivalue": lambda rng, texts, length, count: _needles(rng, texts, 1, 4, 1),
    "niah_multiquery": lambda rng, texts, length, count: _needles(rng, texts, 4, 1, 4),
    "vt": _vt,
    "cwe": _cwe,
    "fwe": lambda rng, texts, length, count: _frequent(rng, length),
}


def make(subset: str, folder: str, length: int, index: int, seed: int, count: Callable[[str], int]) -> Sample:
    """Return one sample of a task.

    Args:
        subset: a name in `SUBSETS`.
        folder: of .txt files.
        length: most tokens of prompt and answer together, those of the chat template before the text included.
        index, seed: of the sample; another index or seed gives another document.
        count: tokens of a text, those of the chat template before it included.

    Raises:
        EvalError: the length is too short for the task, or the texts are.
    """
    texts = read(folder)
    rng = np.random.default_rng([seed, zlib.crc32(subset.encode()), length, index])
    text, answers, prefix = SUBSETS[subset](rng, texts, length, count)
    most = RULER_TOKENS[subset.split("_")[0]]

    def tokens(units: int) -> int:
        return count(f"{text(units)} {prefix}") + most

    if tokens(1) > length:
        raise EvalError(f"length {length} is too short for ruler/{subset}: its shortest prompt has {tokens(1)} tokens")
    units = fit(tokens, length + 1, 2 * length) - 1
    return Sample(
        task=f"ruler/{subset}",
        context=text(units),
        question="",
        answers=tuple(answers),
        metric="string_match_all",
        max_tokens=most,
        length=length,
        index=index,
        seed=seed,
        prefix=prefix,
    )
