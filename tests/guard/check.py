"""Takes from a release of vLLM what a touch asks for, and says what is missing."""

import ast
from collections.abc import Iterator
from inspect import Parameter
from typing import Any

from . import source
from .source import FUNCTIONS, Found, Sources
from .touches import TOUCHES, Touch

Facts = dict[str, Any]


def extract(sources: Sources) -> dict[str, Facts | None]:
    """Facts of all touches, as JSON can hold them."""
    return {touch.where: facts(touch, sources) for touch in TOUCHES}


def facts(touch: Touch, sources: Sources) -> Facts | None:
    """What a release has where `touch` looks; None if there is nothing."""
    if not touch.name:
        return {} if sources.tree(touch.module) else None
    places = [place.split(":") for place in (touch.where, touch.moved) if place]
    found = next(filter(None, (sources.find(module, name) for module, name in places)), None)
    if found is None:
        return None
    result: Facts = {"at": f"{found.module}:{found.name}"}
    if isinstance(found.node, FUNCTIONS):
        result |= _facts_of_function(sources, found)
    elif isinstance(found.node, ast.ClassDef):
        result |= _facts_of_class(touch, sources, found)
    else:
        # What is only declared has a type and no value.
        result["value"] = ast.unparse(found.node.value or found.node.annotation)
    if touch.does:
        result["does"] = dict(zip(touch.does, source.find_all(found.node, touch.does), strict=True))
    return result


def _facts_of_function(sources: Sources, found: Found) -> Facts:
    return {
        "decorators": source.decorators(found.node),
        "parameters": source.parameters(found.node),
        "body": sources.body_digest(found),
    }


def _facts_of_class(touch: Touch, sources: Sources, found: Found) -> Facts:
    return {
        "bases": [cls.name for cls in sources.bases(found)][1:],
        "has": {_name(item): source.attribute(sources, found, _name(item)) for item in touch.has},
        "takes_attributes": source.takes_attributes(sources, found),
        "abstract": source.abstract_methods(sources, found),
        **({"decorators": source.decorators(found.node)} if touch.kind else {}),
    }


def complaints(touch: Touch, known: Facts | None, ours: Sources) -> list[str]:
    """What of a touch does not hold, one sentence each.

    Args:
        touch: what is relied on.
        known: facts of a release.
        ours: sources of vllm_evict.
    """
    if known is None:
        return ["it is not there"]
    return [
        *_check_class(touch, known, ours),
        *_check_function(touch, known, ours),
        *(
            f"its code has no `{code}`" + (" after what the table names before it" if index else "")
            for index, code in enumerate(touch.does)
            if known.get("does", {}).get(code) is None
        ),
        *([f"its value is `{known['value']}`, not `{touch.value}`"] if _differs(touch.value, known) else []),
    ]


def _check_class(touch: Touch, known: Facts, ours: Sources) -> Iterator[str]:
    for base in touch.bases:
        if base not in known["bases"]:
            yield f"it is no {base} (its bases: {', '.join(known['bases']) or 'none'})"
    for item in touch.has:
        evidence = known["has"].get(_name(item))
        if evidence is None:
            yield f"it has no attribute {_name(item)}"
        elif not _is_given_as(item, evidence):
            yield f"its attribute is `{evidence}`, not `{item}`"
    if touch.takes_attributes and not known["takes_attributes"]:
        yield "its instances can't be given attributes of ours"
    if touch.implemented_by:
        module, _, name = touch.implemented_by.partition(":")
        ours_class = ours.find(module, name)
        defined = {node.name for node in ours_class.node.body if isinstance(node, FUNCTIONS)}
        if missing := set(known["abstract"]) - defined:
            yield f"{touch.implemented_by} can't be made: it lacks {', '.join(sorted(missing))}"


def _check_function(touch: Touch, known: Facts, ours: Sources) -> Iterator[str]:
    theirs = known.get("parameters", "")
    if touch.kind and touch.kind not in known["decorators"]:
        yield f"it is no {touch.kind}"
    names = list(source.signature(theirs).parameters) if touch.first else []
    if tuple(names[: len(touch.first)]) != touch.first:
        yield f"its parameters are ({theirs}), not ({', '.join(touch.first)}, ...)"
    for call in touch.calls:
        node = source.pattern(call)
        keywords = [keyword.arg for keyword in node.keywords]
        if error := source.binds(theirs, len(node.args), keywords):
            yield f"`{call}` does not fit ({theirs}): {error}"
    for replacement in touch.replaced_by:
        module, _, name = replacement.partition(":")
        own = source.parameters(ours.find(module, name).node)
        for positional, keywords in _every_call(theirs):
            if error := source.binds(own, positional, keywords):
                yield f"{replacement} takes ({own}) in the place of ({theirs}): {error}"
                break


def _every_call(parameters: str) -> Iterator[tuple[int, list[str]]]:
    """Calls that a function may get: how many positional arguments, and which keywords."""
    by_kind: dict[Any, list[Parameter]] = {}
    for parameter in source.signature(parameters).parameters.values():
        by_kind.setdefault(parameter.kind, []).append(parameter)
    positional = by_kind.get(Parameter.POSITIONAL_OR_KEYWORD, [])
    keywords = by_kind.get(Parameter.KEYWORD_ONLY, [])
    for count in range(len(positional) + 1):
        yield count, [parameter.name for parameter in (*positional[count:], *keywords)]
    required = [parameter for parameter in positional if parameter.default is Parameter.empty]
    yield len(required), [parameter.name for parameter in keywords if parameter.default is Parameter.empty]
    if Parameter.VAR_POSITIONAL in by_kind:
        yield len(positional) + 1, [parameter.name for parameter in keywords]
    if Parameter.VAR_KEYWORD in by_kind:
        yield len(positional), [*(parameter.name for parameter in keywords), "and_another"]


def _name(item: str) -> str:
    """Attribute that an entry of `Touch.has` asks for: `x`, `x = value`, `x: type` or `x()`."""
    return item.partition(" ")[0].rstrip(":()")


def _is_given_as(item: str, evidence: str) -> bool:
    is_method = evidence.startswith("def ")
    if item.endswith("()") or is_method:
        return item.endswith("()") and is_method
    if item == _name(item):
        return True
    wanted, actual = source.pattern(item), source.pattern(evidence)
    part = "annotation" if isinstance(wanted, ast.AnnAssign) else "value"
    return source.matches(getattr(wanted, part), getattr(actual, part, None))


def _differs(value: str | None, known: Facts) -> bool:
    return value is not None and not source.matches(source.pattern(value), source.pattern(known["value"]))
