"""``perfsuite mfu``: numbers by hand and by publications, what it refuses, and every command of its page."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from perfsuite.commands.mfu import mfu
from perfsuite.errors import HardwareError, PerfsuiteError
from perfsuite.models import MODELS

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "mfu.md").read_text(encoding="utf-8")
APP = typer.Typer(add_completion=False)
APP.command()(mfu)

STEP = "--params 7e9 --tokens-per-step 65536"
EIGHT = f"{STEP} --gpu a100-sxm4-40gb --gpus 8"
GPT3 = "--model gpt3-175b --gpus 1024 --gpu a100-sxm4-80gb --tokens 300e9"
LLAMA3 = "--layers 32 --d-model 4096 --heads 32 --kv-heads 8 --d-ff 14336 --vocab 128256 --seq-len 8192"
PLAN = "--gpu l4 --mfu 0.4"


def run(arguments: str) -> Result:
    """The command as it is typed."""
    return CliRunner().invoke(APP, shlex.split(arguments))


def words(result: Result) -> str:
    """The output without its line breaks."""
    return " ".join(result.stdout.split())


def answer(arguments: str) -> dict[str, Any]:
    """The JSON object of a command that ends well."""
    result = run(f"{arguments} --format json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def refused(arguments: str) -> str:
    """The one line of a refusal with exit code 2."""
    result = run(arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("Error: ").rstrip("\n")


# Measured


def test_a_step_that_cannot_be_so_fast_is_called_impossible() -> None:
    result = run(f"{EIGHT} --step-time 0.5 --tokens 1e12")
    assert result.exit_code == 1
    text = words(result)
    assert "impossible: 500 ms a step would be 220.6 % of the peak by 6N; a step takes at least 1.10 s" in text
    assert "days" not in text


def test_a_step_that_can() -> None:
    text = words(run(f"{EIGHT} --step-time 1.5"))
    assert "MFU 73.5 % by 6N, measured; a step takes at least 1.10 s" in text
    assert "Step 1.50 s for 65,536 tokens: 2.75 PFLOP by 6N" in text
    assert "6N a token, 2N forward, 4N backward, no attention" in text
    assert "8 x a100-sxm4-40gb of 312 TFLOP/s bf16, dense data sheet" in text
    # 65,536 tokens in 1.5 s on 8 GPUs; x 42 GFLOP.
    assert "tokens/s 5,461 43,691" in text
    assert "FLOP/s by 6N 229 TFLOP/s 1.84 PFLOP/s" in text
    assert "MFU by 6N 73.5 % 73.5 %" in text


def test_with_parameters_alone_there_is_no_other_convention() -> None:
    found = answer(f"{EIGHT} --step-time 1.5")
    assert list(found["mfu"]) == ["6N"]
    assert (found["hfu"], found["model"]["seq_len"], found["run"]) == (None, None, None)
    assert "HFU" not in run(f"{EIGHT} --step-time 1.5").stdout


def test_a_rate_in_tokens_is_the_step_divided() -> None:
    eight = "--params 7e9 --gpu a100 --gpus 8"
    assert answer(f"{EIGHT} --step-time 2")["mfu"] == answer(f"{eight} --tokens-per-second 32768")["mfu"]
    result = run(f"{eight} --tokens-per-second 1e5")
    assert result.exit_code == 1
    # 8 x 312e12 / 42e9 = 59,429.
    impossible = "impossible: 100,000 tokens/s would be 168.3 % of the peak by 6N; at most 59,429 tokens/s are possible"
    assert impossible in words(result)


def test_a_model_is_counted_exactly() -> None:
    """Llama-3-8B at 8192 tokens: 6 x 7,504,658,432 matmul weights + 6 L H Q (T + 1), 51.5 GFLOP a token."""
    flops = 6 * 7_504_658_432 + 6 * 32 * 4096 * 8193
    step_s = flops * 1e6 / 624e12
    found = answer(f"--model llama3-8b --tokens-per-step 1e6 --step-time {step_s} --gpu a100 --gpus 4")
    assert found["model"]["flops_per_token"]["exact"] == flops
    assert found["mfu"]["exact"] == pytest.approx(0.5)
    assert found["convention"] == "exact"


def test_every_convention_stands_beside_the_others_and_hfu_apart() -> None:
    """Mixtral-8x7B at 4096 tokens: GFLOP a token of the table of conventions, at 5000 a second on 989.5 TFLOP/s."""
    arguments = "--model mixtral-8x7b --seq-len 4096 --gpu h100-sxm5-80gb --tokens-per-second 5e3"
    found = answer(arguments)
    gflops = {"exact": 79.71, "palm": 286.66, "torchtitan": 82.94, "megatron": 79.71, "6N": 280.22}
    assert found["mfu"] == pytest.approx({name: each * 1e9 * 5e3 / 989.5e12 for name, each in gflops.items()}, rel=1e-3)
    assert found["hfu"] == pytest.approx(found["mfu"]["palm"] * 4 / 3)
    lines = run(arguments).stdout.splitlines()
    heading = next(number for number, line in enumerate(lines) if line.startswith("Convention"))
    assert [line.split()[0] for line in lines[heading + 1 :][:5]] == list(gflops)
    (hfu,) = [line for line in lines if line.startswith("HFU")]
    assert hfu.split(maxsplit=1)[1] == "193.1 % if everything is recomputed: 382 GFLOP/token, palm x 4/3"
    above = "Over 100 % palm, 6N, HFU: what is not computed is counted too"
    assert above in " ".join(" ".join(lines).split())


def test_of_a_mixture_both_counts_of_parameters_are_shown() -> None:
    text = words(run(f"--model mixtral-8x7b {PLAN}"))
    assert "Parameters 46,702,792,704, of which a token uses 12,879,925,248" in text
    assert "of which" not in words(run(f"--model llama2-7b {PLAN}"))


# Planned


def test_the_run_of_gpt3_by_hand() -> None:
    """300e9 tokens on 1024 GPUs of 312 TFLOP/s at 30 %, at 2 an hour."""
    weights = 96 * 12 * 12288**2 + 12288 * 50257
    assert weights == 174_563_733_504
    # Of 2048 tokens each sees 1024.5 on average, itself among them; 12 FLOPs for each, and number of a head.
    flops = 6 * weights + 96 * 12288 * 12 * 1024.5
    seconds = 300e9 * flops / (0.30 * 1024 * 312e12)
    assert seconds == pytest.approx(3_323_707, rel=1e-6)  # 38.47 days
    found = answer(f"{GPT3} --mfu 0.30 --price-per-gpu-hour 2")
    assert found["model"]["seq_len"] == 2048
    now, faster = found["run"], found["run_at_five_more"]
    assert now["days"] == pytest.approx(seconds / 86400)
    assert now["gpu_hours"] == pytest.approx(1024 * seconds / 3600)
    assert now["cost"] == pytest.approx(2 * 1024 * seconds / 3600)
    assert faster["mfu"] == pytest.approx(0.35)
    for name in ("days", "gpu_hours", "cost"):
        assert faster[name] == pytest.approx(now[name] * 0.30 / 0.35)
    text = words(run(f"{GPT3} --mfu 0.30 --price-per-gpu-hour 2"))
    assert "300,000,000,000 tokens days GPU-hours cost" in text
    assert "at 30.0 % MFU 38.5 945,410 1,890,821" in text
    assert "at 35.0 % MFU 33.0 810,352 1,620,704" in text
    assert "five points of MFU save 5.50 135,059 270,117" in text
    # 0.30 x 312e12 / 1.0619e12 a GPU.
    assert "tokens/s 88.1 90,261" in text


def test_the_published_run_of_gpt3() -> None:
    """Narayanan et al. 2021 (arXiv:2104.04473), section 5.1: at 140 TFLOP/s on each of 1024 A100, 34 days.

    Their 140 count what is recomputed, a quarter of it, and attention in full.
    """
    found = answer(f"{GPT3} --mfu {140 * 3 / 4 / 312} --convention palm")
    assert found["hfu"] == pytest.approx(140 / 312)
    assert found["run"]["days"] == pytest.approx(34, rel=0.03)


def test_a_plan_goes_by_the_convention_that_is_named() -> None:
    found = answer(f"--model llama3-8b {PLAN} --convention palm")
    assert found["mfu"]["palm"] == pytest.approx(0.4)
    assert found["mfu"]["exact"] == pytest.approx(0.4 * 51.470 / 61.067, rel=1e-4)
    assert found["convention"] == "palm"


def test_a_plan_that_no_cluster_can_keep() -> None:
    """6N counts less than Llama-3-8B needs: 48.182 of 51.471 GFLOP a token."""
    plan = "--model llama3-8b --gpu l4 --mfu 0.95 --convention 6N --tokens 1e9"
    result = run(plan)
    assert result.exit_code == 1
    # 121e12 / 51.471e9.
    assert "impossible: 95.0 % by 6N would be 101.5 % of the peak by exact; at most 2,351 tokens/s" in words(result)
    found = json.loads(run(f"{plan} --format json").stdout)
    assert (found["possible"], found["run"]) == (False, None)


@pytest.mark.parametrize("preset", MODELS)
def test_a_plan_at_the_peak_can_be_but_five_points_more_cannot(preset: str) -> None:
    plan = f"--model {preset} --gpu l4 --gpus 7 --mfu 1 --tokens 1e9"
    found = answer(plan)
    assert found["run"]["mfu"] == pytest.approx(1)
    assert found["run_at_five_more"] is None
    assert "five points more would pass the peak" in words(run(plan))


def test_the_time_of_a_planned_step() -> None:
    found = words(run(f"{EIGHT} --mfu 0.5"))
    assert "Step 2.21 s for 65,536 tokens" in found
    assert "MFU 50.0 % by 6N, planned; a step takes at least 1.10 s" in found


PUBLISHED_CONTEXTS = {
    "gpt2-124m": 1024,
    "gpt3-175b": 2048,
    "llama2-7b": 4096,
    "llama3-8b": 8192,
    "llama3-70b": 8192,
    "mixtral-8x7b": 32768,
}


@pytest.mark.parametrize("preset", PUBLISHED_CONTEXTS)
def test_a_preset_has_its_published_context(preset: str) -> None:
    assert answer(f"--model {preset} {PLAN}")["model"]["seq_len"] == PUBLISHED_CONTEXTS[preset]
    assert answer(f"--model {preset} {PLAN} --seq-len 128")["model"]["seq_len"] == 128


# Sizes


def test_sizes_by_hand_are_the_presets() -> None:
    by_hand, preset = answer(f"{LLAMA3} {PLAN}"), answer(f"--model llama3-8b {PLAN}")
    for each in (by_hand, preset):
        del each["model"]["name"]
    assert by_hand == preset


def test_sizes_of_gpts_kind() -> None:
    sizes = "--layers 12 --d-model 768 --heads 12 --d-ff 3072 --vocab 50257 --seq-len 1024 --no-gated --tied"
    assert answer(f"{sizes} {PLAN}")["model"]["parameters"] == 124_439_808


def test_sizes_of_a_mixture_with_wide_heads() -> None:
    """Qwen3-30B-A3B: 30.5 billion parameters, of which 3.3 are active; its heads together are wider than the model."""
    sizes = "--layers 48 --d-model 2048 --heads 32 --kv-heads 4 --head-dim 128 --d-ff 768 --vocab 151936"
    found = answer(f"{sizes} --experts 128 --active-experts 8 --seq-len 4096 {PLAN}")
    assert found["model"]["parameters"] == pytest.approx(30.5e9, abs=0.05e9)
    assert found["model"]["active_parameters"] == pytest.approx(3.3e9, abs=0.1e9)


def test_a_config_file_is_the_preset(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    sizes = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    config.write_text(json.dumps({"model_type": "gpt2", **sizes}), encoding="utf-8")
    found, preset = answer(f"--config {config} {PLAN}"), answer(f"--model gpt2-124m {PLAN}")
    assert found["model"].pop("name") == str(config)
    assert preset["model"].pop("name") == "gpt2-124m"
    assert found == preset


def test_attention_over_a_window_is_counted_only_where_it_is_full(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 32768, "sliding_window": 4096}
    config.write_text(json.dumps({"model_type": "mistral", **sizes, **more}), encoding="utf-8")
    fault = "sliding_window=4096, and attention over a window is not counted; give --seq-len 4096 or less"
    assert refused(f"--config {config} {PLAN}") == f"--config {config}: {fault}"
    assert refused(f"--config {config} {PLAN} --seq-len 4097") == f"--config {config}: {fault}"
    assert answer(f"--config {config} {PLAN} --seq-len 4096")["model"]["seq_len"] == 4096


def test_a_config_that_tells_no_context_needs_one(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"intermediate_size": 96, "vocab_size": 100}
    config.write_text(json.dumps({"model_type": "llama", **sizes, **more}), encoding="utf-8")
    assert refused(f"--config {config} {PLAN}").startswith("--seq-len is missing")


def test_a_fault_of_the_config_names_the_file(tmp_path: Path) -> None:
    result = run(f"--config {tmp_path}/no.json {PLAN}")
    assert isinstance(result.exception, PerfsuiteError)
    assert str(result.exception) == f"{tmp_path}/no.json: cannot be read: No such file or directory"


# Refusals


ONE_MODEL = (
    "give one of --params N, --model PRESET, --config FILE, "
    "or its sizes (--layers, --d-model, --heads, --d-ff, --vocab)"
)
ONE_RATE = "give one of --step-time S with --tokens-per-step N, --tokens-per-second R, or --mfu F"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (PLAN, f"no model: {ONE_MODEL}"),
        (f"--params 1e9 --model llama3-8b {PLAN}", f"--params and --model contradict each other; {ONE_MODEL}"),
        (f"--model llama3-8b {LLAMA3} {PLAN}", f"--model and --layers contradict each other; {ONE_MODEL}"),
        (f"--config x --untied {PLAN}", f"--config and --tied contradict each other; {ONE_MODEL}"),
        (
            f"--params 1e9 --seq-len 8 {PLAN}",
            "--seq-len: 6N counts no attention; leave it out, or give --model, --config or sizes for --params",
        ),
        (
            f"--model gpt2-124m --seq-len 1025 {PLAN}",
            "--seq-len 1025: gpt2-124m has learned positions for 1024 tokens; give at most that",
        ),
        (
            f"--layers 2 --heads 4 {PLAN}",
            "--d-model, --d-ff, --vocab, --seq-len: missing; a model by its sizes needs each of these",
        ),
        (f"{LLAMA3} --heads 24 {PLAN}", "--head-dim is missing: --d-model 4096 is no multiple of --heads 24"),
        ("--params 1e9 --gpu l4", f"no rate: {ONE_RATE}"),
        ("--params 1e9 --gpu l4 --tokens-per-step 8", f"no rate: {ONE_RATE}"),
        (f"--params 1e9 {PLAN} --step-time 1", f"--step-time and --mfu contradict each other; {ONE_RATE}"),
        (
            f"--params 1e9 {PLAN} --tokens-per-second 1",
            f"--tokens-per-second and --mfu contradict each other; {ONE_RATE}",
        ),
        (
            "--params 1e9 --gpu l4 --step-time 1",
            "--step-time needs --tokens-per-step N: how many tokens all GPUs do in a step",
        ),
        (
            f"--params 1e9 {PLAN} --price-per-gpu-hour 2",
            "--price-per-gpu-hour needs --tokens N: how many tokens the run has",
        ),
        (
            f"--params 1e9 {PLAN} --convention exact",
            "--convention exact: needs a model's sizes; with --params there is 6N",
        ),
        (
            f"--model llama3-8b {PLAN} --convention hfu",
            "--convention hfu: an HFU is no MFU; use one of exact, palm, torchtitan, megatron, 6N",
        ),
        (
            f"--model llama3-8b {PLAN} --convention 6n",
            "--convention 6n: use one of exact, palm, torchtitan, megatron, 6N",
        ),
        (f"--model x {PLAN}", f"--model x: use one of {', '.join(MODELS)}"),
    ],
)
def test_what_contradicts_or_is_missing_is_one_line(arguments: str, line: str) -> None:
    assert refused(arguments) == line


BOTH = "--experts and --active-experts go together; give both, or neither for a dense model"


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ("--kv-heads 5", "--kv-heads 5: --heads 32 must be a multiple of it"),
        ("--kv-heads 64", "--kv-heads 64: --heads 32 must be a multiple of it"),
        ("--head-dim 5", "--head-dim 5 must be even: rotary positions turn pairs; give an even one, or --no-gated"),
        ("--d-model 96", "--head-dim 3 must be even: rotary positions turn pairs; give an even one, or --no-gated"),
        ("--experts 8", BOTH),
        ("--active-experts 8", BOTH),
        ("--experts 8 --no-gated", BOTH),
        ("--experts 8 --active-experts 9", "--active-experts 9 must be at most --experts 8"),
        ("--experts 8 --active-experts 2 --no-gated", "--experts 8 goes with --gated: leave out --no-gated"),
    ],
)
def test_sizes_that_no_model_has_are_refused_by_option(more: str, line: str) -> None:
    assert refused(f"{LLAMA3} {PLAN} {more}") == line


@pytest.mark.parametrize(
    "option",
    ["layers", "d-model", "heads", "kv-heads", "head-dim", "d-ff", "vocab", "experts", "active-experts", "seq-len"],
)
def test_sizes_beyond_any_model_are_refused(option: str) -> None:
    assert refused(f"{LLAMA3} {PLAN} --{option} 1.5e9").startswith(f"--{option} 1.5e9: give at most 1e+09, such as ")


def test_a_context_beyond_any_is_refused_of_a_preset_too() -> None:
    assert refused(f"--model llama3-8b {PLAN} --seq-len 1e24").startswith("--seq-len 1e24: give at most 1e+09")
    assert answer(f"--model llama3-8b {PLAN} --seq-len 1e9")["model"]["seq_len"] == 10**9


@pytest.mark.parametrize(
    ("option", "value", "fault"),
    [
        ("--step-time", "0", "give a positive number, such as 1.5"),
        ("--step-time", "-1", "give a positive number"),
        ("--step-time", "nan", "give a positive number"),
        ("--step-time", "inf", "give a positive number"),
        ("--step-time", "", "give a positive number"),
        ("--step-time", "1e-30", "give a number between 1e-24 and 1e+24"),
        ("--params", "abc", "give a positive number"),
        ("--params", "7B", "give a positive number"),
        ("--params", "-7e9", "give a positive number"),
        ("--params", "1e308", "give a number between 1e-24 and 1e+24"),
        ("--params", "1.5", "give a whole number"),
        ("--tokens-per-step", "0", "give a positive number"),
        ("--gpus", "0", "give a positive number"),
        ("--gpus", "2.5", "give a whole number"),
        ("--tokens", "2.5", "give a whole number"),
        ("--tokens-per-second", "0", "give a positive number"),
        ("--mfu", "40", "give a fraction of at most 1, such as 0.4 for 40 %"),
        ("--mfu", "40%", "give a positive number, such as 0.4"),
        ("--price-per-gpu-hour", "-2", "give a positive number, such as 2"),
        ("--d-ff", "2.5", "give a whole number"),
        ("--dtype", "bf17", "use one of fp64, fp32, tf32, fp16, bf16, fp8, fp4"),
        ("--dtype", "int8", "there is no training in it; use one of fp64, fp32"),
        ("--dtype", "fp4", "a100-sxm4-40gb has no fp4 peak; it has fp64, fp32, tf32, fp16, bf16"),
    ],
)
def test_a_wrong_value_is_one_line_and_exit_2(option: str, value: str, fault: str) -> None:
    options = {"--params": "7e9", "--tokens-per-step": "65536", "--step-time": "1", "--gpu": "a100-sxm4-40gb"}
    options[option] = value
    line = refused(shlex.join(part for pair in options.items() for part in pair))
    assert line.startswith(f"{option} {value}: {fault}")


# Hardware


def test_a_family_will_do_where_its_skus_agree() -> None:
    assert "1 x a100 of 312 TFLOP/s bf16" in words(run(f"{STEP} --step-time 60 --gpu a100"))


def test_a_package_is_called_one() -> None:
    text = words(run(f"{STEP} --step-time 60 --gpu mi250x"))
    assert "1 x mi250x package (2 torch devices) of 383 TFLOP/s" in text


@pytest.mark.parametrize(
    ("gpu", "fault"),
    [
        ("h100", "its SKUs have different bf16 peaks: h100-sxm5-80gb 989.5 TFLOP/s, h100-pcie-80gb 756.5 TFLOP/s"),
        ("v100 ", "no bf16 peak"),
        ("a1000", "'a1000' is not known hardware; near: a100"),
        ("NVIDIA H100", "name the SKU"),
        ("cpu", "a CPU has no data-sheet peak"),
        ("cpu-intel-xeon", "a CPU has no data-sheet peak"),
    ],
)
def test_hardware_without_one_peak(gpu: str, fault: str) -> None:
    result = run(f"{STEP} --step-time 1 --gpu '{gpu}'")
    if isinstance(result.exception, HardwareError):
        assert fault in str(result.exception)
    else:
        assert result.exit_code == 2
        assert fault in result.stderr


# How it reads


LARGE = "--model mixtral-8x7b --gpu mi300x --gpus 16384 --mfu 0.61 --tokens 15e12 --price-per-gpu-hour 2.5"


@pytest.mark.parametrize(
    "arguments",
    [
        f"{GPT3} --mfu 0.3 --price-per-gpu-hour 2",
        f"{EIGHT} --step-time 0.5",
        f"{LARGE} --convention torchtitan --tokens-per-step 16777216",
    ],
)
def test_no_figure_is_cut_at_80_columns(arguments: str) -> None:
    result = run(arguments)
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    assert "…" not in result.stdout
    assert "\x1b" not in result.stdout


BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(found[1], found[2]) for found in BLOCK.finditer(PAGE)]
COMMANDS = [place for place, (_, block) in enumerate(BLOCKS) if block.startswith("perfsuite mfu ")]


@pytest.mark.parametrize("place", COMMANDS)
def test_a_command_of_the_page_prints_what_it_shows(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (config,) = [block for language, block in BLOCKS if language == "json"]
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    result = run(BLOCKS[place][1].replace("\\\n", " ").removeprefix("perfsuite mfu "))
    assert result.exit_code == ("impossible" in result.stdout), result.output
    shown = [block for language, block in BLOCKS[place + 1 : place + 2] if language == "text"]
    assert shown in ([], ["".join(f"{line.rstrip()}\n" for line in result.stdout.splitlines())])


def test_the_page_has_commands_their_output_and_every_option() -> None:
    assert len(COMMANDS) >= 5
    assert len([language for language, _ in BLOCKS if language == "text"]) >= 3
    parameters = typer.main.get_command(APP).params
    options = {name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)}
    assert {name for name in options if f"`{name}" not in PAGE} == set()
