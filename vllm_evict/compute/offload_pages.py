"""Where host blocks lie: in memory, or in a file."""

import os
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..config import KVPolicyError
from ..config.errors import place
from .pinned import pinned


class OffloadPages(Protocol):
    """Bytes of host blocks, in all layers of a KV group. Numbers are of host blocks, `physical` of the device.

    Attributes:
        may_fail: whether blocks may fail to be written or read.
        error: why a block could not be written or read; None: no block failed.
    """

    may_fail: bool
    error: str | None

    def write(self, pages: Sequence[torch.Tensor], physical: list[int], numbers: list[int]) -> list[int]:
        """Copy blocks of the device to the host; returns the numbers of those that could not be written."""
        ...

    def read(self, pages: Sequence[torch.Tensor], physical: list[int], numbers: list[int]) -> list[int]:
        """Copy blocks back; returns the physical blocks of those that could not be read."""
        ...

    def poison(self, numbers: list[int]) -> None:
        """Fill host blocks with NaN (tests)."""
        ...


class MemoryPages:
    """Host blocks in memory, pinned where there is a device.

    Args:
        pages: each layer's cache, blocks first.
        blocks: of the host.
        on_cpu: whether the cache is in memory too.

    Raises:
        KVPolicyError: the machine does not give so much memory, or does not pin it.
    """

    may_fail = False
    error: str | None = None

    def __init__(self, pages: Sequence[torch.Tensor], blocks: int, on_cpu: bool) -> None:
        self._on_cpu = on_cpu
        allocate = torch.empty if on_cpu else pinned
        try:
            self.own = [allocate((blocks, *page.shape[1:]), dtype=page.dtype) for page in pages]
        except (RuntimeError, MemoryError) as error:
            size = sum(page[0].nbytes for page in pages)
            raise KVPolicyError(
                f"host: the machine has not {blocks} blocks of {size} bytes left; expected {blocks * size} bytes "
                "beside what it runs; set host to less"
            ) from error

    def write(self, pages: Sequence[torch.Tensor], physical: list[int], numbers: list[int]) -> list[int]:
        for page, own in zip(pages, self.own):
            _copy(own, numbers, page, physical, self._on_cpu)
        return []

    def read(self, pages: Sequence[torch.Tensor], physical: list[int], numbers: list[int]) -> list[int]:
        for page, own in zip(pages, self.own):
            _copy(page, physical, own, numbers, self._on_cpu)
        return []

    def poison(self, numbers: list[int]) -> None:
        for page in self.own:
            _floats(page)[numbers] = float("nan")


def _copy(to: torch.Tensor, there: list[int], of: torch.Tensor, here: list[int], at_once: bool) -> None:
    if at_once:
        to[there] = of[here]
        return
    for block, number in zip(there, here):
        to[block].copy_(of[number], non_blocking=True)


class FilePages:
    """Host blocks in a file, one record each. The kernel's page cache holds what was read or written last.

    The file is made in its full size, so a disk that other files fill later has room for it. It has no name, so it goes
    with the process. It is read and written by calls that say if they fail; a mapped file that fails ends the process.

    Args:
        path: of the file, which is made.
        pages: each layer's cache, blocks first, in memory.
        blocks: of the host.

    Raises:
        KVPolicyError: the file can't be made in its full size.
    """

    may_fail = True

    def __init__(self, path: str, pages: Sequence[torch.Tensor], blocks: int) -> None:
        self.error: str | None = None
        self._record = sum(page[0].nbytes for page in pages)
        self._shapes = [(page.shape[1:], page.dtype) for page in pages]
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except (OSError, ValueError) as error:  # ValueError: a null character
            reason = getattr(error, "strerror", error)
            raise KVPolicyError(
                f"host_path: {place(path)} can't be made ({reason}); expected a file that does not exist yet, in a "
                "directory that the server may write; set another host_path"
            ) from None
        try:
            os.unlink(path)
            os.posix_fallocate(self._file, 0, blocks * self._record)
        except OSError as error:
            os.close(self._file)
            del self._file
            raise KVPolicyError(
                f"host_path: {place(path)} can't have {blocks * self._record} bytes ({error.strerror}); expected room "
                "for host on its disk; set host to less, or another host_path"
            ) from None

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def write(self, pages: Sequence[torch.Tensor], physical: list[int], numbers: list[int]) -> list[int]:
        return [
            number
            for block, number in zip(physical, numbers)
            if not self._moved(os.pwritev, [_bytes(page[block]) for page in pages], number)
        ]

    def read(self, pages: Sequence[torch.Tensor], physical: list[int], numbers: list[int]) -> list[int]:
        failed = []
        for block, number in zip(physical, numbers):
            rows = [torch.empty(shape, dtype=dtype) for shape, dtype in self._shapes]
            if self._moved(os.preadv, list(map(_bytes, rows)), number):
                for page, row in zip(pages, rows):
                    page[block] = row
            else:
                failed.append(block)
        return failed

    def poison(self, numbers: list[int]) -> None:
        rows = [torch.empty(shape, dtype=dtype) for shape, dtype in self._shapes]
        for row in rows:
            _floats(row).fill_(float("nan"))
        for number in numbers:
            self._moved(os.pwritev, list(map(_bytes, rows)), number)

    def _moved(self, how: Callable[[int, list[memoryview], int], int], rows: list[memoryview], number: int) -> bool:
        """Read or write the record of a host block; return whether that was done."""
        try:
            moved = how(self._file, rows, number * self._record)
        except OSError as error:
            self.error = error.strerror
            return False
        if moved < self._record:
            self.error = f"{moved} of {self._record} bytes"
        return moved == self._record


def _floats(page: torch.Tensor) -> torch.Tensor:
    """Return a page in a dtype that has NaN."""
    return page.view(torch.float8_e4m3fn) if page.dtype == torch.uint8 else page


def _bytes(row: torch.Tensor) -> memoryview:
    """Return the bytes of a block in one layer."""
    return memoryview(row.contiguous().view(-1).view(torch.uint8).numpy())
