"""`evict: host`: evicted blocks go to host memory."""

from typing import Any

from ...config import KVPolicyConfig
from ..blocks import RequestBlocks
from ..offload import OffloadPool
from .base import Mechanism


class Offload(Mechanism):
    """Keeps the host blocks of requests. What moves them knows vLLM (`integration.engine.offloading`).

    Attributes:
        pool: the host blocks.
    """

    pool: OffloadPool

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return config.evict == "host"

    def on_free(self, request: Any) -> None:
        for group in self.view.groups:
            if (blocks := group.residents.get(request.request_id)) is not None:
                self.release(blocks)

    def release(self, blocks: RequestBlocks) -> None:
        """Keep nothing of a request any more."""
        self.pool.release(self.view.next_plan, blocks)
