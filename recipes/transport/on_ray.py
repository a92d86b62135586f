"""Actors on a Ray that belongs to this run alone."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.checkpoint import RESERVE, free_bytes
from recipes.config import OrchestratorConfig
from recipes.errors import EngineError
from recipes.transport import ActorDiedError, ActorFailedError


class RayTransport:
    """See :class:`recipes.transport.Transport`. Ray's processes are bound to the driver's life, and an actor exits when
    its raylet goes."""

    name = "ray"

    def __init__(self, config: OrchestratorConfig) -> None:
        self._config = config

    def require_space(self) -> None:
        """Raise on a disk that cannot take Ray's logs, and its object store where shared memory cannot.

        Raises:
            EngineError: names Ray's temporary folder, the bytes needed and the bytes free.
        """
        folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # as Ray looks for it
        need, free = self._config.object_store_bytes + RESERVE, free_bytes(folder)
        if free < need:
            raise EngineError(
                f"Ray needs about {need >> 20} MiB here (orchestrator.object_store_bytes and logs), {free >> 20} MiB "
                "are free",
                where=folder,
                fix="Free disk space, or set RAY_TMPDIR to a folder with a short path that has room.",
            )

    def start(self) -> None:
        """Start Ray on this machine. It replaces the signal handlers."""
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # On a busy machine Ray's agent needs longer for its imports than the 15 s after which the raylet gives up.
        os.environ.setdefault("RAY_agent_register_timeout_ms", "120000")
        os.environ.setdefault("RAY_raylet_start_wait_time_s", "150")  # read when ray is imported
        import ray

        ray.init(
            address="local",  # not the cluster that RAY_ADDRESS may name
            num_cpus=self._config.num_cpus,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=self._config.object_store_bytes,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )

    def spawn(self, cls: type, args: Sequence[Any], *, env: Mapping[str, str], log: Path) -> Any:
        """An actor without restarts."""
        import ray

        options = {"num_cpus": 0, "max_restarts": 0, "runtime_env": {"env_vars": dict(env)}}
        actor: Any = ray.remote(cls)
        return actor.options(**options).remote(*args)

    def call(self, actor: Any, method: str, args: Sequence[Any]) -> Any:
        """A Ray object reference."""
        return getattr(actor, method).remote(*args)

    def put(self, value: Any) -> Any:
        """In Ray's object store."""
        import ray

        return ray.put(value)

    def wait(self, references: Sequence[Any], timeout: float) -> list[Any]:
        """``ray.wait`` for one."""
        import ray

        return ray.wait(list(references), num_returns=1, timeout=timeout)[0]

    def result(self, reference: Any) -> Any:
        """``ray.get``, with this package's errors."""
        import ray

        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            raise ActorFailedError(getattr(error, "cause", None) or error) from None
        except ray.exceptions.RayActorError as error:
            cause = getattr(error, "cause", None) or getattr(error, "__cause__", None)
            raise ActorDiedError(str(cause or error).strip().splitlines()[-1]) from None
        except ray.exceptions.RayError as error:  # an exception that Ray cannot rebuild here
            raise ActorFailedError(str(error)) from None

    def shutdown(self, actors: Sequence[Any], grace_s: float = 5.0) -> None:
        """End the actors, then Ray."""
        if not actors and not self._running():
            return
        import ray

        if not ray.is_initialized():
            return
        with contextlib.suppress(Exception):
            ray.wait([a.shutdown.remote() for a in actors], num_returns=len(actors), timeout=grace_s)
        for actor in actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        with contextlib.suppress(Exception):
            ray.shutdown()

    def _running(self) -> bool:
        import ray

        return bool(ray.is_initialized())
