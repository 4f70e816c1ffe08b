"""The page of failure modes names tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`([a-z_0-9]+/test_[a-z_0-9]+\.py)::(test_[a-zA-Z_0-9]+)`")


def test_every_test_that_the_page_names_exists():
    named = NAMED.findall((ROOT / "docs" / "failure-modes.md").read_text())
    assert len(named) > 50
    missing = []
    for file, name in named:
        path = ROOT / "tests" / file
        tree = ast.parse(path.read_text()) if path.exists() else ast.Module([], [])
        found = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        if name not in found:
            missing.append(f"{file}::{name}")
    assert not missing
