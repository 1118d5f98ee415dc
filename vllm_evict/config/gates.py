"""Files of gates in DuoAttention's published form, and what retrieval and streaming heads hold.

A file is a TSV with a row a layer and a column a KV head, each the gate of full attention in [0, 1], and beside it a
`config.json` with `sink_size` and `recent_size` in tokens. Xiao et al., ICLR 2025, arXiv:2410.10819.
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
#: How far a gate may stray outside [0, 1]: the published ones do so by up to 0.0014.
STRAY = 0.01


class HeadsError(ValueError):
    """Something a user can get wrong about head files; the message says what."""


@dataclass(frozen=True)
class HeadPattern:
    """Which KV heads keep everything (retrieval) and which keep sinks and recent tokens (streaming).

    Attributes:
        retrieval: bool [layers, kv_heads].
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
        """`HeadGates.read`, then `HeadGates.pattern`; raises what they raise."""
        return HeadGates.read(path, shape).pattern(threshold, sparsity)

    def save(self, path: str | Path) -> None:
        """Write it as gates of 0 and 1. See `HeadGates.save`."""
        HeadGates(self.retrieval.astype(float), self.sink, self.recent).save(path)

    @property
    def inverted(self) -> "HeadPattern":
        """Retrieval heads as streaming heads and the other way round: the control of an ablation."""
        return HeadPattern(~self.retrieval, self.sink, self.recent)

    @property
    def share(self) -> float:
        """Retrieval heads of all heads."""
        return float(self.retrieval.mean())

    def blocks(self, tokens: int, block_size: int = 1) -> tuple[int, int]:
        """Blocks that one KV head holds for a sequence of `tokens` -> (retrieval, streaming).

        A streaming head holds every block with a sink or a recent token in it. Blocks of one token are tokens.
        """
        every = math.ceil(tokens / block_size)
        sinks = min(every, math.ceil(self.sink / block_size))
        first_recent = max(0, tokens - self.recent) // block_size
        return every, min(every, sinks + every - max(first_recent, sinks))

    def head_blocks(self, tokens: int, block_size: int = 1) -> int:
        """Blocks of all KV heads of all layers together, a block being `block_size` tokens of one head."""
        retrieval, streaming = self.blocks(tokens, block_size)
        heads = int(self.retrieval.sum())
        return heads * retrieval + (self.retrieval.size - heads) * streaming

    def saving(self, tokens: int, block_size: int = 1) -> float:
        """Full attention's KV cache over this pattern's: 2.0 is half of the cache."""
        return self.retrieval.size * self.blocks(tokens, block_size)[0] / self.head_blocks(tokens, block_size)


@dataclass(frozen=True)
class HeadGates:
    """A gate a KV head: 1 is all full attention, 0 all streaming.

    Attributes:
        gates: float64 [layers, kv_heads] in [0, 1].
        sink: leading tokens of streaming attention, with which the gates were found.
        recent: trailing tokens of it.
    """

    gates: np.ndarray
    sink: int
    recent: int

    @classmethod
    def read(cls, path: str | Path, shape: tuple[int, int] | None = None) -> "HeadGates":
        """Read a TSV, or a folder that holds it under its published name, and the config.json beside it.

        Args:
            path: file or folder.
            shape: (layers, kv_heads) that the model has.

        Raises:
            HeadsError: no file, ragged rows, something that is no number, a gate far outside [0, 1], no config or one
                without sizes, another shape than the model's.
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
        """Write the TSV and the config.json beside it, folders included.

        Raises:
            HeadsError: a config.json that is no heads config lies there, as in a model's folder, or one with other
                sizes that another file may need.
        """
        path = Path(path)
        config, sizes = path.parent / CONFIG, {"sink_size": self.sink, "recent_size": self.recent}
        check_out(path, self.sink, self.recent)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savetxt(path, self.gates, fmt="%.6f", delimiter="\t")
        config.write_text(json.dumps(sizes) + "\n")

    def pattern(self, threshold: float | None = None, sparsity: float | None = None) -> HeadPattern:
        """Split the heads by a value or by their rank; by the value 0.5 if neither is given.

        Args:
            threshold: heads with at least this gate are retrieval heads.
            sparsity: share of all heads that stream, those of the smallest gates: exactly this share, to the nearest
                head, also where gates are equal. Of equal gates earlier layers, then earlier heads, keep everything.

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
    """Make sure that gates with these sizes can be saved at `path`, before work is spent on them.

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
    """The text of a file. Raises HeadsError if it is longer than any gates, and what reading and decoding raise."""
    with path.open("rb") as file:
        content = file.read(LONGEST + 1)
    if len(content) > LONGEST:
        raise HeadsError(f"{path} is too long for gates, which have at most {LONGEST} bytes")
    return content.decode()


def _table(path: Path) -> np.ndarray:
    """Gates of a TSV, clipped to [0, 1] -> float64 [layers, kv_heads]."""
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
    wrong = np.argwhere(~((gates >= -STRAY) & (gates <= 1 + STRAY)))  # not a number is wrong too
    if len(wrong):
        layer, head = wrong[0]
        raise HeadsError(f"{path}: the gate of layer {layer}, KV head {head} is {gates[layer, head]:g}, not in [0, 1]")
    return gates.clip(0, 1)


def _sizes(path: Path) -> dict[str, int]:
    """sink_size and recent_size of a config.json."""
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
