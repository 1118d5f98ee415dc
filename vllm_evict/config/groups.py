"""Configurations of the KV groups that an allocator makes of layers or heads: bands, classes of heads, profiles."""

import math
from functools import cached_property

import numpy as np

from .allocators import ALLOCATORS, Allocator
from .errors import KVPolicyError
from .frozen import C, Frozen
from .gates import HeadPattern

#: KV groups of policies with the field `bands`, if it is left out.
DEFAULT_BANDS = 4
#: Names of head classes, in the order of their KV groups.
RETRIEVAL, STREAMING = "retrieval", "streaming"


class Groups(Frozen):
    """The part of `KVPolicyConfig` about KV groups."""

    @property
    def allocator(self) -> Allocator:
        """Return the allocator that shares a request's budget among layers and heads."""
        return ALLOCATORS[self.allocate]

    @property
    def classes(self: C) -> dict[str, C]:
        """Head class -> configuration of its heads. A configuration that splits nothing has one class, named "".

        Classes of `duo` without heads are left out.
        """
        if self._share is not None or not self.allocator.splits:
            return {"": self}
        classes: dict[str, C] = self.split_classes
        return classes

    @cached_property
    def split_classes(self: C) -> dict[str, C]:
        """`classes` of an allocator that splits heads or layers. Made once, and shared by requests."""
        may_keep_all = ("full",) if "full" in self.allowed else ()
        if self.allocator.splits != "classes":
            shares = self.allocator.shares(self, self.bands or DEFAULT_BANDS)
            return {f"band-{band}": self.replace(_share=share, allow=may_keep_all) for band, share in enumerate(shares)}
        rows = "".join(self.pattern)
        classes = {}
        if "1" in rows:
            classes[RETRIEVAL] = (self.retrieval or type(self)(name="full")).replace(allow=may_keep_all)
        if "0" in rows:
            sizes = {"sink": self.sink, "recent": self.recent}
            classes[STREAMING] = type(self)(name="sink-window", **sizes, allow=may_keep_all)
        return classes

    @property
    def presses(self: C) -> bool:
        """Whether some heads lose blocks when the pool runs out, and none before."""
        return any(part.when == "pressure" for part in self.classes.values())

    @property
    def sparse_heads(self: C) -> bool:
        """Whether decodes read a part of the blocks on the device, in some heads."""
        return any(part.sparse for part in self.classes.values())

    def of_class(self: C, head_class: str) -> C:
        """Return the configuration of a head class: this one if it splits nothing."""
        part: C = self.classes.get(head_class, self)
        return part

    def for_model(self: C, layers: int, kv_heads: int, ranks: int) -> C:
        """Return this configuration with the number of bands and of layers filled in.

        Args:
            layers, kv_heads: of the model.
            ranks: tensor-parallel size.

        Raises:
            KVPolicyError: `bands` exceeds the number of layers, or of KV heads on a rank.
        """
        if self.allocator.splits in ("", "classes"):
            return self
        what, most = f"{layers} layers", layers
        if self.allocator.splits == "heads":
            most = max(kv_heads // ranks, 1)
            what = f"{most} KV heads on each rank"
        if (self.bands or 0) > most:
            raise KVPolicyError(f"bands: {self.name!r} can't make {self.bands} of {what}, at most {most}")
        return self.replace(bands=self.bands or min(DEFAULT_BANDS, most), _depth=layers)

    def profiled(self: C, name: str, block_size: int, prompt_len: int) -> C:
        """Return the configuration of a KV group whose policy is chosen: that policy with this one's sizes."""
        budget, sizes = self._resolved(block_size, prompt_len)
        as_given = isinstance(self.budget, int) and budget == math.ceil(self.budget / block_size)
        sizes["budget"] = self.budget if as_given else budget * block_size
        taken = {field: sizes.get(field, getattr(self, field)) for field in self.policy.profiles[name]}
        config: C = self.parse({"name": name, **taken})
        return config

    @property
    def head_pattern(self: C) -> HeadPattern:
        """The retrieval and streaming heads of `duo`."""
        retrieval = np.array([[digit == "1" for digit in row] for row in self.pattern])
        return HeadPattern(retrieval, self.sink, self.recent)
