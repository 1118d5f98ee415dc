"""All mechanisms that a scheduler may need."""

from ...core.mechanisms import Budget, Mechanism, Profiles, SharedBudget, WholePrompts
from ...features.audit.engine import Audits
from ...features.context.engine import Context
from ...features.kvzip.engine import Reconstructions
from .allocation import Reads
from .outdated import Outdated
from .poison import Poison
from .pressure import PoolRelief
from .reaching import Reaching
from .shadows import ShadowRequests
from .token_pages import TokenPages

#: In the order in which their hooks are called. `Outdated` comes before what keeps what was computed, `ShadowRequests`
#: after what begins shadows.
KINDS: tuple[type[Mechanism], ...] = (
    Poison, Reads, TokenPages, WholePrompts, PoolRelief, Profiles, Budget, SharedBudget, Outdated, Reaching, Context,
    Reconstructions, Audits, ShadowRequests,
)  # fmt: skip
