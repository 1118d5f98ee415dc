"""The command `vllm-evict`. Its packages come with the extra `eval`, and may be missing."""

import os
import sys

#: Packages of the extra `eval`.
PACKAGES = frozenset({"datasets", "httpx", "matplotlib", "openai", "rich", "tqdm", "typer"})


def main() -> None:
    """Run a command; one line on stderr and exit status 2 if a package is missing.

    `check` needs vLLM and none of `PACKAGES`. `tools.cli` has the other commands.
    """
    if sys.argv[1:2] == ["check"]:
        from .tools.check.cli import main as check

        status = check(sys.argv[2:])
        sys.stdout.flush()
        os._exit(status)  # without a teardown of what vLLM imports, which takes a second
    try:
        from .tools.cli import main as command

        command()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in PACKAGES:
            raise
        print(
            f"vllm-evict: needs the package {error.name}: in a checkout of vllm_evict, "
            "pip install --no-build-isolation '.[eval]'",
            file=sys.stderr,
        )
        sys.exit(2)
