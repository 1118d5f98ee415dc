"""Has a step wait until other processes have copied the blocks that its requests are about to lose."""

import time
from collections.abc import Collection
from typing import Any

from vllm.logger import init_logger

from ..start.connectors import LMCACHE, named, of_lmcache

logger = init_logger("vllm.evict")

#: Seconds between two looks at copies that are not done. A copy of a chunk takes milliseconds.
PAUSE = 2e-4
#: Seconds that a step waits at most. vLLM's own adapter does not tell whether LMCache's server still answers.
LONGEST = 30.0


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
            of_lmcache(adapter, "store_futures")
        #: A copy that took longer than a step waits. Until it is done, no step waits.
        self._late: Any = None

    def wait(self, req_ids: Collection[str]) -> None:
        """Wait until the server has copied what these requests have it store, as long as it answers."""
        if self._late is not None and not self._late.query():
            return
        self._late, end = None, time.monotonic() + LONGEST
        for adapter in self._adapters:
            for future in _copies(adapter.store_futures, req_ids):
                while not future.query() and getattr(adapter, "is_healthy", True):
                    if time.monotonic() > end:
                        self._late = future
                        logger.warning(
                            "LMCache's server did not copy blocks of %d requests within %g s. The requests lose them, "
                            "so what the server keeps of the requests may be wrong: restart the server",
                            len(req_ids),
                            LONGEST,
                        )
                        return
                    time.sleep(PAUSE)


def _copies(futures: dict[str, Any], req_ids: Collection[str]) -> list[Any]:
    """Return the copies of requests that are under way. vLLM's own adapter has one a step, and forgets for which."""
    found = [future for req_id, future in futures.items() if isinstance(future, tuple) or req_id in req_ids]
    return [future[0] if isinstance(future, tuple) else future for future in found]
