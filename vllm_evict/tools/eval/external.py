"""Reads RULER, LongBench and 2StageRetr: rows in their published schema, from a file or a Hub dataset.

    ruler=DIR/niah_single_1/validation.jsonl     `index, input, outputs, length` (`answer_prefix`), as its scripts write
    ruler=hf:simonjegou/ruler/4096               `context, question, answer, answer_prefix, task, max_new_tokens`
    longbench=DIR/data/hotpotqa.jsonl            `input, context, answers, length, dataset, all_classes`
    2stageretr=DIR/2stage.jsonl                  `prompt, answers`, as OmniKV's script writes

A file is .jsonl (or a folder of them). Prompts and answer lengths of LongBench come from its own
`config/dataset2prompt.json` and `config/dataset2maxlen.json` beside the data.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import EvalError
from .tasks import Sample

Row = dict[str, Any]

#: RULER: first letters of a subset -> most tokens of an answer, from its scripts.
RULER_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
#: 2StageRetr: answers may state the sum first; from OmniKV's script.
TWO_STAGE_TOKENS = 200
#: LongBench: dataset -> metric.
LONGBENCH_METRICS = {
    "narrativeqa": "qa_f1",
    "qasper": "qa_f1",
    "multifieldqa_en": "qa_f1",
    "multifieldqa_zh": "qa_f1_zh",
    "hotpotqa": "qa_f1",
    "2wikimqa": "qa_f1",
    "musique": "qa_f1",
    "dureader": "rouge_l_zh",
    "gov_report": "rouge_l",
    "qmsum": "rouge_l",
    "multi_news": "rouge_l",
    "vcsum": "rouge_l_zh",
    "trec": "classification_first_line",
    "triviaqa": "qa_f1_first_line",
    "samsum": "rouge_l_first_line",
    "lsht": "classification_first_line",
    "passage_retrieval_en": "retrieval",
    "passage_count": "count",
    "passage_retrieval_zh": "retrieval_zh",
    "lcc": "code_similarity",
    "repobench-p": "code_similarity",
}


def load(benchmark: str, source: str, limit: int | None = None, seed: int = 0) -> list[Sample]:
    """Samples of one benchmark.

    Args:
        benchmark: a name in `BENCHMARKS`.
        source: a .jsonl file, a folder of them, or hf:OWNER/NAME[/CONFIG].
        limit: most rows of each file.
        seed: kept on the samples; the order of rows does not depend on it.

    Raises:
        EvalError: no such data, or a row without its fields; names file, line and field.
    """
    reader = BENCHMARKS[benchmark]
    samples = []
    for rows, place, path in _sources(source):
        for number, row in rows:
            if limit is not None and number > limit:
                break
            samples.append(reader(row, Origin(f"{place}, row {number}", path), number - 1, seed))
    if not samples:
        raise EvalError(f"{source}: no rows")
    return samples


class Origin:
    """The origin of a row, for messages and for names that only its path has."""

    def __init__(self, words: str, path: Path | None):
        self.words, self.path = words, path

    def field(self, row: Row, name: str, kind: type | tuple[type, ...], meant: str = "") -> Any:
        """Return a required field; `meant`: its name in a message, if others would do."""
        if name not in row:
            raise EvalError(
                f"{self.words} has no field {meant or repr(name)}; it has: {', '.join(sorted(row)) or 'none'}"
            )
        if not isinstance(row[name], kind):
            raise EvalError(f"{self.words}: field {name!r} is {type(row[name]).__name__}, not what its schema says")
        return row[name]

    def strings(self, row: Row, name: str) -> tuple[str, ...]:
        """Return a required field of one or several strings (numbers count as their text)."""
        value = self.field(row, name, (str, int, float, list))
        value = tuple(str(v) for v in (value if isinstance(value, list) else [value]))
        if not value:
            raise EvalError(f"{self.words}: field {name!r} is empty")
        return value


def ruler(row: Row, place: Origin, index: int, seed: int) -> Sample:
    """Return a row as RULER's scripts have it, or kvpress's copy on the Hub, with context and question apart."""
    apart = "context" in row
    if apart:
        subset, answers = place.field(row, "task", str), place.strings(row, "answer")
        context, question = place.field(row, "context", str), place.field(row, "question", str)
    else:
        context, question, answers = place.field(row, "input", str), "", place.strings(row, "outputs")
        subset = row.get("task") or _ruler_subset(place)
    kind = subset.split("_")[0]
    if kind not in RULER_TOKENS:
        raise EvalError(f"{place.words}: {subset!r} is no subset of RULER ({', '.join(RULER_TOKENS)}, ...)")
    return Sample(
        task=f"ruler/{subset}",
        context=context,
        question=question,
        answers=answers,
        metric="string_match_part" if kind == "qa" else "string_match_all",
        max_tokens=int(row.get("max_new_tokens") or RULER_TOKENS[kind]),
        length=int(row.get("length") or 0),
        index=index,
        seed=seed,
        prefix=row.get("answer_prefix") or "",
    )


def _ruler_subset(place: Origin) -> str:
    """Return the subset by the file's name: SUBSET/validation.jsonl by RULER's scripts, SUBSET.jsonl in copies."""
    if place.path is None:
        raise EvalError(f"{place.words} has no field 'task', and no file name tells the subset")
    names = (place.path.stem, place.path.parent.name)
    return next((n for n in names if n.split("_")[0] in RULER_TOKENS), names[0])


def longbench(row: Row, place: Origin, index: int, seed: int) -> Sample:
    context, question = place.field(row, "context", str), place.field(row, "input", str)
    answers = place.strings(row, "answers")
    dataset = place.field(row, "dataset", str).removesuffix("_e")
    if dataset not in LONGBENCH_METRICS:
        raise EvalError(f"{place.words}: {dataset!r} is no dataset of LongBench ({', '.join(LONGBENCH_METRICS)})")
    prompts, lengths = _longbench_config(place)
    if dataset not in prompts or dataset not in lengths:
        raise EvalError(f"{place.words}: LongBench's config has no prompt or length for {dataset!r}")
    return Sample(
        task=f"longbench/{dataset}",
        context=prompts[dataset].format(context=context, input=question),
        question="",
        answers=answers,
        metric=LONGBENCH_METRICS[dataset],
        max_tokens=lengths[dataset],
        length=int(row.get("length") or 0),
        index=index,
        seed=seed,
        classes=tuple(row.get("all_classes") or ()),
    )


_longbench_configs: dict[Path, tuple[dict[str, str], dict[str, int]]] = {}


def _longbench_config(place: Origin) -> tuple[dict[str, str], dict[str, int]]:
    start = (place.path or Path.cwd() / "-").resolve().parent
    for folder in (start, start.parent, start.parent / "LongBench"):
        config = folder / "config"
        if config not in _longbench_configs and (config / "dataset2prompt.json").exists():
            files = (config / "dataset2prompt.json", config / "dataset2maxlen.json")
            _longbench_configs[config] = tuple(json.loads(f.read_text(encoding="utf-8")) for f in files)
        if config in _longbench_configs:
            return _longbench_configs[config]
    raise EvalError(
        f"LongBench's prompts are not here: put its config/dataset2prompt.json and config/dataset2maxlen.json (from "
        f"its repository, THUDM/LongBench) into {start / 'config'}"
    )


def two_stage_retrieval(row: Row, place: Origin, index: int, seed: int) -> Sample:
    """Return a row of OmniKV's 2StageRetr; an answer is right if any expected one occurs, as in its script."""
    prompt = place.field(row, "prompt", str)
    return Sample(
        task="2stageretr",
        context=prompt,
        question="",
        answers=place.strings(row, "answers"),
        metric="string_match_part",
        max_tokens=TWO_STAGE_TOKENS,
        length=len(re.findall(r"\w+", prompt)),
        index=index,
        seed=seed,
    )


BENCHMARKS: dict[str, Callable[[Row, Origin, int, int], Sample]] = {
    "ruler": ruler,
    "longbench": longbench,
    "2stageretr": two_stage_retrieval,
}


def _sources(source: str) -> Iterator[tuple[Iterator[tuple[int, Row]], str, Path | None]]:
    """Numbered rows from 1 on, a name for messages, and the file or None."""
    if source.startswith("hf:"):
        yield enumerate(_hub(source), 1), source, None
        return
    path = Path(source)
    if path.is_dir():
        files = sorted(path.rglob("*.jsonl"))
        if not files:
            raise EvalError(f"{path}: no .jsonl file in it")
    elif path.exists():
        files = [path]
    else:
        raise EvalError(f"{path}: no such file (a dataset on the Hub is hf:OWNER/NAME/CONFIG)")
    for file in files:
        yield lines(file), str(file), file


def lines(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a JSONL file, with their numbers from 1 on; empty lines are left out.

    Raises:
        EvalError: the file is no text, or a row is no JSON object.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _object(line, f"{path}, row {number}")
    except UnicodeDecodeError as error:
        raise EvalError(f"{path} is no text in UTF-8: {error}") from None


def _object(line: str, place: str) -> Row:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise EvalError(f"{place} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise EvalError(f"{place} is not an object")
    return row


def _hub(source: str) -> Iterator[Row]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise EvalError(f"{source} needs the package datasets: pip install datasets, or give a local file") from None
    owner, _, rest = source.removeprefix("hf:").partition("/")
    name, _, config = rest.partition("/")
    try:
        return iter(load_dataset(f"{owner}/{name}", config or None, split="test"))
    except Exception as error:  # the Hub's client raises what its transport raises
        raise EvalError(f"{source}: {' '.join(str(error).split())}") from None
