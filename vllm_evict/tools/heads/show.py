"""Shows a file of gates: heat maps, heads of each layer, and memory."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ...config.gates import HeadGates, HeadPattern, HeadsError

COLOURS = "viridis"
GIB = 1 << 30


@dataclass(frozen=True)
class Geometry:
    """Sizes that convert tokens of a KV head to bytes.

    Attributes:
        head_dim: elements of a key, and of a value.
        kv_bytes: bytes of an element of the KV cache.
        weights: bytes of the model's weights; 0 if unknown.
    """

    head_dim: int
    kv_bytes: int
    weights: int = 0

    def cache(self, head_tokens: int) -> int:
        """Return the bytes of keys and values of `head_tokens` tokens of one KV head."""
        return 2 * self.head_dim * self.kv_bytes * head_tokens

    @classmethod
    def of_model(cls, path: str | Path) -> "Geometry":
        """Read the sizes of a model, with a KV cache in the weights' dtype.

        Raises:
            HeadsError: there is no model.
        """
        from .dense import read_config

        config = read_config(path)
        text = config.get_text_config()
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        bits = str(config.dtype or "bfloat16")
        return cls(head_dim, 4 if "32" in bits else 2, _weights(Path(path)))


def _weights(folder: Path) -> int:
    """Return the bytes of a folder's safetensors files, from their index if there is one."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return int(json.loads(index.read_text())["metadata"]["total_size"])
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def context_for(pattern: HeadPattern, geometry: Geometry, ratio: float) -> int | None:
    """Return the shortest context, in tokens, at which weights and KV cache together are `ratio` times smaller; None
    if there is no such context."""
    every = pattern.retrieval.size

    def saves(tokens: int) -> bool:
        full = geometry.weights + geometry.cache(every * tokens)
        return full >= ratio * (geometry.weights + geometry.cache(pattern.head_blocks(tokens)))

    low, high = 1, 1 << 40
    if not saves(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if saves(middle) else (middle + 1, high)
    return low


def memory(pattern: HeadPattern, lengths: tuple[int, ...], block_size: int, geometry: Geometry | None) -> Table:
    """Make the table of tokens, bytes and ratios of one sequence at each length."""
    table = Table(title=f"KV cache of one sequence, blocks of {block_size} tokens", title_justify="left")
    for name in ("context", "a retrieval head", "a streaming head", "KV cache"):
        table.add_column(name, justify="right")
    if geometry:
        table.add_column("full attention", justify="right")
        table.add_column("this pattern", justify="right")
        if geometry.weights:
            table.add_column("with weights", justify="right")
    for tokens in lengths:
        held = [f"{blocks * block_size:,}" for blocks in pattern.blocks(tokens, block_size)]
        row = [f"{tokens:,}", *held, f"{pattern.saving(tokens, block_size):.2f}x less"]
        if geometry:
            full = geometry.cache(pattern.retrieval.size * pattern.blocks(tokens, block_size)[0] * block_size)
            here = geometry.cache(pattern.head_blocks(tokens, block_size) * block_size)
            row += [_size(full), _size(here)]
            if geometry.weights:
                row.append(f"{(full + geometry.weights) / (here + geometry.weights):.2f}x less")
        table.add_row(*row)
    return table


def heat_map(gates: HeadGates, pattern: HeadPattern) -> Table:
    """Make the heat map of gates, layers x KV heads, with retrieval heads marked and counted."""
    import matplotlib

    colours = matplotlib.colormaps[COLOURS]
    table = Table(box=None, padding=(0, 1), title_justify="left", title="gates, layers x KV heads (● retrieval)")
    table.add_column("layer", justify="right")
    table.add_column("KV heads")
    table.add_column("retrieval", justify="right")
    table.add_column("streaming", justify="right")
    for layer, (row, marks) in enumerate(zip(gates.gates, pattern.retrieval)):
        cells = Text()
        for gate, mark in zip(row, marks):
            red, green, blue = (int(255 * part) for part in colours(float(gate))[:3])
            ink = "black" if 0.3 * red + 0.6 * green + 0.1 * blue > 110 else "white"
            cells.append("● " if mark else "· ", Style(color=ink, bgcolor=f"rgb({red},{green},{blue})"))
        table.add_row(str(layer), cells, str(int(marks.sum())), str(int((~marks).sum())))
    return table


def draw(gates: HeadGates, pattern: HeadPattern, path: Path, title: str) -> None:
    """Write the heat map as a PNG, with retrieval heads marked. Raises HeadsError if the file cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    layers, heads = gates.gates.shape
    figure, axis = pyplot.subplots(figsize=(max(3.0, 0.24 * heads + 1.6), max(2.0, 0.24 * layers + 1.0)))
    image = axis.imshow(gates.gates, vmin=0, vmax=1, cmap=COLOURS, aspect="auto")
    rows, columns = pattern.retrieval.nonzero()
    axis.scatter(columns, rows, s=14, c="white", edgecolors="black", linewidths=0.6)
    axis.set(xlabel="KV head", ylabel="layer", title=title)
    axis.set_xticks(range(0, heads, math.ceil(heads / 16)), minor=False)
    axis.set_yticks(range(0, layers, math.ceil(layers / 16)), minor=False)
    figure.colorbar(image, ax=axis, label="gate")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path, dpi=120, bbox_inches="tight", facecolor="white")
    except (OSError, ValueError) as error:
        raise HeadsError(f"{path}: {error}") from None
    finally:
        pyplot.close(figure)


def show(
    gates: HeadGates,
    pattern: HeadPattern,
    console: Console,
    lengths: tuple[int, ...],
    block_size: int,
    geometry: Geometry | None,
    ratio: float | None,
) -> None:
    """Print heat map, counts and memory.

    Args:
        gates, pattern: the gates, and the heads split by them.
        console: output.
        lengths: contexts of the memory table, in tokens.
        block_size: tokens of a KV block.
        geometry: adds bytes, and ratios with weights if they are known.
        ratio: adds the context at which weights and KV cache together are this many times smaller.
    """
    console.print(heat_map(gates, pattern))
    heads, size = int(pattern.retrieval.sum()), pattern.retrieval.size
    console.print(
        f"{heads} retrieval and {size - heads} streaming of {size} KV heads ({pattern.share:.0%} retrieval); "
        f"streaming heads keep {pattern.sink} sinks and {pattern.recent} recent tokens",
        highlight=False,
    )
    console.print(memory(pattern, lengths, block_size, geometry))
    if ratio and geometry:
        tokens = context_for(pattern, geometry, ratio)
        least = f"from {tokens:,} tokens on" if tokens else "at no context"
        console.print(f"weights and KV cache together are {ratio:g}x less {least}", highlight=False)


def _size(size: int) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):,.2f} MiB"
