"""Releases of vLLM that this release has been checked against."""

import functools
import logging

from packaging.version import Version

from ..config import KVPolicyError

#: Releases whose sources hold all that the guard asks for (tests/test_guard.py).
TESTED = ("0.32.0", "0.33.0")
#: Those of them that the tests have been run on.
RUN = ("0.32.0",)

# Below vLLM's own, which says where lines go.
logger = logging.getLogger("vllm.evict")


def check(version: str) -> None:
    """Refuse releases of vLLM whose internals were not looked at, and say once if this one was only looked at.

    Raises:
        KVPolicyError: saying what to install.
    """
    if Version(version).is_prerelease or Version(version).base_version not in TESTED:
        raise KVPolicyError(
            f"vllm_evict works inside vLLM and has not been tested with vLLM {version}: "
            f"install one of {', '.join(f'vllm=={tested}' for tested in TESTED)}, or leave --kv-policy out"
        )
    if Version(version).base_version not in RUN:
        _warn_not_run(version)


@functools.cache
def _warn_not_run(version: str) -> None:
    logger.warning(
        "vllm_evict has been checked against the sources of vLLM %s, not run on it; it has been run on vLLM %s",
        version,
        ", ".join(RUN),
    )
