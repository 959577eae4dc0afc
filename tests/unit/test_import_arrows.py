"""Who may import whom: the architecture's arrows, read from the source."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Folder -> the project's packages it may import (itself always); the table of docs/design.md.
ALLOWED = {
    "omni_ds/config": {"omni_ds.errors"},
    "omni_ds/plan": {"omni_ds.config", "omni_ds.errors"},
    "omni_ds/parallel": {"omni_ds.plan", "omni_ds.errors"},
    "omni_ds/show": {"omni_ds.plan"},
    "omni_ds/emulate": {"omni_ds.plan", "omni_ds.parallel", "omni_ds.engine", "omni_ds.errors", "models"},
    "models": {"omni_ds.plan", "omni_ds.parallel", "omni_ds.errors"},
    "data": {"omni_ds.plan", "omni_ds.config", "omni_ds.errors"},
    "omni_ds/checkpoint": {"omni_ds.plan", "omni_ds.parallel", "omni_ds.config", "omni_ds.errors", "models"},
}
FORBIDDEN = {
    "omni_ds/config": {"torch", "deepspeed", "transformers"},
    "omni_ds/plan": {"torch", "deepspeed", "transformers", "numpy"},
    "omni_ds/show": {"torch", "deepspeed", "transformers", "numpy"},
    "models": {"deepspeed"},
    "data": {"deepspeed"},
}
OURS = ("omni_ds", "models", "data", "run")


def sources(folder: str) -> list[Path]:
    skip = ("hf_code", "digits")
    return [p for p in sorted((ROOT / folder).rglob("*.py")) if not any(part in skip for part in p.parts)]


def imported(path: Path) -> list[tuple[int, str]]:
    """Modules a file imports when it is imported itself or when its functions run; type-checking ones too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.append((node.lineno, node.module))
    return found


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_follow_the_arrows(folder: str) -> None:
    itself = folder.replace("/", ".")
    allowed = ALLOWED[folder] | {itself}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sources(folder)
        for line, module in imported(path)
        if module.split(".")[0] in OURS
        and not any(module == name or module.startswith(name + ".") for name in allowed)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_heavy_packages_stay_where_they_belong(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sources(folder)
        for line, module in imported(path)
        if module.split(".")[0] in FORBIDDEN[folder]
    ]
    assert not wrong, "\n".join(wrong)


def test_deepspeed_only_in_engine_parallel_checkpoint() -> None:
    places = ("omni_ds/engine", "omni_ds/parallel", "omni_ds/checkpoint", "tests", "benchmarks")
    wrong = [
        str(path.relative_to(ROOT))
        for path in sources(".")
        if not str(path.relative_to(ROOT)).startswith(places)
        and not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
        and any(module.split(".")[0] == "deepspeed" for _, module in imported(path))
    ]
    assert not wrong, wrong
