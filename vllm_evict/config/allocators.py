"""Allocators: each deals the layers or heads of a model to KV groups, and shares a request's budget among them.

An allocator goes with any policy whose scores compare between layers and heads. `adakv` and `pyramidkv` are `snapkv`
with one of them.
"""

from collections.abc import Iterable
from typing import ClassVar, Literal

from .fields import CONTEXT, PER_TOKEN, READ, TIER
from .options import TOO_MANY, Fields, Option, names_of, real, whole, without

ALLOCATE = Option(
    "allocate",
    Literal["uniform", "pyramid", "ada"],
    "uniform",
    "`uniform`: all layers and heads lose the same blocks. `pyramid`: bands of layers whose budgets fall with depth. "
    "`ada`: groups of heads that share one budget",
)
BANDS = Option(
    "bands", whole(1) | None, None, "KV groups that layers or heads are dealt to; null: 4, or as many as there are"
)
BETA = Option("beta", real(ge=1, lt=TOO_MANY), 20.0, "the last layer's budget is 1 / `beta` of the mean")
FLOOR = Option("floor", real(ge=0, le=1), 0.2, "share of an even split of the budget that each KV group keeps")
#: Fields of every policy that may be given an allocator.
ALLOCATION = (ALLOCATE, BANDS, BETA, FLOOR)


class Allocator:
    """Shares the budget of a request among KV groups. This one divides nothing: one group has it all."""

    #: Value of the field `allocate`.
    name: ClassVar[str] = "uniform"
    #: What is dealt to KV groups: "layers", "heads" of each layer, "classes" of heads, or "" (nothing).
    splits: ClassVar[str] = ""
    #: Whether all KV groups of a request share one budget.
    pools: ClassVar[bool] = False
    #: Fields that only configurations with this allocator have.
    declares: ClassVar[tuple[Option, ...]] = ()
    #: Fields of other features that do not go with this allocator.
    lacks: ClassVar[frozenset[str]] = frozenset()

    def fields(self, declared: Iterable[Option]) -> tuple[Option, ...]:
        """Return the fields of a policy that always has this allocator.

        Args:
            declared: fields of the policy that scores.
        """
        return (*without(declared, *self.lacks, *names_of(ALLOCATION)), *self.declares)

    def shares(self, config: Fields, bands: int) -> list[float]:
        """Return for each KV group its budget over the mean of all groups, both without sinks and recent window."""
        return [1.0] * bands


class Pyramid(Allocator):
    """Cuts the layers into `bands` of successive layers, each a KV group with a budget of its own.

    The budget beside sinks and recent window falls linearly with depth, from 2 - 1/beta of its mean in the first layer
    to 1/beta in the last. A band gets the mean of its layers.
    """

    name = "pyramid"
    splits = "layers"
    declares = (BANDS, BETA)
    lacks = names_of((CONTEXT, *TIER, *READ))

    def shares(self, config: Fields, bands: int) -> list[float]:
        # Bands take equal memory, however many layers they have, so the mean over bands is the budget.
        depth = config._depth or bands
        middles = [(depth * band // bands + depth * (band + 1) // bands - 1) / 2 for band in range(bands)]
        slope = (2 - 2 / config.beta) / max(depth - 1, 1)
        return [1 + slope * (sum(middles) / bands - middle) for middle in middles]


class HeadBands(Allocator):
    """Deals the heads of each layer to `bands` KV groups, each with the whole budget. For policies of their own."""

    name = "heads"
    splits = "heads"
    declares: ClassVar[tuple[Option, ...]] = (BANDS,)
    lacks = names_of((CONTEXT, *TIER, *READ, *PER_TOKEN))


class Ada(HeadBands):
    """Deals the heads of each layer to `bands` KV groups, and ranks the blocks of all groups together.

    A decision leaves each group at least the share `floor` of an even split of the budget (the paper's safeguard).
    """

    name = "ada"
    pools = True
    declares = (BANDS, FLOOR)


class Gates(Allocator):
    """Deals heads to two classes by their gates, each with a policy of its own. For `duo`."""

    name = "gates"
    splits = "classes"


#: All allocators by name. Users may name those of `ALLOCATE`.
ALLOCATORS = {each.name: each for each in (Allocator(), Pyramid(), Ada(), HeadBands(), Gates())}
