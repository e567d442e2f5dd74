"""Test-time registers: find the register neurons, give them a token of their own."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from regista.backbones.attention_bias import AttentionBias
from regista.backbones.base import Backbone
from regista.backbones.register_neurons import RegisterNeurons, prefix_segments
from regista.diagnosis.config import DiagnosisConfig
from regista.diagnosis.known_outliers import OutlierRule, outlier_count, outlier_rule, some_of, too_many
from regista.diagnosis.source import ImageSource
from regista.methods.protocol import Method, Progress, State, Workspace
from regista.methods.test_time.config import TestTimeConfig
from regista.methods.test_time.neurons import Neuron, neuron_scores, top_neurons

TRIED = (10, 20, 45, 100)  # the paper's 10 (OpenCLIP B/16), 45 (DINOv2-L) and 100 (CLIP-L)
CURED = 0.1  # of the outliers may be left


class TestTime(Method):
    """Registers without training (2506.08010)."""

    __test__ = False

    name = "test_time"
    summary = "a zero register takes over what register neurons write; no training"
    config_class = TestTimeConfig

    def outline(self, backbone: Backbone) -> Backbone:
        """Without neurons."""
        last = self.config.last_block
        if last is not None and not 0 <= last < backbone.depth:
            raise ValueError(f"{backbone.name} has blocks 0 to {backbone.depth - 1}, got last_block={last}")
        empty = torch.zeros(backbone.depth, backbone.num_heads, backbone.embed_dim // backbone.num_heads)
        return self.apply(backbone, State({"neurons": []}, {"keys": empty, "values": empty}))

    def fit(
        self,
        backbone: Backbone,
        images: Any = None,
        *,
        progress: Progress | None = None,
        workspace: Workspace | None = None,
    ) -> State:
        """Find the neurons, and for the attention-bias variant the mean key and value of the register."""
        config: TestTimeConfig = self.config
        if config.top_k == 0:
            neurons: list[Neuron] = []
            record: dict[str, Any] = {"neurons": [], "onset_block": None, "cutoff": None}
            notes = ["top_k=0: no neuron was chosen, so the register stays idle and nothing is cured"]
        else:
            few = some_of(images)
            rule = outlier_rule(backbone, few, cutoff=config.cutoff, batch_size=config.batch_size)
            last = rule.onset if config.last_block is None else config.last_block
            scores = neuron_scores(backbone, images, rule, last, batch_size=config.batch_size)
            neurons = top_neurons(scores, config.top_k)
            record, notes = {"outliers": rule.count}, list(too_many(rule.share))
            if config.top_k is None:
                neurons, left = self._fewest(backbone, few, rule, scores, progress)
                record["outliers_left"] = left
                notes += _why_no_cure(left, rule, len(neurons), scores.numel())
            record |= {
                "neurons": [[block, unit, round(score, 6)] for block, unit, score in neurons],
                "onset_block": rule.onset,
                "outlier_block": rule.block,
                "cutoff": rule.cutoff,
            }
        if config.form == "token":
            return State(record, notes=tuple(notes))
        keys, values = mean_key_value(self._with_token(backbone, neurons), images, config.batch_size)
        return State(record, {"keys": keys, "values": values}, tuple(notes))

    def apply(self, backbone: Backbone, state: State) -> Backbone:
        """A copy with the intervention at its MLPs; the register is a prefix token like any other."""
        neurons = [(int(block), int(unit), float(score)) for block, unit, score in state.record["neurons"]]
        if self.config.form == "token":
            return self._with_token(backbone, neurons)
        biased = copy.deepcopy(backbone)
        segments = prefix_segments(biased.layout())
        biased.add(RegisterNeurons(_by_block(neurons), segments, 0, self.config.variant))
        biased.add(AttentionBias(state.tensors["keys"], state.tensors["values"]))
        return biased

    def _with_token(self, backbone: Backbone, neurons: list[Neuron]) -> Backbone:
        count = self.config.registers
        cured = backbone.with_registers(torch.zeros(count, backbone.embed_dim))
        cured.add(RegisterNeurons(_by_block(neurons), prefix_segments(cured.layout()), count, self.config.variant))
        return cured

    def _fewest(
        self, backbone: Backbone, images: Any, rule: OutlierRule, scores: Tensor, progress: Progress | None
    ) -> tuple[list[Neuron], int]:
        """The fewest neurons of a few tries that leave a tenth of the outliers, or the best try; and what it leaves."""
        counts = {len(top_neurons(scores, None)), *(count for count in TRIED if count <= scores.numel())}
        best: tuple[list[Neuron], int] | None = None
        for done, count in enumerate(sorted(counts), 1):
            neurons = top_neurons(scores, count)
            left = outlier_count(self._with_token(backbone, neurons), images, rule, self.config.batch_size)
            if progress is not None:
                progress("numbers of neurons tried", done, len(counts))
            if best is None or left < best[1]:
                best = neurons, left
            if left <= CURED * rule.count:
                break
        assert best is not None
        return best


@torch.inference_mode()
def mean_key_value(backbone: Backbone, images: Any, batch_size: int) -> tuple[Tensor, Tensor]:
    """Mean key and value of the last register in every block, as used in the product: (blocks, H, K) each."""
    sums: dict[str, Tensor] = {}
    count = 0
    for pixels, _ in ImageSource(backbone, images, DiagnosisConfig(batch_size=batch_size)):
        layout = backbone.layout((pixels.shape[-2], pixels.shape[-1]))

        def last(value: Tensor, layout: Any = layout) -> Tensor:
            registers = layout.take(value, "registers")
            summed: Tensor = registers.narrow(-2, registers.shape[-2] - 1, 1).squeeze(-2).double().sum(0)  # (H, K)
            return summed

        sites = [f"blocks.{block}.{kind}" for block in range(backbone.depth) for kind in "kv"]
        for site, value in backbone(pixels, dict.fromkeys(sites, last)).captured.items():
            sums[site] = sums[site] + value if site in sums else value
        count += len(pixels)
    keys, values = (
        torch.stack([sums[f"blocks.{block}.{kind}"] / count for block in range(backbone.depth)]).to(backbone.dtype)
        for kind in "kv"
    )
    return keys, values


def _why_no_cure(left: int, rule: OutlierRule, count: int, units: int) -> list[str]:
    """A note if more outliers are left than a cure leaves."""
    if left <= CURED * rule.count:
        return []
    return [
        (
            f"of {rule.count} outliers {left} are left with {count} of {units} neurons, more than a tenth, and other "
            "numbers of neurons leave no fewer: this model's outliers are not written by a few neurons, or the cutoff "
            "or the images do not show them; do not take it for cured"
        )
    ]


def _by_block(neurons: list[Neuron]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for block, unit, _ in neurons:
        found.setdefault(block, []).append(unit)
    return found


METHOD = TestTime
