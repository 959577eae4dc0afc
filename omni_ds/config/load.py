"""Read the JSON file, apply `--set`, validate."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from omni_ds.config.limits import refuse_unsupported
from omni_ds.config.messages import error_lines
from omni_ds.config.root import Config
from omni_ds.config.schema import describe_schema
from omni_ds.config.tree import SchemaTree
from omni_ds.errors import UserError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in the JSON file `path`, with `overrides` (`dotted.key=value`) on top.

    UserError lists everything that is wrong, and everything that is not supported yet.
    """
    config = parse_config(path, overrides)
    with _named(path):
        refuse_unsupported(config)
    return config


def parse_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Like `load_config`, for a configuration that is only looked at: features to come are accepted."""
    raw = apply_overrides(read_json(path), overrides)
    with _named(path):
        return validate(raw)


def validate(raw: dict[str, Any]) -> Config:
    """The Config of plain JSON values; UserError with one line for each fault."""
    try:
        return Config.model_validate({key: value for key, value in raw.items() if key != "$schema"})
    except ValidationError as error:
        raise UserError("\n".join(error_lines(error, _tree()))) from None


class _named:
    """Put the file's name before the message of a UserError."""

    def __init__(self, path: str | Path):
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, UserError):
            lines = str(error).splitlines()
            if len(lines) == 1:
                raise UserError(f"{self.path}: {lines[0]}") from None
            raise UserError("\n  ".join([f"{self.path}: {len(lines)} problems", *lines])) from None


@functools.cache
def _tree() -> SchemaTree:
    return SchemaTree(describe_schema())


def read_json(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file; UserError for one that is missing, unreadable or not JSON."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give the path of a JSON configuration") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give a readable JSON file") from None
    try:
        raw = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}: not JSON: {error.msg} in line {error.lineno}, column {error.colno}; correct it there"
        ) from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: holds a {type(raw).__name__}; expected an object {{...}} at the top level")
    return raw


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for key, value in pairs:
        if key in unique:
            raise UserError(f"the key {key} appears twice in one object; remove one")
        unique[key] = value
    return unique


def _no_constant(name: str) -> Any:
    raise UserError(f"{name} is not a JSON number; give a finite one")


def apply_overrides(raw: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `raw` with each `dotted.key=value` set, in order.

    The value is JSON, or else a bare string. Missing objects on the way are made; entries of a list are
    `key[0]` or `key.0`.
    """
    result = copy.deepcopy(raw)
    for override in overrides:
        key, equals, text = override.partition("=")
        path = [part for part in re.split(r"[.\[\]]+", key.strip()) if part]
        if not equals or not path:
            raise UserError(
                f"--set {override}: expected dotted.key=value, for example omni.train.max_steps=10"
            )
        try:
            value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=str)
        except json.JSONDecodeError:
            value = text
        target: Any = result
        for depth, part in enumerate(path[:-1]):
            here = ".".join(path[:depth])
            if isinstance(target, dict) and target.get(part) is None:
                target[part] = {}
            target = _entry(override, here, target, part)[part if isinstance(target, dict) else int(part)]
        target = _entry(override, ".".join(path[:-1]), target, path[-1])
        target[path[-1] if isinstance(target, dict) else int(path[-1])] = value
    return result


def _entry(override: str, here: str, target: Any, part: str) -> Any:
    """`target`, after making sure that `part` can be set in it."""
    if isinstance(target, list):
        if not part.isdigit() or int(part) >= len(target):
            raise UserError(f"--set {override}: {here} is a list of {len(target)}; use {here}[0] and so on")
    elif not isinstance(target, dict):
        raise UserError(
            f"--set {override}: {here} is {json.dumps(target)}, which has no {part}; set {here} whole"
        )
    return target
