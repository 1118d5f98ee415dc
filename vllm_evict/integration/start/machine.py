"""Memory of the machine for this process: all of it, or what its control groups leave."""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

#: The control groups of this process.
OWN_GROUPS = "/proc/self/cgroup"
#: Controller of memory in `OWN_GROUPS` -> where its groups are, and the file with the most bytes that one may take. The
#: groups of version 2 name no controller.
CONTROL_GROUPS = {
    "": ("/sys/fs/cgroup", "memory.max"),
    "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
}


def memory_bytes() -> int:
    """Return the bytes of memory that the machine has, or that this process may take of it."""
    limits = (_read(path).strip() for path in _limits())
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(int(limit) for limit in limits if limit.isdigit())])


def _limits() -> Iterator[Path]:
    """Yield the files with limits of this process's control groups and of all groups around them.

    A container may see its own group as the root, under a name that it does not have there.
    """
    own = {"": "/", "memory": "/"}
    for line in _read(Path(OWN_GROUPS)).splitlines():
        _, controllers, group = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), group)
    for controller, (root, file) in CONTROL_GROUPS.items():
        place = PurePosixPath(own[controller])
        for each in (place, *place.parents):
            yield Path(f"{root}{each}", file)


def _read(path: Path) -> str:
    """Return the text of a file; "" if it can't be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
