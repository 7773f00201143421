"""The catalogue: exact look-up, dense values, and a cross-check of each from SM count and clock."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.errors import CaseError, FileError, HardwareError
from perfsuite.hardware.catalogue import CATALOGUE, PEAK_DTYPES, Hardware, load, parse

FACTS = Path(__file__).resolve().parents[1].parent / "shared" / "hardware-peaks.csv"
PEAK_COLUMNS = ("fp64", "fp64_tensor", "fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4")

SMALL = """
schema = 1
[sources]
W = "a paper"
[[hardware]]
sku = "x1-40gb"
family = "x1"
device_names = ["Vendor X1"]
pci_device_ids = ["10de:0001"]
chip = { compute_capability = "8.0", sm = 10, boost_mhz = 1000, flop_per_clock_per_sm = 2048 }
memory = { gb = 40, gb_per_s = 1000 }
link = {}
peaks = { basis = "dense", bf16 = 20 }
sources = ["W"]
"""


def row(sku: str) -> Hardware:
    found = load().by_sku(sku)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA B300 SXM6 AC", "bf16", 2250),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA H200", "bf16", 989.5),
        ("NVIDIA H200 NVL", "bf16", 836),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40", "bf16", 181),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("AMD Instinct MI300X", "fp8", 2614.9),
        ("NVIDIA A100-SXM4-40GB", "fp64", 19.5),
    ],
)
def test_a_device_name_gives_its_own_dense_peak(name: str, dtype: str, tera: float) -> None:
    found = load().by_device_name(name)
    assert found is not None
    assert found.flops_per_s(dtype) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA RTX A1000",
        "NVIDIA GB300",
        "NVIDIA B300",
        "NVIDIA A100X",
        "NVIDIA L40G",
        "NVIDIA A10M",
        "NVIDIA H200 SXM",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "nvidia l4",
        "L4",
        "Graphics Device",
        "",
    ],
)
def test_other_names_are_unknown_and_never_another_card(name: str) -> None:
    assert load().by_device_name(name) is None


def test_bytes_and_surrounding_space_are_the_only_normalisation() -> None:
    assert load().by_device_name(b"NVIDIA L4\0") == row("l4")
    assert load().by_device_name("  NVIDIA L4\n") == row("l4")
    assert load().by_device_name("NVIDIA  L4") is None


@given(st.text(max_size=30))
def test_no_text_finds_a_row_that_does_not_carry_it(text: str) -> None:
    found = load().candidates(text)
    known = {name for each in load().hardware for name in each.device_names} | set(load().ambiguous_device_names)
    assert bool(found) == (text.strip(" \t\r\n\0") in known)


@pytest.mark.parametrize("name", ["NVIDIA H100", "NVIDIA A100"])
def test_an_ambiguous_name_asks_for_the_sku(name: str) -> None:
    with pytest.raises(HardwareError, match=r"does not say which SKU it is: name one of .*sxm.*pcie"):
        load().by_device_name(name)


def test_pci_ids_are_exact() -> None:
    assert load().by_pci_id("10DE:2330") == row("h100-sxm5-80gb")
    assert load().by_pci_id("10de:ffff") is None


def test_a_request_is_a_sku_a_family_or_an_exact_name() -> None:
    assert load().find("A100-SXM4-80GB") == (row("a100-sxm4-80gb"),)
    assert {each.sku for each in load().find("h100")} == {"h100-sxm5-80gb", "h100-pcie-80gb", "h100-nvl-94gb"}
    assert load().find("NVIDIA L40S") == (row("l40s"),)
    assert load().find("a1000") == ()


def test_an_unknown_request_names_what_is_spelled_like_it() -> None:
    with pytest.raises(HardwareError, match=r"'a1000' is not known hardware; near: a100, .*perfsuite hardware"):
        load().resolve("a1000")
    assert load().near("l4os") == ("l40s", "l4")
    with pytest.raises(HardwareError, match=r"^'zzzzzz' is not known hardware; `perfsuite"):
        load().resolve("zzzzzz")


# The worked numbers: 16-bit TFLOP/s from SM count, FLOP per clock and SM, and boost clock.
@pytest.mark.parametrize(
    ("sku", "tera"),
    [("a100-sxm4-80gb", 311.9), ("h100-sxm5-80gb", 989.4), ("l4", 121.2), ("rtx-4090", 165.2), ("t4", 65.1)],
)
def test_the_cross_check_gives_the_worked_numbers(sku: str, tera: float) -> None:
    assert row(sku).cross_check_flops_per_s() == pytest.approx(tera * 1e12, rel=5e-4)


def test_no_peak_is_sparse() -> None:
    """A sparse figure would be twice what SMs and clock allow; power-capped sheets stay up to 16 % below that."""
    checked = 0
    for each in load().hardware:
        computed = each.cross_check_flops_per_s()
        peak = each.flops_per_s("bf16") or each.flops_per_s("fp16")
        if computed is not None and peak is not None:
            assert 0.86 < peak / computed < 1.01, each.sku
            checked += 1
    assert checked >= 28  # all but the A10G, H20, GH200 and AMD's four


def test_narrower_types_are_whole_multiples_of_wider_ones() -> None:
    for each in load().hardware:
        assert each.peaks.basis == "dense"
        for narrow, wide in (("fp8", "bf16"), ("bf16", "tf32")):
            low, high = each.flops_per_s(wide), each.flops_per_s(narrow)
            if low and high:
                assert round(high / low, 1) == pytest.approx(2, abs=0.1), (each.sku, narrow)


def test_the_cross_check_needs_every_part() -> None:
    assert row("a10g").cross_check_flops_per_s() is None
    assert row("mi300x").cross_check_flops_per_s() is None


def test_the_flop_rate_follows_the_chip() -> None:
    rates = {"7.0": 1024, "7.5": 1024, "8.0": 2048, "8.6": 1024, "8.9": 1024, "9.0": 4096, "10.0": 8192, "10.3": 8192}
    for each in load().hardware:
        chip = each.chip
        halved = each.sku.startswith("rtx-") or each.sku == "l40"
        expected = 512 if halved else rates.get(chip.compute_capability)
        assert chip.flop_per_clock_per_sm == expected, each.sku


def test_fp64_matmul_is_held_against_the_tensor_rate() -> None:
    a100, v100 = row("a100-sxm4-40gb"), row("v100-sxm2-16gb")
    assert a100.flops_per_s("fp64") == 19.5e12
    assert a100.flops_per_s("fp64", matmul=False) == 9.7e12
    assert v100.flops_per_s("fp64") == 7.8e12


def test_element_wise_work_has_no_matrix_unit_peak() -> None:
    assert row("l4").flops_per_s("bf16", matmul=False) is None
    assert row("l4").flops_per_s("fp32", matmul=False) == 30.3e12


def test_what_is_not_known_is_none() -> None:
    v100 = row("v100-sxm2-16gb")
    assert v100.flops_per_s("bf16") is None
    assert v100.dtypes() == ("fp64", "fp32", "fp16")
    assert row("a100-pcie-40gb").link_bytes_per_s is None
    with pytest.raises(CaseError, match="dtype='bf17'"):
        v100.flops_per_s("bf17")


def test_bandwidths_are_decimal_bytes_per_second() -> None:
    h100 = row("h100-sxm5-80gb")
    assert h100.memory_bytes_per_s == 3.35e12
    assert h100.memory_bytes == 80e9
    assert h100.link_bytes_per_s == 450e9


def test_a_slow_clock_never_lowers_the_peak() -> None:
    h100 = row("h100-sxm5-80gb")
    assert h100.clock_scale(915) == 1
    assert h100.clock_scale(None) == 1
    assert h100.clock_scale(1980) == pytest.approx(1980 / 1830)
    assert row("a10g").clock_scale(9999) == 1


def test_one_die_of_a_package_is_half_of_it() -> None:
    package = row("mi250x")
    die = package.per_torch_device()
    assert package.flops_per_s("bf16") == 383e12
    assert die.flops_per_s("bf16") == 191.5e12
    assert die.memory_bytes_per_s == 1.64e12
    assert die.memory_bytes == 64e9
    assert die.chip.sm == 110
    assert die.link_bytes_per_s is None
    assert row("mi300x").per_torch_device() is row("mi300x")


@pytest.mark.skipif(not FACTS.exists(), reason="the table of facts is not beside this checkout")
def test_every_fact_is_here_and_every_gap_is_one() -> None:
    with FACTS.open(encoding="utf-8", newline="") as file:
        facts = list(csv.DictReader(file))
    assert len(facts) == 35
    for fact in facts:
        each = row(fact["sku"])
        assert each.family == fact["family"]
        assert list(each.device_names) == [fact["device_names"]]
        assert each.chip.compute_capability == fact["cc"]
        assert " ".join(each.sources) == fact["sources"]
        assert each.note == fact["note"]
        numbers = {
            "sm": each.chip.sm,
            "boost_mhz": each.chip.boost_mhz,
            "memory_gb": each.memory.gb,
            "memory_gb_per_s": each.memory.gb_per_s,
            "link_gb_per_s_per_direction": each.link.gb_per_s_per_direction,
            "pcie_gen": each.link.pcie_gen,
        } | {column: getattr(each.peaks, column) for column in PEAK_COLUMNS}
        for column, value in numbers.items():
            assert value == (float(fact[column]) if fact[column] else None), (each.sku, column)


def test_each_row_names_its_sources() -> None:
    catalogue = load()
    for each in catalogue.hardware:
        assert each.sources
        assert set(each.sources) <= set(catalogue.sources)


def test_the_file_is_read_once() -> None:
    assert load() is load()
    assert parse(CATALOGUE.read_bytes(), source="catalogue.toml") == load()


def test_every_peak_column_is_a_data_type() -> None:
    assert set(PEAK_COLUMNS) - {"fp64_tensor"} == set(PEAK_DTYPES)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('"dense"', '"sparse"', r"Invalid enum value 'sparse' - at `\$\.hardware\[0\]\.peaks\.basis`"),
        ('basis = "dense", ', "", "missing required field `basis`"),
        ("bf16 = 20", "bf16 = -20", r"peaks\.bf16"),
        ("bf16 = 20", "bf16 = 0", r"peaks\.bf16"),
        ("bf16 = 20", 'bf16 = "20"', r"peaks\.bf16"),
        ("bf16 = 20", "bf61 = 20", "unknown field `bf61`"),
        ("schema = 1", "schema = 2", r"\$\.schema"),
        ("schema = 1", "schema = ", "line 2"),
        ('["W"]', '["Q"]', r"x1-40gb: source 'Q' is not in \[sources\]"),
        ('["W"]', "[]", "sources"),
        ("10de:0001", "0x10de", "pci_device_ids"),
        ('"x1-40gb"', '"X1 40GB"', r"\.sku"),
    ],
)
def test_a_faulty_file_is_one_line_that_names_file_and_field(old: str, new: str, fault: str) -> None:
    assert parse(SMALL.encode(), source="x.toml").hardware[0].flops_per_s("bf16") == 20e12
    with pytest.raises(FileError, match=fault) as error:
        parse(SMALL.replace(old, new).encode(), source="x.toml")
    assert str(error.value).startswith("x.toml: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("sku", "name", "pci_id", "fault"),
    [
        ("x1-40gb", "Vendor X2", "10de:0002", "sku: 'x1-40gb' occurs twice"),
        ("x2", "Vendor X1", "10de:0002", "device_names: 'Vendor X1' occurs twice"),
        ("x2", "Vendor X2", "10de:0001", "pci_device_ids: '10de:0001' occurs twice"),
        ("x1", "Vendor X2", "10de:0002", "x1: this SKU is also a family"),
    ],
)
def test_nothing_may_stand_for_two_rows(sku: str, name: str, pci_id: str, fault: str) -> None:
    table = SMALL[SMALL.index("[[hardware]]") :]
    second = table.replace('"x1-40gb"', f'"{sku}"').replace("Vendor X1", name).replace("10de:0001", pci_id)
    second = second.replace('family = "x1"', 'family = "x2"')
    with pytest.raises(FileError, match=fault):
        parse((SMALL + second).encode(), source="x.toml")


def test_an_ambiguous_name_must_lead_somewhere() -> None:
    text = SMALL.replace("[[hardware]]", '[ambiguous_device_names]\n"Vendor X" = ["x9"]\n[[hardware]]')
    with pytest.raises(FileError, match="'Vendor X': 'x9' is no SKU"):
        parse(text.encode(), source="x.toml")


def test_bytes_that_are_no_text_are_one_line() -> None:
    with pytest.raises(FileError, match=r"^x\.toml: "):
        parse(b"\xff\xfe", source="x.toml")
