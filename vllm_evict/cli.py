"""The command `vllm-evict`. It needs the packages of the extra `eval`."""

import sys

#: Packages of the extra `eval`.
PACKAGES = frozenset({"datasets", "httpx", "matplotlib", "openai", "rich", "tqdm", "typer"})


def main() -> None:
    """Run `eval.cli.main`. If a package is missing, print one line to stderr and exit with status 2."""
    try:
        from .eval.cli import main as command

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
