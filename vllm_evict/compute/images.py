"""Images whose tokens attend to each other (prefix-LM): where they lie in views, and what their queries see.

vLLM's metadata name them in `mm_req_doc_ranges`: row of the batch -> first and last token of each image.
"""

from collections.abc import Callable, Set
from copy import copy
from typing import Any

import numpy as np

#: First and last token of each image of a row.
Ranges = dict[int, list[tuple[int, int]]]


def with_ranges(metadata: Any, unread: Callable[[int], Set[int] | None], block_size: int) -> Any:
    """Return metadata whose images lie where they do in views; the metadata itself if no request has an image.

    An image with a query in the step ends behind all blocks that its row does not read, and it moves to the front by
    those before its first token. In other images no query attends, so they are left out: they could be taken for tokens
    of the view.

    Args:
        metadata: vLLM's `CommonAttentionMetadata`, of all tokens.
        unread: row of the batch -> logical blocks that it does not read; None: it reads all. Of a decode's row these
            may be fewer than there are.
        block_size: tokens.
    """
    ranges: Ranges | None = getattr(metadata, "mm_req_doc_ranges", None)
    if not ranges or not any(ranges.values()):
        return metadata
    _, firsts, _ = _queries(metadata)
    metadata = copy(metadata)
    metadata.mm_req_doc_ranges = {
        row: [_moved(image, blocks, block_size) for image in images if image[1] >= firsts[row]]
        if (blocks := unread(row)) is not None
        else images
        for row, images in ranges.items()
    }
    return metadata


def seen_ahead(metadata: Any) -> np.ndarray | None:
    """Return how many tokens after its own each query of the step sees: int32 [T]; None: no query sees one.

    Args:
        metadata: vLLM's `CommonAttentionMetadata` of views.
    """
    ranges: Ranges | None = getattr(metadata, "mm_req_doc_ranges", None)
    if not ranges or not any(ranges.values()):
        return None
    starts, firsts, lens = _queries(metadata)
    ahead = np.zeros(starts[-1], np.int32)
    for row, images in ranges.items():
        for first, last in images:
            first, last = max(first, firsts[row]), min(last, lens[row] - 1)
            if first < last:
                begin = starts[row] + first - firsts[row]
                ahead[begin : begin + last - first] = np.arange(last - first, 0, -1)
    return ahead if ahead.any() else None


def _moved(image: tuple[int, int], unread: Set[int], block_size: int) -> tuple[int, int]:
    """Return where an image lies in a row without these blocks."""
    first, last = image
    before = sum(min(max(first - block * block_size, 0), block_size) for block in unread)
    return first - before, last - len(unread) * block_size


def _queries(metadata: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the offset of each row in the batch, its first query's position, and its length.

    Lengths are exact for prompts. Of decodes they are bounds, which no image reaches.
    """
    starts, lens = metadata.query_start_loc_cpu.numpy(), metadata.seq_lens_cpu_upper_bound.numpy()
    lens = lens[: len(starts) - 1]
    return starts, lens - np.diff(starts)[: len(lens)], lens
