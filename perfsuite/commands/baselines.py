"""``perfsuite baselines``: show them, compare them, remove those whose case is gone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from perfsuite.baseline import Baselines, Change, Kind, Row, Store, compare, missing, skus, split_node_id
from perfsuite.baseline.trees import Tree, load_folder, load_revision
from perfsuite.commands.collect import find_project
from perfsuite.commands.console import output
from perfsuite.commands.scope import Scope
from perfsuite.errors import UsageError
from perfsuite.missing import fixed_prefix

app = typer.Typer(help="Show, compare and prune baselines.", no_args_is_help=True)

Directory = Annotated[Path, typer.Option("--baselines", metavar="DIR", help="The folder of the baselines.")]
Sku = Annotated[str | None, typer.Option("--sku", metavar="SKU", help="Only this SKU.")]
DEFAULT = Path("baselines")


@app.command()
def show(sku: Sku = None, directory: Directory = DEFAULT) -> None:
    """List the stored rows: what is judged, how far its runs lie apart, what measured it."""
    tree = load_folder(directory)
    console = output()
    if not tree:
        console.print(Text(f"no baselines in {directory}"), soft_wrap=True)
    for name in _chosen(sku, tree, directory):
        console.print(Text(f"{name}\n", style="bold"))
        for table in _tables(tree[name]):
            console.print(table)
            console.print()
        for environment, content in sorted(tree[name].environments.items()):
            console.print(Text(f"{environment}: {', '.join(f'{key} {value}' for key, value in content.items())}"))


def _chosen(sku: str | None, available: Iterable[str], directory: Path) -> list[str]:
    """The SKUs that a command is about; a UsageError where there are none."""
    names = sorted(available)
    if sku is not None and sku not in names:
        raise UsageError(f"--sku {sku}: {directory} has no baselines of it; it has {', '.join(names) or 'none at all'}")
    return names if sku is None else [sku]


def _tables(baselines: Baselines) -> Iterator[Table]:
    """One SKU's rows, a table for each case file."""
    ids = sorted(baselines.rows, key=split_node_id)
    for file, own in itertools.groupby(ids, key=lambda node_id: split_node_id(node_id)[0]):
        yield _table(file, {split_node_id(node_id)[1]: baselines.rows[node_id] for node_id in own})


def _table(file: str, rows: Mapping[str, Row]) -> Table:
    """One case file's rows; reasons have a column where there are any."""
    accepted = any(row.accepted for row in rows.values())
    table = Table(title=Text(file), title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=True)
    table.add_column("case", overflow="fold", ratio=1)
    table.add_column("metric", overflow="fold", max_width=10)
    for header in ("judged", "spread"):
        table.add_column(header, no_wrap=True, justify="right")
    table.add_column("env", no_wrap=True)
    if accepted:
        table.add_column("accepted", overflow="fold", max_width=16)
    for key, row in rows.items():
        table.add_row(*(Text(cell) for cell in _cells(key, row)[: len(table.columns)]))
    return table


def _cells(key: str, row: Row) -> tuple[str, ...]:
    """One row's columns; the spread is that of the runs, from the least to the greatest."""
    spread = math.log(max(row.runs) / min(row.runs))
    return (
        key,
        row.metric,
        f"{row.value:.6g}",
        f"{spread:.1%}" if len(row.runs) > 1 else "one run",
        row.environment,
        row.accepted or "",
    )


@app.command()
def diff(
    first: Annotated[
        str, typer.Argument(metavar="[REV | A]", help="A git revision, or a folder of baselines.")
    ] = "HEAD",
    second: Annotated[str | None, typer.Argument(metavar="[B]", help="The folder to compare with A.")] = None,
    directory: Directory = DEFAULT,
) -> None:
    """Compare two folders of baselines, or the working tree with a git revision (HEAD): the worst change first."""
    before = load_revision(directory, first) if second is None else load_folder(Path(first))
    after = load_folder(directory if second is None else Path(second))
    console = output()
    found = [(sku, compare(_of(before, sku), _of(after, sku))) for sku in sorted({*before, *after})]
    for sku, changes in found:
        if changes:
            console.print(Text(f"{sku}: {_counts(changes)}"), soft_wrap=True)
        for change in changes:
            console.print(Text(_line(change)), soft_wrap=True)
    if not any(changes for _, changes in found):
        console.print("no difference")


def _of(tree: Tree, sku: str) -> Baselines:
    """One SKU's baselines; empty where the tree has none."""
    return tree.get(sku, Baselines(sku=sku, rows={}, environments={}))


def _counts(changes: Iterable[Change]) -> str:
    """How many rows differ, by kind."""
    kinds = [change.kind for change in changes]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in Kind if kind in kinds)


def _line(change: Change) -> str:
    """One row that differs."""
    percent = "" if change.change is None else f"{change.change:+.1%}"
    details = f" ({'; '.join(change.details)})" if change.details else ""
    return f"  {change.kind:<7} {percent:>7}  {change.node_id}{details}"


@app.command()
def prune(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="[PATH]...", help="Case files and folders to look at.")
    ] = None,
    directory: Directory = DEFAULT,
    cases: Annotated[Path | None, typer.Option("--cases", metavar="PATH", help="One more file or folder.")] = None,
    sku: Sku = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and leave it.")] = False,
) -> None:
    """Remove the rows whose case does not exist any more. Nothing is removed unless all cases can be collected.

    Without a PATH: the folder of perf_cases, else the files that the rows name.
    """
    chosen = _chosen(sku, skus(directory), directory)
    project = find_project()
    prefix = fixed_prefix(project.patterns)
    stores = [Store(directory=directory, sku=name, prefix=prefix) for name in chosen]
    loaded = {store.sku: store.load() for store in stores}
    stored = {split_node_id(node_id)[0] for baselines in loaded.values() for node_id in baselines.rows}
    named = [*(paths or ()), *([] if cases is None else [cases])]
    collection = Scope.of(named, stored, project).collected()
    console = output()
    count = 0
    for store in stores:
        gone = missing(loaded[store.sku].rows, collection.items, set(collection.files))
        if not dry_run:
            store.update({}, {}, remove=gone)
        for node_id in gone:
            console.print(Text(f"{'would remove' if dry_run else 'removed'} {store.sku}: {node_id}"), soft_wrap=True)
        count += len(gone)
    console.print(f"{count} {'row' if count == 1 else 'rows'} without a case")
