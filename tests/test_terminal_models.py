"""What the terminal adds for models and sweeps: their tables, the sentences below them, and what was not compiled."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from perfsuite.record import CompilationPart, Record, SweepPart, TimePart
from perfsuite.terminal import PlanRow, plan, summary

GIB = 2**30
NONE = "\N{EN DASH}"
STEP = "cases/t.py::bench_step"
FAMILY = f"{STEP}[bf16]"
COMPILED = CompilationPart(seconds=31.2, graphs=1)


def record(case: str = STEP, verdict: str = "PASS", **changes: Any) -> Record:
    """4096 tokens in 500 ms: 8192 a second."""
    plain: dict[str, Any] = {
        "run": "r",
        "case": case,
        "verdict": verdict,
        "reason": "because",
        "metric": "mfu",
        "value": 0.5,
        "hfu": 0.5,
        "dtype": "bf16",
        "flops": 10**14,
        "tokens": 4096,
        "tokens_per_s": 8192.0,
        "bound": "compute",
        "time_us": TimePart(median=5e5, low=4.9e5, high=5.1e5, samples=40),
        "peak_memory_bytes": 3 * GIB,
    }
    return Record(**{**plain, **changes})


def bare(verdict: str, reason: str, **changes: Any) -> Record:
    """A record of a case that was not measured."""
    return Record(**{"run": "r", "case": STEP, "verdict": verdict, "reason": reason, **changes})


def show(*records: Record, width: int = 80, **options: Any) -> str:
    return summary(records, width=width, color=False, **options)


def part(text: str, title: str) -> list[str]:
    """The lines from the one that begins with ``title`` to the next empty one; none where nothing does."""
    lines = [*text.splitlines(), ""]
    start = next((place for place, line in enumerate(lines) if line.lstrip().startswith(title)), len(lines))
    return lines[start : lines.index("", start)] if start < len(lines) else []


def models(*records: Record, width: int = 80) -> list[str]:
    """The table of models."""
    return part(show(*records, width=width), "models and compiled cases")


def flat(*lines: str) -> str:
    return " ".join(" ".join(lines).split())


# Models


def test_row_of_a_model() -> None:
    full = record(
        hfu=0.65,
        predicted_memory_bytes={"parameters": GIB, "activations": 2 * GIB},
        compilation=COMPILED,
        shares={"input_wait": 0.672},
    )
    _, titles, _, row = models(full)
    assert flat(titles) == "case tokens/s MFU HFU memory predicted compile input wait"
    assert flat(row) == "bench_step 8.19 k 50.0 % 65.0 % 3.00 GiB 3.00 GiB 31.2 s 67.2 %"


def test_columns_in_which_nothing_is_said_stay_out() -> None:
    assert flat(models(record())[1]) == "case tokens/s MFU memory"
    assert flat(models(record(hfu=0.5004))[1]) == "case tokens/s MFU memory", "50.0 % both"
    assert flat(models(record(hfu=None, peak_memory_bytes=None))[1]) == "case tokens/s MFU"


def test_hfu_of_every_case_is_shown_where_one_recomputes() -> None:
    _, titles, _, plain, checkpointed = models(record(f"{STEP}[a]"), record(f"{STEP}[b]", hfu=0.6))
    assert "HFU" in titles
    assert flat(plain).startswith("a 8.19 k 50.0 % 50.0 %")
    assert flat(checkpointed).startswith("b 8.19 k 50.0 % 60.0 %")


@pytest.mark.parametrize(("metrics", "title"), [(("mfu",), "MFU"), (("mbu",), "MBU"), (("mfu", "mbu"), "MFU/MBU")])
def test_utilization_is_called_what_it_is(metrics: tuple[str, ...], title: str) -> None:
    records = [record(f"{STEP}[{metric}]", metric=metric, hfu=None) for metric in metrics]
    assert f" {title} " in f"{models(*records)[1]} "


def test_only_models_and_compiled_cases_are_rows() -> None:
    gemm = record("cases/g.py::bench_gemm", tokens=0, tokens_per_s=None)
    fused = record("cases/f.py::bench_fused", tokens=0, tokens_per_s=None, compilation=COMPILED)
    skipped = bare("SKIPPED", "does not fit", case="cases/s.py::bench_s")
    text = flat(*models(gemm, record(), fused, skipped))
    assert "bench_gemm" not in text
    assert "bench_s " not in text
    assert f"bench_fused {NONE} 50.0 % 3.00 GiB 31.2 s" in text
    assert models(gemm, skipped) == []


def test_other_conventions_have_their_columns_in_wide_terminals() -> None:
    counted = record(mfu_by_convention={"palm": 0.56, "megatron": 0.51})
    assert not any("palm" in line for line in models(counted))
    lines = models(counted, width=140)
    assert flat(lines[1]) == "case tokens/s MFU by palm by megatron memory"
    assert flat(lines[3]) == "bench_step 8.19 k 50.0 % 56.0 % 51.0 % 3.00 GiB"
    assert "another convention" in lines[4]


# Compilation


def test_graph_breaks_and_fallbacks_are_told_case_by_case() -> None:
    broken = record(
        f"{STEP}[a]", compilation=CompilationPart(seconds=1.0, graphs=3, graph_breaks=("call to print", "x.item()"))
    )
    once = record(f"{STEP}[b]", compilation=CompilationPart(seconds=1.0, graphs=2, graph_breaks=("two\nlines",)))
    eager = record(
        f"{STEP}[c]", compilation=CompilationPart(seconds=0.0, graphs=0, fallbacks=("nothing was compiled",))
    )
    whole = record(f"{STEP}[d]", compilation=COMPILED)
    text = flat(show(broken, once, eager, whole))
    assert f"{STEP}[a]: 2 graph breaks under torch.compile: call to print" in text
    assert f"{STEP}[b]: 1 graph break under torch.compile: two lines" in text
    assert f"{STEP}[c]: torch.compile fell back to eager: nothing was compiled" in text
    assert f"{STEP}[d]:" not in text


# Sweeps


def at(batch: float, rate: float | None, verdict: str = "PASS", **changes: Any) -> Record:
    """A member of the family: ``rate`` in tokens per second, None where it was not measured."""
    place = {"case": f"{STEP}[{batch:g}-bf16]", "sweep": SweepPart(family=FAMILY, axis="batch", at=batch)}
    if rate is None:
        plain = {"reason": "needs 91.0 GiB of memory, h100 has 78.4 GiB free for it."}
        return bare(verdict, **{**plain, **place, **changes})
    time = TimePart(median=batch * 4096e6 / rate, low=None, high=None, samples=20)
    counted: dict[str, Any] = {"tokens": int(batch * 4096), "tokens_per_s": rate, "flops": int(batch * 10**14)}
    return record(verdict=verdict, **{**place, **counted, "time_us": time, **changes})


CURVE = [at(batch, rate) for batch, rate in ((1, 3000.0), (2, 5800.0), (4, 8200.0), (8, 9100.0), (16, 9250.0))]
TOO_LARGE = [at(batch, None, "SKIPPED") for batch in (32, 64)]


def sweep(*records: Record, width: int = 80, **options: Any) -> list[str]:
    """The table of sweeps along the batch."""
    return part(show(*records, width=width, **options), "batch  ")


def test_table_of_a_sweep() -> None:
    titles, heading, first, *_ = lines = sweep(*CURVE, *TOO_LARGE)
    assert flat(titles) == "batch rate MFU time memory verdict"
    assert heading == f"sweep of {FAMILY}"
    assert flat(first) == "1 3.00 ktokens/s 50.0 % 1.37 s 3.00 GiB PASS"
    assert re.fullmatch(r"32 needs 91.0 GiB of memory.* SKIPPED", flat(lines[7]))
    assert flat(*lines[9:]) == (
        "knee at batch 8 (95 % of the best rate); best batch that fits: 16 (9.25 ktokens/s, 50.0 % MFU, 3.00 GiB); "
        "32, 64 SKIPPED (at 32): needs 91.0 GiB of memory, h100 has 78.4 GiB free for it."
    )


@pytest.mark.parametrize("width", [60, 80, 140])
def test_sentence_is_whole_at_every_width(width: int) -> None:
    text = flat(*sweep(*CURVE, *TOO_LARGE, width=width))
    assert "knee at batch 8 (95 % of the best rate); best batch that fits: 16 (9.25 ktokens/s" in text


@pytest.mark.parametrize(
    ("records", "sentence"),
    [
        (CURVE[:2], "too few points for a knee: 2 measured, 3 needed; best batch: 2 (5.80 ktokens/s, 50.0 % MFU, "),
        (CURVE[:3], "knee at batch 4 (95 % of the best rate), the last that was measured: the rate may still rise; "),
        (
            [*CURVE, at(32, None, "SKIPPED", reason="one iteration takes at least 61.0 s, the limit is 30.0 s")],
            "; best batch: 16 (9.25 ktokens/s, 50.0 % MFU, 3.00 GiB); 32 SKIPPED: one iteration takes at least 61.0 s",
        ),
        (
            [*CURVE, at(32, None, "SKIPPED", reason="t4: no TF32"), TOO_LARGE[1]],
            "; best batch: 16 (9.25 ktokens/s, 50.0 % MFU, 3.00 GiB); 32, 64 SKIPPED (at 32): t4: no TF32.",
        ),
        (
            [at(1, 1.0, "ERROR"), at(2, 1.0, "INVALID"), TOO_LARGE[0]],
            "no knee: there are no rates to compare; 32 SKIPPED: needs 91.0 GiB",
        ),
        (
            [at(batch, rate, metric="latency_us", peak_memory_bytes=None) for batch, rate in ((0.5, 9.0), (1, 10.0))],
            "best batch: 1 (10.0 tokens/s).",
        ),
    ],
)
def test_sentence_of_a_sweep(records: list[Record], sentence: str) -> None:
    assert sentence in flat(*sweep(*records))


def test_sweep_of_what_has_no_tokens_shows_the_judged_rate() -> None:
    plain = [at(batch, 1e3 * batch, tokens=0, tokens_per_s=None) for batch in (1.0, 2.0)]
    assert "24.4 TFLOP/s" in flat(*sweep(*plain)), "1e14 FLOPs in 4.096 s"
    mixed = [plain[0], at(2, 2000.0, tokens=0, tokens_per_s=None, metric="mbu", nbytes=10**12)]
    text = flat(*sweep(*mixed))
    assert "24.4 TFLOP/s" in text
    assert "244 GB/s" in text
    assert "no rates to compare" in text


def test_families_of_one_parameter_share_a_table() -> None:
    other = [at(batch, 10.0, sweep=SweepPart(family="cases/o.py::bench_o", axis="batch", at=batch)) for batch in (1, 2)]
    longer = [at(1, 10.0, sweep=SweepPart(family=FAMILY, axis="seq_len", at=length)) for length in (128.0, 4096.0)]
    text = show(*CURVE, *other, *longer)
    headings = [line for line in part(text, "batch  ") if line.startswith("sweep of")]
    assert headings == [f"sweep of {FAMILY}", "sweep of cases/o.py::bench_o"]
    assert "4096" in flat(*part(text, "seq_len  "))


def test_sweeps_that_tell_nothing_have_no_table() -> None:
    assert sweep(CURVE[0]) == [], "the table above says all of it"
    assert sweep(*TOO_LARGE, show_skipped=False) == []
    assert sweep(*TOO_LARGE) != []
    assert sweep(CURVE[0], *TOO_LARGE, show_skipped=False) != []


def test_wide_sweeps_say_more() -> None:
    predicted = [at(batch, 10.0, predicted_memory_bytes={"parameters": 2 * GIB}) for batch in (1, 2)]
    titles, _, first, *_ = sweep(*predicted, width=140)
    assert flat(titles) == "batch rate MFU time n memory predicted verdict"
    assert flat(first).endswith("20 3.00 GiB 2.00 GiB PASS")


# Memory in the plan


def planned(case: str = STEP, **changes: Any) -> PlanRow:
    """A training step of 100 GiB."""
    parts = {"parameters": 13 * GIB, "gradients": 13 * GIB, "optimizer_state": 52 * GIB, "activations": 22 * GIB}
    plain: dict[str, Any] = {
        "case": case,
        "flops": 10**14,
        "nbytes": 10**11,
        "arithmetic_intensity": 1000.0,
        "bound": "compute",
        "roofline_time_us": 1e5,
        "memory_bytes": sum(changes.get("memory_parts", parts).values()),
        "memory_parts": parts,
        "largest_batch": 7,
        "dtype": "bf16",
        "skip": None,
    }
    return PlanRow(**{**plain, **changes})


def memory(*rows: PlanRow, width: int = 140) -> list[str]:
    """The plan's second table."""
    return part(plan(rows, width=width, color=False), "peak memory by part")


def test_plan_shows_memory_by_part() -> None:
    _, titles, _, row = memory(planned(), planned("cases/g.py::bench_gemm", memory_parts={}))
    assert flat(titles) == "case parameters gradients optimizer activations total max batch"
    assert flat(row) == "bench_step 13.0 GiB 13.0 GiB 52.0 GiB 22.0 GiB 100 GiB 7"


def test_plan_of_cases_without_parts_has_one_table() -> None:
    assert memory(planned(memory_parts={})) == []


def test_plan_of_cases_without_a_batch_says_nothing_of_it() -> None:
    assert "max batch" not in memory(planned(largest_batch=None))[1]
    none_fits = memory(planned(f"{STEP}[a]"), planned(f"{STEP}[b]", largest_batch=None))
    assert none_fits[-1].endswith(NONE)
    assert memory(planned(largest_batch=65536))[-1].endswith("65536+"), "the search ends there"


def test_cases_of_a_file_share_their_parts_and_files_do_not() -> None:
    first = planned(f"{STEP}[a]", memory_parts={"parameters": GIB})
    second = planned(f"{STEP}[b]", memory_parts={"parameters": GIB, "kv_cache": 2 * GIB})
    text = plan([first, second, planned("cases/o.py::bench_o", memory_parts={"inputs": GIB})], width=80, color=False)
    titles = [flat(line) for line in text.splitlines() if "max batch" in line]
    assert titles == ["case parameters kv cache total max batch", "case inputs total max batch"]
    assert f"a 1.00 GiB {NONE} 1.00 GiB 7" in flat(text)


@pytest.mark.parametrize(
    ("width", "titles"),
    [
        (100, "case parameters gradients optimizer activations total max batch"),
        (75, "case parameters gradients optimizer activations max batch"),
        (68, "case optimizer activations others total max batch"),
        (40, "case total max batch"),
        (20, "case total"),
    ],
)
def test_narrow_plans_put_the_smallest_parts_together(width: int, titles: str) -> None:
    lines = memory(planned("cases/t.py::bench_step[llama3-8b]"), width=width)
    assert flat(lines[1]) == titles
    if "others" in titles:
        assert "26.0 GiB" in lines[-1], "13 for the parameters, 13 for the gradients"


# Anything fits

texts = st.text(max_size=20) | st.sampled_from(["input_wait", "[red]x", "\x1b[2J", "日本" * 10, "a" * 90, "\ud800"])
sizes = st.integers(min_value=0, max_value=10**15)
swept = st.builds(SweepPart, family=texts, axis=texts, at=st.floats(-1e300, 1e300) | st.integers(1, 9).map(float))
anything = st.builds(
    record,
    case=st.builds(lambda file, name: f"{file}::{name}", texts, texts) | texts,
    verdict=st.sampled_from(["PASS", "SKIPPED", "ERROR", "INVALID", "MISSING", "NEW"]),
    reason=texts,
    metric=st.sampled_from(["mfu", "mbu", "latency_us", None]),
    value=st.none() | st.floats(0, 1e4),
    hfu=st.none() | st.floats(0, 1e4),
    mfu_by_convention=st.dictionaries(texts, st.floats(0, 1e4), max_size=3),
    tokens=st.integers(0, 10**9),
    tokens_per_s=st.none() | st.floats(0, 1e12),
    time_us=st.none() | st.builds(TimePart, median=st.floats(1e-3, 1e9), low=st.none(), high=st.none(), samples=sizes),
    predicted_memory_bytes=st.dictionaries(texts, sizes, max_size=3),
    compilation=st.none()
    | st.builds(
        CompilationPart,
        seconds=st.floats(0, 1e5),
        graphs=sizes,
        graph_breaks=st.lists(texts, max_size=2).map(tuple),
        fallbacks=st.lists(texts, max_size=2).map(tuple),
    ),
    shares=st.dictionaries(texts, st.floats(0, 1), max_size=3),
    sweep=st.none() | swept,
)


@given(st.lists(anything, max_size=6), st.integers(min_value=20, max_value=200), st.booleans())
def test_every_line_fits_and_is_plain(records: list[Record], width: int, show_skipped: bool) -> None:
    lines = summary(records, width=width, color=False, show_skipped=show_skipped).split("\n")
    assert all(cell_len(line) <= width for line in lines)
    assert all(line.isprintable() for line in lines)


rows = st.builds(planned, case=texts, memory_parts=st.dictionaries(texts, sizes, max_size=8), skip=st.none() | texts)


@given(st.lists(rows, min_size=1, max_size=6), st.integers(min_value=20, max_value=200))
def test_every_line_of_a_plan_fits(found: list[PlanRow], width: int) -> None:
    lines = plan(found, width=width, color=False).split("\n")
    assert all(cell_len(line) <= width for line in lines)
    assert all(line.isprintable() for line in lines)
