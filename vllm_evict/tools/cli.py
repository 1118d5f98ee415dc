"""`vllm-evict eval`, `plot`, `tune`, `show`, `policies`, `check`, and the group `heads`."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from .. import __version__
from ..config import HeadsError, KVPolicyConfig, KVPolicyError
from .eval import EvalError
from .eval.policies import parse_budgets, split_list
from .eval.tasks import TASKS
from .eval.words import HAYSTACKS
from .heads.cli import app as heads
from .heads.cli import wide_console

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Measure what KV eviction costs and gains, through vLLM; find the heads that need the whole context.",
)
app.add_typer(heads, name="heads")
TASK_HELP = (
    f"Built-in tasks ({', '.join(TASKS)}), and benchmarks from a file or the Hub: ruler=FILE, longbench=FILE, "
    "2stageretr=FILE, ruler=hf:OWNER/NAME/CONFIG. RULER's tasks are also made, of a folder of texts (.txt): "
    "ruler=FOLDER, or one of them: ruler/niah_single_2=FOLDER."
)


def numbers(text: str, kind: type, what: str) -> tuple[Any, ...]:
    """Return a comma-separated list of numbers.

    Raises:
        EvalError: an entry is no number.
    """
    try:
        return tuple(kind(entry) for entry in split_list(text))
    except ValueError:
        raise EvalError(f"{what} must be numbers separated by commas, not {text!r}") from None


def _version(wanted: bool) -> None:
    if wanted:
        print(f"vllm-evict {__version__}")
        raise typer.Exit


def _from_file(context: typer.Context, file: Path | None) -> None:
    """Read defaults of a command's options from a YAML file; lists and objects become what the command line takes.

    Raises:
        EvalError: the file can't be read, is no YAML object, or names an option that the command does not have.
    """
    if file is None:
        return
    try:
        given = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise EvalError(f"--config {file}: {' '.join(str(error).split())}") from None
    known = {parameter.name for parameter in context.command.params} - {"config"}
    if not isinstance(given, dict):
        raise EvalError(f"--config {file} got {type(given).__name__}; expected options such as 'tasks: [niah]'")
    if unknown := [str(name) for name in given if name not in known]:
        raise EvalError(f"--config {file} got {', '.join(unknown)}; expected some of: {', '.join(sorted(known))}")
    context.default_map = {name: _words(value) for name, value in given.items()}


def _words(value: Any) -> Any:
    """Return a value of a file as the command line has it."""
    if isinstance(value, list):
        return ",".join(str(_words(entry)) for entry in value)
    return json.dumps(value) if isinstance(value, dict) else value


@app.callback()
def _all(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_version)] = (
        False
    ),
) -> None:
    pass


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Option(help="Model directory or Hub name; with --url the served name.")],
    out: Annotated[Path, typer.Option(help="Results folder; a second run continues a stopped one.")],
    tasks: Annotated[str, typer.Option(help=TASK_HELP)] = "niah,multikey,twostage,vt,ppl",
    policies: Annotated[str, typer.Option(help="Names, YAML files or JSON objects.")] = "full,h2o,sink-window",
    budgets: Annotated[str, typer.Option(help="Tokens, or ratios of the prompt below 1. '': the policies' own.")] = (
        "128,256,512,0.25"
    ),
    lengths: Annotated[str, typer.Option(help="Tokens before the question (built-in tasks).")] = "1024,2048,4096",
    depths: Annotated[
        str, typer.Option(help="Depths of the asked fact in the context, from 0 to 1.")
    ] = "0.1,0.3,0.5,0.7,0.9",
    samples: Annotated[int, typer.Option(help="Prompts for each task, length and depth.")] = 4,
    settings: Annotated[
        str, typer.Option(help="agnostic, aware, turns, served. Default: agnostic, over HTTP served.")
    ] = "",
    turns: Annotated[int, typer.Option(help="Questions about one document in the setting turns.")] = 4,
    haystacks: Annotated[
        str, typer.Option(help="Text around the facts, or how they are laid out: " + ", ".join(HAYSTACKS) + ".")
    ] = "grammar",
    url: Annotated[
        str | None, typer.Option(help="An OpenAI-compatible server instead of an engine in this process.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer, if it is not the model's.")] = None,
    chat: Annotated[bool, typer.Option(help="Use the model's chat template, if it has one.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    sink: Annotated[int | None, typer.Option(help="Sink tokens of policies given by name; default: their own.")] = None,
    recent: Annotated[
        int | None, typer.Option(help="Recent tokens of policies given by name; default: their own.")
    ] = None,
    buffer: Annotated[
        int | None, typer.Option(help="Hysteresis of policies given by name; default: their own.")
    ] = None,
    chunk: Annotated[int, typer.Option(help="Prefill chunk in the agnostic setting; divides all lengths.")] = 256,
    block_size: Annotated[int | None, typer.Option(help="Tokens of a KV block; default: vLLM's.")] = None,
    batch: Annotated[int, typer.Option(help="Requests at once.")] = 8,
    limit: Annotated[int | None, typer.Option(help="Most rows of each benchmark file.")] = None,
    engine_args: Annotated[str, typer.Option(help='More arguments of LLM, as JSON: {"dtype": "float32"}.')] = "{}",
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML file of these options; what the command line says wins.", is_eager=True, callback=_from_file
        ),
    ] = None,
) -> None:
    """Run tasks under every policy and budget, then write tables, pictures and a report."""
    # Before vLLM is imported: engines run one after the other in this process.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from .eval import report
    from .eval.run import RunOptions, run

    console = wide_console()
    args = RunOptions(
        model=model,
        out=out,
        tasks=tuple(split_list(tasks)),
        policies=policies,
        budgets=tuple(parse_budgets(budgets)),
        lengths=numbers(lengths, int, "--lengths"),
        depths=numbers(depths, float, "--depths"),
        samples=samples,
        settings=tuple(split_list(settings)),
        turns=turns,
        haystacks=tuple(split_list(haystacks)),
        url=url,
        tokenizer=tokenizer,
        chat=chat,
        seed=seed,
        sink=sink,
        recent=recent,
        buffer=buffer,
        chunk=chunk,
        block_size=block_size,
        batch=batch,
        limit=limit,
        engine_args=_object(engine_args, "--engine-args"),
    )
    rows = run(args, _said(console))
    _tell(report.write(rows, out, console), console)


@app.command()
def plot(folder: Annotated[Path, typer.Argument(help="Results folder of an evaluation.")]) -> None:
    """Write tables, pictures and report from a results folder, and print the table."""
    from .eval import report

    console = wide_console()
    _tell(report.write(report.load(folder), folder, console), console)


@app.command()
def tune(
    prompts: Annotated[
        Path, typer.Option(help="JSONL: prompt (text) or messages (of a chat) in each row, perhaps output_tokens.")
    ],
    model: Annotated[
        str | None, typer.Option(help="Model directory or Hub name; with --url the served name, by default the first.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="A server that audits all answers (audit: 1) instead of an engine here.")
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="Share of answers that has to stay as it is.", show_default="0.95")
    ] = None,
    measure: Annotated[
        str, typer.Option(help="identical; unchanged (leaves ties out); tokens (that agree, by answer).")
    ] = "identical",
    policies: Annotated[str, typer.Option(help="Names, YAML files or JSON objects.")] = "h2o,snapkv,keydiff",
    budgets: Annotated[
        str,
        typer.Option(
            help="What is searched: tokens, or ratios of the prompt below 1.",
            show_default="0.05 to 0.95, in steps of 0.05",
        ),
    ] = ",".join(f"{n / 20:.2f}" for n in range(1, 20)),
    budget_bytes: Annotated[
        int | None, typer.Option(help="Bytes of KV cache a request and worker: find the best policy for them.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Results folder; a second run continues a stopped one.")] = Path("tune"),
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer, where a row does not say it.")] = 256,
    batch: Annotated[int, typer.Option(help="Requests at once.")] = 16,
    chat: Annotated[
        bool,
        typer.Option(help="Use the model's chat template for text, if it has one. A server without one: --no-chat."),
    ] = True,
    engine_args: Annotated[str, typer.Option(help='More arguments of LLM, as JSON: {"max_model_len": 8192}.')] = "{}",
) -> None:
    """Find the smallest budget that keeps a share of the answers to your prompts as full attention gives them.

    Exit status 1: no budget is confirmed.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # before vLLM is imported: the engine runs in this process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from .tune.report import write
    from .tune.run import TuneOptions, run

    console = wide_console()
    args = TuneOptions(
        prompts=prompts,
        out=out,
        model=model,
        url=url,
        target=target,
        measure=measure,
        policies=policies,
        budgets=tuple(parse_budgets(budgets)),
        budget_bytes=budget_bytes,
        max_tokens=max_tokens,
        batch=batch,
        chat=chat,
        engine_args=_object(engine_args, "--engine-args"),
    )
    result = run(args, _said(console))
    _tell(write(result, console), console)
    raise typer.Exit(budget_bytes is None and not (result.best and result.best.confirmed))


@app.command()
def show(
    prompt: Annotated[Path, typer.Argument(help="Text file.")],
    model: Annotated[str, typer.Option(help="Model directory or Hub name.")],
    policy: Annotated[str, typer.Option(help="Name, YAML file or JSON object.")] = "h2o",
    budget: Annotated[float | None, typer.Option(help="Tokens, or a ratio of the prompt below 1.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)] = 64,
    chat: Annotated[bool, typer.Option("--chat", help="Put the text through the model's chat template.")] = False,
    out: Annotated[Path, typer.Option(help="The page.")] = Path("kept.html"),
    engine_args: Annotated[str, typer.Option(help='More arguments of LLM, as JSON: {"dtype": "float32"}.')] = "{}",
) -> None:
    """Write a page that shows what a policy evicted of a prompt, and where its answer differs from full attention's."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # before vLLM is imported: the engine runs in this process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        text = prompt.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise EvalError(f"{prompt} got {type(error).__name__}; expected a text file: {error}") from None
    config = KVPolicyConfig.parse(policy)
    if budget is not None:
        config = KVPolicyConfig.parse(config.to_dict() | {"budget": int(budget) if budget.is_integer() else budget})
    if model.startswith((".", "/")) and not Path(model).exists():
        raise EvalError(f"no model at {model}")
    is_new = not os.path.lexists(out)
    try:  # before the engine starts
        out.parent.mkdir(parents=True, exist_ok=True)
        out.open("a").close()
        if is_new:
            out.unlink()
    except OSError as error:
        raise EvalError(f"--out got {out}; expected a file that can be written: {error}") from None
    from .eval.policies import budget_words, label_of
    from .show.page import page
    from .show.record import run

    console = wide_console()
    shown = run(model, config, text, max_tokens, _object(engine_args, "--engine-args"), _said(console), chat)
    sized = "" if config.budget is None else f", budget {budget_words(config.budget)}"
    out.write_text(page(shown, f"{Path(model).name}, {label_of(config)}{sized}"), encoding="utf-8")
    _tell([out], console)


@app.command()
def policies(
    policy: Annotated[str, typer.Argument(help="YAML or JSON file, JSON object, or a name.", show_default=False)] = "",
) -> None:
    """List policies and presets; of one policy or file, check it and print all its fields."""
    from . import listing

    if policy:
        listing.show_one(policy, wide_console())
    else:
        listing.show_all(wide_console())


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def check(context: typer.Context, device: Annotated[str, typer.Option(help="The device of the server.")] = "") -> None:
    """Say whether vllm serve MODEL [FLAGS] starts under a KV policy on a device, without the device."""
    from .check.cli import main as run

    raise typer.Exit(run(["--device", device, *context.args]))


def _said(console: Console) -> Callable[[str], None]:
    """Return what prints a line for the user at once."""
    return lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True)


def _tell(files: list[Path], console: Console) -> None:
    for file in files:
        console.print(str(file), style="dim", highlight=False, soft_wrap=True)


def _object(text: str, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise EvalError(f"{what} is not JSON ({error}): {text}") from None
    if not isinstance(value, dict):
        raise EvalError(f"{what} must be a JSON object, not {text}")
    return value


def main() -> None:
    """Run the command; a user's mistake is one line on stderr and exit status 2."""
    try:
        app()
    except (EvalError, HeadsError, KVPolicyError) as error:
        print(f"vllm-evict: {error}", file=sys.stderr)
        sys.exit(2)
