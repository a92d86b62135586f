"""Exit 0 when the running interpreter satisfies a lock file, else print each difference (standard library only)."""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def differences(lock: Path) -> list[str]:
    found = []
    for line in lock.read_text(encoding="utf-8").splitlines():
        requirement = line.split("#", 1)[0].strip()
        if not requirement:
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+)", requirement)
        if match is None:
            found.append(f"{lock.name}: not a pin: {requirement}")
            continue
        name, wanted = match.groups()
        try:
            have = version(name)
        except PackageNotFoundError:
            found.append(f"{name}: wanted {wanted}, not installed")
            continue
        # A local version label (+cpu, +cu130) in the lock must match; one that only the installed wheel has may differ.
        if have != wanted and have.split("+")[0] != wanted:
            found.append(f"{name}: wanted {wanted}, found {have}")
    return found


if __name__ == "__main__":
    problems = differences(Path(sys.argv[1]))
    print("\n".join(problems))
    sys.exit(bool(problems))
