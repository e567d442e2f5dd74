"""Strict loading of weights: how many tensors of how many, and which not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from regista.backbones.architecture import describe_difference
from regista.backbones.checkpoint_files import read_state_dict
from regista.results import weights_hash as hash_of_arrays

__all__ = ["LoadReport", "Part", "choose_part", "load_strict", "read_state_dict", "weights_hash"]

# Of training and of heads: a model without them gives the same tokens.
HARMLESS = re.compile(
    r"^(mask_token|masked_embed|bias_mask|cls_head|head|head_dist|fc|classifier|pooler|pre_logits|projectors|"
    r"dino_head|ibot_head|decoder\w*|lm_head|local_cls_norm|linear_head|fc_norm_dist)(\.|$)"
    r"|(^|\.)(periods|inv_freq|position_ids|num_batches_tracked|relative_position_index|bias_mask)$"
)
WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
PREFERRED = re.compile(r"(^|[._])(teacher|ema|momentum|target)([._]|$)", re.IGNORECASE)
SECOND_CHOICE = re.compile(r"(^|[._])(student|online)([._]|$)", re.IGNORECASE)
_NAMED = 4


@dataclass(frozen=True)
class LoadReport:
    """What fitted and what did not.

    Attributes:
        loaded, total: Tensors of the module that were filled, and that it has.
        missing: Names that the module has and the file has not.
        unexpected: Names that the file has and the module has not, but for heads and the like.
        misshaped: (name, shape in the file, shape in the module).
        left_out: Names in the file that no token depends on: heads, mask tokens, buffers.
    """

    loaded: int
    total: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    misshaped: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Every tensor of the module was filled, and nothing of the file was lost."""
        return self.loaded == self.total and not self.unexpected

    def __str__(self) -> str:
        share = 100 * self.loaded // self.total if self.total else 0
        parts = [f"loaded {self.loaded} of {self.total} tensors ({share} %)"]
        for word, names in (("missing", self.missing), ("unexpected", self.unexpected)):
            if names:
                parts.append(f"{word} {len(names)}: {_listed(names)}")
        if self.misshaped:
            shapes = [f"{name} {got}, wanted {wanted}" for name, got, wanted in self.misshaped]
            parts.append(f"of another shape {len(shapes)}: {_listed(shapes)}")
        if self.left_out:
            parts.append(f"left out {len(self.left_out)}: {_listed(self.left_out)}")
        return "; ".join(parts)


def load_strict(
    module: nn.Module, state: Mapping[str, Tensor], allow_partial: bool = False, *, name: str = "weights"
) -> LoadReport:
    """Fill every parameter and buffer of a module, or change nothing and say what does not fit.

    Args:
        module: Keeps its own dtype and device.
        state: {the module's own names: tensors}.
        allow_partial: Load what fits all the same; the rest of the module stays as it was.
        name: Of the file or model, for messages.

    Raises:
        ValueError: if a tensor of the module is not in ``state`` or has another shape there, if
            ``state`` holds more than heads, mask tokens and buffers besides, or if a value is NaN
            or infinite. None of these with ``allow_partial``, unless nothing at all fits.
    """
    wanted = {key: tuple(value.shape) for key, value in module.state_dict().items()}
    fitting = {key: value for key, value in state.items() if wanted.get(key) == tuple(value.shape)}
    extra = [key for key in state if key not in wanted]
    report = LoadReport(
        loaded=len(fitting),
        total=len(wanted),
        missing=tuple(key for key in wanted if key not in state),
        unexpected=tuple(key for key in extra if not HARMLESS.search(key)),
        misshaped=tuple(
            (key, tuple(value.shape), wanted[key])
            for key, value in state.items()
            if key in wanted and key not in fitting
        ),
        left_out=tuple(key for key in extra if HARMLESS.search(key)),
    )
    if not fitting or not (report.complete or allow_partial):
        hint = describe_difference(state, module.state_dict())
        useful = not allow_partial and 2 * len(fitting) >= len(wanted)
        advice = "" if not useful else "; --allow-partial (allow_partial=True) loads what fits"
        raise ValueError(f"{name}: {report}" + (f". {hint}" if hint else "") + advice)
    if not allow_partial:
        check_finite(fitting.items(), name)
    module.load_state_dict(fitting, strict=False)
    return report


def check_finite(tensors: Iterable[tuple[str, Tensor]], name: str) -> None:
    """Raise ``ValueError`` that names the first tensor with a NaN or an infinity in it."""
    for key, value in tensors:
        if not value.is_floating_point() or value.is_meta:
            continue
        wide = value.float() if value.element_size() == 1 else value  # float8 has no arithmetic
        if torch.isfinite(wide.sum(dtype=torch.float32)):
            continue  # a sum is ten times as fast to check, and an overflowing one is looked into
        bad = int((~torch.isfinite(wide)).sum())
        if bad:
            raise ValueError(
                f"{name}: {bad} of {value.numel()} values of {key!r} are NaN or infinite, so the training it is from "
                "diverged or the file is damaged"
            )


@dataclass(frozen=True)
class Part:
    """One of the models in a weight file.

    Attributes:
        prefix: What its names begin with in the file.
        state: Its tensors without the prefix.
        notes: What was chosen and what was left out.
    """

    prefix: str
    state: dict[str, Tensor]
    notes: tuple[str, ...]


def choose_part(
    state: Mapping[str, Tensor], anchors: Sequence[str], fit: Callable[[Mapping[str, Tensor]], tuple[int, ...]]
) -> Part:
    """Find the model in a file: see through ``module.``, ``teacher.backbone.``, ``state_dict.`` and the like.

    Args:
        state: Names as in the file.
        anchors: Names of which every model has one; what stands before one is a prefix to try.
        fit: How well tensors without a prefix fit, larger is better. Among equals a teacher or
            average is taken before others, and a student last; then the shortest prefix.
    """
    state = {WRAPPERS.sub("", key): value for key, value in state.items()}
    prefixes = {key.removesuffix(anchor) for key in state for anchor in anchors if key.endswith(anchor)}
    tried = {prefix for prefix in prefixes if not prefix or prefix.endswith(".")} or {""}
    parts = {prefix: dict(_below(state, prefix)) for prefix in tried}
    fits = {prefix: fit({key: value.to("meta") for key, value in part.items()}) for prefix, part in parts.items()}
    best = max(tried, key=lambda prefix: (fits[prefix], _liking(prefix), -len(prefix), prefix))
    rivals = [f"{prefix}*" for prefix in sorted(tried) if prefix != best and fits[prefix] == fits[best]]
    notes = [f"read from {best}*" + (f" and not from {', '.join(rivals)}" if rivals else "")] if best or rivals else []
    counts = Counter(group_of(key) for key in state if not key.startswith(best))
    if counts:
        left = ", ".join(f"{group}* ({count})" for group, count in sorted(counts.items()))
        notes.append(f"left out of the file: {left}")
    return Part(best, parts[best], tuple(notes))


def group_of(key: str) -> str:
    """The part of a name that says what it belongs to: ``student.dino_head.mlp.0.weight`` -> ``student.dino_head.``."""
    parts = key.split(".")
    depth = 2 if len(parts) > 2 and (PREFERRED.search(key) or SECOND_CHOICE.search(key)) else 1
    return ".".join(parts[:depth]) + ("." if len(parts) > depth else "")


def weights_hash(module: nn.Module) -> str:
    """SHA-256 of a module's parameters and buffers, the same on every device (see ``regista.results``)."""

    def arrays() -> Iterator[tuple[str, np.ndarray]]:
        for key, value in module.state_dict().items():
            value = value.detach().cpu().contiguous()
            try:
                yield key, value.numpy()
            except TypeError:  # bfloat16 and the float8 types, which numpy lacks
                yield key, value.view(torch.uint8 if value.element_size() == 1 else torch.int16).numpy()

    return hash_of_arrays(arrays())


def _below(state: Mapping[str, Tensor], prefix: str) -> Iterator[tuple[str, Tensor]]:
    for key, value in state.items():
        if key.startswith(prefix):
            yield key.removeprefix(prefix), value


def _liking(prefix: str) -> int:
    return 1 if PREFERRED.search(prefix) else -1 if SECOND_CHOICE.search(prefix) else 0


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"
