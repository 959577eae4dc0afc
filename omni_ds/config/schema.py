"""The JSON Schema of the configuration, for editors, messages and documentation."""

from __future__ import annotations

from typing import Any

from omni_ds.config.deepspeed import PassedOn
from omni_ds.config.root import Config


def describe_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of the file a user edits; every key has a description."""
    body = _tidy(Config.model_json_schema(mode="validation"))
    keys = body["properties"]
    passed_on = {key: keys.pop(key) for key in PassedOn.model_fields}
    omni = keys.pop("omni")
    editor = {"type": "string", "description": "Where an editor finds this schema; not read."}
    body["properties"] = {"$schema": editor, **keys, **passed_on, "omni": omni}
    _describe(body, body["$defs"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "omni_ds configuration",
        **body,
    }


def _describe(node: Any, definitions: dict[str, Any]) -> None:
    """Give a key that only refers to a section the section's description: pydantic leaves equal ones out."""
    if isinstance(node, dict):
        for value in node.get("properties", {}).values():
            if "$ref" in value and "description" not in value:
                value["description"] = definitions[value["$ref"].rsplit("/", 1)[1]]["description"]
    for value in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _describe(value, definitions)


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
