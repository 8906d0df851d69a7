"""The rooms of the package and of its tests: who may import whom."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src"
PACKAGE = SOURCE / "tomadiff"
# What a room may import stands beside or below it. Settings and errors are everybody's.
FLOORS = {"core": 0, "errors": 1, "methods": 2, "models": 2, "kernels": 2, "config": 2, "runtime": 3}
FLOORS |= {"tools": 5, "__main__": 5}
API = 4  # the other files at the root
ADDED = """
import json, sys
before = set(sys.modules)
import tomadiff
at_once = set(sys.modules) - before
import torch, diffusers.hooks
before = set(sys.modules)
tomadiff.apply
print(json.dumps([sorted(at_once), sorted(set(sys.modules) - before)]))
"""


def is_module(name: str) -> bool:
    path = SOURCE.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports(file: Path) -> Iterator[str]:
    """Full names of the modules that a file imports anywhere, also within functions."""
    package = file.relative_to(SOURCE).parts[:-1] if file.is_relative_to(SOURCE) else ()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*above, *([node.module] if node.module else [])))
            for alias in node.names:
                if (module, alias.name) != ("tomadiff", "__version__"):  # a constant, which anybody may say
                    yield f"{module}.{alias.name}" if is_module(f"{module}.{alias.name}") else module


def floor(parts: tuple[str, ...]) -> int:
    """parts: below the package, e.g. ("core", "plan")"""
    return FLOORS.get(parts[0], API) if parts else API


def sources() -> list[Path]:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 100
    return files


def test_imports_never_point_upwards() -> None:
    upwards = []
    for file in sources():
        here = floor(file.relative_to(PACKAGE).with_suffix("").parts)
        for name in imports(file):
            top, *below = name.split(".")
            if top == "tomadiff" and floor(tuple(below)) > here:
                upwards.append(f"{file.relative_to(SOURCE)} imports {name}")
    assert not upwards


def test_core_imports_torch_and_nothing_else() -> None:
    allowed = {"torch", *sys.stdlib_module_names}
    others = {
        name
        for file in sorted((PACKAGE / "core").rglob("*.py"))
        for name in imports(file)
        if name.split(".")[0] not in allowed and not name.startswith("tomadiff.core")
    }
    assert not others


def test_the_root_of_the_package_has_few_files() -> None:
    assert len([path for path in PACKAGE.iterdir() if path.is_file()]) <= 8
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms == {"core", "methods", "kernels", "models", "runtime", "tools"}


def test_importing_the_package_waits_for_torch_and_loads_neither_tools_nor_extras() -> None:
    done = subprocess.run([sys.executable, "-c", ADDED], capture_output=True, text=True, check=True)
    at_once, later = json.loads(done.stdout)
    assert "tomadiff" in at_once and "torch" not in at_once
    assert "tomadiff.runtime.session" in later
    added = [*at_once, *later]
    known = {"tomadiff", "torch", "diffusers", *sys.stdlib_module_names}
    assert not [name for name in added if name.split(".")[0] not in known]
    assert not [name for name in added if name.startswith(("tomadiff.tools", "tomadiff.kernels."))]


def test_no_test_file_imports_another() -> None:
    files = sorted(TESTS.rglob("test_*.py"))
    assert len(files) > 20
    assert not [
        f"{file.name} imports {name}" for file in files for name in imports(file) if name.startswith("test_")
    ]
