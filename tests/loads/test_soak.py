"""A short soak of a real server (soak/): clients of all kinds, reports that are lost, late and doubled, a worker that
raises."""

import pytest
from oracle.tiny import make_tiny_llama
from soak.clients import Load
from soak.deaths import ROOM, die
from soak.rounds import check, soak
from soak.server import POLICY, Server

pytestmark = pytest.mark.minutes


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak")
    with Server(make_tiny_llama(folder / "model"), POLICY, folder / "server", ROOM) as running:
        yield running


def test_nothing_grows_and_answers_stay_the_same(server):
    load = Load(server)
    load.ask_quietly()
    found = soak(server, load, ["", "lost", "late", "doubled", "", ""], 100)
    check(load, found)
    struck = found[-1].books["EngineCore"]["struck"]
    assert all(struck[fault] > 0 for fault in ("lost", "late", "doubled")), struck
    assert load.counts["same answers"] > 40 and load.counts["hang_up"] > 20 and load.counts["bad"] > 20
    assert server.total("vllm:kv_evict_blocks_evicted_total") > 100
    # A late report counts as missing, where its request still runs.
    assert server.total("vllm:kv_evict_reports_missing_total") >= struck["missed"] > 0
    assert "Traceback" not in server.log


def test_a_worker_that_raises_ends_the_server_and_its_clients_hear_of_it(server):
    """The last test here, as it ends the server. Like stock vLLM: answers are errors or cut, and no process stays."""
    death = die(server, "worker raises")
    assert death.seconds is not None and not death.left and not death.shared, death
    assert sum(death.answers.values()) == 8 and not death.answers.get("short"), death
    assert death.answers.get("error", 0) + death.answers.get("cut", 0) > 0, death
    assert "injected: a worker raises" in server.log
