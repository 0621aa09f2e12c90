"""A context in pieces gives what one call over the whole context gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine import split_attention


@pytest.mark.parametrize("pieces", [2, 3, 8])
@pytest.mark.parametrize("context", [1024, 1500, 2047])
@pytest.mark.parametrize("rows", [1, 24])
def test_pieces_give_the_whole(context: int, rows: int, pieces: int) -> None:
    generator = torch.Generator().manual_seed(context)
    keys, values = (torch.randn(3, 2200, 64, generator=generator)[:, :context] for _ in range(2))
    query = torch.randn(3, rows, 64, generator=generator)
    mask = None
    if rows > 1:
        hidden = torch.arange(context) > torch.arange(context - rows, context)[:, None]
        mask = torch.zeros(rows, context).masked_fill_(hidden, -torch.inf)
    expected = F.scaled_dot_product_attention(query[None], keys[None], values[None], attn_mask=mask, scale=0.2)[0]
    cut = split_attention.piece_mask(mask, context, pieces, torch.float32)
    got = split_attention.attend(query, keys, values, cut, 0.2, pieces)
    assert torch.allclose(got, expected, atol=1e-5)
    again = split_attention.attend(query, keys, values, cut, 0.2, pieces)
    assert torch.equal(got, again)


def test_a_context_is_cut_only_where_that_evens_the_threads_out() -> None:
    threads = torch.get_num_threads()
    long, short = torch.empty(threads, 4096, 64), torch.empty(1, 512, 64)
    assert split_attention.piece_count(threads, long, long) == 1
    assert split_attention.piece_count(1, short, short) == 1
    assert split_attention.piece_count(1, long, torch.empty(1, 4096, 32)) == 1
    torch.set_num_threads(2)
    try:
        assert split_attention.piece_count(3, long, long) == 2
    finally:
        torch.set_num_threads(threads)
