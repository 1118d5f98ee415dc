"""DuoAttention: retrieval heads follow a policy of their own, streaming heads keep sinks and a recent window."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ..config import REGISTRY, KVPolicyConfig
from ..config.errors import place, shown
from ..config.fields import RECENT, SINK
from ..config.gates import HeadPattern, HeadsError
from ..config.options import MOST_ENTRIES, Option, entries, real, text
from ..config.sources import path_of
from .full import Full


def _whole_heads(retrieval: Any) -> KVPolicyConfig | None:
    """Parse the policy of retrieval heads: its name, its fields or a configuration."""
    if retrieval is None or isinstance(retrieval, KVPolicyConfig):
        config = retrieval
    elif isinstance(retrieval, Mapping) and "retrieval" in retrieval:
        raise ValueError("got a policy with the field retrieval; expected a policy for whole layers, such as h2o")
    elif isinstance(retrieval, (str, Mapping)):
        config = KVPolicyConfig.parse({"name": retrieval} if isinstance(retrieval, str) else retrieval)
    else:
        raise ValueError(f"must be the name of a policy or its fields, not {shown(retrieval)}")
    if config is None:
        return None
    if config.policy.allocator.splits or config.policy.reconstructs:
        names = (name for name, policy in REGISTRY.items() if not policy.allocator.splits and not policy.reconstructs)
        raise ValueError(f"retrieval heads can't run {config.name!r}, they can run: {', '.join(sorted(names))}")
    if config.allocator.splits:
        raise ValueError(f"got allocate: {config.allocate}; heads are dealt to retrieval and streaming: leave it out")
    if config.allow is not None:
        raise ValueError("got the field allow; set allow beside retrieval")
    if "max" in (config.heads, config.layers):
        # Layers differ in their numbers of retrieval heads, so a maximum over layers cannot go head by head.
        raise ValueError("heads and layers must be sum or mean in the policy of retrieval heads, not max")
    return config


def _as_many_heads_in_each_layer(pattern: tuple[str, ...]) -> tuple[str, ...]:
    if len({len(row) for row in pattern}) > 1:
        raise ValueError("must have the same number of digits in every row, one for each KV head")
    return pattern


ROW = Annotated[text, Field(pattern="^[01]+$", max_length=MOST_ENTRIES)]
GATES = Option("gates", text | None, None, "path of a file of gates, as `vllm-evict heads train` writes it")
THRESHOLD = Option("threshold", real(ge=0, le=1) | None, None, "heads with at least this gate are retrieval heads")
SPARSITY = Option("sparsity", real(ge=0, le=1) | None, None, "share of all heads that stream, of the smallest gates")
RETRIEVAL = Option(
    "retrieval", Any, None, "the policy of retrieval heads, by name or fields; null: they keep everything", _whole_heads
)
PATTERN = Option(
    "pattern",
    entries(ROW),
    (),
    "a row for each layer with attention, of `1` for each retrieval and `0` for each streaming head; if left out, from "
    "`gates`",
    _as_many_heads_in_each_layer,
)


class Duo(Full):
    """Splits the KV heads of each layer into two classes, each under a policy of its own (`KVPolicyConfig.of_class`).

    Streaming heads run `sink-window`. Retrieval heads run `full`, or the policy in the field `retrieval`.
    """

    name = "duo"
    paper = "Xiao et al., DuoAttention: Efficient Long-Context LLM Inference ..., ICLR 2025, arXiv:2410.10819"
    declares = (SINK, RECENT, GATES, THRESHOLD, SPARSITY, RETRIEVAL, PATTERN)
    renamed = {"heads": "gates"}
    fixed = {"allocate": "gates"}
    triggers = ("budget",)

    def complete(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Fill fields that are not given from the file of gates. Raises ValueError if the file cannot be read."""
        given, pattern = dict(fields), fields.get("pattern")
        if pattern is not None and not (isinstance(pattern, (list, tuple)) and not pattern):
            return given
        gates = given.get("gates")
        if not isinstance(gates, (str, Path)) or not str(gates):
            raise ValueError(
                f"policy {self.name!r} needs gates: the path of a file of gates, as `vllm-evict heads train` writes "
                f"it, not {shown(gates)}"
            )
        path = path_of(gates)
        try:
            read = HeadPattern.read(path, given.get("threshold"), given.get("sparsity"))
        except HeadsError as error:
            raise ValueError(f"gates: {error}".replace(str(path), place(path))) from None
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"gates: {place(gates)} can't be read: {why}") from None
        pattern = ["".join("1" if head else "0" for head in layer) for layer in read.retrieval]
        return {"sink": read.sink, "recent": read.recent, **given, "gates": str(gates), "pattern": pattern}
