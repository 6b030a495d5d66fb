"""Which tokens are loaded: whole blocks, beyond what vLLM has, and never the last token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.adapters.vllm.blocks import full_blocks, loadable_tokens, usable_blocks

COUNTS = st.integers(0, 500)


@pytest.mark.parametrize(
    ("found", "local", "prompt", "loaded"),
    [
        (0, 0, 100, 0),
        (96, 0, 100, 96),
        (96, 32, 100, 64),
        (64, 64, 100, 0),  # vLLM has as much itself
        (32, 64, 100, 0),  # and here more
        (64, 0, 64, 32),  # a token is left to compute, so the last block is
        (64, 0, 65, 64),
        (32, 0, 32, 0),
        (48, 0, 100, 32),  # half a block is of no use
        (32, 0, 0, 0),
    ],
)
def test_what_is_loaded(found: int, local: int, prompt: int, loaded: int) -> None:
    assert loadable_tokens(found, local, prompt, 32) == loaded


@given(COUNTS, COUNTS, COUNTS, st.integers(1, 40))
def test_bounds(found: int, local_blocks: int, prompt: int, block: int) -> None:
    local = local_blocks * block
    loaded = loadable_tokens(found, local, prompt, block)
    assert loaded % block == 0
    if loaded:
        assert local + loaded <= found
        assert local + loaded < prompt


@given(COUNTS, st.integers(1, 40))
def test_a_usable_prompt_leaves_at_least_one_token(prompt: int, block: int) -> None:
    assert usable_blocks(prompt, block) * block < max(prompt, 1)
    assert 0 <= full_blocks(prompt, block) - usable_blocks(prompt, block) <= 1
