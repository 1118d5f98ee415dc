"""Trains gates by distillation: a gate stays high if streaming attention in its head changes the answers."""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ...config.gates import HeadGates, HeadsError, check_out
from . import dense
from .passkeys import Passkeys, Reader


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return the learning rate of a step: linear from a tenth of the peak over the first fifth of steps, constant, and
    linear down to a tenth over the last fifth."""
    edge = max(1, steps // 5)
    return peak * min(1.0, max((step + 1) / edge, 0.1), max((steps - step) / edge, 0.1))


def train(
    model: Any,
    tokenizer: Any,
    out: Path,
    *,
    steps: int = 2000,
    lengths: tuple[int, int] | None = None,
    passkeys: int = 10,
    batch: int = 1,
    sink: int = 128,
    recent: int = 256,
    lr: float = 0.02,
    l1: float = 0.05,
    seed: int = 0,
    save_every: float = 60.0,
    recompute: bool = False,
    progress: bool = True,
) -> HeadGates:
    """Train a gate for each KV head with the model frozen, and write the gates to `out`.

    Gates begin at 1. Each attention output is gate x full + (1 - gate) x streaming attention. The loss is the mean
    squared error of the last hidden states that predict answers, against full attention, plus `l1` times the mean gate.
    Gates are clipped to [0, 1] after each step of AdamW. After Xiao et al., ICLR 2025, arXiv:2410.10819, with passkeys
    of this package (four digits each), and with the mean of gates in place of their sum, so that `l1` does not depend
    on the number of heads.

    The state is written to `out` + ".state.pt" every `save_every` seconds. The same call resumes from it, with the same
    result as a run without a stop.

    Args:
        model, tokenizer: from `dense.load`.
        out: path of the TSV; config.json goes beside it.
        steps, batch: number of steps, and documents of each step.
        lengths: approximate fewest and most tokens of a document; None: see `dense.lengths_for`.
        passkeys: passkeys of a document.
        sink, recent: tokens that streaming attention sees.
        lr: peak of the learning rate.
        l1: weight of the mean gate.
        seed: seed of the documents.
        save_every: seconds between two writes of the state.
        recompute: whether the backward pass computes activations again, which long documents need.
        progress: whether to show a progress bar.

    Raises:
        HeadsError: a size is out of range, gates cannot be written to `out`, or the state is of another run.
    """
    for name, value, least in (("steps", steps, 1), ("batch", batch, 1), ("sink", sink, 0), ("recent", recent, 1)):
        if value < least:
            raise HeadsError(f"{name} must be at least {least}, not {value}")
    check_out(out, sink, recent)
    lengths = dense.lengths_for(model, lengths)
    documents = Passkeys(Reader(tokenizer), passkeys, lengths, seed)
    settings = {
        **{"model": model.name_or_path, "steps": steps, "lengths": list(lengths), "passkeys": passkeys, "batch": batch},
        **{"sink": sink, "recent": recent, "lr": lr, "l1": l1, "seed": seed},
    }
    gates = torch.nn.Parameter(torch.ones(dense.shape(model.config), device=model.device))
    optimizer = torch.optim.AdamW([gates], weight_decay=0.0)
    state, first = Path(f"{out}.state.pt"), 0
    if state.exists():
        saved = torch.load(state, map_location=model.device)
        differing = [name for name in settings if saved["settings"].get(name) != settings[name]]
        if differing:
            was = ", ".join(f"{name} {saved['settings'].get(name)}" for name in differing)
            raise HeadsError(f"{state} is of a run with {was}: remove it, or give the same options to go on")
        with torch.no_grad():
            gates.copy_(saved["gates"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]

    heads, everything = dense.GatedHeads(gates, sink, recent), dense.FullHeads()
    saved_at = time.monotonic()
    bar = tqdm(range(first, steps), initial=first, total=steps, unit="step", disable=not progress)
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, lr)
        optimizer.zero_grad()
        distance = 0.0
        for document in map(documents, range(step * batch, (step + 1) * batch)):
            with torch.no_grad():
                wanted = dense.hidden_states(model, document, everything)
            with dense.recomputed(model) if recompute else nullcontext():
                loss = (dense.hidden_states(model, document, heads) - wanted).square().mean() / batch
                loss.backward()
            distance += loss.item()
        (l1 * gates.abs().mean()).backward()
        optimizer.step()
        with torch.no_grad():
            gates.clamp_(0, 1)
        bar.set_postfix(tokens=len(document.ids), distance=f"{distance:.4f}", gates=f"{gates.mean().item():.3f}")
        if time.monotonic() - saved_at > save_every or step + 1 == steps:
            saved_at = time.monotonic()
            out.parent.mkdir(parents=True, exist_ok=True)
            temporary = state.with_suffix(".tmp")
            torch.save(
                {
                    **{"settings": settings, "step": step + 1, "gates": gates.detach()},
                    "optimizer": optimizer.state_dict(),
                },
                temporary,
            )
            temporary.replace(state)
    found = HeadGates(gates.detach().double().cpu().numpy(), sink, recent)
    found.save(out)
    return found
