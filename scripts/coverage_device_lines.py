#!/usr/bin/env python3
"""Hold the code that coverage leaves out because it needs a device to under 5 % of all statements.

That code is named in pyproject.toml, [tool.coverage.report] exclude_also, one function or class a line, as
``def name\\(`` or ``class Name\\b``. Exits 1 where a name is not found exactly once
in perfsuite/ or the share is too large.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 0.05
NAMED = re.compile(r"(?:async )?(?:def|class) (\w+)")

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def named_scopes(patterns: list[str]) -> list[str]:
    """The function and class names that the exclusion patterns hold; other patterns are about no device."""
    return [match[1] for pattern in patterns if (match := NAMED.match(pattern))]


def statements(tree: ast.AST) -> int:
    """Statements below ``tree``, itself included, docstrings not."""
    return sum(
        isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in ast.walk(tree)
    )


def main() -> int:
    """Print one line a name and the share; the exit code."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    names = named_scopes(config["tool"]["coverage"]["report"]["exclude_also"])
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "perfsuite").rglob("*.py"))}
    found: dict[str, list[tuple[Path, int]]] = {name: [] for name in names}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, Scope) and node.name in found:
                found[node.name].append((path.relative_to(ROOT), statements(node)))
    for name, places in found.items():
        print(f"{name}: {', '.join(f'{path} ({count} statements)' for path, count in places) or 'not found'}")
    total = sum(statements(tree) for tree in trees.values())
    share = sum(count for places in found.values() for _, count in places) / total
    print(f"device-only statements: {share:.1%} of {total} (limit {LIMIT:.0%})")
    once = all(len(places) == 1 for places in found.values())
    return 0 if once and share < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
