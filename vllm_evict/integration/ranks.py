"""Reductions of what workers measure: over tensor-parallel ranks, and over the stages of a pipeline."""

from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed import get_pp_group, get_tp_group


class Ranks:
    """The ranks of one worker's model.

    The scheduler gets the output of the last stage. Each stage before it sends its values to the next one and goes on
    with the next step; the next stage adds them to its own, in the same step. Stages measure the same requests and
    statistics in the same order, because one plan tells them.
    """

    def __init__(self) -> None:
        #: Values on their way to the next stage, which must not be freed before they are sent.
        self._sent: list[tuple[Any, torch.Tensor]] = []

    @property
    def are_last(self) -> bool:
        """Whether this stage's reports are those of all stages."""
        return get_pp_group().is_last_rank

    def over_tensors(self, values: torch.Tensor, maximise: bool) -> torch.Tensor:
        """Reduce values to their sum or maximum over tensor-parallel ranks, on every rank, in place."""
        group = get_tp_group()
        if group.world_size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX if maximise else dist.ReduceOp.SUM, group=_group(group, values))
        return values

    def over_all(self, values: torch.Tensor, maximise: bool) -> torch.Tensor:
        """Reduce values to their sum over stages and tensor-parallel ranks, in place.

        Args:
            values: float64, of this stage's layers.
            maximise: whether tensor-parallel ranks are reduced by the maximum. A server with several stages has no
                such values (`combinations.stages`).

        Returns:
            On the last stage the values of all stages, on every rank. On other stages those of the stages up to it.
        """
        stages = get_pp_group()
        if stages.world_size == 1:
            return self.over_tensors(values, maximise)
        group = _group(stages, values)
        if not stages.is_first_rank:
            before = torch.empty_like(values)
            dist.recv(before, stages.prev_rank, group=group)
            values += before
        if stages.is_last_rank:
            return self.over_tensors(values, maximise)
        self._sent = [each for each in self._sent if not each[0].is_completed()]
        self._sent.append((dist.isend(values, stages.next_rank, group=group), values))
        return values


def _group(group: Any, values: torch.Tensor) -> Any:
    """The process group of vLLM's `group` that carries tensors of this device."""
    return group.cpu_group if values.device.type == "cpu" else group.device_group
