"""The language of the needle model: its words, its tokenizer and the tasks that it is trained and measured on.

Everything is made here from a seed. A document is filler text (a small stochastic grammar) with facts put into it at
chosen depths, followed by questions and answers in chat form. The tasks:

    niah      one fact somewhere in filler           "the code of paris is 4815."
    multikey  eight such facts, one is asked for
    kv        eight pairs in one list                "paris = 4815, rome = 2310, ..."
    twostage  compute a key, then look it up         "recall the code of three plus four."
    vt        follow a variable to its value         "the code of rome equals paris."
    copy      repeat a list of words                 "the list of oslo is apple drum ..."
    text      filler only, with passages that return: next-token prediction
"""

from dataclasses import dataclass, field

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
UNK, BOS, SYSTEM, USER, ASSISTANT, END = range(len(SPECIAL))


def words(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


KEYS = words(
    "paris rome oslo cairo lima tokyo delhi accra quito berlin madrid vienna dublin lisbon prague warsaw athens sofia "
    "riga tallinn vilnius minsk kiev bern monaco malta tunis rabat dakar lagos nairobi kigali harare luanda maputo "
    "havana bogota caracas santiago brasilia managua panama ottawa toronto boston chicago denver dallas seattle "
    "miami sydney perth auckland jakarta manila hanoi bangkok seoul beijing kabul tehran baghdad amman doha"
)
NUMBERS = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen"
)
ITEMS = words(
    "apple drum lamp spoon brick candle ribbon hammer pencil mirror basket button carpet violin anchor barrel "
    "blanket bottle bucket cactus camera carrot chisel feather flute guitar helmet jacket kettle ladder lemon magnet "
    "marble napkin needle olive paddle pepper pillow pumpkin saddle scarf shovel sponge ticket trumpet wallet whistle"
)
NOUNS = words(
    "river mountain forest valley bridge garden castle village harbor island meadow tower market temple road field "
    "cloud storm winter summer morning evening shadow silence window door stone fire horse wolf eagle fox deer ship "
    "wagon train engine clock letter book story song painting map journey battle feast soldier farmer teacher doctor "
    "painter sailor king queen child stranger merchant hunter"
)
NAMES = words(
    "anna boris clara david emma felix greta henry irene jonas karin leon maria nils olga peter rosa simon tessa "
    "victor wanda xavier yvonne zoe"
)
ADJECTIVES = words(
    "old young bright dark quiet loud small large cold warm green golden silver broken hidden distant narrow wide "
    "gentle fierce lonely happy weary ancient heavy swift pale deep empty wild"
)
VERBS = words(
    "crosses follows watches remembers leaves finds guards builds paints carries calls hears visits loves fears "
    "describes reaches opens closes repairs seeks avoids enters passes studies admires"
)
ADVERBS = words("slowly quickly quietly often never again gladly sadly early late alone together")
PREPOSITIONS = words("near beyond behind under above beside within across")
GLUE = words("the a of is equals plus and while recall code list what you")
MARKS = [".", ",", "?", ":", "▁="]

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def vocabulary() -> list[str]:
    """All tokens, in the order of their ids. A number is spelled in pairs of digits: 4815 is '▁48', '15'."""
    all_words = GLUE + KEYS + NUMBERS + ITEMS + NOUNS + NAMES + ADJECTIVES + VERBS + ADVERBS + PREPOSITIONS
    digits = [str(i) for i in range(10)] + [f"{i:02d}" for i in range(100)]
    tokens = SPECIAL + MARKS + ["▁" + d for d in digits] + digits + ["▁" + w for w in all_words]
    assert len(set(tokens)) == len(tokens)
    return tokens


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Word-level tokenizer: lower case, words and pairs of digits with their leading space, reversible."""
    core = Tokenizer(models.WordLevel({t: i for i, t in enumerate(vocabulary())}, unk_token=SPECIAL[UNK]))
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


# --- filler ---------------------------------------------------------------------------------------------------------

CLASSES = {"N": NOUNS, "P": NAMES, "J": ADJECTIVES, "V": VERBS, "D": ADVERBS, "R": PREPOSITIONS}
CLASSES |= {"t": ["the"], "a": ["a"], "&": ["and"], "w": ["while"], ",": [","], ".": ["."]}
TEMPLATES = words("tJNVtNRtN. PVtJND. PVtNRtJN. aNVtN&tNVtJN. tNVPwPVtN. P&PVaJN. RtN,tJNVPD. tJNDVtNRaN.")
TOPIC_SIZE = 6
TOPIC_WEIGHTS = np.cumsum([0.4, 0.22, 0.14, 0.1, 0.08, 0.06])
SUCCESSOR_WEIGHTS = np.cumsum([0.55, 0.25, 0.12, 0.08])


def pick(rng: np.random.Generator, weights: np.ndarray, n: int) -> np.ndarray:
    """n draws from cumulative weights [k] -> indices [n]."""
    return np.minimum(np.searchsorted(weights, rng.random(n)), len(weights) - 1)


class Filler:
    """Text from a grammar: who appears depends on the document, what is said depends on the word before.

    A document has a topic, six nouns and four names that come back throughout (what a long context can tell); verbs,
    adjectives, adverbs and prepositions follow the word before them by a fixed random table (what a short one can).
    """

    def __init__(self, seed: int = 0):
        rng = np.random.default_rng(seed)
        ids = {t: i for i, t in enumerate(vocabulary())}
        members = {c: [ids.get("▁" + w, ids.get(w)) for w in ws] for c, ws in CLASSES.items()}
        names = list(CLASSES)
        self.topical = {names.index(c): np.array(members[c]) for c in "NP"}
        width = max(map(len, TEMPLATES))
        self.templates = np.full((len(TEMPLATES), width), -1)
        for row, template in zip(self.templates, TEMPLATES, strict=True):
            row[: len(template)] = [names.index(c) for c in template]
        self.successors = np.stack([rng.choice(members[c], (len(ids), 4)) for c in names])  # [class, word, 4]

    def __call__(self, rng: np.random.Generator, n_tokens: int) -> np.ndarray:
        """The last n_tokens of one document of filler -> ids [n_tokens], ending with a full stop."""
        n = n_tokens // 6 + 2
        classes = self.templates[rng.integers(len(self.templates), size=n)]  # [sentences, width]
        topics = {c: rng.permutation(ids)[:TOPIC_SIZE] for c, ids in self.topical.items()}
        out, word = np.empty_like(classes), np.zeros(n, dtype=int)
        for i in range(classes.shape[1]):
            word = self.successors[classes[:, i], word, pick(rng, SUCCESSOR_WEIGHTS, n)]
            for c, topic in topics.items():
                word = np.where(classes[:, i] == c, topic[pick(rng, TOPIC_WEIGHTS, n)], word)
            out[:, i] = word
        return out[classes >= 0][-n_tokens:]


# --- tasks ----------------------------------------------------------------------------------------------------------


@dataclass
class Task:
    """What goes into a document, and what is asked about it: (question, answer) in text."""

    facts: list[str] = field(default_factory=list)
    turns: list[tuple[str, str]] = field(default_factory=list)


def draw(rng: np.random.Generator, pool: list[str], n: int) -> list[str]:
    """n different words."""
    return [pool[i] for i in rng.permutation(len(pool))[:n]]


def numbers(rng: np.random.Generator, n: int) -> list[str]:
    """n numbers of four digits."""
    return [str(v) for v in rng.integers(1000, 10000, size=n)]


def ask(key: str, what: str = "code") -> str:
    """The question about a key."""
    return f"recall the {what} of {key}."


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
    """n passages of unrelated words that each come twice: next-token text that only the context can tell."""
    return Task([" ".join(draw(rng, ITEMS, length)) + "." for _ in range(n)] * 2)


TASKS = {
    "niah": needles,
    "multikey": lambda rng: needles(rng, 8),
    "kv": key_value,
    "twostage": two_stage,
    "vt": variables,
    "copy": copying,
    "text": passages,
}


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
        text = self.filler(rng, n_tokens - sum(map(len, facts)))
        stops = np.concatenate([[0], np.flatnonzero(text == self.encode("a.")[-1]) + 1])
        nearest = stops[np.abs(stops - depths[:, None] * len(text)).argmin(1)]
        parts, start = [], 0
        for i in np.argsort(nearest, kind="stable"):
            parts += [text[start : nearest[i]], facts[i]]
            start = nearest[i]
        return np.concatenate([*parts, text[start:]]).astype(np.int64)

    def chat(self, turns: list[tuple[str, str]]) -> tuple[list[int], list[bool]]:
        """Turns after the body: ids, and which of them the assistant says."""
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


def training_batch(docs: Documents, rng: np.random.Generator, n: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """n documents, each a mix of tasks, with as many questions as fit -> ids [n, length], answer [n, length]."""
    turns = min(24, max(1, length // 48))
    rows = [docs.document(rng, mixture(docs, rng, length), length, turns) for _ in range(n)]
    ids, answers = zip(*rows, strict=True)
    return np.stack(ids), np.stack(answers)
