"""Sources of what layers read: block tables and lengths, and vLLM's metadata with them."""

from collections.abc import Mapping, Sequence, Set
from copy import copy
from typing import Any

import numpy as np
import torch

from .batch import Batch
from .parts import Part
from .probes import LayerCall
from .step_batch import StepBatch
from .tiles import Cut

#: No rows of a batch.
NO_ROWS = np.empty(0, np.int64)


def with_table(
    metadata: Any, table: torch.Tensor, lens: torch.Tensor, held: np.ndarray | None = None, longest: int | None = None
) -> Any:
    """Return a copy of vLLM's `CommonAttentionMetadata` for other block tables and lengths.

    Args:
        metadata: of the batch.
        table: int32 [R, W].
        lens: int32 [R], tokens in `table`.
        held: int32 [R], the same on the host; None: what `metadata` has.
        longest: the largest of them; None: what `metadata` has.
    """
    metadata = copy(metadata)
    metadata.block_table_tensor, metadata.seq_lens = table, lens
    if held is not None:
        metadata.seq_lens_cpu_upper_bound = torch.from_numpy(held)
    if longest is not None:
        metadata.max_seq_len = longest
    metadata._num_computed_tokens_cache = None
    return metadata


class StepSource:
    """The block tables that the plugin's kernel reads in one step: those of the backend's metadata, in all layers.

    Args:
        lens: int32 [R], tokens in them.

    Attributes:
        rows: int64 [n], rows of the batch that the plugin's kernel has to attend for.
        is_plain: whether layers have nothing to do to read.
        in_place: whether layers write the table of the backend's metadata before the backend's kernel attends.
        queried: how many of the step's leading tokens have all queries that `table` reads.
    """

    rows = NO_ROWS
    is_plain = True
    in_place = False
    queried = 0

    def __init__(self, lens: torch.Tensor) -> None:
        self.lens = lens

    def table(self, call: LayerCall) -> tuple[Any, torch.Tensor]:
        """Return the backend's metadata with the block table that a layer reads, and its lengths, int32 [R]."""
        return call.metadata, self.lens

    def fill(self, call: LayerCall) -> None:
        """Take in the blocks that the step has filled in a layer, which stores its tokens as it attends."""


class Source(Part):
    """The part that chooses what decodes attend to: by default all resident blocks.

    Attributes:
        reads_all: whether decodes attend to all resident blocks of their requests.
        staging: pages that it takes behind the pool's.
        decodes: whether the plugin's kernel attends for rows that read a part of their blocks; else the backend's does.
        cuts: whether some rows of a step may be cut; then the backend's kernel attends for all of them.
        loads: whether a connector brings blocks that no step has computed.
        outgrowing: requests whose prompts end with holes. Where prompts need not be the backend's to the bit, the
            plugin's kernel attends for them from their first chunk on.
        whose, prompts: requests that do not read all resident blocks, and those in `outgrowing`, as the log names them.
        beside_graphs: what the log says of requests that replay no full graph, where others do.
    """

    reads_all = True
    staging = 0
    decodes = False
    cuts = False
    loads = False
    outgrowing: Set[str] = frozenset()
    whose = prompts = beside_graphs = ""

    @classmethod
    def described(cls, sources: Sequence[Any]) -> str:
        """Return what the log says of the sources of this class on a worker: what decodes read, what that takes."""
        return ""

    def bytes_beside(self, keys: int, dtype: torch.dtype) -> int:
        """Return the bytes that it keeps beside a block, whose keys take `keys` bytes in a cache of `dtype`."""
        return 0

    def fits_graph(self, requests: Set[str]) -> bool:
        """Return whether a full graph can read what a decode step of these requests reads."""
        return self.reads_all

    @property
    def writes(self) -> bool:
        """Whether layers write what they read into the backend's table, also of requests without holes."""
        return False

    @property
    def rewrites(self) -> bool:
        """Whether the step's view gets other blocks than the resident ones: a drafter's layers have their own then."""
        return self.staging > 0 or self.writes

    def cut(self, metadata: Any, batch: Batch) -> Cut | None:
        """Return the step's batch with rows cut, if parts of them read different blocks.

        Args:
            metadata: vLLM's `CommonAttentionMetadata`.
            batch: of the step.
        """
        return None

    def step(self, batch: StepBatch) -> StepSource:
        """Return what layers read in a step."""
        return StepSource(batch.lens)

    def replays(self, batch: StepBatch) -> None:
        """Note that the step replays a full graph, in which no layer asks what it reads."""

    def rewrite(self, batch: StepBatch, table: torch.Tensor, lens: torch.Tensor) -> None:
        """Change the step's view where rows read other blocks than the resident ones.

        Args:
            batch: of the step, before `see`; `resident_tokens` become those that its rows read.
            table, lens: int32 [R, W] and [R], what layers read, to be written in place.
        """

    def warm_up(self, call: LayerCall, table: torch.Tensor) -> None:
        """Compile the kernels of one layer, for queries and block tables like these."""

    def hidden(self, req_ids: Sequence[str]) -> list[tuple[int, range]]:
        """Return the resident blocks that a drafter's layers can't read: row of a batch, logical blocks."""
        return []

    def told(self) -> Mapping[str, Any]:
        """Return what the worker tells the scheduler of the step: attribute of a `ModelRunnerOutput` -> value.

        At most one KV group has an attribute. A device's numbers are valid only after the event of the next
        `transfer.copied`.
        """
        return {}
