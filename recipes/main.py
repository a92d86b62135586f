"""Entry point: ``python -m recipes.main [hydra overrides]``. Hydra composes the configuration and stops here."""

from __future__ import annotations

import difflib
import os
import shlex
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig

from recipes.config import RunConfig, build_config
from recipes.errors import ConfigError, RecipeError
from rl_kernel.errors import RLKernelError

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
ConfigStore.instance().store(name="schema", node=RunConfig)


def _keys(cls: type, prefix: str = "") -> list[str]:
    hints = get_type_hints(cls)
    keys: list[str] = []
    for item in fields(cls):
        kind = hints[item.name]
        keys += _keys(kind, f"{prefix}{item.name}.") if is_dataclass(kind) else [prefix + item.name]  # type: ignore[arg-type]
    return keys


def check_overrides(overrides: list[str]) -> None:
    """Refuse an override whose key or group choice does not exist, with the nearest name that does.

    Raises:
        ConfigError: names the key and the fix.
    """
    groups = {path.name: sorted(f.stem for f in path.glob("*.yaml")) for path in CONFIGS.iterdir() if path.is_dir()}
    known = [*_keys(RunConfig), *groups]
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except (OverrideParseException, HydraException) as error:
        raise ConfigError(str(error).splitlines()[0], where="command line", fix="Write key=value.") from None
    for override in parsed:
        key = override.key_or_group
        if key.startswith("hydra"):
            continue
        if override.is_delete():
            raise ConfigError("cannot be removed", where=key, fix="Leave the override out.")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise ConfigError(
                "is not a configuration key", where=key, fix=hint + "recipes/config.py lists all of them."
            )
        if key == "trainer.output_dir":
            raise ConfigError("follows Hydra's run directory", where=key, fix="Use hydra.run.dir=<folder>.")
        value = override.value()
        if key in groups and value not in groups[key]:
            raise ConfigError(f"{value!r} does not exist", where=key, fix=f"Choose one of {', '.join(groups[key])}.")


def _resume_command(output_dir: str) -> str:
    kept = [a for a in sys.argv[1:] if not a.startswith(("hydra.run.dir=", "trainer.resume="))]
    return shlex.join(["python", "-m", "recipes.main", *kept, f"hydra.run.dir={output_dir}"])


def _of_file(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}. Check that hydra.run.dir is a folder that can be written."


def _launch(config: RunConfig) -> int:
    if config.orchestrator.name == "vime":
        import recipes.vime as vime

        launch: Any = getattr(vime, "launch", None)
        if launch is None:
            raise ConfigError(
                "vime is not available in this release: recipes.vime has no launch function",
                where="orchestrator",
                fix="Use orchestrator=local.",
            )
        return int(launch(config) or 0)
    from recipes.run import run

    return run(config, resume_command=_resume_command(config.trainer.output_dir))


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")
def _hydra_main(tree: DictConfig) -> None:
    try:
        config = build_config(tree)
        config.trainer.output_dir = os.path.abspath(HydraConfig.get().runtime.output_dir)
        code = _launch(config)
    except ConfigError as error:
        print(f"configuration error: {error}", file=sys.stderr)
        code = 2
    except (RecipeError, RLKernelError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    except OSError as error:
        if error.filename is None:  # not about a file: a fault of the program, shown with its traceback
            raise
        print(f"error: {_of_file(error)}", file=sys.stderr)
        code = 1
    sys.exit(code)  # from here, so that Hydra adds no traceback to a message that already says what to do


def main() -> None:
    """Compose, validate, run. Exit codes: 0 done, 1 failed, 2 configuration refused, 130 interrupted."""
    try:
        check_overrides([a for a in sys.argv[1:] if a.startswith("~") or ("=" in a and not a.startswith("-"))])
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")
        _hydra_main()
    except ConfigError as error:
        print(f"configuration error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # Hydra could not make its run directory
        if error.filename is None:
            raise
        print(f"configuration error: hydra.run.dir: {_of_file(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # before the run takes the signals over
        sys.exit(130)
    except HydraException as error:
        cause = str(error.__cause__).splitlines()[0] if error.__cause__ else ""
        print(f"configuration error: {error}" + (f": {cause}" if cause else ""), file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
