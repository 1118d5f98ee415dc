"""Reductions of what workers measure: over tensor-parallel ranks, and over the stages of a pipeline."""

from collections import deque
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
        #: Values on their way to the next stage, for each of the last steps. They must outlive their sends.
        self._sent: deque[list[tuple[Any, torch.Tensor]]] = deque()

    @property
    def are_last(self) -> bool:
        """Whether this stage is the last one, so that its reports cover all stages."""
        return get_pp_group().is_last_rank

    def begin(self) -> None:
        """Begin a step.

        A stage runs at most as many steps ahead as there are stages, so older sends have arrived, and waiting for them
        takes no time. (Gloo's sends are not completed before something waits for them.)
        """
        self._sent.append([])
        while len(self._sent) > get_pp_group().world_size + 1:
            for work, _ in self._sent.popleft():
                work.wait()

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
                such values (`capabilities`).

        Returns:
            On the last stage the values of all stages, on every rank. On other stages the values of the first stage up
            to this one.
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
        self._sent[-1].append((dist.isend(values, stages.next_rank, group=group), values))
        return values


def _group(group: Any, values: torch.Tensor) -> Any:
    """Return the process group of vLLM's `group` that carries tensors of this device."""
    return group.cpu_group if values.device.type == "cpu" else group.device_group
