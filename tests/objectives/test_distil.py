"""Distillation of tiny ViTs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from regista.backbones.base import Backbone
from regista.backbones.tiny import tiny_vit
from regista.objectives.distil import DistilTask
from regista.train import TrainConfig, TrainResult, train
from tests.tolerances import assert_close
from tests.train.tasks import lines, same_weights

PIXELS = (56, 42)  # 4 x 3 patches, not the grid of the position table


def vit(registers: int = 0, seed: int = 0) -> Backbone:
    return tiny_vit(num_register_tokens=registers, embed_dim=16, depth=2, num_heads=2, seed=seed)


def pictures(count: int = 10, seed: int = 1) -> Tensor:
    return torch.randn(count, 3, *PIXELS, generator=torch.Generator().manual_seed(seed))


class Images(Dataset[Tensor]):
    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return self.images[index]


def targets_of(teacher: Backbone) -> Callable[[Tensor], Tensor]:
    return lambda images: teacher(images).patches


def another() -> Backbone:
    """A teacher that is far from every student."""
    return vit(seed=7)


def trainable_of(student: Backbone) -> dict[str, nn.Parameter]:
    """Registers, positions, patch projection and the last block."""
    wanted = ("reg_token", "pos_embed", "patch_embed", "blocks.1.")
    return {name: value for name, value in student.module.named_parameters() if name.startswith(wanted)}


def on_the_way(student: Backbone, **options: Any) -> DistilTask:
    options = {"targets": targets_of(another()), **options}
    return DistilTask(student, trainable_of(student), Images(pictures()), **options)


def weights(student: Backbone) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in student.module.state_dict().items()}


def run(task: DistilTask, folder: Path, *, resume: bool = False, **changes: Any) -> TrainResult:
    values: dict[str, Any] = {"epochs": 3, "batch_size": 4, "lr": 3e-3, "device": "cpu", **changes}
    return train(task, TrainConfig(**values), folder, resume=resume)


def slow_loss(p: Tensor, t: Tensor, scale: float) -> float:
    p, t = p.detach(), t.detach()
    return float(1 - F.cosine_similarity(p, t, dim=-1).mean() + scale * F.mse_loss(p, t))


def test_the_loss_is_that_of_the_modules_themselves(tmp_path: Path) -> None:
    student, teacher = vit(4), another()
    images = pictures(4)
    module: Any = student.module
    terms = on_the_way(student, mse_scale=0.3).loss(images, step=0, epoch=0)
    with teacher.prepared(PIXELS), student.prepared(PIXELS):
        tokens = module.forward_features(images)
        target = teacher.layout(PIXELS).take(teacher.forward_tokens(images), "patches")
    predicted = student.layout(PIXELS).take(tokens, "patches")
    assert terms["loss"].item() == pytest.approx(slow_loss(predicted, target, 0.3), rel=1e-5)
    assert set(terms) == {"loss", "cosine", "mse"}


def test_a_student_learns_and_the_rest_keeps_every_bit(tmp_path: Path) -> None:
    student, teacher = vit(4), another()
    chosen = trainable_of(student)
    chosen["reg_token"].requires_grad_(False)
    flags = {name: value.requires_grad for name, value in student.module.named_parameters()}
    before, before_teacher = weights(student), weights(teacher)
    task = DistilTask(student, chosen, Images(pictures()), targets=targets_of(teacher))
    result = run(task, tmp_path / "run", epochs=8)
    first = lines(tmp_path / "run", "epoch")[0]
    assert result.terms["loss"] < 0.5 * first["loss"]
    after = weights(student)
    assert {name for name in before if not torch.equal(before[name], after[name])} == set(chosen)
    assert same_weights(before_teacher, weights(teacher))
    assert {name: value.requires_grad for name, value in student.module.named_parameters()} == flags
    assert not student.training
    assert not student.module.training
    assert all(parameter.grad is None for parameter in student.module.parameters())


def test_targets_in_the_data_or_on_the_way(tmp_path: Path) -> None:
    one, other = vit(2), vit(2)
    with torch.no_grad():
        stored = another()(pictures()).patches
    run(DistilTask(one, trainable_of(one), TensorDataset(pictures(), stored)), tmp_path / "a")
    run(on_the_way(other), tmp_path / "b")
    for line, wanted in zip(lines(tmp_path / "a"), lines(tmp_path / "b"), strict=True):
        for name in ("loss", "cosine", "mse", "grad_norm"):
            assert line[name] == pytest.approx(wanted[name], rel=1e-4)


@pytest.mark.parametrize("batch_size", [1, 3, 10])
def test_evaluation_by_hand(batch_size: int) -> None:
    student = vit(4)
    held_out = pictures(7, seed=9)
    task = on_the_way(student, held_out=Images(held_out), batch_size=batch_size)
    found = task.evaluate(0)
    with torch.no_grad():
        predicted = torch.cat([student(image[None]).patches for image in held_out])
        target = torch.cat([another()(image[None]).patches for image in held_out])
    wanted = [slow_loss(predicted, target, 1.0), float(F.cosine_similarity(predicted, target, dim=-1).mean())]
    assert [found["held_out_loss"], found["held_out_cosine"]] == pytest.approx(wanted, rel=1e-5)
    assert found["held_out_mse"] == pytest.approx(float(F.mse_loss(predicted, target)), rel=1e-5)


def test_masked_evaluation_weighs_patches_alike() -> None:
    student = vit(1)
    images, valid = pictures(5), torch.rand(5, 12, generator=torch.Generator().manual_seed(2)) > 0.5
    with torch.no_grad():
        target, predicted = another()(images).patches, student(images).patches
    data = TensorDataset(images, target, valid)
    one, five = (
        DistilTask(student, trainable_of(student), data, held_out=data, batch_size=size).evaluate(0) for size in (1, 5)
    )
    assert one == pytest.approx(five, rel=1e-5)
    assert one["held_out_mse"] == pytest.approx(float(F.mse_loss(predicted[valid], target[valid])), rel=1e-5)


def test_a_mask_beside_images_alone() -> None:
    student = vit(1)
    images, valid = pictures(3), torch.zeros(3, 12, dtype=torch.bool)
    valid[1] = True
    terms = on_the_way(student).loss((images, valid), step=0, epoch=0)
    with torch.no_grad():
        wanted = slow_loss(student(images).patches[1], another()(images).patches[1], 1.0)
    assert terms["loss"].item() == pytest.approx(wanted, rel=1e-5)


def test_extra_metrics_and_another_read_out(tmp_path: Path) -> None:
    student = vit(2)

    def halves(backbone: Backbone, images: Tensor) -> Tensor:
        return backbone(images).patches.narrow(-1, 0, 8)

    task = on_the_way(
        student,
        targets=lambda images: another()(images).patches.narrow(-1, 0, 8),
        student_patches=halves,
        extra_metrics=lambda epoch: {"ten": 10.0 + epoch},
    )
    result = run(task, tmp_path / "run")
    assert result.metrics == {"ten": 12.0}
    assert [line["ten"] for line in lines(tmp_path / "run", "epoch")] == [10.0, 11.0, 12.0]


def test_going_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    through, stopped, going_on = vit(2), vit(2), vit(2, seed=5)
    held_out = Images(pictures(3, seed=4))
    run(on_the_way(through, held_out=held_out), tmp_path / "a")
    run(on_the_way(stopped, held_out=held_out), tmp_path / "b", max_steps=4)
    result = run(on_the_way(going_on, held_out=held_out), tmp_path / "b", resume=True, num_workers=2)
    assert result.resumed_from == 4
    assert lines(tmp_path / "a") == lines(tmp_path / "b")
    assert lines(tmp_path / "a", "epoch") == lines(tmp_path / "b", "epoch")
    assert same_weights(weights(through), weights(going_on))


def test_a_run_with_other_targets_is_refused(tmp_path: Path) -> None:
    run(on_the_way(vit(2), described={"num_views": 10}), tmp_path / "run", max_steps=1)
    with pytest.raises(ValueError, match=r"task\.num_views was 10, is 4"):
        run(on_the_way(vit(2), described={"num_views": 4}), tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match=r"mse_scale was 1\.0, is 0\.2"):
        run(on_the_way(vit(2), described={"num_views": 10}, mse_scale=0.2), tmp_path / "run", resume=True)


def test_weights_shared_with_the_teacher_learn_under_autocast(tmp_path: Path) -> None:
    """Casts of shared weights that the teacher made without gradients must not reach the student."""
    student = vit(1)
    shared = dict(student.module.named_parameters())["blocks.1.mlp.fc1.weight"]
    before = shared.detach().clone()

    def targets(images: Tensor) -> Tensor:
        return student(images).patches.roll(1, -1)

    task = DistilTask(student, {"weight": shared}, Images(pictures()), targets=targets)
    run(task, tmp_path / "run", precision="bf16", max_steps=1, weight_decay=0.0)
    assert not torch.equal(before, shared)


def test_a_student_that_blows_up_is_named_with_its_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(NaN|infinite|inf|nan).*step \d+, epoch \d+"):
        run(on_the_way(vit(2)), tmp_path / "run", lr=1e30, epochs=10)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda s: DistilTask(s, {}, Images(pictures())), "it is empty"),
        (lambda s: DistilTask(s, {"x": nn.Parameter(torch.ones(1))}, Images(pictures())), r"\['x'\] are none of it"),
        (lambda s: DistilTask(s, trainable_of(s), Images(pictures())), "images alone"),
        (lambda s: on_the_way(s, targets=lambda x: torch.ones(len(x), 5, 16)), r"\(1, 12, 16\) .* is \(1, 5, 16\)"),
        (lambda s: on_the_way(s, held_out=Images(pictures(0))), "held-out data are empty"),
        (lambda s: DistilTask(s, trainable_of(s), Images(pictures(0)), targets=len), "training data are empty"),  # type: ignore[arg-type]
        (lambda s: DistilTask(s, trainable_of(s), TensorDataset(*[pictures()] * 4)), "1 parts too many"),
    ],
)
def test_mistakes_are_named_before_anything_is_written(
    tmp_path: Path, make: Callable[[Backbone], DistilTask], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        run(make(vit(1)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_picture_with_nan_is_named(tmp_path: Path) -> None:
    images = pictures()
    images[7, 0, 0, 0] = math.nan
    student = vit(1)
    task = DistilTask(student, trainable_of(student), Images(images), targets=targets_of(another()))
    with pytest.raises(ValueError, match=r"NaN or infinite pixels in image \d .*step \d, epoch 0"):
        run(task, tmp_path / "run")


def test_gradients_reach_the_registers_and_the_positions() -> None:
    student = vit(4)
    task = on_the_way(student)
    with task.prepared():
        task.loss(pictures(2), step=0, epoch=0)["loss"].backward()
    named = dict(student.module.named_parameters())
    for name in ("reg_token", "pos_embed"):
        grad = named[name].grad
        assert grad is not None
        assert grad.abs().sum() > 0
    assert named["blocks.0.mlp.fc1.weight"].grad is None
    # the slope along one direction, by differences
    direction = torch.randn(named["reg_token"].shape, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        sides = []
        for sign in (1, -1):
            named["reg_token"].add_(sign * 1e-2 * direction)
            sides.append(task.loss(pictures(2), step=0, epoch=0)["loss"].double())
            named["reg_token"].sub_(sign * 1e-2 * direction)
    grad = named["reg_token"].grad
    assert grad is not None
    slope = (grad * direction).sum().double()
    assert_close((sides[0] - sides[1]) / 2e-2 / slope, torch.ones((), dtype=torch.float64), dtype=torch.bfloat16)
