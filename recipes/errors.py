"""Exceptions of the recipes. Every message says what is wrong, where, and what to do about it."""

from __future__ import annotations


class RecipeError(Exception):
    """Base class of every error raised by ``recipes``.

    Args:
        what: the fact that is wrong, with the offending value.
        where: the config key, file, tensor or request it was found in.
        fix: what the reader can do.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        text = f"{where}: {what}" if where else what
        super().__init__(f"{text}. {fix}" if fix else text)

    def __reduce__(self) -> tuple[object, ...]:
        # The default would call the class with the joined message alone, and lose `where` and `fix` between processes.
        return _rebuild, (type(self), self.what, self.where, self.fix)


def _rebuild(cls: type[RecipeError], what: str, where: str, fix: str) -> RecipeError:
    return cls(what, where=where, fix=fix)


class ConfigError(RecipeError, ValueError):
    """A configuration value is unknown, out of range or contradicts another one. Raised before any engine starts."""


class DataError(RecipeError, ValueError):
    """A data set line, prompt or token cannot be used."""


class EngineError(RecipeError, RuntimeError):
    """An engine failed, lacks an extension point, or returned something that must not be trained on."""


class WeightSyncError(RecipeError, RuntimeError):
    """Weights given to an engine are incomplete, malformed or not what the engine holds afterwards."""


class CheckpointError(RecipeError, RuntimeError):
    """A checkpoint cannot be written, or cannot be read back as written."""
