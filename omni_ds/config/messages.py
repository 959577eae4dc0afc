"""pydantic's errors as one line each: which key, what was given, what is accepted."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from omni_ds.config.deepspeed import REFUSED
from omni_ds.config.foreign import LATER, VALUES, translate
from omni_ds.config.nearest import nearest
from omni_ds.config.tree import Node, Path, SchemaTree, dotted


def error_lines(error: ValidationError, tree: SchemaTree) -> list[str]:
    """One line for each key that is wrong, in the order of the schema; alternatives of a type are joined."""
    lines: dict[str, None] = {}
    for fault in error.errors(include_url=False):
        for line in _lines(fault, tree):
            lines.setdefault(line)
    return list(lines)


def _lines(fault: dict[str, Any], tree: SchemaTree) -> list[str]:
    location, kind = fault["loc"], fault["type"]
    if kind == "extra_forbidden":
        return [unknown_key(*tree.resolve(location[:-1]), str(location[-1]), tree)]
    path, node = tree.resolve(location)
    if kind == "value_error":
        prefix = f"{dotted(path)}: " if path else ""
        return [prefix + line for line in str(fault["ctx"]["error"]).splitlines()]
    if kind == "missing":
        return [f"{dotted(path)}: missing; expected {tree.accepted(node)}"]
    if kind == "too_short":
        return [f"{dotted(path)}: is empty; expected at least one entry"]
    hint = ""
    if isinstance(fault["input"], str) and fault["input"] == "auto":
        hint = "; auto cannot be worked out here"
    elif path[-1:] == ("path",) or "string" in kind and not isinstance(fault["input"], str | None):
        hint = "; put text in quotes (on a command line: 'key=\"text\"')"
    if kind == "literal_error" and isinstance(fault["input"], str):
        hint = _meant(fault["input"], node, tree) or hint
    return [
        f"{dotted(path) or 'the file'}: got {_short(fault['input'])}, expected {tree.accepted(node)}{hint}"
    ]


def _meant(value: str, node: Node, tree: SchemaTree) -> str:
    names = [name for branch in tree.branches(node) for name in branch.get("enum", [])]
    names = [name for name in names if isinstance(name, str)]
    translation = VALUES.get(value.lower())
    near = [translation] if translation in names else nearest(value, names)
    return f"; did you mean {json.dumps(near[0])}?" if near else ""


def unknown_key(path: Path, node: Node, key: str, tree: SchemaTree) -> str:
    """The line for a key that is not known at `path`: a translation, its right place, or the nearest name."""
    where = dotted((*path, key))
    if not path and key in REFUSED:
        return f"{where}: this DeepSpeed key is not used: {REFUSED[key]}"
    if key.lower() in LATER:
        return f"{where}: {LATER[key.lower()]}"
    translation = translate(key)
    if translation is not None:
        return f"{where}: is another trainer's name; here it is {translation}"
    siblings = tree.keys(node)
    near = nearest(key, siblings)
    if near:
        return f"{where}: unknown key; did you mean {dotted((*path, near[0]))}?"
    everywhere: dict[str, str] = {}
    for dotted_path, _ in tree.paths():
        everywhere.setdefault(dotted_path.rsplit(".", 1)[-1], dotted_path)
    near = nearest(key, everywhere)
    if near:
        return f"{where}: unknown key; did you mean {everywhere[near[0]]}?"
    return f"{where}: unknown key; known here: {', '.join(siblings)}"


def _short(value: Any) -> str:
    try:
        text = json.dumps(value)
    except TypeError:
        text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
