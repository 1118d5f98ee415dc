"""LoRA adapters of a load. One that is loaded again has other weights under its name."""

import shutil

from lora import write_adapter
from vllm.lora.request import LoRARequest

#: Adapters of a case; more than a step can have.
ADAPTERS = 3


class Adapters:
    """Adapters of one model, numbered from 0.

    Args:
        model: directory.
        folder: of the adapters' files.
    """

    def __init__(self, model, folder):
        self._model, self._folder = model, folder
        folder.mkdir(exist_ok=True)
        #: How often each was written.
        self._written = [0] * ADAPTERS
        for number in range(ADAPTERS):
            self.write(number)

    def write(self, number):
        """Write an adapter with other weights than it had, where it was."""
        self._written[number] += 1
        write_adapter(self._model, self._path(number), 100 * self._written[number] + number)
        shutil.copytree(self._path(number), self._path(*self.newest(number)), dirs_exist_ok=True)

    def newest(self, number):
        """What tells the weights of an adapter, as they are now, from all others: its number, and how often it was written."""
        return number, self._written[number]

    def named(self, number, **about):
        """The `LoRARequest` of an adapter on the engine that is tried."""
        return LoRARequest(f"a{number}", number + 1, str(self._path(number)), **about)

    def alone(self, number, written):
        """The `LoRARequest` of an adapter with the weights that it had then, for an engine that has all of them."""
        name = f"a{number}-{written}"
        return LoRARequest(name, ADAPTERS * written + number + 1, str(self._path(number, written)))

    def reload(self, engine, number, in_place):
        """Give an adapter other weights, and have an engine load them: in the old ones' place, or once they are removed."""
        self.write(number)
        if not in_place:
            engine.core.remove_lora(number + 1)
        engine.core.add_lora(self.named(number, load_inplace=in_place))

    def _path(self, number, *written):
        return self._folder / "-".join(map(str, (number, *written)))


def number_of(lora_request):
    """The number of a request's adapter; None: it has none."""
    return None if lora_request is None else lora_request.lora_int_id - 1
