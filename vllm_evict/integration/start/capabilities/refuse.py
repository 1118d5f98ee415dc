"""Refuses servers that have a feature in an environment that cannot stand it: by name, with the way out of either."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from vllm.logger import init_logger

from ....config import KVPolicyConfig, KVPolicyError
from ....config.features import ANY, READS, SCORES, Feature
from ....environment import decode_kernel
from .environment import RUN_UNTRIED, UNTRIED, Environment
from .environments import ENVIRONMENTS, OF_LAYERS
from .server import Layers, Server

logger = init_logger("vllm.evict")


class Refused(KVPolicyError):
    """A server that cannot run its policy. The first refusal is the message; `messages` has all of them."""

    def __init__(self, *messages: str) -> None:
        super().__init__(messages[0])
        self.messages = messages


class Refusal(NamedTuple):
    """A part of a server with which a policy cannot be used.

    Attributes:
        what: the part, and why.
        instead: the ways out.
        untried: whether the only reason is that no test runs the two.
    """

    what: str
    instead: str
    untried: bool = False


def refusals(server: Server, environments: Iterable[Environment] = ENVIRONMENTS) -> Iterator[Refusal]:
    """Yield what a server is refused for: each pair of the table of which it has both."""
    for environment in environments:
        if environment.of(server):
            others = (other for other in environment.cannot_stand if server.has(other))
            yield from (composed(server, environment, other) for other in others)


def composed(server: Server, environment: Environment, other: Feature | Environment) -> Refusal:
    """Return the words for a pair of the table. The ways out leave the environment, or the other part."""
    name, why, instead = (
        text.format_map(server) for text in (environment.name, environment.cannot_stand[other], environment.instead)
    )
    if isinstance(other, Feature):
        beside, without = other.beside or f"{other.name} and {{}}", other.instead
    else:
        beside, without = other.name.format_map(server) + " and {}", other.instead.format_map(server)
    what = beside.replace("{}", name) + (f", {why}" if why else "")
    ways = [instead] if ANY.instead in instead else [instead, without]
    if untried := why.startswith(UNTRIED):
        ways.append(RUN_UNTRIED)
    return Refusal(what, ", or ".join(filter(None, ways)), untried)


def untried(vllm_config: Any, config: KVPolicyConfig) -> list[str]:
    """Return what no test runs of a server whose policy allows it, as far as the configuration tells."""
    return [each.what for each in refusals(Server(vllm_config, config)) if each.untried and config.untried]


def check_config(vllm_config: Any, config: KVPolicyConfig) -> KVPolicyConfig:
    """Refuse engines that a policy cannot run in.

    Returns:
        The configuration. If its user did not say what requests may pick, it lists the policies that can run here, and
        a line of the log names the others.

    Raises:
        Refused: naming each model or setting, and what to do instead.
    """
    decode_kernel()
    asked = config if config.allow is not None else config.replace(allow=())
    refuse(config, refusals(Server(vllm_config, asked)))
    left_out: dict[str, list[str]] = {}
    for name in sorted(config.allowed) if config.allow is None else ():
        if refusal := next(_standing(config, refusals(Server(vllm_config, config.replace(allow=(name,))))), None):
            left_out.setdefault(refusal.what, []).append(name)
    if not left_out:
        return config
    reasons = "; ".join(f"{', '.join(names)}, which can't be used with {what}" for what, names in left_out.items())
    logger.info("KV policy %s: requests may not pick %s", config.name, reasons)
    return config.replace(allow=tuple(sorted(config.allowed.difference(*left_out.values()))))


def measures_mass(vllm_config: Any) -> bool:
    """Return whether workers can measure attention mass by block, under whichever policy."""
    server = Server(vllm_config, KVPolicyConfig.parse("h2o"))
    return not any(each.of(server) for each in ENVIRONMENTS if not {READS, SCORES}.isdisjoint(each.cannot_stand))


def check_layers(vllm_config: Any, config: KVPolicyConfig, layers: Layers) -> None:
    """Refuse what loaded layers cannot stand, of which the configuration did not tell.

    Raises:
        Refused: naming the kind of layers, and what to do instead.
    """
    refuse(config, refusals(Server(vllm_config, config, layers), OF_LAYERS))


def _standing(config: KVPolicyConfig, refused: Iterable[Refusal]) -> Iterator[Refusal]:
    """Yield the refusals that hold under a policy: with `untried: true`, those with a known reason."""
    return (each for each in refused if not (each.untried and config.untried))


def refuse(config: KVPolicyConfig, refused: Iterable[Refusal]) -> None:
    """Raise one error for all refusals that hold, if there are any; warn of the others."""
    refused = list(refused)
    standing = list(_standing(config, refused))
    if standing:
        messages = (f"KV policy {config.name!r} can't be used with {each.what}: {each.instead}" for each in standing)
        raise Refused(*dict.fromkeys(messages))
    for each in refused:
        logger.warning("KV policy %s runs, because untried is true, with %s", config.name, each.what)
