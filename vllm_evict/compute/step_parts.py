"""Parts of a worker that do a feature's share of whole steps. Parts of a KV group are in `parts`."""

from typing import Any

from ..config import KVPolicyConfig
from ..core.plan import EvictionPlan


class StepPart:
    """A feature's share of a worker's steps. By default it does nothing.

    Args:
        worker: an `EvictionWorkerMixin` that has loaded its model.

    Attributes:
        scratch: bytes of device memory that it takes at most, for a short time.
    """

    scratch = 0

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        """Return whether a worker under this policy needs the part."""
        return True

    def allocated(self) -> None:
        """Note that the cache is allocated, and that vLLM's KV connector knows it."""

    def before_orders(self, plan: EvictionPlan) -> None:
        """Apply the plan of a step before its orders are carried out."""

    def after_orders(self, plan: EvictionPlan) -> None:
        """Apply the plan of a step once its orders are carried out, before the model runs."""

    def told(self) -> tuple[dict[str, Any], Any]:
        """Return what the part tells of the step that has run.

        Returns:
            Attribute of vLLM's output -> value, and the event after which the values are on the host; None: they are.
        """
        return {}, None
