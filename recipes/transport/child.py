"""The process of one actor: ``python -m recipes.transport.child <file descriptor of the socket>``.

A thread reads the socket, so the driver never waits to send; the main thread runs the calls in order. The end of the
socket is the end of the driver: the whole session is killed then, at once and whatever the main thread does.
"""

from __future__ import annotations

import importlib
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any


def _read(pipe: Connection, inbox: queue.SimpleQueue[bytes]) -> None:
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)  # the driver is gone; this ends the actor and what it started
        inbox.put(message)
        if not message:
            return


def _portable(error: BaseException) -> BaseException | str:
    """``error`` where the driver can rebuild it without importing more than this project; else its text."""
    text = f"{type(error).__name__}: {error}"
    if type(error).__module__.split(".")[0] not in ("builtins", "recipes", "rl_kernel"):
        return text
    try:
        rebuilt = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever an exception's own pickling raises
        return text
    return error if str(rebuilt) == str(error) else text


def _answer(pipe: Connection, number: int, good: bool, value: Any) -> None:
    try:
        data = pickle.dumps((number, good, value))
    except Exception as error:  # noqa: BLE001 - an answer that cannot travel is the method's error
        traceback.print_exc()
        data = pickle.dumps((number, False, f"the answer cannot be sent: {type(error).__name__}: {error}"))
    pipe.send_bytes(data)


def main() -> None:
    """Build the actor, answer calls until the last message."""
    pipe = Connection(int(sys.argv[1]))
    os.set_inheritable(pipe.fileno(), False)  # a process started here would keep the socket open
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, inbox), daemon=True).start()
    actor: Any = None
    broken: BaseException | str = "it was not built"
    try:
        path, args = pickle.loads(inbox.get())
        module, name = path.split(":")
        actor = getattr(importlib.import_module(module), name)(*pickle.loads(args))
    except Exception as error:  # noqa: BLE001 - the first call reports it
        traceback.print_exc()
        broken = _portable(error)
    while message := inbox.get():
        number, method, parts = pickle.loads(message)
        try:
            if actor is None:
                _answer(pipe, number, False, broken)
                continue
            value = getattr(actor, method)(*(pickle.loads(part) for part in parts))
        except Exception as error:  # noqa: BLE001 - every error of a method is the caller's
            traceback.print_exc()
            _answer(pipe, number, False, _portable(error))
        else:
            _answer(pipe, number, True, value)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # not through the exit handlers of the libraries, which may wait for each other


if __name__ == "__main__":
    main()
