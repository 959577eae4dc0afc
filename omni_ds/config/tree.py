"""Walk the JSON Schema: find a key's node, say in words what it accepts, list all keys."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

Node = dict[str, Any]
Path = tuple[str | int, ...]


class SchemaTree:
    """A JSON Schema with the questions asked of it by messages and documentation."""

    def __init__(self, schema: Node):
        self.root = schema
        self._definitions = schema.get("$defs", {})

    def branches(self, node: Node) -> list[Node]:
        """The node itself, or what its reference or its alternatives stand for."""
        if "$ref" in node:
            return self.branches(self._definitions[node["$ref"].rsplit("/", 1)[1]])
        if "anyOf" in node:
            return [leaf for branch in node["anyOf"] for leaf in self.branches(branch)]
        return [node]

    def child(self, node: Node, key: str | int) -> Node | None:
        """The node of a key or list index, None where the schema has none."""
        for branch in self.branches(node):
            if isinstance(key, int):
                found = branch.get("items")
            else:
                found = branch.get("properties", {}).get(key) or branch.get("additionalProperties")
            if isinstance(found, dict):
                return found
        return None

    def resolve(self, location: Sequence[str | int]) -> tuple[Path, Node]:
        """The longest part of `location` that exists, with its node (the rest names alternatives of a
        type)."""
        path: Path = ()
        node = self.root
        for key in location:
            found = self.child(node, key)
            if found is None:
                break
            path, node = (*path, key), found
        return path, node

    def keys(self, node: Node) -> list[str]:
        """Known keys of an object, empty for anything else."""
        return [key for branch in self.branches(node) for key in branch.get("properties", {})]

    def containers(self, node: Node) -> list[Node]:
        """The branches, of which only the list where entries may also stand alone."""
        branches = self.branches(node)
        return [branch for branch in branches if self.keys(branch.get("items", {}))] or branches

    def paths(self, node: Node | None = None, prefix: str = "") -> Iterator[tuple[str, Node]]:
        """All keys with their dotted path; `<name>` stands for any name, `[]` for any index."""
        for branch in self.containers(self.root if node is None else node):
            for key, child in branch.get("properties", {}).items():
                path = f"{prefix}.{key}" if prefix else key
                yield path, child
                yield from self.paths(child, path)
            entry = branch.get("additionalProperties")
            if isinstance(entry, dict):
                yield from self.paths(entry, f"{prefix}.<name>")
            if isinstance(branch.get("items"), dict):
                yield from self.paths(branch["items"], f"{prefix}[]")

    def accepted(self, node: Node) -> str:
        """What a key accepts, in words."""
        texts: list[str] = []
        for branch in self.branches(node):
            text = self._accepted_branch(branch)
            if text not in texts:
                texts.append(text)
        return " or ".join(texts)

    def _accepted_branch(self, node: Node) -> str:
        if "const" in node:
            return json.dumps(node["const"])
        if "enum" in node:
            return " or ".join(json.dumps(value) for value in node["enum"])
        kind = node.get("type")
        if kind in ("integer", "number"):
            return ("a whole number" if kind == "integer" else "a number") + _bounds(node)
        if kind == "array":
            items = node.get("items", {})
            return f"a list ({self.accepted(items)})" if items else "a list"
        if kind == "object":
            keys = node.get("properties")
            return f"an object with the keys {', '.join(keys)}" if keys else "an object"
        if kind == "string" and "examples" in node:
            return f"a string such as {json.dumps(node['examples'][0])}"
        return {"string": "a string", "boolean": "true or false", "null": "null"}.get(kind, "any value")


def _bounds(node: Node) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {node[key]}" for key, sign in signs.items() if key in node]
    return " " + " and ".join(bounds) if bounds else ""


def dotted(path: Sequence[str | int]) -> str:
    """`("a", 0, "b")` as `a[0].b`."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text
