"""Parts of a KV group's runtime: what measures its requests, what moves their keys, and what its layers read.

A part has its own state of requests and says how much memory it needs. The runtime calls its parts and knows no part
by name; `compose` makes them, from the configuration.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..core.plan import Order
from .holes import Start
from .needs import Needs
from .shape import Shape

#: (float64 tensor, whether to take the maximum) -> the tensor reduced over ranks of the model.
AllReduce = Callable[[torch.Tensor, bool], torch.Tensor]


class Capacity(NamedTuple):
    """The memory of a worker for blocks, once vLLM has sized its pool.

    Attributes:
        blocks: of the pool.
        host_blocks: of host memory.
        ahead: whether memory that grows with the blocks in use is allocated now, as on a device.
    """

    blocks: int
    host_blocks: int = 0
    ahead: bool = False


class Part:
    """Base class of the parts of a KV group's runtime. By default a part keeps nothing, and takes no memory.

    Attributes:
        host_use: words of the log about `host_bytes`, with {} for their number.
        optional: whether a server does without the part where its kernels cannot read the cache.
    """

    host_use = ""
    optional = False

    @property
    def kept_bytes(self) -> int:
        """Bytes on the device that the part keeps between steps."""
        return 0

    @property
    def pool_bytes(self) -> int:
        """Bytes of `kept_bytes` that grow with the pool, which `Needs.block` counts too."""
        return 0

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that one request takes at most."""
        return 0

    def loaded(self, vllm_config: Any, model: torch.nn.Module, layers: Mapping[str, Any]) -> None:
        """Note that the model is loaded; `layers` are those that policies work on, by name."""

    def begin(self, start: Start) -> None:
        """Apply the plan of a step, and drop the state of requests that are gone."""

    def allocate(self, capacity: Capacity) -> None:
        """Allocate memory that depends on the pool."""

    def needs(self, shape: Shape) -> Needs:
        """Return the memory that the part takes on the device, beside `kept_bytes`."""
        return Needs()


class Mover(Part, ABC):
    """A part that carries out one kind of a plan's orders, before the step writes any block.

    Attributes:
        kind: type of the orders.
    """

    kind: type[Order]

    @abstractmethod
    def obey(self, orders: Sequence[Any], all_reduce: AllReduce) -> None:
        """Carry out some orders of one plan, in this order.

        Args:
            orders: of type `kind`.
            all_reduce: over tensor-parallel ranks.
        """

    def obeyed(self) -> None:
        """Go on after all orders of the step are carried out."""
