"""Scores KV heads by the attention mass that answers put on their facts."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from ...config.gates import HeadGates, HeadsError, check_out
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

    The score of a query head is the attention mass that positions which predict an answer put on its fact, averaged
    over all answers. Facts in the sinks, or in a query's window, do not count. A KV head has the largest score of its
    query heads. Attention does not tell whether the model needs a head; `train` does.

    Args:
        model, tokenizer: from `dense.load`.
        out: path of the TSV; config.json goes beside it.
        samples: number of documents.
        lengths: approximate fewest and most tokens of a document; None: see `dense.lengths_for`.
        passkeys: passkeys of a document.
        sink, recent: tokens that streaming heads see.
        seed: seed of the documents.
        progress: whether to show a progress bar.

    Raises:
        HeadsError: scores cannot be written to `out`, or no fact counts.
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
