"""Adds each request's `KVUsage` to vLLM's outputs, and the counts by policy to its statistics."""

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request

from ...core.usage import KVUsage
from .carriers import EvictionOutput, EvictionStats
from .view import EngineView


class Usages:
    """Usage of requests that ended, from one scheduler to the front end.

    Args:
        scheduler: an `EvictionMixin`.
    """

    def __init__(self, scheduler: EngineView) -> None:
        self._scheduler = scheduler
        #: Requests that the front end may end with any output, by stop strings or as sessions -> the usage sent last:
        #: peak, evicted blocks of each KV group.
        self._stoppable: dict[str, tuple[int, ...]] = {}
        #: Usage of the requests that end with a step.
        self._ended: dict[str, KVUsage] = {}

    def begin(self, request: Request) -> None:
        """Note a request that arrives."""
        if request.resumable or (request.sampling_params and request.sampling_params.stop):
            self._stoppable[request.request_id] = ()

    def end(self, req_id: str) -> None:
        """Note the usage of a request that ends, while its blocks are known."""
        self._stoppable.pop(req_id, None)
        self._ended[req_id] = KVUsage.of(self._scheduler.blocks_of(req_id))

    def next_step(self) -> None:
        """Forget the requests that ended with the step before."""
        self._ended.clear()

    def send(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Put usage on the last outputs of requests, and on those that the front end may make the last, where it is
        news to it.
        """
        for client in outputs.values() if self._stoppable or self._ended else ():
            for place, output in enumerate(client.outputs):
                usage = self._ended.get(output.request_id) or self._news(output.request_id)
                if usage is not None:
                    client.outputs[place] = EvictionOutput.of(output, usage)

    def _news(self, req_id: str) -> KVUsage | None:
        """Return the usage so far of a request that the front end may end, if that does not know it."""
        if req_id not in self._stoppable:
            return None
        groups = self._scheduler.blocks_of(req_id)
        known = (groups[0].state.peak_blocks, *(blocks.evicted_blocks for blocks in groups))
        if known == self._stoppable[req_id]:
            return None
        self._stoppable[req_id] = known
        return KVUsage.of(groups)

    def stats(self, stats: SchedulerStats) -> EvictionStats:
        """Add the counts by policy to vLLM's statistics of a step."""
        self._scheduler.mechanisms.call("before_stats")
        self._scheduler.mechanisms.call("on_stats", stats)
        first, *others = (manager.held for manager in self._scheduler.kv_managers)
        held = {policy: blocks + sum(each[policy] for each in others) for policy, blocks in first.items()}
        return EvictionStats.of(stats, self._scheduler.tally.take(held))
