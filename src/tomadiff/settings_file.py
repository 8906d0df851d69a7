"""Settings in a file: what to ask of `apply`, and notes on where that comes from."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from torch import nn

from .config import Config, make
from .errors import ConfigError
from .runtime.files import atomic_write, parse_json, printable

VERSION = 1  # of the file, which it opens with
HEAD, PARTS = "tomadiff settings", ("config", "notes")
MADE_FOR = "model class"  # the note that tells for which models the settings were measured


@dataclass(frozen=True)
class Settings:
    """A configuration, and whatever is worth knowing about it: model, device, size, measured figures."""

    config: Config
    notes: dict[str, Any] = field(default_factory=dict)


def save(path: str | PathLike[str], config: Config, notes: Mapping[str, Any] | None = None) -> None:
    """Write a settings file, whole or not at all."""
    text = dumps(config, notes)
    atomic_write(Path(path), lambda partial: partial.write_text(text))


def dumps(config: Config, notes: Mapping[str, Any] | None = None) -> str:
    """What is in a settings file. Of the configuration, only what was asked for."""
    return json.dumps({HEAD: VERSION, "config": config.asked(), "notes": dict(notes or {})}, indent=1) + "\n"


def load(path: str | PathLike[str]) -> Settings:
    """Read a settings file, or say what is wrong with it."""
    content = _read(Path(path))
    if not isinstance(content, dict) or HEAD not in content:
        raise ConfigError(f'{fspath(path)} is no settings file: it must be an object with "{HEAD}" in it')
    if content[HEAD] != VERSION:
        raise ConfigError(
            f"{fspath(path)} has settings of version {content[HEAD]!r}, and this tomadiff reads version "
            f"{VERSION}: write it anew"
        )
    unknown = [key for key in content if key not in (HEAD, *PARTS)]
    if unknown:
        raise ConfigError(f"{fspath(path)}: unknown {', '.join(map(repr, unknown))}; there are {PARTS}")
    config, notes = content.get("config"), content.get("notes", {})
    if not isinstance(config, dict) or not isinstance(notes, dict):
        raise ConfigError(f'{fspath(path)}: "config" must be an object with settings, and "notes" one, too')
    try:
        given = {name: _revive(value) for name, value in config.items()}
        return Settings(make(None, given), notes)
    except ValueError as error:
        raise ConfigError(f"{fspath(path)}: {error}") from error


def made_for_another(found: Settings, model: nn.Module) -> str | None:
    """The class of models that the settings were measured with, if the file names another than this one's."""
    made_for = found.notes.get(MADE_FOR)
    return None if made_for in (None, type(model).__name__) else printable(str(made_for))


def warn_of_another(path: str | PathLike[str], found: Settings, model: nn.Module) -> None:
    """Warn if the settings were measured with models of another class."""
    if made_for := made_for_another(found, model):
        warnings.warn(
            f"{fspath(path)} was made for {made_for}, and this is {type(model).__name__}: what is fast and "
            "close there need not be so here; measure it with `tomadiff eval`, or find others with "
            "`tomadiff tune`",
            stacklevel=3,
        )


def _read(path: Path) -> Any:
    try:
        return parse_json(path.read_text(encoding="utf-8-sig"))  # editors may put a mark in front
    except OSError as error:
        raise ConfigError(
            f"{fspath(path)!r} can't be read as a settings file ({error.strerror}); presets are named with "
            "preset=..., and single settings by keyword"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{fspath(path)} is no settings file: it is not JSON ({error})") from error


def _revive(value: Any) -> Any:
    """Keys of JSON are text: levels of a model become numbers again."""
    if isinstance(value, dict):
        return {int(key) if key.isdecimal() else key: _revive(part) for key, part in value.items()}
    return [_revive(part) for part in value] if isinstance(value, list) else value
