"""Requests with a `seed`: their generators draw once for each token of an answer, however a prompt is cut into steps."""

import pytest
import torch
from engine import after, random_prompt
from streaming import Sessions

CONTEXT = {"name": "sink-window", "budget": 160, "sink": 32, "buffer": 32, "context": 800}


def drawn(seed, draws):
    """State of a generator after so many draws of vLLM's sampler for CPUs."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(draws):
        torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
    return generator.get_state()


@pytest.mark.both_runners("engine")
@pytest.mark.parametrize("make", ["engine", "async_engine"])
def test_a_prompt_in_chunks_answers_as_one_that_is_computed_at_once(request, make):
    """Two requests with seeds, and one without, whose chunks share steps with the others' answers."""
    prompts, seeds = [random_prompt(length, length) for length in (300, 200, 310)], [3, None, 5]
    answers = []
    for chunk in (64, 1024):
        server = request.getfixturevalue(make)({"name": "full"}, max_num_batched_tokens=chunk)
        ids = [server.add(each, max_tokens=20, temperature=1.0, seed=seed) for each, seed in zip(prompts, seeds)]
        outputs = server.run()
        answers.append([list(outputs[req_id].outputs[0].token_ids) for req_id in ids])
    chunked, whole = answers
    assert chunked[0] == whole[0] and chunked[2] == whole[2]
    assert len(set(map(tuple, whole))) == 3 and len(set(whole[0])) > 10, "nothing was sampled"


@pytest.mark.v1(why="V2 draws by seed and position: it has no generators")
@pytest.mark.parametrize("make", ["engine", "async_engine"])
def test_turns_of_a_session_that_the_plugin_cuts(request, make):
    """vLLM would compute the second turn in one chunk. The session starts over, in chunks from its first token on."""
    options = {"max_num_batched_tokens": 256, "max_model_len": 1024, "enable_prefix_caching": False}
    server, planned = request.getfixturevalue(make)(CONTEXT, **options), []
    after(server.scheduler, "schedule", lambda output, *_: planned.append(output.num_scheduled_tokens.get("s", 0)))
    sessions, runner, draws = Sessions(server), server.worker.model_runner, 0
    for turn, (tokens, answer) in enumerate([(200, 200), (20, 20), (40, 20)]):
        planned.clear()
        sessions.send("s", random_prompt(tokens, turn), answer, temperature=1.0, seed=4)
        if turn == 1:
            server.scheduler.admission.start_over(server.scheduler.requests["s"])
        sessions.run()
        draws += answer
        assert len(sessions.answers["s"][turn][0]) == answer
        # vLLM keeps the generator of the first turn.
        assert torch.equal(runner.requests["s"].generator.get_state(), drawn(4, draws))
        if turn == 1:
            assert next(filter(None, planned)) == 256
    sessions.end("s")
