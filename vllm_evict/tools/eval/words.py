"""The language of the built-in tasks: a few hundred plain words, and filler text from a small grammar.

examples/needle/model is trained on it (examples/needle/data.py), so its tokenizer has one token for each word; other
models read plain English. A change of words, their order or the grammar changes that model's training data.
"""

import numpy as np


def words_in(text: str) -> list[str]:
    return text.split()


KEYS = words_in(
    "paris rome oslo cairo lima tokyo delhi accra quito berlin madrid vienna dublin lisbon prague warsaw athens sofia "
    "riga tallinn vilnius minsk kiev bern monaco malta tunis rabat dakar lagos nairobi kigali harare luanda maputo "
    "havana bogota caracas santiago brasilia managua panama ottawa toronto boston chicago denver dallas seattle "
    "miami sydney perth auckland jakarta manila hanoi bangkok seoul beijing kabul tehran baghdad amman doha"
)
NUMBERS = words_in(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen"
)
ITEMS = words_in(
    "apple drum lamp spoon brick candle ribbon hammer pencil mirror basket button carpet violin anchor barrel "
    "blanket bottle bucket cactus camera carrot chisel feather flute guitar helmet jacket kettle ladder lemon magnet "
    "marble napkin needle olive paddle pepper pillow pumpkin saddle scarf shovel sponge ticket trumpet wallet whistle"
)
NOUNS = words_in(
    "river mountain forest valley bridge garden castle village harbor island meadow tower market temple road field "
    "cloud storm winter summer morning evening shadow silence window door stone fire horse wolf eagle fox deer ship "
    "wagon train engine clock letter book story song painting map journey battle feast soldier farmer teacher doctor "
    "painter sailor king queen child stranger merchant hunter"
)
NAMES = words_in(
    "anna boris clara david emma felix greta henry irene jonas karin leon maria nils olga peter rosa simon tessa "
    "victor wanda xavier yvonne zoe"
)
ADJECTIVES = words_in(
    "old young bright dark quiet loud small large cold warm green golden silver broken hidden distant narrow wide "
    "gentle fierce lonely happy weary ancient heavy swift pale deep empty wild"
)
VERBS = words_in(
    "crosses follows watches remembers leaves finds guards builds paints carries calls hears visits loves fears "
    "describes reaches opens closes repairs seeks avoids enters passes studies admires"
)
ADVERBS = words_in("slowly quickly quietly often never again gladly sadly early late alone together")
PREPOSITIONS = words_in("near beyond behind under above beside within across")
GLUE = words_in("the a of is equals plus and while recall code list what you")
MARKS = [".", ",", "?", ":", "="]
#: Words that only questions of `AGGREGATES` (tasks.py) have; the needle model does not know them.
QUESTIONS = words_in("how many times found sort all codes")
WORDS = GLUE + KEYS + NUMBERS + ITEMS + NOUNS + NAMES + ADJECTIVES + VERBS + ADVERBS + PREPOSITIONS
DIGITS = [str(i) for i in range(10)] + [f"{i:02d}" for i in range(100)]
SPECIAL_TOKENS = 6  # at the head of the needle model's vocabulary


def lexicon() -> list[str | None]:
    """Return the needle model's vocabulary as text, in the order of its ids (None: special), as the grammar has it."""
    return [None] * SPECIAL_TOKENS + MARKS + DIGITS + DIGITS + WORDS  # numbers with and without a leading space


def join(tokens: list[str]) -> str:
    """Return the words and marks as text."""
    return " ".join(tokens).replace(" .", ".").replace(" ,", ",")


CLASSES = {"N": NOUNS, "P": NAMES, "J": ADJECTIVES, "V": VERBS, "D": ADVERBS, "R": PREPOSITIONS}
CLASSES |= {"t": ["the"], "a": ["a"], "&": ["and"], "w": ["while"], ",": [","], ".": ["."]}
TEMPLATES = words_in("tJNVtNRtN. PVtJND. PVtNRtJN. aNVtN&tNVtJN. tNVPwPVtN. P&PVaJN. RtN,tJNVPD. tJNDVtNRaN.")
TOPIC_SIZE = 6
TOPIC_WEIGHTS = np.cumsum([0.4, 0.22, 0.14, 0.1, 0.08, 0.06])
SUCCESSOR_WEIGHTS = np.cumsum([0.55, 0.25, 0.12, 0.08])


def pick(rng: np.random.Generator, weights: np.ndarray, n: int) -> np.ndarray:
    """n draws from cumulative weights [k] -> indices [n]."""
    return np.minimum(np.searchsorted(weights, rng.random(n)), len(weights) - 1)


class Filler:
    """Text from a grammar.

    A document has a topic: six nouns and four names that return throughout, which a model can predict from a long
    context. Each other word follows from the word before by a fixed random table, so a short context predicts it.
    """

    def __init__(self, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.lexicon = lexicon()
        ids = {word: i for i, word in enumerate(self.lexicon)}
        words = {c: [ids[w] for w in ws] for c, ws in CLASSES.items()}
        names = list(CLASSES)
        self.topical = {names.index(c): np.array(words[c]) for c in "NP"}
        width = max(map(len, TEMPLATES))
        self.templates = np.full((len(TEMPLATES), width), -1)
        for row, template in zip(self.templates, TEMPLATES, strict=True):
            row[: len(template)] = [names.index(c) for c in template]
        self.successors = np.stack([rng.choice(words[c], (len(self.lexicon), 4)) for c in names])  # [class, word, 4]

    def __call__(self, rng: np.random.Generator, n_tokens: int) -> list[str]:
        """Return the last n_tokens words and marks of one document, ending with a full stop."""
        return [self.lexicon[i] for i in self.ids(rng, n_tokens)]

    def ids(self, rng: np.random.Generator, n_tokens: int) -> np.ndarray:
        """Return the same as token ids of the needle model: [n_tokens]."""
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


class Shuffled(Filler):
    """The grammar's text with its words permuted; marks stay where they are."""

    def __call__(self, rng: np.random.Generator, n_tokens: int) -> list[str]:
        text = np.array(super().__call__(rng, n_tokens), dtype=object)
        words = np.flatnonzero(~np.isin(text, MARKS))
        text[words] = text[rng.permutation(words)]
        return text.tolist()


class Uniform(Filler):
    """Sentences of 4 to 12 words, all words of the grammar equally often: no topic, no word that predicts the next."""

    def __call__(self, rng: np.random.Generator, n_tokens: int) -> list[str]:
        words = np.array([word for each in CLASSES.values() for word in each if word not in MARKS], dtype=object)
        text = words[rng.integers(len(words), size=n_tokens)]
        stops = n_tokens - 1 - np.cumsum([0, *rng.integers(5, 14, size=n_tokens // 5)])
        text[stops[stops >= 0]] = "."
        return text.tolist()


#: Haystack -> its filler; in `pairs` each sentence has two facts (`tasks.paired`).
HAYSTACKS: dict[str, type[Filler]] = {"grammar": Filler, "shuffled": Shuffled, "uniform": Uniform, "pairs": Filler}
