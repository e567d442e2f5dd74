"""Strict loading, and finding the model in a training checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regista.backbones.architecture import architecture_facts, describe_difference
from regista.backbones.tiny import tiny_vit
from regista.backbones.weights import check_finite, choose_part, load_strict, weights_hash


class Model(nn.Module):
    """Two layers and a buffer: five tensors."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.last = nn.Linear(width, 2)
        self.register_buffer("count", torch.zeros(1))


def state(width: int = 3, value: float = 2.0) -> dict[str, Tensor]:
    return {key: torch.full_like(tensor, value) for key, tensor in Model(width).state_dict().items()}


def untouched(module: nn.Module, before: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def test_all_is_loaded() -> None:
    module = Model()
    report = load_strict(module, {**state(), "head.weight": torch.ones(1), "dino_head.mlp.0.bias": torch.ones(1)})
    assert all((value == 2).all() for value in module.state_dict().values())
    assert report.complete
    assert str(report) == "loaded 5 of 5 tensors (100 %); left out 2: head.weight, dino_head.mlp.0.bias"


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"last.bias": None}, r"file: loaded 4 of 5 tensors \(80 %\); missing 1: last\.bias"),
        ({"first.weight": torch.ones(4, 2)}, r"of another shape 1: first\.weight \(4, 2\), wanted \(3, 2\)"),
        ({"third.weight": torch.ones(1)}, r"loaded 5 of 5 tensors \(100 %\); unexpected 1: third\.weight"),
        ({"last.bias": torch.tensor([1.0, float("nan")])}, r"1 of 2 values of 'last\.bias' are NaN or infinite"),
        ({"first.bias": torch.full((3,), float("inf"))}, r"3 of 3 values of 'first\.bias' are NaN or infinite"),
    ],
)
def test_anything_less_is_an_error_and_changes_nothing(change: dict[str, Tensor | None], wanted: str) -> None:
    given = {key: value for key, value in {**state(), **change}.items() if value is not None}
    module = Model()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ValueError, match=wanted) as caught:
        load_strict(module, given, name="file")
    assert untouched(module, before)
    assert ("allow_partial" in str(caught.value)) == ("NaN" not in wanted)
    report = load_strict(module, given, allow_partial=True)
    assert not untouched(module, before)
    assert report.loaded == 5 - len(report.missing) - len(report.misshaped)


def test_nothing_that_fits_is_always_an_error() -> None:
    with pytest.raises(ValueError, match=r"loaded 0 of 5 tensors \(0 %\)"):
        load_strict(Model(), {"elsewhere.weight": torch.ones(1)}, allow_partial=True)


def test_a_share_is_never_rounded_up() -> None:
    module = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(200)])
    given = {str(number): torch.ones(1) for number in range(199)}
    with pytest.raises(ValueError, match=r"loaded 199 of 200 tensors \(99 %\)"):
        load_strict(module, given)


def test_the_modules_dtype_stays() -> None:
    module = Model().to(torch.bfloat16)
    load_strict(module, state())
    assert module.first.weight.dtype == torch.bfloat16


def test_large_values_are_finite() -> None:
    check_finite([("w", torch.full((100,), 3e38)), ("half", torch.full((100,), 6e4, dtype=torch.float16))], "x")
    check_finite(
        [("w", torch.full((100,), 1e300, dtype=torch.float64)), ("count", torch.ones(1, dtype=torch.int64))], "x"
    )
    check_finite([("w", torch.ones(4).to(torch.float8_e4m3fn))], "x")
    cancelling = torch.tensor([float("inf"), -float("inf")])
    with pytest.raises(ValueError, match="2 of 2 values of 'w'"):
        check_finite([("w", cancelling)], "x")


def test_another_architecture_is_described() -> None:
    small, other = (
        tiny_vit(**options).module.state_dict() for options in ({}, {"embed_dim": 32, "num_register_tokens": 4})
    )
    said = describe_difference(other, small)
    assert said == (
        "The file holds another architecture (width 32, 4 registers, MLP of 128) "
        "than the model built (width 64, 0 registers, MLP of 256)"
    )
    assert describe_difference(small, small) == ""
    assert architecture_facts({"norm.weight": torch.ones(1)}) == {}


# Finding the model ----------------------------------------------------------------------------


def part_of(given: Mapping[str, Tensor]) -> Any:
    wanted = state()

    def fit(tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
        assert all(value.is_meta for value in tensors.values())
        return (sum(key in wanted for key in tensors),)

    return choose_part(given, ["first.weight"], fit)


def under(prefix: str, value: float = 2.0) -> dict[str, Tensor]:
    return {prefix + key: tensor for key, tensor in state(value=value).items()}


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "module.",
        "model.",
        "state_dict.",
        "backbone.",
        "encoder.",
        "teacher.backbone.",
        "state_dict.module.model.",
        "x.",
    ],
)
def test_prefixes_are_seen_through(prefix: str) -> None:
    part = part_of({**under(prefix), "optimizer.state.0.exp_avg": torch.ones(1)})
    assert part.prefix == prefix
    assert set(part.state) - {"optimizer.state.0.exp_avg"} == set(state())
    assert (f"read from {prefix}*" in part.notes) == bool(prefix)
    assert any("optimizer.* (1)" in note for note in part.notes) == bool(prefix)


@pytest.mark.parametrize("wrapper", ["_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."])
def test_wrappers_are_taken_out_anywhere(wrapper: str) -> None:
    given = {f"module.{wrapper}{key.replace('.', f'.{wrapper}', 1)}": value for key, value in state().items()}
    assert set(part_of(given).state) == set(state())


@pytest.mark.parametrize(
    ("preferred", "other"),
    [
        ("teacher.backbone.", "student.backbone."),
        ("model_ema.", "model."),
        ("state_dict_ema.", "state_dict."),
        ("target_encoder.", "encoder."),
        ("model.teacher.", "model.student."),
        ("backbone.", "student."),
    ],
)
def test_the_teacher_or_average_is_taken_and_it_is_said(preferred: str, other: str) -> None:
    given = {
        **under(other, 1.0),
        **under(preferred, 2.0),
        f"{preferred.partition('.')[0]}.dino_head.w.x": torch.ones(1),
    }
    part = part_of(given)
    assert part.prefix == preferred
    assert all((value == 2).all() for key, value in part.state.items() if "dino_head" not in key)
    assert f"read from {preferred}* and not from {other}*" in part.notes
    left_out = next(note for note in part.notes if note.startswith("left out"))
    assert other.partition(".")[0] in left_out


def test_the_part_that_fits_best_is_taken() -> None:
    half = {key: value for key, value in under("teacher.").items() if "last" not in key}
    assert part_of({**half, **under("student.")}).prefix == "student."


def test_a_word_that_only_contains_ema_is_no_average() -> None:
    assert part_of({**under("schema.net.", 1.0), **under("net.", 2.0)}).prefix == "net."


# Hash -----------------------------------------------------------------------------------------


def test_hash_tells_weights_apart() -> None:
    module, same, other = Model(), Model(), Model()
    same.load_state_dict(module.state_dict())
    assert weights_hash(module) == weights_hash(same) != weights_hash(other)
    with torch.no_grad():
        same.last.bias.view(-1)[0] += 1e-6
    assert weights_hash(module) != weights_hash(same)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_hash_of_every_precision(dtype: torch.dtype) -> None:
    module = Model().to(dtype)
    assert weights_hash(module) == weights_hash(copy.deepcopy(module))
    assert weights_hash(module) != weights_hash(copy.deepcopy(module).float())
