"""A hook of MkDocs that checks that the sources have every message of docs/troubleshooting.md.

A heading of that page in backticks is a message, with `…` for variable parts. A string or f-string of the package has
to match it. `make docs` fails for a message without a match.
"""

import ast
import logging
import re
from pathlib import Path
from typing import Any

PAGE = "troubleshooting.md"
ROOT = Path(__file__).parent.parent
log = logging.getLogger("mkdocs.hooks.messages")


def strings() -> list[str]:
    """Return all strings of the package, with `…` for variable parts."""
    found = []
    for path in sorted((ROOT / "vllm_evict").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(_constant(value) for value in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[-.\d]*[a-z]|\{\w*\}", "…", node.value))
    return found


def _constant(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else "…"


def missing(page: str, sources: list[str]) -> list[str]:
    """Return the messages among the page's headings that match no source string."""
    headings = re.findall(r"^#{2,4} `(.+)`$", page, re.MULTILINE)
    assert headings, f"{PAGE} got no heading in backticks; expected one for each message"
    pattern = {told: re.compile(".*".join(map(re.escape, re.split(r"\s*…\s*", told.strip("… "))))) for told in headings}
    return [told for told in headings if not any(pattern[told].search(source) for source in sources)]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    if page.file.src_uri == PAGE:
        for told in missing(markdown, strings()):
            log.warning("%s explains a message that no source has: %s", PAGE, told)


if __name__ == "__main__":
    raise SystemExit("\n".join(missing((ROOT / "docs" / PAGE).read_text(), strings())))
