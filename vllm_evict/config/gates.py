"""Files of gates in DuoAttention's published form, and the blocks that retrieval and streaming heads hold.

A file is a TSV with a row for each layer and a column for each KV head. Each entry is the gate of full attention, in
[0, 1]. A `config.json` beside it has `sink_size` and `recent_size` in tokens. Xiao et al., ICLR 2025, arXiv:2410.10819.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FILE = "full_attention_heads.tsv"
CONFIG = "config.json"
#: Most bytes of either file.
LONGEST = 1 << 20
#: Accepted distance of a gate from [0, 1]. Published gates exceed it by up to 0.0014.
STRAY = 0.01


class HeadsError(ValueError):
    """A mistake in a file of gates, or in how it is used."""


@dataclass(frozen=True)
class HeadPattern:
    """Assigns each KV head a class: retrieval heads keep everything, streaming heads keep sinks and recent tokens.

    Attributes:
        retrieval: bool [layers, kv_heads], whether a head is a retrieval head.
        sink: leading tokens that streaming heads keep.
        recent: trailing tokens that streaming heads keep, the newest included.
    """

    retrieval: np.ndarray
    sink: int
    recent: int

    @classmethod
    def read(
        cls,
        path: str | Path,
        threshold: float | None = None,
        sparsity: float | None = None,
        shape: tuple[int, int] | None = None,
    ) -> "HeadPattern":
        """Read a file of gates and divide the heads into retrieval and streaming heads.

        Args:
            path: the TSV of gates, or its folder.
            threshold: heads with at least this gate are retrieval heads; 0.5 if this and `sparsity` are None.
            sparsity: share of heads that stream, those of the smallest gates.
            shape: (layers, KV heads) that the gates must have.

        Raises:
            HeadsError: the file is malformed or has another shape, or both `threshold` and `sparsity` are given.
        """
        return HeadGates.read(path, shape).pattern(threshold, sparsity)

    def save(self, path: str | Path) -> None:
        """Write the pattern as gates of 0 and 1. See `HeadGates.save`."""
        HeadGates(self.retrieval.astype(float), self.sink, self.recent).save(path)

    @property
    def inverted(self) -> "HeadPattern":
        """The pattern with both classes exchanged: the control of an ablation."""
        return HeadPattern(~self.retrieval, self.sink, self.recent)

    @property
    def share(self) -> float:
        """Share of retrieval heads."""
        return float(self.retrieval.mean())

    def blocks(self, tokens: int, block_size: int = 1) -> tuple[int, int]:
        """Return the blocks of a sequence that one KV head holds: (a retrieval head, a streaming head).

        A streaming head holds every block with a sink or a recent token in it.
        """
        every = math.ceil(tokens / block_size)
        sinks = min(every, math.ceil(self.sink / block_size))
        first_recent = max(0, tokens - self.recent) // block_size
        return every, min(every, sinks + every - max(first_recent, sinks))

    def head_blocks(self, tokens: int, block_size: int = 1) -> int:
        """Return the blocks of all KV heads of all layers, where a block is `block_size` tokens of one head."""
        retrieval, streaming = self.blocks(tokens, block_size)
        heads = int(self.retrieval.sum())
        return heads * retrieval + (self.retrieval.size - heads) * streaming

    def saving(self, tokens: int, block_size: int = 1) -> float:
        """Return the size of full attention's KV cache over this pattern's: 2.0 means half the cache."""
        return self.retrieval.size * self.blocks(tokens, block_size)[0] / self.head_blocks(tokens, block_size)


@dataclass(frozen=True)
class HeadGates:
    """A gate for each KV head: 1 is full attention, 0 is streaming attention.

    Attributes:
        gates: float64 [layers, kv_heads] in [0, 1].
        sink: leading tokens of the streaming attention that the gates were trained with.
        recent: trailing tokens of that streaming attention.
    """

    gates: np.ndarray
    sink: int
    recent: int

    @classmethod
    def read(cls, path: str | Path, shape: tuple[int, int] | None = None) -> "HeadGates":
        """Read a TSV and the config.json beside it.

        Args:
            path: the TSV, or a folder that holds it under its published name.
            shape: (layers, kv_heads) of the model; None: not checked.

        Raises:
            HeadsError: a file is missing, too long or malformed; a gate is far outside [0, 1]; the config has no sizes;
                the gates differ from `shape`.
        """
        path = Path(path)
        path = path / FILE if path.is_dir() else path
        gates = _table(path)
        if shape is not None and gates.shape != tuple(shape):
            raise HeadsError(
                f"{path} has {gates.shape[0]} layers x {gates.shape[1]} KV heads, the model has {shape[0]} x {shape[1]}"
            )
        sizes = _sizes(path.parent / CONFIG)
        return cls(gates, sizes["sink_size"], sizes["recent_size"])

    def save(self, path: str | Path) -> None:
        """Write the TSV and the config.json beside it. Makes missing folders.

        Raises:
            HeadsError: the folder has a config.json of another kind, such as a model's, or another TSV whose sizes
                differ.
        """
        path = Path(path)
        config, sizes = path.parent / CONFIG, {"sink_size": self.sink, "recent_size": self.recent}
        check_out(path, self.sink, self.recent)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savetxt(path, self.gates, fmt="%.6f", delimiter="\t")
        config.write_text(json.dumps(sizes) + "\n")

    def pattern(self, threshold: float | None = None, sparsity: float | None = None) -> HeadPattern:
        """Split the heads by a threshold or by rank; by the threshold 0.5 if neither is given.

        Args:
            threshold: heads with at least this gate are retrieval heads.
            sparsity: share of streaming heads, of the smallest gates, rounded to the nearest head. Of equal gates
                earlier layers, then earlier heads, are retrieval heads.

        Raises:
            HeadsError: both are given, or one is outside [0, 1].
        """
        if threshold is not None and sparsity is not None:
            raise HeadsError("heads are split by threshold or by sparsity, not by both")
        for name, value in (("threshold", threshold), ("sparsity", sparsity)):
            if value is not None and not (isinstance(value, (int, float)) and 0 <= value <= 1):
                raise HeadsError(f"{name} must be between 0 and 1, not {value!r}")
        if sparsity is None:
            return HeadPattern(self.gates >= (0.5 if threshold is None else threshold), self.sink, self.recent)
        retrieval = np.zeros(self.gates.size, dtype=bool)
        most_first = np.argsort(-self.gates.ravel(), kind="stable")
        retrieval[most_first[: retrieval.size - math.floor(sparsity * retrieval.size + 0.5)]] = True
        return HeadPattern(retrieval.reshape(self.gates.shape), self.sink, self.recent)


def check_out(path: str | Path, sink: int, recent: int) -> None:
    """Check that gates with these sizes can be saved at `path`, before they are computed.

    Raises:
        HeadsError: as `HeadGates.save`.
    """
    path = Path(path)
    config = path.parent / CONFIG
    if path.is_dir():
        raise HeadsError(f"{path} is a folder: name a file in it, as {path / FILE}")
    if path == config:
        raise HeadsError(f"{path} is where sink and recent sizes go: name another file for the gates")
    if not config.exists():
        return
    try:
        there = _sizes(config)
    except HeadsError:
        raise HeadsError(
            f"{config} is there and holds no sink_size and recent_size: choose a folder of its own for {path.name}"
        ) from None
    others = [other for other in sorted(path.parent.glob("*.tsv")) if other != path]
    if others and there != {"sink_size": sink, "recent_size": recent}:
        raise HeadsError(
            f"{config} has sink {there['sink_size']} and recent {there['recent_size']} for {others[0].name}, "
            f"not {sink} and {recent}: choose a folder of its own for {path.name}"
        )


def _text(path: Path) -> str:
    """Read a text file. Raises HeadsError above `LONGEST` bytes, and OSError or UnicodeDecodeError."""
    with path.open("rb") as file:
        content = file.read(LONGEST + 1)
    if len(content) > LONGEST:
        raise HeadsError(f"{path} is too long for gates, which have at most {LONGEST} bytes")
    return content.decode()


def _table(path: Path) -> np.ndarray:
    """Read the gates of a TSV, clipped to [0, 1]: float64 [layers, kv_heads]."""
    try:
        lines = [line for line in _text(path).splitlines() if line.strip()]
    except OSError as error:
        raise HeadsError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise HeadsError(f"{path} is no text: gates are numbers separated by tabs, a line a layer") from None
    if not lines:
        raise HeadsError(f"{path} is empty: gates are numbers separated by tabs, a line a layer")
    rows: list[list[float]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = [float(entry) for entry in line.split()]
        except ValueError:
            raise HeadsError(f"{path}: layer {number - 1} has something that is no number: {line[:60]!r}") from None
        if rows and len(row) != len(rows[0]):
            raise HeadsError(f"{path}: layer {number - 1} has {len(row)} KV heads, layer 0 has {len(rows[0])}")
        rows.append(row)
    gates = np.array(rows)
    wrong = np.argwhere(~((gates >= -STRAY) & (gates <= 1 + STRAY)))  # NaN included
    if len(wrong):
        layer, head = wrong[0]
        raise HeadsError(f"{path}: the gate of layer {layer}, KV head {head} is {gates[layer, head]:g}, not in [0, 1]")
    return gates.clip(0, 1)


def _sizes(path: Path) -> dict[str, int]:
    """Read sink_size and recent_size of a config.json."""
    try:
        value: Any = json.loads(_text(path))
    except FileNotFoundError:
        raise HeadsError(
            f'{path} is missing: it says what streaming heads keep, as {{"sink_size": 128, "recent_size": 256}}'
        ) from None
    except OSError as error:
        raise HeadsError(f"{path}: {error.strerror or error}") from None
    except HeadsError:
        raise
    except (ValueError, RecursionError) as error:
        raise HeadsError(f"{path} is not JSON: {error}") from None
    sizes = {}
    for name, least in (("sink_size", 0), ("recent_size", 1)):
        size = value.get(name) if isinstance(value, dict) else None
        if not isinstance(size, int) or isinstance(size, bool) or size < least:
            found = f"not {size!r}" if size is not None else "it has none"
            raise HeadsError(f"{path}: {name} must be a number of tokens of at least {least}, {found}")
        sizes[name] = size
    return sizes
