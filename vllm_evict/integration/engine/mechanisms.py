"""All mechanisms that a scheduler may need."""

from ...core.mechanisms import Budget, Context, Mechanism, Profiles, SharedBudget, WholePrompts
from .allocation import Reads
from .audits import Audits
from .poison import Poison
from .pressure import PoolRelief
from .reaching import Reaching
from .reconstruction import Reconstructions
from .shadows import ShadowRequests

#: In the order in which their hooks are called. `ShadowRequests` comes after what begins shadows.
KINDS: tuple[type[Mechanism], ...] = (
    Poison, Reads, WholePrompts, PoolRelief, Profiles, Budget, SharedBudget, Reaching, Context, Reconstructions, Audits,
    ShadowRequests,
)  # fmt: skip
