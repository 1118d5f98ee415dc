"""Sources of a policy: its name, a preset, JSON or a file."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from .errors import KVPolicyError, instead, place, shown
from .registry import REGISTRY
from .retired import OF_EVICTION, OLD_POLICIES, policy_of, preset_of, with_new_names

PACKAGE = Path(__file__).parents[1]
#: Folder of preset files: inside the package in a wheel, without presets that name a file of gates; beside it in a
#: checkout.
PRESETS = next(folder for folder in (PACKAGE / "configs", PACKAGE.parent / "configs") if folder.is_dir())


#: Most characters of a policy's JSON, and bytes of its file.
LONGEST_TEXT = 1 << 16
#: Suffixes of policy files.
FILES = (".yaml", ".yml", ".json")


def presets() -> dict[str, Path]:
    """Return the files of `PRESETS` by name, without names of policies, which stand for the policies themselves."""
    files = {path.stem: path for path in sorted(PRESETS.glob("*.yaml"))}
    return {name: path for name, path in files.items() if name not in REGISTRY and not name.startswith("duo")}


def read(text: str) -> tuple[Any, str]:
    """Return the value behind a string, and a prefix for messages that names its file ("" if there is none).

    Raises:
        KVPolicyError: the string is not a policy, preset, JSON object or readable policy file.
    """
    if text.startswith("{"):
        if len(text) > LONGEST_TEXT:
            raise KVPolicyError(f"got a JSON object of {len(text)} characters; expected at most {LONGEST_TEXT}")
        try:
            return json.loads(text), ""
        except (ValueError, RecursionError) as error:
            raise KVPolicyError(f"not a JSON object ({error}): {shown(text)}") from None
    path = path_of(text)
    if path.suffix.lower() not in FILES:
        if text in REGISTRY or text in REGISTRY.broken:
            return {"name": text}, ""
        text = preset_of(text)
        if text not in presets():
            if os.sep in text or os.path.isfile(path):
                endings = " or ".join(FILES)
                raise KVPolicyError(f"{shown(text)} is no file of a policy: its name has to end in {endings}")
            choice = f"{instead(text, REGISTRY, presets())}; or a preset: {', '.join(presets())}"
            raise KVPolicyError(f"unknown KV policy {shown(text)}: {choice}")
        path = presets()[text]
    name, content = place(path), read_text(path)
    try:
        value = yaml.safe_load(content)
    except Exception as error:  # PyYAML's constructors raise KeyError, AttributeError, OverflowError and others
        raise KVPolicyError(f"{name} is not YAML: {shown(' '.join(str(error).split()))[1:-1]}") from None
    if not isinstance(value, Mapping):
        raise KVPolicyError(f"{name} must hold the fields of one KV policy (name: ...), not {type(value).__name__}")
    return value, f"{name}: "


def completed(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fill in the fields of a preset that `name` names; the given ones win.

    Beside fields of eviction the old name of a policy stays one, though a preset has it now.
    """
    name = fields.get("name")
    if not isinstance(name, str) or name in REGISTRY or (name in OLD_POLICIES and OF_EVICTION & fields.keys()):
        return fields
    if (name := preset_of(name)) not in presets():
        return fields
    preset, _ = read(name)
    return {**preset, **with_new_names(preset["name"], fields), "name": preset["name"]}


def read_text(path: Path) -> str:
    """Read a file of text.

    Raises:
        KVPolicyError: the file is missing, is not UTF-8, or has more than `LONGEST_TEXT` bytes.
    """
    try:
        with path.open("rb") as file:
            content = file.read(LONGEST_TEXT + 1)
    except OSError as error:
        raise KVPolicyError(f"{place(path)}: {error.strerror or error}") from None
    except ValueError as error:  # a null character
        raise KVPolicyError(f"{place(path)} is no path: {error}") from None
    if len(content) > LONGEST_TEXT:
        raise KVPolicyError(f"{place(path)} is too long for a policy, which has at most {LONGEST_TEXT} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise KVPolicyError(f"{place(path)} is not YAML: {error}") from None


def path_of(text: str | Path) -> Path:
    """Expand a leading ~, which shells do not expand after "=" and in JSON."""
    return Path(os.path.expanduser(text))


def policy_named(name: object) -> Any:
    """Return the policy of this name, or of this old name. Raises KVPolicyError as `Registry.named`."""
    return REGISTRY.named(policy_of(name) if isinstance(name, str) else name, presets)
