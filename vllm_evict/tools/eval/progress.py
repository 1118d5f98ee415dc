"""Progress of a run: a bar in a terminal, a line now and then where there is none."""

import threading
import time
from collections.abc import Callable

from tqdm import tqdm

#: Seconds between two lines.
EVERY = 20.0


class Progress:
    """Counts what a run has done, and says it, also while nothing new is done: an engine may take minutes for a batch.

    Args:
        say: prints a line for the user.
        unit: what is counted.

    Attributes:
        done: so far.
        total: at the end, or the most that it can be.
    """

    def __init__(self, say: Callable[[str], object], unit: str):
        self.done = self.total = 0
        self._say, self._unit, self._what = say, unit, ""
        self._bar = tqdm(unit=unit, disable=None)
        self._start = self._told = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep_saying, name="progress", daemon=True)
        self._thread.start()

    def begin(self, what: str, told: bool = False) -> None:
        """Note what is done next, and say it if it is to be `told`."""
        self._what, self._bar.total = what, self.total
        self._bar.set_description(what)
        if told:
            self.say(what)

    def update(self, count: int) -> None:
        """Count so many more."""
        self.done += count
        self._bar.update(count)

    def _keep_saying(self) -> None:
        """Say how far the run is, whenever nothing was said for a while, until it is closed."""
        while not self._closed.wait(max(0.0, self._told + EVERY - time.monotonic())):
            if not self._bar.disable:
                self._told = time.monotonic()
                self._bar.refresh()
            elif time.monotonic() - self._told >= EVERY:
                self.say(f"{self._what}: {self.done} of at most {self.total} {self._unit}s{self.left}")

    @property
    def left(self) -> str:
        """The time that is left at most, in words; empty if nothing tells it."""
        if not 0 < self.done < self.total:
            return ""
        seconds = (time.monotonic() - self._start) / self.done * (self.total - self.done)
        return f", at most {seconds / 60:.0f} min left" if seconds >= 90 else f", at most {seconds:.0f} s left"

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        self._told = time.monotonic()
        self._bar.clear()
        self._say(line)
        self._bar.refresh()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._bar.close()
