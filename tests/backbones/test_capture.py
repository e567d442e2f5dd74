"""The attention tap and the hooks on plain torch modules, against torch's own results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regista.backbones.capture import ATTENTION, BlockSites, Sites, reads_attention, recording
from regista.backbones.tiny import tiny_vit
from regista.layers import attention as attention_code
from regista.tokens import TokenLayout
from tests.backbones.probes import close, pictures

LAYOUT = TokenLayout.of((2, 3), 14, num_register_tokens=2)
BATCH, TOKENS, WIDTH, HEADS = 2, LAYOUT.num_tokens, 12, 3


class Attention(nn.Module):
    """A block that hands its input to an attention function."""

    def __init__(self, attend: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.attend = attend
        self.mlp_out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.attend(x)


@contextmanager
def tapped(
    module: nn.Module, kinds: tuple[str, ...] = ATTENTION, edits: dict[str, Callable[[Tensor], Tensor]] | None = None
) -> Iterator[dict[str, Tensor]]:
    sites = Sites((BlockSites(module, module, nn.Identity()),), None, None)
    wanted = {f"blocks.0.{kind}": torch.clone for kind in kinds}
    with recording(sites, wanted, edits or {}, LAYOUT, BATCH) as captured:
        yield captured


def qkv(flat: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, HEADS, TOKENS, 4)
    q, k, v = (torch.randn(shape, generator=generator) * 2 for _ in range(3))
    return (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)) if flat else (q, k, v)


def masks() -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    keep = torch.rand(BATCH, HEADS, TOKENS, TOKENS, generator=generator) > 0.4
    keep |= torch.eye(TOKENS, dtype=torch.bool)
    additive = torch.randn(BATCH, HEADS, TOKENS, TOKENS, generator=generator)
    return {
        "none": None,
        "boolean": keep,
        "additive": additive,
        "one for all": additive.select(0, 0).select(0, 0),
        "one for all heads": additive.narrow(1, 0, 1),
        "keys only": additive.narrow(1, 0, 1).narrow(2, 0, 1),
    }


def slow_attention(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """One row at a time."""
    batch, heads, tokens, _ = q.shape
    if mask is not None:
        mask = mask.expand(batch, heads, tokens, tokens)
    out = torch.zeros(batch, heads, tokens, tokens)
    for b in range(batch):
        for h in range(heads):
            for i in range(tokens):
                row = torch.stack([(q[b, h, i] * k[b, h, j]).sum() * scale for j in range(tokens)])
                if mask is not None and mask.dtype == torch.bool:
                    row = torch.where(mask[b, h, i], row, torch.tensor(float("-inf")))
                elif mask is not None:
                    row = row + mask[b, h, i]
                out[b, h, i] = row.softmax(0)
    return out


@pytest.mark.parametrize("mask_kind", masks())
@pytest.mark.parametrize("scale", [None, 0.2])
def test_the_tap_reads_the_fused_product(mask_kind: str, scale: float | None) -> None:
    q, k, v = qkv()
    mask = masks()[mask_kind]
    module = Attention(lambda _x: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale))
    wanted = slow_attention(q, k, mask, 0.5 if scale is None else scale)
    output = module(q)
    with tapped(module) as captured:
        close(module(q), output, 1e-5)
    close(captured["blocks.0.attn"], wanted, 1e-5)
    close(captured["blocks.0.attn_received"], wanted.mean(2), 1e-5)
    close(captured["blocks.0.attn_prefix"], wanted.narrow(2, 0, 3), 1e-5)
    for kind, value in zip("qkv", (q, k, v), strict=True):
        assert torch.equal(captured[f"blocks.0.{kind}"], value)


def test_flattened_heads_are_unfolded_and_folded_again() -> None:
    q, k, v = qkv(flat=True)
    module = Attention(lambda _x: F.scaled_dot_product_attention(q, k, v))
    output = module(q)
    with tapped(module) as captured:
        close(module(q), output, 1e-5)
    close(captured["blocks.0.attn"], slow_attention(*qkv()[:2], None, 0.5), 1e-5)


@pytest.mark.parametrize("budget", [1, 30, 100, 1 << 20])
def test_attention_received_does_not_depend_on_the_chunks(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_code, "_CHUNK_ELEMENTS", budget)
    q, k, v = qkv()
    for mask in masks().values():
        out, received = attention_code.attention_received(q, k, v, mask)
        close(out, F.scaled_dot_product_attention(q, k, v, attn_mask=mask), 1e-5)
        close(received, slow_attention(q, k, mask, 0.5).mean(2), 1e-5)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_multihead_attention_is_read(batch_first: bool, need_weights: bool, inference: bool, bias: bool) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, bias=bias).eval()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.mul_(2).add_(0.1 * torch.randn(parameter.shape))
    x = torch.randn(BATCH, TOKENS, WIDTH) if batch_first else torch.randn(TOKENS, BATCH, WIDTH)
    with torch.inference_mode(inference):
        output, probabilities = attention(x, x, x, need_weights=True, average_attn_weights=False)
        with tapped(attention) as captured:
            tapped_output, weights = attention(x, x, x, need_weights=need_weights)
    close(tapped_output, output, 1e-5)
    close(captured["blocks.0.attn"], probabilities, 1e-5)
    close(captured["blocks.0.attn_received"], probabilities.mean(2), 1e-5)
    if need_weights:
        close(weights, probabilities.mean(1), 1e-5)
    else:
        assert weights is None


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("boolean", [True, False])
def test_multihead_attention_with_a_mask(per_head: bool, boolean: bool) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    x = 3 * torch.randn(BATCH, TOKENS, WIDTH)
    shape = (BATCH * HEADS, TOKENS, TOKENS) if per_head else (TOKENS, TOKENS)
    mask = torch.randn(shape)
    if boolean:  # of nn.MultiheadAttention: True = must not attend
        mask = (mask > 0) & ~torch.eye(TOKENS, dtype=torch.bool)
    output, probabilities = attention(x, x, x, attn_mask=mask, average_attn_weights=False)
    with tapped(attention) as captured:
        tapped_output, _ = attention(x, x, x, attn_mask=mask, need_weights=False)
    close(captured["blocks.0.attn"], probabilities, 1e-5)
    close(tapped_output, output, 1e-5)


def test_a_learned_query_over_other_keys() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    query, keys = torch.randn(BATCH, 1, WIDTH), torch.randn(BATCH, TOKENS, WIDTH)
    _, probabilities = attention(query, keys, keys, average_attn_weights=False)
    with tapped(attention, ("attn", "attn_received")) as captured:
        attention(query, keys, keys)
    close(captured["blocks.0.attn"], probabilities, 1e-5)
    close(captured["blocks.0.attn_received"], probabilities.mean(2), 1e-5)


def test_keys_and_values_of_another_width() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(WIDTH, HEADS, kdim=5, vdim=7, batch_first=True).eval()
    query = 3 * torch.randn(BATCH, 2, WIDTH)
    keys, values = 3 * torch.randn(BATCH, TOKENS, 5), torch.randn(BATCH, TOKENS, 7)
    output, probabilities = attention(query, keys, values, average_attn_weights=False)
    with tapped(attention, ("attn", "v")) as captured:
        tapped_output, _ = attention(query, keys, values, need_weights=False)
    close(captured["blocks.0.attn"], probabilities, 1e-5)
    assert captured["blocks.0.v"].shape == (BATCH, HEADS, TOKENS, WIDTH // HEADS)
    close(tapped_output, output, 1e-5)


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_unusual_multihead_attention_is_refused(options: dict[str, Any]) -> None:
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)
    x = torch.randn(BATCH, TOKENS, WIDTH)
    with tapped(attention), pytest.raises(ValueError, match="cannot be captured"):
        attention(x, x, x)


def test_causal_attention_is_refused() -> None:
    q, k, v = qkv()
    module = Attention(lambda _x: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    with tapped(module), pytest.raises(ValueError, match="causal"):
        module(q)


def test_attention_outside_the_watched_module_is_left_alone() -> None:
    q, k, v = qkv()
    module = Attention(lambda _x: F.scaled_dot_product_attention(q, k, v))
    with tapped(module, edits={"blocks.0.v": torch.zeros_like}) as captured:
        outside = F.scaled_dot_product_attention(q, k, v)
        assert not captured
        assert module(q).abs().max() == 0
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), outside)
    assert torch.equal(module(q), outside)


def test_nothing_is_watched_after_an_exception_inside_the_module() -> None:
    q, k, v = qkv()

    def fail(_x: Tensor) -> Tensor:
        raise KeyError("planted")

    module = Attention(fail)
    with tapped(module) as captured:
        with pytest.raises(KeyError):
            module(q)
        F.scaled_dot_product_attention(q, k, v)
        assert not captured
    assert not module._forward_hooks
    assert not module._forward_pre_hooks


def test_a_reducer_may_use_attention_itself() -> None:
    q, k, v = qkv()
    module = Attention(lambda _x: F.scaled_dot_product_attention(q, k, v))
    sites = Sites((BlockSites(module, module, nn.Identity()),), None, None)
    twice = {"blocks.0.v": lambda v: F.scaled_dot_product_attention(q, k, v)}
    with recording(sites, twice, {}, LAYOUT, BATCH) as captured:
        output = module(q)
    close(captured["blocks.0.v"], output, 1e-5)


def test_blocks_that_return_tuples_are_read_and_edited() -> None:
    x = torch.randn(BATCH, TOKENS, WIDTH)
    module = Attention(lambda x: (x, "weights"))
    with tapped(module, ("resid",), {"blocks.0.resid": lambda x: x + 1}) as captured:
        first, rest = module(x)
    assert torch.equal(first, x + 1)
    assert torch.equal(captured["blocks.0.resid"], x + 1)
    assert rest == "weights"


def test_attention_that_does_not_pass_the_fused_function_is_an_error() -> None:
    backbone = tiny_vit()
    attention: Any = next(iter(backbone.module.blocks)).attn
    attention.forward = lambda x, **_options: x
    with pytest.raises(RuntimeError, match=r"nothing passed through \['blocks.0.attn'\]"):
        backbone(pictures(backbone), ["blocks.0.attn"])
    assert backbone(pictures(backbone), ["blocks.1.attn"]).captured


def test_site_names() -> None:
    sites = tiny_vit(depth=2).sites()
    assert len(sites) == len(set(sites)) == 2 * 8 + 1
    assert sites[-1] == "patch_embed"
    assert reads_attention(["blocks.1.attn_prefix"])
    assert not reads_attention(["blocks.1.resid", "blocks.0.mlp_hidden", "patch_embed"])


def test_inner_edits_end_with_their_context() -> None:
    backbone = tiny_vit()
    images = pictures(backbone)
    plain = backbone(images).tokens
    with backbone.editing({"blocks.0.mlp_hidden": torch.zeros_like}):
        outer = backbone(images).tokens
        with backbone.editing({"blocks.1.mlp_hidden": torch.zeros_like}):
            assert not torch.equal(backbone(images).tokens, outer)
        assert torch.equal(backbone(images).tokens, outer)
    assert torch.equal(backbone(images).tokens, plain)


def test_one_site_may_be_given_by_its_name_alone() -> None:
    backbone = tiny_vit()
    images = torch.randn(1, 3, 56, 56)
    captured = backbone(images, capture="blocks.0.attn").captured
    assert list(captured) == ["blocks.0.attn"]


@pytest.mark.parametrize("wrong", [5, [None], {"blocks.0.attn": 5}])
def test_a_wrong_capture_is_one_error(wrong: object) -> None:
    with pytest.raises(ValueError, match="capture is"):
        tiny_vit()(torch.randn(1, 3, 56, 56), capture=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["resid", "mlp_hidden", "q", "attn"])
def test_an_edit_that_gives_no_such_tensor_is_named(kind: str) -> None:
    backbone = tiny_vit()
    for wrong in (lambda value: None, lambda value: value.double()):
        with backbone.editing({f"blocks.1.{kind}": wrong}), pytest.raises(ValueError, match=f"blocks.1.{kind}"):
            backbone(torch.randn(1, 3, 56, 56))


@pytest.mark.parametrize("size", [112, (112,), ("a", 1), (112.0, 112.0), 0])
def test_sizes_of_preprocess_are_one_number_or_two(size: object) -> None:
    image = torch.rand(1, 3, 112, 112)
    if size == 112:
        assert tiny_vit().preprocess(image, image_size=112).shape == (1, 3, 112, 112)  # type: ignore[arg-type]
    else:
        with pytest.raises(ValueError, match="image_size"):
            tiny_vit().preprocess(image, image_size=size)  # type: ignore[arg-type]
