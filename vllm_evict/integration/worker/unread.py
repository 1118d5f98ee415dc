"""Waits for the processes that copy blocks of requests which are about to lose them."""

import time
from collections.abc import Collection
from typing import Any

from ..start.connectors import each_connector

#: Seconds between two looks at copies that are not done. A copy of a chunk takes milliseconds.
PAUSE = 2e-4


def wait_until_read(connector: Any, req_ids: Collection[str]) -> None:
    """Wait until LMCache's server has copied what requests have it store; no longer than it answers.

    Args:
        connector: the worker's side of vLLM's KV connector.
        req_ids: the requests.
    """
    for each in each_connector(connector):
        if (adapter := getattr(each, "worker_adapter", None)) is not None:
            for future in _copies(adapter.store_futures, req_ids):
                while not future.query() and getattr(adapter, "is_healthy", True):
                    time.sleep(PAUSE)


def _copies(futures: dict[str, Any], req_ids: Collection[str]) -> list[Any]:
    """Return the copies of requests that are under way. vLLM's own adapter has one a step, and forgets for which."""
    found = [future for req_id, future in futures.items() if isinstance(future, tuple) or req_id in req_ids]
    return [future[0] if isinstance(future, tuple) else future for future in found]
