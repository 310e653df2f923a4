"""The files that a command or a configuration names: followed where they are here, and said where they are not."""

from __future__ import annotations

import re

from fsdp_doctor.check.config_findings import ConfigFinding, note, unknown
from fsdp_doctor.check.launch_commands import NOT_READ, SECTION
from fsdp_doctor.check.reading import followed
from fsdp_doctor.check.settings import Setting, Settings, Unreadable

# `--config FILE`, and `train FILE` or `@ FILE`; the file that a YAML changes, as NeMo-RL's do. What `--config_file` of
# accelerate means is accelerate's.
_NAMING = ("config", f"{SECTION}.config", "defaults")
_MOST_FOLLOWED = 5
_FILE = re.compile(r"[^\n]+\.(?:ya?ml|json|toml)", re.IGNORECASE)


def with_named_files(settings: Settings) -> Settings:
    """What names a file goes before what that file says, and so on."""
    names = _naming(settings)
    for _ in range(_MOST_FOLLOWED):
        if not names or (found := _followed(names.pop(0))) is None:
            continue
        settings = Settings.joined(found, settings)
        names += _naming(found)
    return settings


def not_read(settings: Settings) -> list[ConfigFinding]:
    """Files that are not here, and commands beside the one that was taken for the training."""
    missing = "this names a file that cannot be read here, so what it sets is not known; give it beside"
    several = "of several commands that look like the training the last is read"
    others = settings.first(NOT_READ)
    return [
        *(unknown(missing, row) for row in _naming(settings) if _followed(row) is None),
        *([note(several, others)] if others is not None else []),
    ]


def _naming(settings: Settings) -> list[Setting]:
    rows = [settings.rows[key] for key in _NAMING if key in settings]
    return [row for row in rows if isinstance(row.value, str) and _FILE.fullmatch(row.value)]


def _followed(row: Setting) -> Settings | None:
    try:
        return followed(row)
    except Unreadable:
        return None
