"""Sessions of several turns (vLLM's streaming input) on an `LLM`, whose `generate` has none."""

from collections.abc import Mapping
from typing import Any

import msgspec

from . import EvalError

#: Steps without an answer after which sessions are given up. Prompts of a turn take fewer.
PATIENCE = 10_000


class Sessions:
    """Sessions that go on together, turn by turn.

    The tokens of a turn follow those of the turn before it and its answer. vLLM drops the last token of an answer,
    which no step has computed.
    """

    def __init__(self, llm: Any):
        self._llm, self._names = llm, set[str]()

    def turn(self, prompts: Mapping[str, list[int]], params: Any) -> dict[str, Any]:
        """Give each session its next tokens. A session starts with its first turn.

        Args:
            prompts: session -> token ids.
            params: `SamplingParams` of this turn, without stop strings.

        Returns:
            Session -> `RequestOutput`: text and token ids are this turn's, the usage is that of the session so far.

        Raises:
            EvalError: the engine answered no session in PATIENCE steps, such as with a pool that has no room.
        """
        engine, tasks = self._llm.llm_engine, self._llm.supported_tasks
        params = params.clone()
        params.output_kind = type(params.output_kind).DELTA
        self._names |= prompts.keys()
        for name, ids in prompts.items():
            prompt = {"prompt_token_ids": ids}
            request = engine.input_processor.process_inputs(name, prompt, params, tasks, resumable=True)
            request.external_req_id = name
            # Front end and engine, in one process, both extend the list that they get.
            engine.output_processor.add_request(msgspec.structs.replace(request, prompt_token_ids=list(ids)), None)
            engine.engine_core.add_request(request)
        answers: dict[str, Any] = {}
        running, silent = set(prompts), 0
        while running:
            outputs = engine.step()
            silent = 0 if outputs else silent + 1
            if silent > PATIENCE:
                raise EvalError(
                    f"{', '.join(sorted(running))} got no answer in {PATIENCE} steps; expected room for {len(prompts)} "
                    "sessions in the KV cache; take a smaller --batch, or give the engine more memory"
                )
            for output in outputs:
                if output.request_id in answers:
                    answers[output.request_id].add(output, aggregate=True)
                else:
                    answers[output.request_id] = output
                if output.outputs[0].finish_reason is not None:
                    running.discard(output.request_id)
        return answers

    def end(self) -> None:
        """Free all that the sessions hold."""
        self._llm.llm_engine.abort_request(list(self._names))
        self._names.clear()
