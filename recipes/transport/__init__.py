"""Processes behind one small interface, on Ray or on plain processes.

A :class:`Transport` starts an actor (an object of a class, in a process of its own), calls its methods, waits for the
first of several answers and ends processes. What a call, an error or a death looks like to :mod:`recipes.cluster` is
the same on both. Ray is imported only when it is used.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from recipes.config import OrchestratorConfig
from recipes.errors import ConfigError

__all__ = ["ActorDiedError", "ActorFailedError", "Transport", "choose", "has_ray"]

log = logging.getLogger(__name__)


class ActorFailedError(Exception):
    """A method raised ``cause``; the process lives on."""

    def __init__(self, cause: BaseException | str) -> None:
        super().__init__(str(cause))
        self.cause = cause


class ActorDiedError(Exception):
    """The process ended before it answered; the message says how."""


class Transport(Protocol):
    """Starts, calls and ends actors. Actors die with the process that started them, however that ends."""

    name: str

    def require_space(self) -> None:
        """Raise ``EngineError`` where the disk cannot take what :meth:`start` writes; nothing was started then."""
        ...

    def start(self) -> None:
        """Get ready to spawn. It may replace signal handlers."""
        ...

    def spawn(self, cls: type, args: Sequence[Any], *, env: Mapping[str, str], log: Path) -> Any:
        """An actor: ``cls(*args)`` in a process with ``env``, which holds before the process imports anything. The
        class itself sends its output to ``log``; what is printed before that belongs there too, where possible."""
        ...

    def call(self, actor: Any, method: str, args: Sequence[Any]) -> Any:
        """Call a method, return a reference to the answer. Calls of one actor run one after the other, in order."""
        ...

    def put(self, value: Any) -> Any:
        """``value`` serialised once, to be given as an argument of many calls."""
        ...

    def wait(self, references: Sequence[Any], timeout: float) -> list[Any]:
        """Those that are answered, at least one; empty when there is none after ``timeout`` seconds."""
        ...

    def result(self, reference: Any) -> Any:
        """The answer of a reference that :meth:`wait` returned.

        Raises:
            ActorFailedError: the method raised.
            ActorDiedError: the process ended.
        """
        ...

    def shutdown(self, actors: Sequence[Any], grace_s: float = 5.0) -> None:
        """Call ``shutdown`` of every actor, give them ``grace_s``, end every process. Never raises."""
        ...


def has_ray() -> bool:
    """Whether Ray is installed."""
    try:
        return importlib.util.find_spec("ray") is not None
    except (ImportError, ValueError):
        return False


def choose(config: OrchestratorConfig) -> Transport:
    """The transport of ``orchestrator.backend``; ``auto`` is Ray where it is installed, said once in the log.

    Raises:
        ConfigError: ``ray`` was asked for and is not installed.
    """
    backend = config.backend
    if backend == "ray" and not has_ray():
        raise ConfigError(
            "'ray' needs Ray, which is not installed",
            where="orchestrator.backend",
            fix="Install it (pip install 'ray[default]'), or use orchestrator.backend=process.",
        )
    if backend == "auto":
        backend = "ray" if has_ray() else "process"
        level = logging.INFO if backend == "ray" else logging.WARNING
        log.log(level, "orchestrator.backend=auto: %s", "Ray" if backend == "ray" else "plain processes, without Ray")
    if backend == "ray":
        from recipes.transport.on_ray import RayTransport

        return RayTransport(config)
    from recipes.transport.on_processes import ProcessTransport

    return ProcessTransport()
