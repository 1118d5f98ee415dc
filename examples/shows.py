"""Contents of the demo, by model: prompts, sizes, policies, and what a run has to give.

The embedded model is made for the demo, and answers in its own words. Trained models come from `make models`.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts import models
from vllm_evict.tools.eval import ruler, tasks, words
from vllm_evict.tools.eval.prompts import Prompts
from vllm_evict.tools.eval.score import score

CHECKOUT = Path(__file__).resolve().parents[1]
MODELS = CHECKOUT / "models"
EMBEDDED = "needle"
BLOCK = 32
REACH = "full, host"  # blocks over the budget wait on the host, and layers read what the question wants


class DemoError(Exception):
    """Something did not work; the message says what."""


def require(works: Any, message: str) -> None:
    if not works:
        raise DemoError(message)


# ---- prompts


@dataclass(frozen=True)
class Needle:
    """A number hidden at some depth of a text, and the question for it."""

    sample: tasks.Sample
    ids: list[int]

    def found_in(self, text: str) -> bool:
        return score(text, self.sample) == 1


@dataclass(frozen=True)
class Talk:
    """A message of a user, and its end, which is shown; `needle` is the answer that it asks for, if it asks for one."""

    text: str
    end: str
    tokens: int
    needle: Needle | None = None


class Needles:
    """Prompts that the embedded model can answer; each index gives another text."""

    def __init__(self, show: "Show") -> None:
        require((show.model / "model.safetensors").exists(), f"there is no model in {show.model}")
        self.prompts, self.show = Prompts(str(show.model)), show

    @functools.cached_property
    def filler(self) -> words.Filler:
        return words.Filler()

    def batch(self, number: int, first: int = 0) -> list[Needle]:
        """Return needles with the indices from `first` on, in the order of their depths."""
        samples = [self.sample((i + 0.5) / number, first + i) for i in range(number)]
        samples.sort(key=lambda sample: sample.context.index(sample.answers[0]) / len(sample.context))
        return [Needle(sample, self.prompts.ids(sample)) for sample in samples]

    def sample(self, depth: float, index: int) -> tasks.Sample:
        return tasks.make("niah", self.show.length - QUESTION, depth, index, 0, self.prompts.count, self.filler)

    def talk(self, needle: Needle) -> Talk:
        """Return the chat of the demo; the needle is one that was asked for before."""
        return Talk(needle.sample.text, needle.sample.question, 16, needle)

    def answer(self, token_ids: list[int]) -> str:
        """The model's answer up to the end of its turn."""
        end = self.prompts.tokenizer.eos_token_id
        return self.prompts.tokenizer.decode(token_ids[: token_ids.index(end)] if end in token_ids else token_ids)


class Essays(Needles):
    """RULER's single needle in essays, at a depth that the index draws, and a whole essay to talk about."""

    folder = MODELS / models.SOURCES["essays"].folder
    about = "newideas.txt"

    def sample(self, depth: float, index: int) -> tasks.Sample:
        return ruler.make("niah_single_2", str(self.folder), self.show.length, index, 0, self.prompts.count)

    def talk(self, needle: Needle) -> Talk:
        end = "What does the author say about new ideas?" if self.prompts.chat else "In short, the author says that"
        essay = " ".join((self.folder / self.about).read_text(encoding="utf-8", errors="replace").split())
        return Talk(f"{essay}\n\n{end}", end, 64)


# ---- what a run has to give on any machine


def falls(found: Mapping[str, int]) -> None:
    """Require of the embedded model that each better policy finds more needles."""
    require(found[REACH] > found[LAST], f"{REACH} found no more needles than {LAST}: {found[REACH]}, {found[LAST]}")
    order = [found[name] for name in ("full", LAST, "sink-window")]
    require(order[0] > order[1] > order[2], f"needles found by full, {LAST}, sink-window do not fall: {order}")


def reaches(found: Mapping[str, int]) -> None:
    """Require of a trained model that it finds most of the needles on the host."""
    message = f"{REACH} lost half of the needles of stock: {found[REACH]}, {found['stock']}"
    require(found[REACH] > found["stock"] / 2, message)


# ---- the models


@dataclass(frozen=True)
class Show:
    """The demo on one model.

    Attributes:
        model: folder of the model.
        requests, output: of the batch, and tokens that each request writes.
        length: most tokens of a prompt.
        pool_blocks, block_bytes: blocks of the pool, and bytes of one.
        kept: what policies keep, for the user.
        policies: of the batch, by name; the first one keeps everything. None is stock vLLM.
        server_policy: of the server.
        asked: needles over HTTP.
        sound: share of the needles that the first policy has to find.
        order: checks the needles that each policy found.
        prompts: makes the prompts.
        outgrown: whether requests under the first policy outgrow the pool, so that vLLM preempts.
        threads: of torch; None leaves them to torch.
        made: name in `make models`; None for the embedded model.
    """

    model: Path
    requests: int
    length: int
    output: int
    pool_blocks: int
    block_bytes: int
    kept: str
    policies: Mapping[str, Any]
    server_policy: dict[str, Any]
    asked: int
    sound: float
    order: Callable[[Mapping[str, int]], None]
    prompts: Callable[["Show"], Needles]
    outgrown: bool = True
    threads: int | None = None
    made: str | None = None


QUESTION = 8  # tokens of a question and of the embedded model's chat template after it
BUDGET = 256
SIZES = {"buffer": 0, "sink": 32, "recent": 64}
H2O = {"name": "h2o", "budget": BUDGET, **SIZES}
LAST = "h2o last 16"  # scores by the last 16 queries; "h2o" sums over all queries, as in the paper
H2O_LAST = {**H2O, "accumulate": "last", "window": 16}


def embedded() -> Show:
    """Return the demo on the embedded model."""
    return Show(
        model=CHECKOUT / "examples" / "needle" / "model",
        requests=16,
        length=1024 + QUESTION,
        output=256,
        pool_blocks=192,
        block_bytes=BLOCK * 2 * 4 * 2 * 64 * 2,  # keys and values, layers, KV heads, head size, bfloat16
        kept=f"Policies that evict keep {BUDGET} tokens of each.",
        policies={
            "full": {"name": "full"},
            "sink-window": {"name": "sink-window", "sink": 32, "recent": BUDGET - 32},
            "h2o": H2O,
            LAST: H2O_LAST,
            REACH: {**H2O, "name": "full", "evict": "host", "host": "64MiB"},
        },
        server_policy=H2O_LAST,
        asked=8,
        sound=0.9,
        order=falls,
        prompts=Needles,
        threads=1,  # a model this small gains nothing from a second one, and on a busy machine two wait for each other
    )


TENTH = {"name": "full", "evict": "host", "host": "512MiB", "budget": 0.1}
QUARTER = {"prompt": "whole", "budget": 0.25, **SIZES}
TOVA = {"name": "tova", **QUARTER}


def trained(name: str, pool_blocks: int, block_bytes: int, outgrown: bool = True) -> Show:
    """Return the demo on a model that `make models` makes."""
    return Show(
        model=MODELS / models.SOURCES[name].folder,
        requests=6,
        length=2048,
        output=96,
        pool_blocks=pool_blocks,
        block_bytes=block_bytes,
        outgrown=outgrown,
        kept="full, host keeps a tenth of each and an index; at each step layers choose what they read on the host; "
        "tova and snapkv keep a quarter of each prompt, once it is computed"
        + ("; h2o-pressure evicts when the pool runs out." if outgrown else "."),
        policies={
            "stock": None,
            REACH: TENTH,
            "tova": TOVA,
            "snapkv": {"name": "snapkv", **QUARTER},
            **({"h2o-pressure": "h2o-pressure"} if outgrown else {}),
        },
        server_policy=TOVA,
        asked=2,
        sound=0.6,
        order=reaches,
        prompts=Essays,
        made=name,
    )


SHOWS: dict[str, Callable[[], Show]] = {
    EMBEDDED: embedded,
    # A block: keys and values, layers that share it, KV heads, head size, bfloat16.
    "smollm2": lambda: trained("smollm2", 188, BLOCK * 2 * 30 * 3 * 64 * 2),
    # Five of six layers hold 512 tokens of a decode, and more of a chunk of its prompt: nothing outgrows the pool.
    "gemma": lambda: trained("gemma", 450, BLOCK * 2 * 3 * 1 * 256 * 2, outgrown=False),
}


def named(name: str) -> Show:
    """Return the demo on a model.

    Raises:
        DemoError: there is no such model.
    """
    trained = " or ".join(name for name in SHOWS if name != EMBEDDED)
    wanted = f"expected {trained}, trained models that `make models` makes, or no MODEL for the embedded one"
    require(name in SHOWS, f"MODEL got {name}; {wanted}")
    return SHOWS[name]()
