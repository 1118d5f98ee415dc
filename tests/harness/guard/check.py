"""Takes from a release of vLLM what the plugin relies on, and says what of it is missing or does not fit."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from inspect import Parameter
from typing import Any, NamedTuple

from vllm_evict.integration.start.versions import find

from . import source
from .invariants import INVARIANTS, Invariant
from .names import CALLED, CARRIERS, COMPLETE, NO_NAMES, REPLACED
from .source import FUNCTIONS, Found, Sources

Facts = dict[str, Any]
BOUND = ("classmethod", "staticmethod", "property")


class Place(NamedTuple):
    """A method or function of vLLM, and ours in its place."""

    where: str
    ours: str


def replaced() -> list[Place]:
    return [
        Place(f"{theirs}.{name}".replace(":.", ":"), f"{ours} {name}")
        for theirs, by in REPLACED.items()
        for ours, names in by.items()
        for name in names.split()
    ]


def touched() -> set[str]:
    """Places of the functions whose code is compared where vLLM is a release that is not tested."""
    return {place.where for place in replaced()} | CALLED.keys() | {each.where for each in INVARIANTS}


def own(ours: Sources, place: Place) -> Found | None:
    """Return the plugin's part in a place: a member of that name, or the function that the table names."""
    path, name = place.ours.split()
    module, _, holder = f"vllm_evict.{path}".partition(":")
    found = ours.find(module, holder)
    member = found and ours.find(module, f"{holder}.{name}")
    return member if member or not isinstance(found and found.node, FUNCTIONS) else found


@cache
def imported(ours: Sources) -> dict[str, list[str]]:
    """Names of vLLM that the plugin imports, and modules that it names -> its modules that do."""
    found: dict[str, set[str]] = {}
    for module, tree in ours.modules():
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [f"{alias.name}:" for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}:{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Constant) and re.fullmatch(r"vllm(\.\w+)+", str(node.value)):
                names = [] if node.value in NO_NAMES else [node.value]
            elif isinstance(node, ast.Constant) and re.fullmatch(r"vllm(\.\w+)+:\w+", str(node.value)):
                names = [node.value]
            for name in names:
                if re.match(r"vllm\b(?!_)", name):
                    found.setdefault(name, set()).add(module)
    return {name: sorted(users) for name, users in found.items()}


def extract(sources: Sources, ours: Sources) -> Facts:
    """Return a release's facts, as JSON can hold them."""
    functions = {place.where for place in replaced()} | CALLED.keys()
    return {
        "functions": {where: _function(sources, where) for where in sorted(functions)},
        "imports": {name: _is_there(sources, name) for name in sorted(imported(ours))},
        "carriers": {where: _carries(sources, where) for where in CARRIERS},
        "abstract": {where: _abstract(sources, where) for where in COMPLETE},
        "invariants": {each.key: _evidence(sources, each.where, each.does) for each in INVARIANTS},
    }


def _function(sources: Sources, where: str) -> Facts | None:
    found = find(sources, where)
    if found is None or not isinstance(found.node, FUNCTIONS):
        return None
    if "abstractmethod" in source.decorators(found.node) and not where.endswith(found.name):
        return None  # only a base promises it
    return {
        "decorators": [name for name in source.decorators(found.node) if name in BOUND],
        "parameters": source.parameters(found.node),
    }


def _is_there(sources: Sources, name: str) -> bool:
    module, colon, attribute = name.partition(":")
    if not colon:  # a string: a module, or something in one
        parent, _, last = module.rpartition(".")
        return sources.tree(module) is not None or sources.find(parent, last) is not None
    if not attribute or sources.tree(f"{module}.{attribute}") is not None:
        return sources.tree(module) is not None
    return find(sources, name) is not None


def _carries(sources: Sources, where: str) -> bool:
    found = find(sources, where)
    return found is not None and source.takes_attributes(sources, found)


def _abstract(sources: Sources, where: str) -> list[str] | None:
    found = find(sources, where)
    return found and source.abstract_methods(sources, found)


def _evidence(sources: Sources, where: str, does: tuple[str, ...]) -> list[str | None] | None:
    found = find(sources, where)
    return found and source.find_all(found.node, does)


def complaints(known: Facts, version: str, ours: Sources) -> list[str]:
    """Return the facts that do not hold in a release, one line each."""
    return [
        *_check_replaced(known["functions"], ours),
        *_check_called(known["functions"]),
        *(
            f"{name}: it is not there, and vllm_evict.{' and '.join(users)} needs it"
            for name, users in imported(ours).items()
            if not known["imports"][name]
        ),
        *(f"{where}: its instances can't be given attributes" for where in CARRIERS if not known["carriers"][where]),
        *_check_complete(known["abstract"], ours),
        *_check_invariants(known["invariants"], version),
    ]


def _check_replaced(functions: Facts, ours: Sources) -> Iterator[str]:
    for place in replaced():
        theirs, mine = functions[place.where], own(ours, place)
        if theirs is None:
            yield f"{place.where}: it is not there, and vllm_evict.{place.ours} takes its place"
            continue
        taken, given = source.parameters(mine.node), theirs["parameters"]
        for positional, keywords in _every_call(given):
            if error := source.binds(taken, positional, keywords):
                yield f"{place.where}: vllm_evict.{place.ours} takes ({taken}) in the place of ({given}): {error}"
                break
        named = source.positional(taken)
        if named != source.positional(given)[: len(named)]:
            yield f"{place.where}: its parameters are ({given}); vllm_evict.{place.ours} takes ({taken})"
        bound = [name for name in source.decorators(mine.node) if name in BOUND]
        if "." in place.ours.partition(":")[2] and bound and bound != theirs["decorators"]:
            yield f"{place.where}: it is {theirs['decorators'] or 'a method'}, vllm_evict.{place.ours} is {bound}"


def _check_called(functions: Facts) -> Iterator[str]:
    for where, call in CALLED.items():
        if functions[where] is None:
            yield f"{where}: it is not there, and is called"
            continue
        node, given = source.pattern(f"call{call}"), functions[where]["parameters"]
        names = source.positional(given)
        if error := source.binds(given, len(node.args), [keyword.arg for keyword in node.keywords]):
            yield f"{where}: it is called with {call}, and takes ({given}): {error}"
        for index, argument in enumerate(node.args):
            if isinstance(argument, ast.Name) and names[index : index + 1] != [argument.id]:
                yield f"{where}: it is called with {call}, and takes ({given})"
                break


def _check_complete(abstract: Facts, ours: Sources) -> Iterator[str]:
    for where, name in COMPLETE.items():
        module, _, cls = f"vllm_evict.{name}".partition(":")
        defined = {node.name for node in ours.find(module, cls).node.body if isinstance(node, FUNCTIONS)}
        if abstract[where] is None or (missing := set(abstract[where]) - defined):
            yield f"{where}: vllm_evict.{name} lacks {', '.join(sorted(missing)) if abstract[where] else 'its base'}"


def _check_invariants(invariants: Facts, version: str) -> Iterator[str]:
    for each in INVARIANTS:
        if each.holds_in(version) and (broken := _broken(each, invariants)):
            yield f"{broken}; {each.name}, else {each.why}"


def _broken(each: Invariant, invariants: Facts) -> str | None:
    found = invariants[each.key]
    if found is None:
        return f"{each.where}: it is not there"
    missing = next((code for code, evidence in zip(each.does, found, strict=True) if evidence is None), None)
    return missing and f"{each.where}: no `{missing}` in this order"


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
