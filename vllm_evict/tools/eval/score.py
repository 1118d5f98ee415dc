"""Metrics that compare an answer with the expected ones. All give 0 to 1.

Those of RULER, LongBench and 2StageRetr follow the published scripts, quirks included, so that figures can be compared.
"""

import difflib
import itertools
import re
import string
from collections import Counter
from collections.abc import Callable

from . import EvalError
from .tasks import Sample


def contains(answer: str, sample: Sample) -> float:
    """Built-in tasks: 1 if the expected words occur in the answer, as whole words."""
    (expected,) = sample.answers
    spoken = " ".join(answer.lower().split())
    return float(re.search(rf"(?<!\w){re.escape(expected.lower())}(?!\w)", spoken) is not None)


def steps(answer: str, sample: Sample) -> float:
    """Built-in tasks of several steps: the share of the expected words that come before the first wrong one."""
    (expected,) = sample.answers
    words = expected.split()
    right = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(answer.lower().split(), words))
    return len(list(right)) / len(words)


# --- RULER, 2StageRetr ----------------------------------------------------------------------------------------------


def string_match_all(answer: str, sample: Sample) -> float:
    """RULER: share of the expected strings that occur."""
    answer = _printable(answer)
    return sum(expected.lower() in answer for expected in sample.answers) / len(sample.answers)


def string_match_part(answer: str, sample: Sample) -> float:
    """RULER (QA) and 2StageRetr: 1 if any of the expected strings occurs."""
    answer = _printable(answer)
    return float(any(expected.lower() in answer for expected in sample.answers))


def _printable(answer: str) -> str:
    return re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip().lower()


# --- LongBench ------------------------------------------------------------------------------------------------------


def qa_f1(answer: str, expected: str, classes: tuple[str, ...] = ()) -> float:
    """F1 of words, without case, punctuation and articles."""
    return _f1(_normal(answer).split(), _normal(expected).split())


def qa_f1_zh(answer: str, expected: str, classes: tuple[str, ...] = ()) -> float:
    """Score the same for Chinese, by jieba's words."""
    spoken, right = ([w for w in map(_normal_zh, _cut(text)) if w] for text in (answer, expected))
    return _f1(spoken, right)


def rouge_l(answer: str, expected: str, classes: tuple[str, ...] = ()) -> float:
    """ROUGE-L as the package `rouge` computes it: by summary, over sets of words.

    For each expected sentence, the words of its longest common subsequences with the sentences of the answer; F of
    their union against the sets of words on both sides.
    """
    said, right = ([" ".join(s.split()).split(" ") for s in text.split(".") if s] for text in (answer, expected))
    if not said or not right:
        return 0.0
    common: set[str] = set()
    for sentence in right:
        for other in said:
            common |= _common_subsequence(sentence, other)
    recall = len(common) / len({w for s in right for w in s})
    precision = len(common) / len({w for s in said for w in s})
    return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_l_zh(answer: str, expected: str, classes: tuple[str, ...] = ()) -> float:
    """Score the same for Chinese, by jieba's words."""
    return rouge_l(" ".join(_cut(answer)), " ".join(_cut(expected)))


def classification(answer: str, expected: str, classes: tuple[str, ...] = ()) -> float:
    """1 over the number of labels in the answer, if the right one is among them.

    Labels that are part of the right one do not count. The published script removes them from the list over which it
    iterates, and so skips the label after each; this function does the same.
    """
    found = [label for label in classes if label in answer]
    for label in found:
        if label in expected and label != expected:
            found.remove(label)
    return 1 / len(found) if expected in found else 0.0


def retrieval(answer: str, expected: str, classes: tuple[str, ...] = ()) -> float:
    """Return the share of the numbers in the answer that are the paragraph's."""
    return _share(re.findall(r"Paragraph (\d+)", expected)[0], answer)


def retrieval_zh(answer: str, expected: str, classes: tuple[str, ...] = ()) -> float:
    return _share(re.findall(r"段落(\d+)", expected)[0], answer)


def count(answer: str, expected: str, classes: tuple[str, ...] = ()) -> float:
    """Return the share of the numbers in the answer that are the right one."""
    return _share(expected, answer)


def code_similarity(answer: str, expected: str, classes: tuple[str, ...] = ()) -> float:
    """Similarity of the first line that is no comment, in hundredths."""
    lines = answer.lstrip("\n").split("\n")
    line = next((s for s in lines if not any(mark in s for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, line, expected).ratio()) / 100


def _normal(text: str) -> str:
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


#: LongBench's Chinese punctuation, beside the ASCII punctuation.
PUNCTUATION_ZH = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣"
    "､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)


def _normal_zh(text: str) -> str:
    return "".join(c for c in text.lower() if not c.isspace() and c not in string.punctuation + PUNCTUATION_ZH)


def _f1(said: list[str], right: list[str]) -> float:
    common = sum((Counter(said) & Counter(right)).values())
    return 2 * common / (len(said) + len(right)) if common else 0.0


def _share(number: str, answer: str) -> float:
    numbers = re.findall(r"\d+", answer)
    return numbers.count(str(number)) / len(numbers) if numbers else 0.0


def _common_subsequence(a: list[str], b: list[str]) -> set[str]:
    """Return the words of one longest common subsequence."""
    length = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a, 1):
        for j, y in enumerate(b, 1):
            length[i][j] = length[i - 1][j - 1] + 1 if x == y else max(length[i - 1][j], length[i][j - 1])
    words, i, j = set(), len(a), len(b)
    while i and j:
        if a[i - 1] == b[j - 1]:
            words.add(a[i - 1])
            i, j = i - 1, j - 1
        elif length[i - 1][j] > length[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words


def _cut(text: str) -> list[str]:
    try:
        import jieba
    except ImportError:
        raise EvalError("LongBench's Chinese datasets are scored by jieba's words: pip install jieba") from None
    return jieba.lcut(text)


def best_of(metric: Callable[..., float]) -> Callable[[str, Sample], float]:
    """LongBench: the best score against any of the expected answers."""
    return lambda answer, sample: max(metric(answer, expected, sample.classes) for expected in sample.answers)


def first_line(metric: Callable[[str, Sample], float]) -> Callable[[str, Sample], float]:
    """LongBench, few-shot tasks: only the first line counts, because models continue with the next example."""
    return lambda answer, sample: metric(answer.lstrip("\n").split("\n")[0], sample)


METRICS: dict[str, Callable[[str, Sample], float]] = {
    "contains": contains,
    "steps": steps,
    "string_match_all": string_match_all,
    "string_match_part": string_match_part,
    "qa_f1": best_of(qa_f1),
    "qa_f1_first_line": first_line(best_of(qa_f1)),
    "qa_f1_zh": best_of(qa_f1_zh),
    "rouge_l": best_of(rouge_l),
    "rouge_l_first_line": first_line(best_of(rouge_l)),
    "rouge_l_zh": best_of(rouge_l_zh),
    "classification_first_line": first_line(best_of(classification)),
    "retrieval": best_of(retrieval),
    "retrieval_zh": best_of(retrieval_zh),
    "count": best_of(count),
    "code_similarity": best_of(code_similarity),
}


def score(answer: str, sample: Sample) -> float:
    """Return the score of an answer, 0 to 1."""
    return METRICS[sample.metric](answer, sample)
