"""Routing by arithmetic: every pair computed or dropped, the shares of the experts, the same in every process."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.errors import CaseError
from perfsuite.workloads.routing import KINDS, Routing, prepare


def listed(routing: Routing) -> list[list[int]]:
    """The tokens of each expert."""
    return [tokens.tolist() for tokens in routing.assignments()]


FACTORS = st.none() | st.floats(min_value=0.1, max_value=4.0)


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    """Routings of a few tokens, of either kind, with and without a capacity."""
    experts = draw(st.integers(1, 12))
    return Routing(
        tokens=draw(st.integers(1, 40)),
        experts=experts,
        active=draw(st.integers(1, experts)),
        kind=draw(st.sampled_from(KINDS)),
        capacity_factor=draw(FACTORS),
        seed=draw(st.integers(0, 9)),
    )


@given(routing=routings())
def test_pairs_are_kept_or_dropped(routing: Routing) -> None:
    assert routing.kept + routing.dropped == routing.tokens * routing.active
    assert routing.kept == sum(map(len, routing.assignments()))
    assert routing.dropped == 0 or routing.capacity_factor is not None


@given(routing=routings())
def test_token_has_different_experts(routing: Routing) -> None:
    assert [len(set(experts)) for experts in routing.choices] == [routing.active] * routing.tokens
    assert {expert for experts in routing.choices for expert in experts} <= set(range(routing.experts))


@given(routing=routings())
def test_expert_computes_its_first_tokens_up_to_capacity(routing: Routing) -> None:
    wanted = [
        [token for token, experts in enumerate(routing.choices) if expert in experts]
        for expert in range(routing.experts)
    ]
    assert listed(routing) == [tokens[: routing.capacity] for tokens in wanted]
    assert list(routing.wanted) == [len(tokens) for tokens in wanted]


@given(routing=routings())
def test_balanced_shares_differ_by_one_at_most(routing: Routing) -> None:
    shares = [len(tokens) for tokens in replace(routing, kind="balanced", capacity_factor=None).assignments()]
    assert max(shares) - min(shares) <= 1


@given(routing=routings())
def test_balanced_drops_nothing_at_a_capacity_of_its_share(routing: Routing) -> None:
    assert replace(routing, kind="balanced", capacity_factor=1.0).dropped == 0


@given(experts=st.integers(2, 16), tokens=st.integers(64, 200), seed=st.integers(0, 9), data=st.data())
def test_skewed_is_less_equal_than_balanced(experts: int, tokens: int, seed: int, data: st.DataObject) -> None:
    active = data.draw(st.integers(1, experts // 2))
    skewed = Routing(tokens=tokens, experts=experts, active=active, kind="skewed", seed=seed)
    balanced = replace(skewed, kind="balanced")
    assert max(map(len, skewed.assignments())) > max(map(len, balanced.assignments()))


def test_skewed_follows_zipf() -> None:
    """One of four experts by the weights 1, 1/2, 1/3 and 1/4: shares of 0.48, 0.24, 0.16 and 0.12."""
    shares = [len(tokens) / 20000 for tokens in Routing(tokens=20000, experts=4, active=1, kind="skewed").assignments()]
    assert shares == pytest.approx([0.48, 0.24, 0.16, 0.12], abs=0.01)


def test_balanced_by_hand() -> None:
    routing = Routing(tokens=3, experts=4, active=2)
    assert routing.choices.tolist() == [[0, 1], [2, 3], [0, 1]]
    assert listed(routing) == [[0, 2], [0, 2], [1], [1]]
    assert listed(replace(routing, capacity_factor=0.5)) == [[0], [0], [1], [1]]


def test_capacity_is_rounded_up_from_the_exact_product() -> None:
    # 1.1 * 10 is 11.000000000000002 in binary.
    assert Routing(tokens=40, experts=8, active=2, capacity_factor=1.1).capacity == 11
    assert Routing(tokens=41, experts=8, active=2, capacity_factor=1.0).capacity == 11


def test_seed_decides() -> None:
    routing = Routing(tokens=64, experts=8, active=2, kind="skewed")
    assert routing.choices.tolist() == replace(routing).choices.tolist()
    assert routing.choices.tolist() != replace(routing, seed=18).choices.tolist()


def test_millions_of_tokens_are_counted_as_they_are_drawn() -> None:
    """More than are drawn at once; a token at a time took 20 us, and 43 s for these."""
    routing = Routing(tokens=64 * 32768, experts=8, active=2, kind="skewed", capacity_factor=1.25)
    assert routing.wanted == tuple(np.bincount(routing.choices.ravel(), minlength=8).tolist())
    assert routing.kept == sum(map(len, routing.pairs))
    fewer = replace(routing, tokens=1000)
    assert fewer.choices.tolist() == routing.choices[:1000].tolist()


def test_every_process_routes_alike() -> None:
    routing = Routing(tokens=256, experts=8, active=2, kind="skewed", capacity_factor=1.25)
    script = f"""
import hashlib
from perfsuite.workloads.routing import Routing
print(hashlib.sha256(repr({routing!r}.choices.tolist()).encode()).hexdigest())
"""
    here = hashlib.sha256(repr(routing.choices.tolist()).encode()).hexdigest()
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == here


@given(routing=routings())
def test_prepared_tensors_say_the_same(routing: Routing) -> None:
    ready = prepare(routing, "cpu")
    assert ready.chosen.tolist() == [list(experts) for experts in routing.choices]
    assert [tokens.tolist() for tokens in ready.tokens] == listed(routing)
    for expert, (tokens, pairs) in enumerate(zip(ready.tokens, ready.pairs, strict=True)):
        assert torch.equal(pairs // routing.active, tokens)
        assert ready.chosen.flatten()[pairs].tolist() == [expert] * len(pairs)


def test_prepared_on_meta_has_shapes_alone() -> None:
    ready = prepare(Routing(tokens=6, experts=4, active=2), "meta")
    assert ready.chosen.shape == (6, 2)
    assert ready.chosen.is_meta
    assert [len(pairs) for pairs in ready.pairs] == [3, 3, 3, 3]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"tokens": 0}, "routing: tokens=0 must be a whole number of at least 1"),
        ({"active": 5}, "routing: active=5 must not exceed experts=4"),
        ({"kind": "random"}, "routing: kind='random' must be one of balanced, skewed"),
        ({"capacity_factor": 0.0}, "routing: capacity_factor=0.0 must be a number above 0"),
        ({"capacity_factor": float("nan")}, "routing: capacity_factor=nan must be a number above 0"),
        (
            {"capacity_factor": "1.0"},
            "routing: capacity_factor='1.0' must be a number above 0, or None to drop nothing",
        ),
        ({"capacity_factor": True}, "routing: capacity_factor=True must be a number above 0"),
        ({"capacity_factor": [1.0]}, r"routing: capacity_factor=\[1.0\] must be a number above 0"),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(CaseError, match=says):
        Routing(**{"tokens": 8, "experts": 4, "active": 2, **wrong})
