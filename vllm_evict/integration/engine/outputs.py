"""Adds each request's `KVUsage` to vLLM's outputs, and the counts by policy to its statistics."""

from typing import TYPE_CHECKING, Any

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats

from ...config import KVPolicyConfig
from ...core.host import HostPool
from ...core.usage import KVUsage
from .carriers import EvictionOutput, EvictionStats
from .tally import Tally

if TYPE_CHECKING:
    from .managers import EvictableManager


class OutputsMixin:
    """The part of the scheduler that tells the front end."""

    kv_policy: KVPolicyConfig
    kv_managers: "list[EvictableManager]"
    host_pool: HostPool | None
    tally: Tally
    #: Requests that the front end may end with any output, by stop strings or as sessions -> the usage sent last: peak,
    #: evicted blocks of each KV group.
    _stoppable: dict[str, tuple[int, ...]]
    #: Usage of the requests that end with a step.
    _ended: dict[str, KVUsage]

    def _note_end(self, req_id: str) -> None:
        """Note the usage of a request that ends, while its blocks are known."""
        self._stoppable.pop(req_id, None)
        self._ended[req_id] = KVUsage.of(self._residents_of(req_id))

    def _send_usage(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Put usage on the last outputs of requests, and on those that the front end may make the last, where it is
        news to it.
        """
        for client in outputs.values():
            for place, output in enumerate(client.outputs):
                usage = self._ended.get(output.request_id) or self._news(output.request_id)
                if usage is not None:
                    client.outputs[place] = EvictionOutput.of(output, usage)

    def _news(self, req_id: str) -> KVUsage | None:
        """The usage so far of a request that the front end may end, if that does not know it."""
        if req_id not in self._stoppable:
            return None
        residents = self._residents_of(req_id)
        known = (residents[0].state.peak_blocks, *(resident.evicted_blocks for resident in residents))
        if known == self._stoppable[req_id]:
            return None
        self._stoppable[req_id] = known
        return KVUsage.of(residents)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            first, *others = (manager.held for manager in self.kv_managers)
            held = {policy: blocks + sum(each[policy] for each in others) for policy, blocks in first.items()}
            if self.host_pool is not None:
                self.tally.hold(self.kv_policy.name, self.host_pool.used, self._host_block_bytes)
            stats = EvictionStats.of(stats, self.tally.take(held))
        return stats
