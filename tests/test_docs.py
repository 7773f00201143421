"""The documents say what the code does: links, code blocks, commands, options, verdicts and numbers."""

from __future__ import annotations

import ast
import math
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

import perfsuite
from perfsuite.baseline.rows import FINGERPRINT
from perfsuite.cli import app
from perfsuite.hardware.catalogue import load
from perfsuite.measure.stats import LOOKS, median_interval
from perfsuite.session import settings_of
from perfsuite.settings import GPU_DEST, GPU_FLAG, MARKER_ARGUMENTS, OPTIONS
from perfsuite.verdict import FAILED, UNDECIDED, Outcome, Reference

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), ROOT / "baselines" / "README.md"])
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
INLINE = re.compile(r"`([^`]+)`")
COMMAND = re.compile(r"^(?:- run: )?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(pytest|perfsuite) (.*)$")
CONTINUED = re.compile(r"\s*\\?\n\s+(?=--)")
"""In a shell after a backslash, in YAML without one; everywhere the next line begins with an option here."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """One document; ``prose`` is what stands outside its blocks."""

    path: Path
    text: str

    @property
    def name(self) -> str:
        """As people write it."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def blocks(self) -> list[tuple[str, str]]:
        """Language and content of each fenced block."""
        return [(found[1], found[2]) for found in BLOCK.finditer(self.text)]

    @property
    def prose(self) -> str:
        """The text without its blocks."""
        return BLOCK.sub("", self.text)

    @property
    def anchors(self) -> set[str]:
        """What a link may name after ``#``."""
        headings = (found[1].lower() for found in HEADING.finditer(self.prose))
        return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}

    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """Every command line of pytest or perfsuite, as the program and its arguments."""
        blocks = (CONTINUED.sub(" ", block) for language, block in self.blocks if language != "python")
        lines = [line for block in blocks for line in block.splitlines()]
        inline = (" ".join(found[1].split()) for found in INLINE.finditer(self.prose))
        for line in (*lines, *inline):
            if (found := COMMAND.match(line.strip())) and not found[2].startswith("on "):  # a summary's title
                plain = re.sub(r"[\[\]|]", " ", found[2].split("&&")[0].split("||")[0])
                yield found[1], shlex.split(plain, comments=True)

    def tables(self) -> Iterator[list[str]]:
        """The cells of every row of every table, code marks kept."""
        for line in self.prose.splitlines():
            if line.startswith("|") and not set(line) <= set("|-: "):
                yield [cell.strip() for cell in line.strip("|").split("|")]


def page(name: str) -> Page:
    """A document by its name."""
    path = ROOT / name
    return Page(path=path, text=path.read_text(encoding="utf-8"))


ALL = [page(path.relative_to(ROOT).as_posix()) for path in PAGES]
every_page = pytest.mark.parametrize("each", ALL, ids=lambda each: each.name)


# Links


@every_page
def test_links_lead_somewhere(each: Page) -> None:
    for found in LINK.finditer(each.prose):
        target, _, anchor = found[1].partition("#")
        if target.startswith(("http:", "https:")):
            continue
        path = (each.path.parent / target).resolve() if target else each.path
        assert path.exists(), f"{each.name}: {found[0]}"
        assert not anchor or anchor in page(path.relative_to(ROOT).as_posix()).anchors, f"{each.name}: {found[0]}"


def test_the_index_has_every_page_and_the_readme_has_the_index() -> None:
    linked = {found[1] for found in LINK.finditer(page("docs/index.md").prose)}
    assert {path.name for path in DOCS.glob("*.md")} - {"index.md"} <= linked
    assert "docs/index.md" in {found[1] for found in LINK.finditer(page("README.md").prose)}


# Code


@every_page
def test_code_blocks_parse(each: Page) -> None:
    for language, block in each.blocks:
        if language == "python":
            ast.parse(block, filename=each.name)
        elif language == "toml":
            tomllib.loads(block)


def test_the_first_case_is_short_and_the_readme_too() -> None:
    readme = page("README.md")
    case = next(block for language, block in readme.blocks if language == "python")
    names = [node.name for node in ast.parse(case).body if isinstance(node, ast.FunctionDef)]
    assert any(name.startswith("bench_") for name in names)
    assert len([line for line in case.splitlines() if line.strip()]) < 10
    assert len(readme.text.splitlines()) < 150


# Commands


@every_page
def test_pytest_commands_use_options_that_are_there(each: Page, pytester: pytest.Pytester) -> None:
    for program, arguments in each.commands():
        if program != "pytest":
            continue
        config = pytester.parseconfig("-p", "perfsuite.plugin", *arguments)  # a UsageError names what is not an option
        settings_of(config)
        gpu = getattr(config.option, GPU_DEST)
        assert gpu in (None, "auto", "cpu") or load().find(gpu), f"{each.name}: {GPU_FLAG} {gpu} is not listed"


@every_page
def test_perfsuite_commands_use_options_that_are_there(each: Page) -> None:
    for program, arguments in each.commands():
        if program == "perfsuite":
            # An option that is not there is found before --help is heeded.
            result = CliRunner().invoke(app, [*arguments, "--help"])
            assert result.exit_code == 0, f"{each.name}: perfsuite {' '.join(arguments)}: {result.output}"


def test_the_plan_is_what_its_command_prints(tmp_path: Path) -> None:
    section = page("docs/reading-results.md").text.partition("\n## The plan\n")[2].partition("\n## ")[0]
    (_, command), (_, sample) = Page(path=DOCS / "reading-results.md", text=section).blocks
    program, *arguments = shlex.split(command)
    assert program == "pytest"
    result = subprocess.run(
        [sys.executable, "-m", program, "-p", "perfsuite.plugin", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "80", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    assert set(sample.splitlines()) <= set(result.stdout.splitlines())


def test_the_commands_of_the_documents_are_found() -> None:
    """Otherwise the two tests above would hold of nothing."""
    found = dict.fromkeys(("pytest", "perfsuite"), 0)
    for each in ALL:
        for program, _ in each.commands():
            found[program] += 1
    assert found["pytest"] > 20
    assert found["perfsuite"] > 15


@every_page
def test_make_targets_are_there(each: Page) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {found[1] for found in re.finditer(r"`make ([a-z]+)", each.prose)}
    named |= {found[1] for _, block in each.blocks for found in re.finditer(r"^make ([a-z]+)", block, re.MULTILINE)}
    assert named <= targets


@every_page
def test_options_that_are_mentioned_are_there(each: Page) -> None:
    flags = {option.flag for option in OPTIONS}
    assert set(re.findall(r"--perf-[a-z-]+[a-z]", each.text)) <= flags
    settings = {option.dest for option in OPTIONS} | {"perf_cases", "perf_gpu"}
    assert set(re.findall(r"\bperf_[a-z_]+", each.text)) - {"perf_counter_ns"} <= settings


# Tables that have to be whole


def test_the_table_of_options_is_that_of_the_settings() -> None:
    rows = {cells[0]: cells for cells in page("docs/options.md").tables() if cells[0].startswith("`--")}
    expected = {f"`{option.flag}{f' {option.metavar}' if option.metavar else ''}`" for option in OPTIONS}
    assert set(rows) == {*expected, f"`{GPU_FLAG} NAME`"}
    for option in OPTIONS:
        cells = next(cells for name, cells in rows.items() if name.strip("`").split()[0] == option.flag)
        assert cells[1] == f"`{option.dest}`"
        if option.parse is None:
            assert cells[2] == "off"
        elif isinstance(option.default, float | int):
            assert float(cells[2]) == option.default


@pytest.mark.parametrize("name", ["docs/options.md", "docs/writing-cases.md"])
def test_the_markers_arguments_are_listed(name: str) -> None:
    assert [argument for argument in MARKER_ARGUMENTS if f"`{argument}`" not in _code_words(page(name))] == []


def _code_words(each: Page) -> set[str]:
    """Every word in code marks, each in marks of its own."""
    return {f"`{word}`" for found in INLINE.finditer(each.prose) for word in re.findall(r"\w+", found[1])}


def test_the_table_of_verdicts_is_whole_and_in_order() -> None:
    rows = [cells for cells in page("docs/verdicts.md").tables() if cells[0] in Outcome.__members__]
    assert [cells[0] for cells in rows] == list(Outcome)
    for name, _, pytest_says in rows:
        assert ("failed" in pytest_says.partition(";")[0]) == (Outcome(name) in FAILED)
        assert ("--perf-strict" in pytest_says) == (Outcome(name) in UNDECIDED)


def test_results_name_every_verdict() -> None:
    rows = {cells[0] for cells in page("docs/reading-results.md").tables()}
    assert set(Outcome) <= rows


def test_every_workload_has_a_place() -> None:
    words = set(re.findall(r"\w+", page("docs/writing-cases.md").text))
    assert {name for name in perfsuite.__all__ if not name.startswith("_")} <= words


def test_every_field_of_a_row_is_explained() -> None:
    assert {f"`{name}`" for name in FINGERPRINT} <= _code_words(page("docs/baselines.md"))


def test_exit_codes_are_listed() -> None:
    for name in ("README.md", "docs/ci.md"):
        codes = {cells[0] for cells in page(name).tables()}
        assert {"0", "1", "2", "4", "5"} <= codes


# Numbers


def test_the_example_by_hand_is_right() -> None:
    text = page("docs/verdicts.md").text
    row = Reference(runs=tuple(map(math.log, (1.12402, 1.11162, 1.12486))), prior_spread=0.03)
    difference = row.median - math.log(0.85130)
    resolution = row.resolution(3)
    assert f"b = {row.median:.5f}" in text
    assert f"= {row.spread**2:.6f},  s = {row.spread:.4f}" in text
    assert (
        f"= {resolution:.4f}, that is 1 - exp(-{resolution:.4f}) = {-math.expm1(-resolution):.1%}".replace("%", " %")
        in text
    )
    assert f"= {difference:.4f}" in text
    ends = (math.expm1(-difference - resolution), math.expm1(-difference + resolution))
    assert f"{ends[0] * 100:.1f} % to {ends[1] * 100:.1f} %" in text


@pytest.mark.parametrize(("runs", "datasheet", "control"), [(3, "1.0", "9.7"), (5, "0.9", "8.2"), (10, "0.7", "6.9")])
def test_what_a_row_resolves(runs: int, datasheet: str, control: str) -> None:
    cells = next(cells for cells in page("docs/verdicts.md").tables() if cells[0] == str(runs))
    assert cells == [str(runs), datasheet, control]
    for spread, written in ((0.003, datasheet), (0.03, control)):
        # Runs alternately above and below, so far that the row's own spread is the prior's.
        row = Reference(runs=_with_spread(runs, spread), prior_spread=spread)
        assert row.spread == pytest.approx(spread)
        assert f"{-math.expm1(-row.resolution(3)) * 100:.1f}" == written


def _with_spread(count: int, spread: float) -> tuple[float, ...]:
    """``count`` values around 0 whose squares sum to (count - 1) spread²: one in the middle, or two that are 0."""
    middle = 2 - count % 2
    size = spread * math.sqrt((count - 1) / (count - middle))
    half = (count - middle) // 2
    return (*[size] * half, *[0.0] * middle, *[-size] * half)


@pytest.mark.parametrize("samples", LOOKS)
def test_the_table_of_intervals(samples: int) -> None:
    cells = next(cells for cells in page("docs/measuring.md").tables() if cells[0] == str(samples))
    interval = median_interval(list(range(1, samples + 1)))
    expected = "the smallest to the largest" if samples == 10 else None
    if expected is None:
        low, high = (int(end) for end in (interval.low, interval.high))
        expected = f"the {_ordinal(low)} to the {_ordinal(high)}"
    assert cells[1] == expected


def _ordinal(number: int) -> str:
    """``3rd``."""
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number not in (11, 12, 13) else "th"
    return f"{number}{suffix}"


def test_the_catalogue_is_as_large_as_it_is_said_to_be() -> None:
    assert f"A catalogue of {len(load().hardware)} SKUs" in page("CHANGELOG.md").text
