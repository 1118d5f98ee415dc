"""Has a step wait until other processes have copied the blocks that its requests are about to lose."""

import time
from collections.abc import Collection
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.logger import init_logger

from ...compute.step_parts import StepPart
from ...core.plan import EvictionPlan
from ..start.connectors import LMCACHE, Unread, named, of_lmcache

logger = init_logger("vllm.evict")

#: Seconds between two looks at copies that are not done. A copy of a chunk takes milliseconds.
PAUSE = 2e-4
#: Seconds after which a step that waits says so, again and again.
SAID = 30.0


class Copies:
    """Copies that LMCache's server makes of a worker's blocks.

    Args:
        vllm_config: vLLM's configuration.
        connector: the worker's side of vLLM's KV connector.

    Raises:
        KVPolicyError: LMCache's connector lacks an attribute that tells of its copies.
    """

    def __init__(self, vllm_config: Any, connector: Any) -> None:
        found = [each for name, each in named(vllm_config, connector) if name == LMCACHE]
        self._adapters = [getattr(each, of_lmcache(each, "worker_adapter")) for each in found]
        for adapter in self._adapters:
            adapter.store_futures = _Futures(getattr(adapter, of_lmcache(adapter, "store_futures")))

    def wait(self, req_ids: Collection[str]) -> None:
        """Wait until the server has copied what these requests have it store, or is known to be gone.

        Until then no step may write these blocks: the server would keep what it finds there under hashes of what was
        there. LMCache's own adapter tells that the server is gone. vLLM's tells nothing, and its lookups wait, too.
        """
        since = said = time.monotonic()
        for adapter in self._adapters:
            for future in adapter.store_futures.of(req_ids):
                while not future.query() and getattr(adapter, "is_healthy", True):
                    if (now := time.monotonic()) - said > SAID:
                        said = now
                        logger.warning(
                            "a step waits for LMCache's server, which has not copied blocks of %d requests for %.3g s. "
                            "The requests lose them after that: if the server does not answer, restart it and vLLM",
                            len(req_ids),
                            now - since,
                        )
                    time.sleep(PAUSE)


class Waiting(StepPart):
    """Has a step wait for the copies of blocks that its plan takes away."""

    _copies: Copies

    def allocated(self) -> None:
        if has_kv_transfer_group():
            self._copies = Copies(self.worker.vllm_config, get_kv_transfer_group())

    def before_orders(self, plan: EvictionPlan) -> None:
        if (told := Unread.within(plan)) is not None:
            self._copies.wait(told.req_ids)


class _Futures(dict[str, Any]):
    """An adapter's futures of copies, which keeps those that the adapter forgets before they are done.

    The adapter has one future a request. A request's next copy takes the place of the one before, and in vLLM's own
    adapter a step's copy that is done takes those of all of its requests with it.

    Args:
        futures: request -> a future; in vLLM's own adapter with the other requests of its step.
    """

    def __init__(self, futures: dict[str, Any]) -> None:
        super().__init__()
        self._under_way: list[tuple[str | None, Any]] = []
        for req_id, future in futures.items():
            self[req_id] = future

    def __setitem__(self, req_id: str, future: Any) -> None:
        super().__setitem__(req_id, future)
        # vLLM's own adapter has a copy a step, and may forget for which requests.
        added = (None, future[0]) if isinstance(future, tuple) else (req_id, future)
        self._under_way = [*(each for each in self._under_way if not each[1].query()), added]

    def of(self, req_ids: Collection[str]) -> list[Any]:
        """Return the futures of copies that may be of these requests."""
        return [future for req_id, future in self._under_way if req_id is None or req_id in req_ids]
