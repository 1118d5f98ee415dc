"""RULER's tasks from a folder of texts: what a careful reader answers, lengths, and folders that do not do."""

import itertools
import re
from collections import Counter

import pytest

from vllm_evict.tools.eval import EvalError, ruler
from vllm_evict.tools.eval.external import RULER_TOKENS

LENGTH = 1500


def count(text):
    return len(text.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two files, 1,500 sentences of 729 different words."""
    folder = tmp_path_factory.mktemp("texts")
    words = ["".join(parts) for parts in itertools.product(("ba", "ko", "li"), repeat=3)]
    words = [
        first + last for first, last in itertools.product(words, ("t", "n", "s", "rd", "m", "lt", "x", "nk", "ft"))
    ]
    words = [f"{word}{end}" for word in words for end in ("", "e", "y")]
    for name in ("a", "b"):
        sentences = (" ".join(words[(7 * i + k) % len(words)] for k in range(9)) + "." for i in range(750))
        (folder / f"{name}.txt").write_text("\n".join(sentences))
    return str(folder)


def solve(subset, text, question):
    """Answer as a careful reader does, by reading the text: written apart from the generators."""
    if subset == "vt":
        (value,) = re.findall(r"assigned the value (\d+) in the text above", question)
        names, told = [], dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text))
        while found := [name for name, what in told.items() if what == (names[-1] if names else value)]:
            names += found
        return names
    if subset == "cwe":
        listed = Counter(re.findall(r"\d+\. (\w+)", text.rpartition("Below is a numbered list")[2]))
        return [word for word, _ in listed.most_common(10)]
    if subset == "fwe":
        return [
            word for word, _ in Counter(re.findall(r"\b[a-z]{6}\b", text.partition("coded words. ")[2])).most_common(3)
        ]
    told = re.findall(r"One of the special magic \w+ for ([\w-]+) is: ([\w-]+)\.", text)
    return [value for key, value in told if key in question]


@pytest.mark.parametrize("subset", ruler.SUBSETS)
def test_a_reader_of_the_text_finds_the_answers(folder, subset):
    samples = [ruler.make(subset, folder, LENGTH, index, 0, count) for index in range(3)]
    for sample in samples:
        text, _, question = sample.text.rpartition("\n")
        assert set(solve(subset, text, question)) == set(sample.answers)
        tokens = count(f"{sample.text} {sample.prefix}") + RULER_TOKENS[subset.split("_")[0]]
        assert 0.9 * LENGTH < tokens <= LENGTH
        assert "{" not in sample.text + sample.prefix
    assert len({sample.sha256 for sample in samples}) == 3
    assert ruler.make(subset, folder, LENGTH, 0, 0, count) == samples[0]
    assert ruler.make(subset, folder, LENGTH, 0, 1, count) != samples[0]


def test_one_needle_is_asked_for_in_the_singular(folder):
    one, several = (ruler.make(f"niah_{name}", folder, LENGTH, 0, 0, count) for name in ("single_2", "multiquery"))
    assert "A special magic number is hidden" in one.text and "What is the special magic number for" in one.text
    assert one.prefix.endswith(" mentioned in the provided text is")
    assert "Some special magic numbers are hidden" in several.text and len(several.answers) == 4
    assert ", and " in several.prefix


def test_what_does_not_do_is_refused(folder, tmp_path):
    with pytest.raises(EvalError, match=r"length 100 is too short for ruler/niah_multiquery: its shortest prompt has"):
        ruler.make("niah_multiquery", folder, 100, 0, 0, count)
    (tmp_path / "short.txt").write_text("A fox. Some grapes.")
    with pytest.raises(EvalError, match="got 0 sentences and 1 words; expected 100 and 500 or more"):
        ruler.make("vt", str(tmp_path), LENGTH, 0, 0, count)
    assert ruler.is_texts(str(tmp_path))
    (tmp_path / "rows.jsonl").write_text("{}\n")
    assert not ruler.is_texts(str(tmp_path)), "a benchmark's rows are read, whatever else is there"
