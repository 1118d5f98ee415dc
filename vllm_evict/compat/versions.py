"""Releases of vLLM that this release has been tested with."""

from packaging.version import Version

from ..config import KVPolicyError

#: What it runs on here (0.32.0) and what a GPU user installs today (0.33.0).
TESTED = ("0.32.0", "0.33.0")


def check(version: str) -> None:
    """Refuse releases of vLLM whose internals were not looked at.

    Raises:
        KVPolicyError: saying what to install.
    """
    if Version(version).is_prerelease or Version(version).base_version not in TESTED:
        raise KVPolicyError(
            f"vllm_evict works inside vLLM and has not been tested with vLLM {version}: "
            f"install one of {', '.join(f'vllm=={tested}' for tested in TESTED)}, or leave --kv-policy out"
        )
