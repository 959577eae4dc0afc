"""The JSON Schema of the configuration, for editors, messages and documentation."""

from __future__ import annotations

from typing import Any

from omni_ds.config.root import Config


def describe_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of the file a user edits; every key has a description."""
    body = _tidy(Config.model_json_schema(mode="validation"))
    body["properties"] = {
        "$schema": {"type": "string", "description": "Where an editor finds this schema; not read."},
        **body["properties"],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "omni_ds configuration",
        **body,
    }


def _tidy(node: Any, *, names: bool = False) -> Any:
    """Without pydantic's titles, line breaks in descriptions, and defaults that are whole sections."""
    if isinstance(node, list):
        return [_tidy(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    tidy = {}
    for key, value in node.items():
        if names:
            tidy[key] = _tidy(value)
        elif key == "title" or (key == "default" and "$ref" in node):
            continue
        elif key == "description":
            tidy[key] = " ".join(value.split())
        elif key == "default":
            tidy[key] = value
        else:
            tidy[key] = _tidy(value, names=key in ("properties", "$defs"))
    return tidy
