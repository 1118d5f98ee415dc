"""Where a policy comes from: its name, a preset, JSON or a file; and the file of gates that it may name."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from .errors import LONGEST_SHOWN, KVPolicyError, nearest, shown
from .heads.pattern import HeadPattern, HeadsError
from .policies import POLICIES

#: Policy files that come with the package: configs/ of the repository, but those that name a file of gates.
PRESETS = Path(__file__).parent / "configs"


#: What files of a policy end in.
FILES = (".yaml", ".yml", ".json")


def presets() -> dict[str, Path]:
    """Files of `PRESETS` by their names; a policy's name is the policy."""
    files = {path.stem: path for path in sorted(PRESETS.glob("*.yaml"))}
    return {name: path for name, path in files.items() if name not in POLICIES and not name.startswith("duo")}


def read(text: str) -> tuple[Any, str]:
    """The value behind a string, and the words that say where it came from."""
    if text.startswith("{"):
        try:
            return json.loads(text), ""
        except (json.JSONDecodeError, RecursionError) as error:
            raise KVPolicyError(f"not a JSON object ({error}): {text[:LONGEST_SHOWN]}") from None
    path = _path(text)
    if path.suffix.lower() not in FILES:
        if text in POLICIES:
            return {"name": text}, ""
        if text not in presets():
            if os.sep in text or os.path.isfile(path):
                endings = " or ".join(FILES)
                raise KVPolicyError(f"{shown(text)} is no file of a policy: its name has to end in {endings}")
            choice = f"choose one of: {nearest(text, POLICIES)}; or a preset: {nearest(text, presets())}"
            raise KVPolicyError(f"unknown KV policy {shown(text)}; {choice}")
        path = presets()[text]
    try:
        value = yaml.safe_load(path.read_text())
    except OSError as error:
        raise KVPolicyError(f"{path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise KVPolicyError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(value, Mapping):
        raise KVPolicyError(f"{path} must hold the fields of one KV policy (name: ...), not {type(value).__name__}")
    return value, f"{path}: "


def _path(text: str | Path) -> Path:
    """A path that may begin with ~, which shells leave alone after "=" and in JSON."""
    return Path(os.path.expanduser(text))


def with_pattern(values: Mapping[str, Any]) -> dict[str, Any]:
    """duo's fields, with what its file of gates says in place of those that are not given."""
    values = dict(values)
    if values.get("pattern"):
        return values
    heads = values.get("heads")
    if not isinstance(heads, (str, Path)) or not str(heads):
        raise ValueError(
            f"policy {values['name']!r} needs heads: the path of a file of gates, as `vllm-evict heads train` writes "
            f"it, not {heads!r}"
        )
    try:
        read = HeadPattern.read(_path(heads), values.get("threshold"), values.get("sparsity"))
    except HeadsError as error:
        raise ValueError(str(error)) from None
    pattern = tuple("".join("1" if head else "0" for head in layer) for layer in read.retrieval)
    return {"sink": read.sink, "recent": read.recent, **values, "heads": str(heads), "pattern": pattern}
