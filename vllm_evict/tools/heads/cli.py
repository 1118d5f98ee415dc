"""`vllm-evict heads`: profile, train, show."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ...config.gates import HeadGates, HeadsError

app = typer.Typer(no_args_is_help=True, help="Find the KV heads that need the whole context (DuoAttention).")

Model = Annotated[str, typer.Option(help="Model directory or Hub name.")]
Out = Annotated[Path, typer.Option(help="TSV of gates; config.json with sink and recent sizes goes beside it.")]
Lengths = Annotated[str, typer.Option(help="Fewest and most tokens of a document; 1000,32000 if they fit.")]
Passkeys = Annotated[int, typer.Option(help="Facts in a document, all asked for.")]
Sink = Annotated[int, typer.Option(help="Leading tokens that streaming heads keep.")]
Recent = Annotated[int, typer.Option(help="Trailing tokens that streaming heads keep.")]
Seed = Annotated[int, typer.Option(help="Seed of the documents.")]
Device = Annotated[str, typer.Option(help="Device by torch's name; by default a GPU if there is one.")]


@app.command()
def profile(
    model: Model,
    out: Out,
    samples: Annotated[int, typer.Option(min=1, help="Documents.")] = 20,
    lengths: Lengths = "",
    passkeys: Passkeys = 10,
    sink: Sink = 128,
    recent: Recent = 256,
    seed: Seed = 0,
    device: Device = "",
) -> None:
    """Score heads by the attention mass that answers put on their facts. Takes minutes."""
    between = _lengths(lengths) if lengths else None
    from . import dense
    from .profile import profile as run

    sizes = {"lengths": between, "passkeys": passkeys, "sink": sink, "recent": recent}
    gates = run(*dense.load(model, device), out, samples=samples, seed=seed, **sizes)
    _tell(gates, out)


@app.command()
def train(
    model: Model,
    out: Out,
    steps: Annotated[int, typer.Option(help="Steps.")] = 2000,
    lengths: Lengths = "",
    passkeys: Passkeys = 10,
    batch: Annotated[int, typer.Option(help="Documents of a step.")] = 1,
    sink: Sink = 128,
    recent: Recent = 256,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 0.02,
    l1: Annotated[
        float, typer.Option(help="Weight of the mean gate in the loss: more of it, fewer retrieval heads.")
    ] = 0.05,
    seed: Seed = 0,
    save_every: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 60.0,
    recompute: Annotated[bool, typer.Option(help="Recompute activations: less memory, more time.")] = False,
    device: Device = "",
) -> None:
    """Train a gate for each KV head against the model with full attention. The same command resumes a stopped run."""
    between = _lengths(lengths) if lengths else None
    from . import dense
    from .train import train as run

    sizes: dict[str, Any] = {"lengths": between, "passkeys": passkeys, "batch": batch, "sink": sink, "recent": recent}
    more: dict[str, Any] = {"lr": lr, "l1": l1, "seed": seed, "save_every": save_every, "recompute": recompute}
    loaded, tokenizer = dense.load(model, device)
    gates = run(loaded, tokenizer, out, steps=steps, **sizes, **more)
    _tell(gates, out)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="TSV of gates, or the folder of a published pattern.")],
    threshold: Annotated[float | None, typer.Option(help="Gates of at least this are retrieval heads (0.5).")] = None,
    sparsity: Annotated[float | None, typer.Option(help="Share of heads that stream, by rank, instead.")] = None,
    contexts: Annotated[str, typer.Option(help="Contexts of the memory table, in tokens.")] = "4096,32768,131072",
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a KV block.")] = 16,
    model: Annotated[str, typer.Option(help="The model: checks the shape, and adds bytes.")] = "",
    head_dim: Annotated[int, typer.Option(min=0, help="Without --model: adds bytes, of 16-bit keys and values.")] = 0,
    weights: Annotated[float, typer.Option(min=0, help="Without --model: bytes of the weights, as 13.5e9.")] = 0.0,
    ratio: Annotated[
        float | None, typer.Option(min=1, help="Find the context where weights and KV cache are so many times less.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Write the heat map here too.")] = None,
) -> None:
    """Show a heat map of the gates, the retrieval heads of each layer, and the memory that the pattern saves."""
    from . import show as shown

    geometry, shape = None, None
    if model:
        from .dense import read_config
        from .dense import shape as shape_of

        geometry, shape = shown.Geometry.of_model(model), shape_of(read_config(model))
    elif head_dim:
        geometry = shown.Geometry(head_dim, 2, int(weights))
    if ratio is not None and geometry is None:
        raise HeadsError("--ratio needs bytes: give --model, or --head-dim and --weights")
    gates = HeadGates.read(file, shape)
    pattern = gates.pattern(threshold, sparsity)
    console = wide_console()
    shown.show(gates, pattern, console, _numbers(contexts, "--contexts"), block_size, geometry, ratio)
    if png:
        shown.draw(gates, pattern, png, file.resolve().name if file.is_dir() else file.resolve().parent.name)
        console.print(str(png), style="dim", highlight=False, soft_wrap=True)


def wide_console() -> Console:
    """Standard output; if it is no terminal, wide enough for every column."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def _tell(gates: HeadGates, out: Path) -> None:
    from .show import heat_map

    console = wide_console()
    console.print(heat_map(gates, gates.pattern()))
    console.print(str(out), style="dim", highlight=False, soft_wrap=True)


def _numbers(text: str, what: str) -> tuple[int, ...]:
    try:
        numbers: Any = tuple(int(entry) for entry in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise HeadsError(f"{what} must be whole numbers above 0 separated by commas, not {text!r}")
    return numbers


def _lengths(text: str) -> tuple[int, int]:
    numbers = _numbers(text, "--lengths")
    if len(numbers) > 2:
        raise HeadsError(f"--lengths must be the fewest and the most tokens, not {text!r}")
    return numbers[0], numbers[-1]
