"""Tells front ends how much room the pool of each of their engines has for a request, with vLLM's ready response."""

from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from typing import Any

import msgspec

from ...config import Room
from ..seams import replaces

#: Attribute of a `VllmConfig`: the `Room` of each engine, once, in an engine's process and in a front end's.
ROOMS = "kv_evict_rooms"


@dataclass
class Told:
    """A ready response as far as it is the plugin's. A decoder passes over fields that its type does not have."""

    kv_evict_room: Room | None = None


def tell(vllm_config: Any, room: Room) -> None:
    """Note the room of an engine's pool in its configuration, which a front end in the same process shares."""
    rooms = told(vllm_config)
    setattr(vllm_config, ROOMS, rooms if room in rooms else (*rooms, room))


def told(vllm_config: Any) -> tuple[Room, ...]:
    """Return the rooms that engines told, without repetition; none where there is no engine, or none evicts."""
    return getattr(vllm_config, ROOMS, ())


@replaces(
    "vllm.v1.engine.core:EngineCoreProc._make_ready_response",
    at_import=True,
    why="an engine tells each of its front ends how much room its pool has",
    remove_when="ready responses of vLLM carry fields of plugins",
)
def tell_ready(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(self: Any) -> Any:
        response, rooms = make(self), told(self.vllm_config)
        if not rooms:
            return response
        with_room = make_dataclass("ReadyResponse", (), bases=(Told, type(response)))
        return with_room(**vars(response), kv_evict_room=rooms[0])

    return made


@replaces(
    "vllm.v1.engine.core_client:MPClient._apply_ready_response",
    at_import=True,
    why="a front end hears of the room of each of its engines, also of those that join later",
    remove_when="ready responses of vLLM carry fields of plugins",
)
def hear_ready(apply: Callable[..., None]) -> Callable[..., None]:
    def applied(self: Any, payload: bytes) -> None:
        apply(self, payload)
        room = msgspec.msgpack.decode(payload, type=Told).kv_evict_room if payload else None
        if room is not None:
            tell(self.vllm_config, room)

    return applied
