"""Retrieval scores by attention: how much of it an answer spends on the fact that it comes from."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from ..config.gates import HeadGates, HeadsError, check_out
from . import dense
from .passkeys import Passkeys, Reader


@torch.inference_mode()
def profile(
    model: Any,
    tokenizer: Any,
    out: Path,
    *,
    samples: int = 20,
    lengths: tuple[int, int] | None = None,
    passkeys: int = 10,
    sink: int = 128,
    recent: int = 256,
    seed: int = 0,
    progress: bool = True,
) -> HeadGates:
    """Score each KV head by attention mass, and write the scores to `out` as gates.

    The score of a query head is the mass that positions which predict an answer put on the fact with this answer, their
    mean over all answers; facts in the sinks, or in a query's window, do not count. A KV head has the largest score of
    the query heads that share it: one that looks far back is reason enough to keep everything. Attention alone does not
    tell whether a model could do without; `train` does.

    Args:
        model, tokenizer: of `dense.load`.
        out: the TSV; its config.json goes beside it.
        samples: documents.
        lengths: fewest and most tokens of a document, about; None as `dense.lengths_for`.
        passkeys: in each document.
        sink, recent: tokens that streaming heads would see.
        seed: another seed is other documents.

    Raises:
        HeadsError: a place where scores cannot be written, or no fact that counts.
    """
    check_out(out, sink, recent)
    lengths = dense.lengths_for(model, lengths)
    documents = Passkeys(Reader(tokenizer), passkeys, lengths, seed)
    layers, kv_heads = dense.shape(model.config)
    found = []
    for document in tqdm(map(documents, range(samples)), total=samples, unit="document", disable=not progress):
        heads = dense.MassHeads(document, sink, recent)
        dense.hidden_states(model, document, heads)
        if heads.mass:
            found.append(torch.stack([heads.mass[layer] for layer in range(layers)]))
    if not found:
        raise HeadsError(f"all facts lie in the {sink} sinks or the {recent} recent tokens: use longer documents")
    scores = torch.stack(found).mean(0).reshape(layers, kv_heads, -1).amax(-1)
    gates = HeadGates(np.clip(scores.double().numpy(), 0, 1), sink, recent)
    gates.save(out)
    return gates
