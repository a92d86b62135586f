"""Both transports: the same answers, errors and endings."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from recipes.cluster import visible_devices
from recipes.config import OrchestratorConfig
from recipes.errors import ConfigError, DataError
from recipes.transport import ActorDiedError, ActorFailedError, choose, has_ray

ROOT = Path(__file__).resolve().parents[2]


class Echo:
    """The actor of these tests."""

    def __init__(self, word: str) -> None:
        self.word = word

    def say(self, *things: object) -> tuple:
        """The word and the arguments."""
        return (self.word, *things)

    def variable(self, name: str) -> str | None:
        """Of the environment."""
        return os.environ.get(name)

    def wait(self, seconds: float) -> str:
        """After a while."""
        time.sleep(seconds)
        return "done"

    def fail(self, kind: str) -> None:
        """Raise."""
        if kind == "recipe":
            raise DataError("is wrong", where="there", fix="Mend it.")
        if kind == "local":

            class OddError(Exception):
                def __init__(self, a: int, b: int) -> None:
                    super().__init__(f"{a} and {b}")

            raise OddError(1, 2)
        raise ValueError("a plain one")

    def die(self) -> None:
        """End the process."""
        print("my last words", flush=True)
        os._exit(4)

    def child(self) -> int:
        """Start a process that outlives this one unless somebody ends it."""
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

    def shutdown(self) -> None:
        """Nothing to do."""


@pytest.fixture(scope="module", params=["process", "ray"])
def transport(request):
    """Started once."""
    if request.param == "ray" and not has_ray():
        pytest.skip("Ray is not installed")
    found = choose(OrchestratorConfig(backend=request.param, object_store_bytes=100 << 20))
    assert found.name == request.param
    found.start()
    yield found
    found.shutdown([])


@pytest.fixture
def spawn(transport, tmp_path):
    """Actors with an environment that imports the tests."""
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), *(p for p in sys.path if p)]), "ECHO_MARK": "1,3"}

    def start(word: str):
        return transport.spawn(Echo, (word,), env=env, log=tmp_path / f"{word}.log")

    return start


def ask(transport, actor, method, *args, timeout=120.0):
    """One call, waited for."""
    reference = transport.call(actor, method, args)
    assert transport.wait([reference], timeout) == [reference], "no answer"
    return transport.result(reference)


def test_answers_errors_and_waiting(transport, spawn):
    one, two = spawn("one"), spawn("two")
    big = os.urandom(8 << 20)  # more than a socket holds, both ways
    assert ask(transport, one, "say", 1, None, big) == ("one", 1, None, big)
    put = transport.put({"weights": big})
    for actor, word in ((one, "one"), (two, "two")):
        assert ask(transport, actor, "say", put, 2) == (word, {"weights": big}, 2)
    assert ask(transport, one, "variable", "ECHO_MARK") == "1,3"
    # The first of several, while the other is busy; then a wait that ends with nothing.
    slow, quick = transport.call(one, "wait", (3.0,)), transport.call(two, "say", ())
    assert transport.wait([slow, quick], 60.0) == [quick] and transport.result(quick) == ("two",)
    start = time.monotonic()
    assert transport.wait([slow], 0.3) == [] and time.monotonic() - start < 2.0
    assert transport.wait([slow], 60.0) == [slow] and transport.result(slow) == "done"
    # Errors keep their type, and the actor lives on.
    with pytest.raises(ActorFailedError) as failed:
        ask(transport, one, "fail", "recipe")
    cause = failed.value.cause
    assert isinstance(cause, DataError) and (cause.where, cause.fix) == ("there", "Mend it.")
    with pytest.raises(ActorFailedError, match="a plain one"):
        ask(transport, one, "fail", "plain")
    with pytest.raises(ActorFailedError, match="1 and 2"):
        ask(transport, one, "fail", "local")
    assert ask(transport, one, "say") == ("one",)


def test_a_dead_process_is_an_error_of_its_own(transport, spawn):
    actor, other = spawn("mortal"), spawn("other")
    assert ask(transport, actor, "say") == ("mortal",)
    with pytest.raises(ActorDiedError):
        ask(transport, actor, "die")
    with pytest.raises(ActorDiedError):  # and so is every later call
        ask(transport, actor, "say")
    assert ask(transport, other, "say") == ("other",)


def test_processes_end_with_what_they_started(tmp_path):
    transport = choose(OrchestratorConfig(backend="process"))
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), *(p for p in sys.path if p)])}
    actors = [transport.spawn(Echo, (word,), env=env, log=tmp_path / f"{word}.log") for word in ("idle", "busy")]
    children = [ask(transport, actor, "child") for actor in actors]
    transport.call(actors[1], "wait", (600.0,))
    start = time.monotonic()
    transport.shutdown(actors, grace_s=1.0)
    assert time.monotonic() - start < 10.0
    for pid in [*(actor.popen.pid for actor in actors), *children]:
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_class_that_does_not_import_and_the_log(tmp_path):
    transport = choose(OrchestratorConfig(backend="process"))
    actor = transport.spawn(Echo, (), env={"PYTHONPATH": str(ROOT)}, log=tmp_path / "a.log")
    try:
        with pytest.raises(ActorFailedError, match="missing 1 required positional argument"):
            ask(transport, actor, "say")
        assert "Traceback" in (tmp_path / "a.log").read_text()
        with pytest.raises(ActorDiedError, match="killed by SIGKILL"):
            actor.popen.kill()
            ask(transport, actor, "say")
    finally:
        transport.shutdown([actor])


def test_the_choice(monkeypatch, caplog):
    import recipes.transport as module

    assert choose(OrchestratorConfig()).name == ("ray" if has_ray() else "process")
    monkeypatch.setattr(module, "has_ray", lambda: False)
    assert choose(OrchestratorConfig()).name == "process" and "plain processes, without Ray" in caplog.text
    with pytest.raises(ConfigError, match=r"orchestrator.backend: 'ray' needs Ray.*orchestrator.backend=process"):
        choose(OrchestratorConfig(backend="ray"))


def test_visible_devices_follow_what_the_driver_sees():
    assert visible_devices("cuda", [0, 1], {}) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert visible_devices("rocm", [1], {"CUDA_VISIBLE_DEVICES": "7"}) == {"HIP_VISIBLE_DEVICES": "1"}
    assert visible_devices("cuda", [2, 1], {"CUDA_VISIBLE_DEVICES": "4, 5,GPU-1a"}) == {
        "CUDA_VISIBLE_DEVICES": "GPU-1a,5"
    }
    with pytest.raises(ConfigError, match="the run wants device 1"):
        visible_devices("cuda", [1], {"CUDA_VISIBLE_DEVICES": "3"})
