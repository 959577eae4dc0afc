"""`python -m omni_ds.config`: write the generated files of the repository."""

import argparse
import json
from pathlib import Path

from omni_ds.config.docs import render_docs
from omni_ds.config.schema import describe_schema


def main() -> None:
    """Write the JSON Schema and the documentation of every key."""
    parser = argparse.ArgumentParser(prog="python -m omni_ds.config", description=main.__doc__)
    parser.add_argument("--schema", type=Path, default=Path("ds_configs/schema.json"))
    parser.add_argument("--docs", type=Path, default=Path("docs/config.md"))
    arguments = parser.parse_args()
    schema = describe_schema()
    texts = {arguments.schema: json.dumps(schema, indent=2) + "\n", arguments.docs: render_docs(schema)}
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
