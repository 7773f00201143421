"""The rules of the house that no linter knows, held on the syntax trees of perfsuite/."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A module imports only from its own line and the lines above it.
ORDER = (
    "errors units dtypes locks",
    "hardware",
    "models",
    "flops footprint",
    "utilization",
    "topology",
    "workloads",
    "training_run",
    "verdict",
    "measure",
    "workers",
    "record runfolder",
    "baseline",
    "history interop report",
    "settings collect missing sweep ceilings",
    "collection evidence",
    "gate recording",
    "selfcheck terminal",
    "planning",
    "commands",
    "sessionrun",
    "session",
    "plugin cli",
)
LINE = {name: number for number, names in enumerate(ORDER) for name in names.split()}

NEVER_AT_TOP = {"torch", "scipy", "plotly", "duckdb", "ruptures", "pynvml"}
TORCH_LIVES_IN = {"workloads", "measure", "workers", "hardware"}
TORCH_MODULES = "perfsuite.workloads.modules"
"""Classes that derive from torch's; imported in functions alone."""
MAX_FUNCTION_LINES = 50
MAX_FILE_LINES = 500


@dataclass(frozen=True, kw_only=True)
class Module:
    """One file: its dotted name and its part of the house (such as ``workloads``; empty at the root)."""

    name: str
    part: str
    path: Path
    source: str
    tree: ast.Module


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported name: ``target`` is the module, ``lazy`` where importing its file does not run it."""

    line: int
    target: str
    name: str | None
    lazy: bool


House = dict[str, Module]
Rule = Callable[[House], list[str]]


def read_house(root: Path) -> House:
    """Every module below ``root``/perfsuite by dotted name."""
    house = {}
    for path in sorted((root / "perfsuite").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        dotted = parts[:-1] if parts[-1] == "__init__" else parts
        source = path.read_text(encoding="utf-8")
        name = ".".join(dotted)
        part = dotted[1] if len(dotted) > 1 else ""
        house[name] = Module(name=name, part=part, path=path, source=source, tree=ast.parse(source))
    return house


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _imported(node: ast.AST, *, lazy: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(line=node.lineno, target=alias.name, name=None, lazy=lazy)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield Import(line=node.lineno, target=node.module or "", name=alias.name, lazy=lazy)


def imports(tree: ast.AST, *, lazy: bool = False) -> Iterator[Import]:
    """Every import below ``tree``; those in functions and under TYPE_CHECKING are lazy."""
    for node in ast.iter_child_nodes(tree):
        yield from _imported(node, lazy=lazy)
        in_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from imports(node, lazy=lazy or in_function or _is_type_checking(node))


def inner_target(found: Import, house: House) -> str | None:
    """The module of perfsuite that ``found`` reaches, a submodule in ``from package import`` included."""
    if found.target.partition(".")[0] != "perfsuite":
        return None
    below = f"{found.target}.{found.name}"
    return below if below in house else found.target


def _at(module: Module, line: int, text: str) -> str:
    return f"{module.name}:{line}: {text}"


def imports_point_up(house: House) -> list[str]:
    """Each part imports from its own line of ORDER and above; the root is for users, not for the house."""
    faults = []
    for module in house.values():
        if not module.part:
            continue
        if module.part not in LINE:
            faults.append(_at(module, 1, f"{module.part} has no place in the order"))
            continue
        for found in imports(module.tree):
            target = inner_target(found, house)
            if target == "perfsuite" and not (found.name or "").startswith("__"):
                faults.append(_at(module, found.line, "imports the root; name the module itself"))
            part = (target or "").partition(".")[2].partition(".")[0]
            if part and LINE.get(part, len(ORDER)) > LINE[module.part]:
                faults.append(_at(module, found.line, f"imports {target}, which stands below it"))
    return faults


def no_cycles(house: House) -> list[str]:
    """No module reaches itself again, lazily or not."""
    graph: dict[str, set[str]] = {}
    for module in house.values():
        if module.part:
            targets = {inner_target(found, house) for found in imports(module.tree)}
            graph[module.name] = {target for target in targets if target and target != "perfsuite"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" -> ".join(reversed(error.args[1]))]
    return []


def heavy_imports_are_lazy(house: House) -> list[str]:
    """Slow and optional libraries are imported where they are used, torch only in the parts that measure."""
    faults = []
    for module in house.values():
        for found in imports(module.tree):
            library = found.target.partition(".")[0]
            if (inner_target(found, house) or "").startswith(TORCH_MODULES):
                library = "torch"
            if library in NEVER_AT_TOP and not found.lazy and not module.name.startswith(TORCH_MODULES):
                faults.append(_at(module, found.line, f"imports {library} at the top"))
            if library == "torch" and module.part not in TORCH_LIVES_IN:
                faults.append(_at(module, found.line, "torch has no business here"))
    return faults


def files_are_nouns_and_short(house: House) -> list[str]:
    """No utils.py, no file over 500 lines."""
    faults = []
    for module in house.values():
        if "utils" in module.name.split("."):
            faults.append(_at(module, 1, "name the file after what it holds"))
        if (lines := len(module.source.splitlines())) > MAX_FILE_LINES:
            faults.append(_at(module, 1, f"{lines} lines; split it"))
    return faults


def functions_are_short(house: House) -> list[str]:
    """No function over 50 lines, from its def to its end."""
    return [
        _at(module, node.lineno, f"{node.name} has {node.end_lineno - node.lineno + 1} lines")
        for module in house.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    ]


def public_names_are_documented(house: House) -> list[str]:
    """A docstring for every module, and for every public class and function at its top."""
    faults = []
    for module in house.values():
        if ast.get_docstring(module.tree) is None:
            faults.append(_at(module, 1, "no docstring"))
        for node in module.tree.body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if not node.name.startswith("_") and ast.get_docstring(node) is None:
                faults.append(_at(module, node.lineno, f"{node.name} has no docstring"))
    return faults


def no_bare_except(house: House) -> list[str]:
    """A bare except also catches the Ctrl-C that asks to stop."""
    return [
        _at(module, node.lineno, "bare except")
        for module in house.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]


RULES = (
    imports_point_up,
    no_cycles,
    heavy_imports_are_lazy,
    files_are_nouns_and_short,
    functions_are_short,
    public_names_are_documented,
    no_bare_except,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_house_keeps(rule: Rule) -> None:
    house = read_house(ROOT)
    assert {"perfsuite", "perfsuite.errors", "perfsuite.plugin", "perfsuite.cli"} <= house.keys()
    assert rule(house) == []


DOC = '"""A module."""\n'
LONG = "def work():\n" + "    step()\n" * MAX_FUNCTION_LINES


@pytest.mark.parametrize(
    ("rule", "files", "fault"),
    [
        (imports_point_up, {"errors.py": "import perfsuite.units\n", "units.py": ""}, None),
        (
            imports_point_up,
            {"flops.py": "from perfsuite.gate import Gate\n"},
            "flops:1: imports perfsuite.gate",
        ),
        (
            imports_point_up,
            {"flops.py": "from perfsuite import gate\n", "gate.py": ""},
            "imports perfsuite.gate",
        ),
        (
            imports_point_up,
            {"flops.py": "def f():\n    import perfsuite.cli\n"},
            "flops:2: imports perfsuite.cli",
        ),
        (
            imports_point_up,
            {"hardware/device.py": "from perfsuite.flops import f\n"},
            "hardware.device:1: imports",
        ),
        (imports_point_up, {"flops.py": "from perfsuite import Gemm\n"}, "imports the root"),
        (imports_point_up, {"cli.py": "from perfsuite import __version__\n"}, None),
        (imports_point_up, {"helpers.py": ""}, "helpers has no place in the order"),
        (
            no_cycles,
            {
                "workloads/a.py": "import perfsuite.workloads.b",
                "workloads/b.py": "from perfsuite.workloads import a",
            },
            "perfsuite.workloads.a -> perfsuite.workloads.b -> perfsuite.workloads.a",
        ),
        (no_cycles, {"errors.py": "", "units.py": "import perfsuite.errors"}, None),
        (heavy_imports_are_lazy, {"measure/a.py": "import torch.cuda\n"}, "imports torch at the top"),
        (heavy_imports_are_lazy, {"measure/a.py": "class A:\n    from torch import nn\n"}, "measure.a:2"),
        (
            heavy_imports_are_lazy,
            {"measure/a.py": "try:\n    import pynvml\nexcept E: pass\n"},
            "pynvml at the top",
        ),
        (heavy_imports_are_lazy, {"measure/a.py": "def f():\n    import torch\n"}, None),
        (heavy_imports_are_lazy, {"workloads/modules/a.py": "import torch\n"}, None),
        (
            heavy_imports_are_lazy,
            {"workloads/modules/a.py": "", "workloads/b.py": "from perfsuite.workloads.modules import a\n"},
            "imports torch at the top",
        ),
        (heavy_imports_are_lazy, {"measure/a.py": "if TYPE_CHECKING:\n    import torch\n"}, None),
        (heavy_imports_are_lazy, {"gate.py": "def f():\n    import torch\n"}, "torch has no business here"),
        (heavy_imports_are_lazy, {"verdict.py": "def f():\n    from scipy import stats\n"}, None),
        (files_are_nouns_and_short, {"report/utils.py": ""}, "name the file after what it holds"),
        (files_are_nouns_and_short, {"gate.py": "\n" * (MAX_FILE_LINES + 1)}, "501 lines"),
        (files_are_nouns_and_short, {"gate.py": "\n" * MAX_FILE_LINES}, None),
        (
            functions_are_short,
            {"gate.py": f"class Gate:\n{LONG.replace('def', ' def')}"},
            "work has 51 lines",
        ),
        (functions_are_short, {"gate.py": LONG.removesuffix("    step()\n")}, None),
        (public_names_are_documented, {"gate.py": ""}, "gate:1: no docstring"),
        (
            public_names_are_documented,
            {"gate.py": f"{DOC}class Gate: ...\n"},
            "gate:2: Gate has no docstring",
        ),
        (
            public_names_are_documented,
            {"gate.py": f"{DOC}async def judge(): ...\n"},
            "judge has no docstring",
        ),
        (public_names_are_documented, {"gate.py": f"{DOC}def _judge(): ...\n"}, None),
        (no_bare_except, {"gate.py": "try:\n    f()\nexcept:\n    g()\n"}, "gate:3: bare except"),
        (no_bare_except, {"gate.py": "try:\n    f()\nexcept OSError:\n    g()\n"}, None),
    ],
)
def test_rule_finds_only_its_fault(tmp_path: Path, rule: Rule, files: dict[str, str], fault: str | None) -> None:
    for name, source in files.items():
        path = tmp_path / "perfsuite" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    faults = rule(read_house(tmp_path))
    if fault is None:
        assert faults == []
    else:
        assert len(faults) == 1
        assert fault in faults[0]


def loaded_after(code: str) -> set[str]:
    """The top-level packages that a fresh interpreter holds after ``code``."""
    report = f"{code}\nimport sys\nprint(*(name for name in sys.modules if '.' not in name))"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_plugin_starts_without_numbers() -> None:
    """pytest imports the plugin in every project it is installed beside; that must stay cheap."""
    loaded = loaded_after("import perfsuite, perfsuite.plugin")
    assert "pytest" in loaded
    assert loaded & {"torch", "scipy", "numpy", "jinja2", "typer"} == set()


def test_no_module_loads_torch() -> None:
    names = [name for name in read_house(ROOT) if not name.endswith("__main__") and not name.startswith(TORCH_MODULES)]
    assert loaded_after("\n".join(f"import {name}" for name in names)) & NEVER_AT_TOP == set()
