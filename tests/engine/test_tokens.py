"""Token counts that FP8 matrix products divide by, and their check."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8bridge.engine import FP8EngineConfig, align_tokens, check_tokens, token_alignment
from fp8bridge.engine.config import RECIPES
from fp8bridge.errors import ConfigError


@pytest.mark.parametrize(
    ("recipe", "tp", "cp", "sequence_parallel", "expected"),
    [
        ("blockwise", 1, 1, False, 16),
        ("blockwise", 4, 1, False, 16),
        ("blockwise", 1, 2, False, 32),
        ("blockwise", 4, 2, True, 4 * 2 * 128),
        ("blockwise", 1, 1, True, 16),
        ("tensorwise", 4, 1, True, 64),
        ("delayed", 2, 2, True, 64),
        ("mxfp8", 1, 1, False, 32),
        ("mxfp8", 4, 1, True, 128),
        ("mxfp8", 2, 2, False, 64),
    ],
)
def test_alignment(recipe, tp, cp, sequence_parallel, expected):
    assert (
        token_alignment(FP8EngineConfig(recipe=recipe), tp=tp, cp=cp, sequence_parallel=sequence_parallel) == expected
    )


def test_a_multiple_of_ones_own_comes_on_top():
    config = FP8EngineConfig(token_multiple=96)
    assert token_alignment(config) == 96
    assert token_alignment(config, tp=2, sequence_parallel=True) == 768


@given(
    tokens=st.integers(1, 10**6),
    recipe=st.sampled_from(RECIPES),
    tp=st.integers(1, 16),
    cp=st.integers(1, 8),
    sequence_parallel=st.booleans(),
)
def test_padding_is_the_least_that_the_check_takes(tokens, recipe, tp, cp, sequence_parallel):
    config, ranks = FP8EngineConfig(recipe=recipe), {"tp": tp, "cp": cp, "sequence_parallel": sequence_parallel}
    padded = align_tokens(tokens, config, **ranks)
    check_tokens(padded, config, **ranks)
    assert tokens <= padded < tokens + token_alignment(config, **ranks)
    each = padded // cp // (tp if sequence_parallel else 1)
    assert each % (32 if recipe == "mxfp8" else 16) == 0
    if padded != tokens:
        with pytest.raises(ConfigError, match=f"pad to {padded}"):
            check_tokens(tokens, config, **ranks)


@pytest.mark.parametrize(("name", "value"), [("tp", 0), ("cp", 1.5), ("tp", True)])
def test_sizes_must_be_sizes(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be a whole number"):
        align_tokens(10, FP8EngineConfig(), **{name: value})
    with pytest.raises(ConfigError, match="tokens must be"):
        align_tokens(0, FP8EngineConfig())
