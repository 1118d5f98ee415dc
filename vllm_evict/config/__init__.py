"""What users write, validated: policies' fields, their sizes in blocks, and what one request may ask for.

    options    how a policy declares a field     fields     fields that many policies have
    registry   which policies there are          schema     `KVPolicyConfig`
    sizes      limits of a request in blocks     groups     KV groups of policies that split heads or layers
    request    what one request may ask for      sources    names, presets, JSON and files
    gates      files of gates of heads           errors     refusals

Policies build on this package: `vllm_evict.policies` puts them into the registry.
"""

from .errors import KVPolicyError
from .fields import REDUCTION_NAMES
from .groups import DEFAULT_BANDS, RETRIEVAL, STREAMING
from .options import TOO_MANY
from .registry import REGISTRY
from .request import MOST_COMPARED, REQUEST_FIELDS, REQUEST_SIZES, given
from .schema import KVPolicyConfig
from .sizes import NEVER, Limits
from .sources import policy_named, presets

__all__ = [
    "DEFAULT_BANDS", "MOST_COMPARED", "NEVER", "REDUCTION_NAMES", "REGISTRY", "REQUEST_FIELDS", "REQUEST_SIZES",
    "RETRIEVAL", "STREAMING", "TOO_MANY", "KVPolicyConfig", "KVPolicyError", "Limits", "given", "policy_named",
    "presets",
]  # fmt: skip
