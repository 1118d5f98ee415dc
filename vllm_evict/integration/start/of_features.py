"""A list of what features do to a server's configuration before it is checked."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from ...config import KVPolicyConfig
from ...features.context import start as context

#: Functions that return a policy as it is for a model: (vLLM's configuration, policy) -> policy.
SETTLED: tuple[Callable[[Any, KVPolicyConfig], KVPolicyConfig], ...] = (context.in_tokens,)
#: Contexts, by the policy, in which vLLM checks its own arguments.
CHECKED: tuple[Callable[[KVPolicyConfig], AbstractContextManager[None]], ...] = (context.longer_than_the_model,)


@contextmanager
def checked(config: KVPolicyConfig) -> Iterator[None]:
    """Enter all of `CHECKED`."""
    with ExitStack() as stack:
        for each in CHECKED:
            stack.enter_context(each(config))
        yield
