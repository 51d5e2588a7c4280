"""Masks of attention that are made of constants by a program that was told that it is compiled."""
import pytest
import torch
import torch.nn.functional as F
from recorders import Recorder

import minicompile

pytestmark = pytest.mark.usefixtures("fresh")


def everything(rows, columns):
    return (torch.arange(rows)[None, None, :, None] >= 0).expand(2, -1, rows, columns)


def causal(rows, columns):
    rows, columns = torch.arange(rows) + 0, torch.arange(columns)
    return rows.new_ones((), dtype=torch.bool) & (columns[None, :] <= rows[:, None])


def written(rows, columns):
    mask = torch.ones(rows, columns, dtype=torch.bool)
    mask[:, 1:] = False
    return mask


def written_before(rows, columns):
    positions = torch.arange(rows)
    positions.sub_(2)
    return (positions[:, None] >= 0) | (torch.arange(columns) >= 1)


def some(rows, columns):
    return torch.arange(columns).expand(rows, columns) < columns - 1


def additive(rows, columns):
    return torch.zeros(rows, columns)


MASKS = {everything: (True, False), causal: (True, True), written: (False, False), written_before: (False, False), some: (False, False),
         additive: (False, False)}


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("make", MASKS, ids=lambda f: f.__name__)
def test_a_mask_that_hides_nothing_is_left_out(make, asks):
    def function(q, k, v):
        mask = make(q.shape[-2], k.shape[-2]) if not asks or torch.compiler.is_compiling() else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    backend = Recorder()
    result = minicompile.compile(function, backend=backend, fullgraph=True)(q, k, v)
    torch.testing.assert_close(result, F.scaled_dot_product_attention(q, k, v, attn_mask=make(5, 7)))
    [call] = [n for n in backend.graphs[0].graph.nodes if n.target is F.scaled_dot_product_attention]
    gone, is_causal = MASKS[make] if asks else (False, False)
    assert (call.kwargs["attn_mask"] is None, call.kwargs.get("is_causal", False)) == (gone, is_causal)


def test_a_mask_by_its_place_and_one_whose_size_varies():
    def function(q, k, v):
        torch.compiler.is_compiling()
        return F.scaled_dot_product_attention(q, k, v, causal(q.shape[-2], k.shape[-2]), 0.0)
    backend = Recorder()
    compiled = minicompile.compile(function, backend=backend, fullgraph=True)
    for length in (5, 6, 9):
        q, k, v = torch.randn(3, 2, 3, length, 8)
        torch.testing.assert_close(compiled(q, k, v), function(q, k, v))
    assert len(backend.graphs) == 2
    [call] = [n for n in backend.graphs[0].graph.nodes if n.target is F.scaled_dot_product_attention]
    assert call.kwargs["is_causal"] is True and call.kwargs["attn_mask"] is None


def test_a_batch_size_that_varies_is_no_part_of_the_mask():
    def function(q, k, v):
        torch.compiler.is_compiling()
        mask = (torch.arange(q.shape[-2])[None, None, :, None] >= 0).expand(q.shape[0], -1, -1, k.shape[-2])
        return F.scaled_dot_product_attention(q, k, v, mask & torch.ones(1, 1, dtype=torch.bool))
    backend = Recorder()
    compiled = minicompile.compile(function, backend=backend, fullgraph=True)
    for batch in (2, 3, 5, 7):
        q, k, v = torch.randn(3, batch, 3, 6, 8)
        torch.testing.assert_close(compiled(q, k, v), function(q, k, v))
    assert len(backend.graphs) == 2
    for gm in backend.graphs:
        [call] = [n for n in gm.graph.nodes if n.target is F.scaled_dot_product_attention]
        assert call.kwargs["attn_mask"] is None
