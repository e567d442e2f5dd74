"""A ViT one can look into and edit: the protocol every adapter fulfils."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regista.backbones.additions import Addition, additions_of
from regista.backbones.capture import BlockSites, Reduce, Sites, reads_attention, recording
from regista.backbones.checks import asked_sites, checked_images, raise_not_finite
from regista.backbones.features import Features, Planted
from regista.data.fit import checked_size
from regista.data.images import FitPolicy, FittedImages, fit_images
from regista.tokens import TokenLayout

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class Backbone(ABC):
    """One interface over the ViTs of timm, transformers, open_clip, torchvision and torch.hub.

    The wrapped ``module`` is never changed: flags and hooks live only inside a call and are
    undone when it ends, also by an exception. A call runs in evaluation mode unless
    ``training`` is set to True.

    Attributes:
        module: The live upstream module.
        name: What the user asked for.
        embed_dim, depth, num_heads, patch_size, num_register_tokens: As in timm.
        image_size: (height, width) that ``preprocess`` brings files and PIL images to.
        mean, std: Of the RGB channels in [0, 1].
        planted: Ground truth of planted outliers, or None.
        history: What was done to the model: {method, config, state} of every fix.
        additions: What stands inside the module that its own library has no place for.
        notes: What loading had to say: how much was loaded, what was left out or converted.
    """

    library: str = ""
    training: bool = False

    def __init__(
        self,
        module: nn.Module,
        *,
        name: str,
        embed_dim: int,
        num_heads: int,
        patch_size: int,
        image_size: tuple[int, int],
        num_register_tokens: int = 0,
        num_cls_tokens: int = 1,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ) -> None:
        self.module = module
        self.name = name
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.patch_size = patch_size
        self.image_size = image_size
        self.num_register_tokens = num_register_tokens
        self.num_cls_tokens = num_cls_tokens
        self.mean = tuple(float(value) for value in mean)
        self.std = tuple(float(value) for value in std)
        self.planted: Planted | None = None
        self.notes: list[str] = []
        self.additions: list[Addition] = additions_of(module)
        self.num_register_tokens += sum(addition.num_register_tokens for addition in self.additions)
        for addition in self.additions:
            addition.bind(self)
        self._edits: dict[str, Reduce] = {}
        self._visible_registers: int | None = None  # all
        self.history: list[dict[str, Any]] = []

    # What an adapter says about its library -------------------------------------------------

    @abstractmethod
    def block_sites(self) -> Sequence[BlockSites]:
        """The modules of each block that captures and edits hang on."""

    @abstractmethod
    def forward_tokens(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, N, D) after the final norm, in the model's own order."""

    def patch_projection(self) -> nn.Module | None:
        """The convolution that embeds patches, before any position is added."""
        return None

    def position_table(self) -> nn.Parameter | None:
        """The learned absolute positions, or None."""
        return None

    def register_table(self) -> nn.Parameter | None:
        """The learned registers (1, R, D), or None for a model without any."""
        inserted = [addition for addition in self.additions if addition.num_register_tokens]
        return next((addition.register_table() for addition in inserted), None)

    def encoder_entrance(self) -> tuple[nn.Module, bool]:
        """A module whose input (True) or output (False) is all tokens as they enter the encoder."""
        raise ValueError(f"{self.name}: a {type(self.module).__name__} has no known place for registers")

    def pooling_head(self) -> nn.Module | None:
        """A head inside the module that reads the whole sequence, where there is one."""
        return None

    def insert_registers(self, registers: Tensor) -> None:
        """Put further registers (R, D), R > 0, behind those there are, in place; see ``with_registers``."""
        raise ValueError(f"{self.name}: registers cannot be inserted into a {type(self.module).__name__}")

    def pool_attention(self) -> nn.Module | None:
        """The module whose learned query pools the patches, where there is one."""
        return None

    def prepared(self, image_size: tuple[int, int]) -> AbstractContextManager[Any]:
        """Bring the module to this image size for one call; undone on exit."""
        return nullcontext()

    def fused_attention(self) -> AbstractContextManager[Any]:
        """Put attention on ``scaled_dot_product_attention`` where it is not; undone on exit."""
        return nullcontext()

    def to_joint_space(self, tokens: Tensor) -> Tensor:
        """Final norm and projection into the space shared with text: (B, N, D) before the norm -> (B, N, E)."""
        raise ValueError(f"{self.name}: a {type(self.module).__name__} has no space in common with text")

    def global_vector(self, tokens: Tensor, layout: TokenLayout) -> Tensor:
        """The model's image vector: (B, N, D) -> (B, D). CLS, or the mean of the patches."""
        if layout.count("cls"):
            return layout.take(tokens, "cls").mean(-2)
        return layout.take(tokens, "patches").mean(-2)

    # What users call ------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len(self.block_sites())

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the patch embedding's parameters; images are cast to it."""
        projection = self.patch_projection() or self.module
        return next(projection.parameters()).dtype

    def layout(self, image_size: tuple[int, int] | None = None) -> TokenLayout:
        """Token layout for images of (height, width), the model's own size by default.

        Raises:
            ValueError: if the size is not divisible by the patch size.
        """
        height, width = image_size or self.image_size
        if height % self.patch_size or width % self.patch_size or min(height, width) < self.patch_size:
            raise ValueError(
                f"image size {height}x{width} is not divisible by the patch size {self.patch_size}; "
                "use preprocess(images, policy='resize' | 'pad' | 'crop')"
            )
        grid_size = (height // self.patch_size, width // self.patch_size)
        return TokenLayout.of(
            grid_size,
            self.patch_size,
            num_cls_tokens=self.num_cls_tokens,
            num_register_tokens=self.num_register_tokens,
        )

    def fit(
        self, images: Any, *, image_size: tuple[int, int] | None = None, policy: FitPolicy = "resize"
    ) -> FittedImages:
        """Bring images to one size and normalise them; says what it did and which cells are real.

        Args:
            images: Paths, PIL images or (h, w, 3) arrays, one or many, or raw RGB tensors
                (B, 3, h, w), uint8 or in [0, 1].
            image_size: (height, width) wanted; by default the model's for files and PIL
                images, and their own for tensors and arrays.
            policy: How to get there: see ``regista.data.images.fit_images``.
        """
        return fit_images(
            images,
            size=checked_size(image_size),
            default_size=self.image_size,
            patch_size=self.patch_size,
            mean=self.mean,
            std=self.std,
            policy=policy,
        )

    def preprocess(
        self, images: Any, *, image_size: tuple[int, int] | None = None, policy: FitPolicy = "resize"
    ) -> Tensor:
        """Images as the model takes them: (B, 3, H, W), normalised, float32. See ``fit``."""
        return self.fit(images, image_size=image_size, policy=policy).pixels

    def __call__(self, images: Tensor, capture: Iterable[str] | Mapping[str, Reduce] = ()) -> Features:
        """Forward preprocessed images.

        Args:
            images: (B, 3, H, W), height and width divisible by the patch size.
            capture: Site names (see ``sites``), or {site: function}: the function is applied
                to the site's tensor at once, on its device, and only its result is kept.

        Raises:
            ValueError: for wrong shapes, an unknown site, or NaN or infinite values (naming
                the block and the image).
        """
        images = checked_images(images).to(device=self.device, dtype=self.dtype)
        layout = self.layout((images.shape[-2], images.shape[-1]))
        wanted = asked_sites(capture)
        tokens, captured = self._run(images, layout, wanted)
        layout.check(tokens)
        if not tokens.is_meta and not torch.isfinite(tokens).all():
            raise_not_finite(self, lambda sites: self._run(images, layout, sites)[1])
        return Features(tokens, layout, captured)

    def sites(self) -> tuple[str, ...]:
        """Every site name this model offers; blocks count from 0."""
        return self._sites().names()

    @contextmanager
    def editing(self, edits: Mapping[str, Reduce]) -> Iterator[None]:
        """Change what passes through sites while the context is open.

        Args:
            edits: {site: function from the site's tensor to a tensor of the same shape}, for
                q, k, v, attn, mlp_hidden and resid sites. Captures see the edited values.
        """
        self._sites().check(edits, editable=True)
        before = dict(self._edits)
        self._edits.update(edits)
        try:
            yield
        finally:
            self._edits = before

    @contextmanager
    def hiding_registers(self, *, keep: int = 0) -> Iterator[None]:
        """Keep every token from attending to registers while the context is open.

        All other tokens are then those of the model without these registers; but register neurons that were
        there before still take the largest activation over all tokens, hidden ones too.

        Args:
            keep: So many of the first registers stay visible.

        Raises:
            ValueError: if ``keep`` is negative.
        """
        if keep < 0:
            raise ValueError(f"keep is a number of registers, 0 or more, got {keep}")
        before, self._visible_registers = self._visible_registers, keep
        try:
            yield
        finally:
            self._visible_registers = before

    def with_registers(self, registers: Tensor) -> Backbone:
        """A copy of the model with further register tokens, which have no position.

        Args:
            registers: (R, D) that enter the first block (CLIP: its first norm) behind CLS and the
                registers there are. With R = 0 the copy is the same to the bit.

        Raises:
            ValueError: for another width, or a model that has no place for registers.
        """
        if registers.ndim != 2 or registers.shape[-1] != self.embed_dim:
            raise ValueError(f"registers are (R, {self.embed_dim}) for {self.name}, got {tuple(registers.shape)}")
        new = copy.deepcopy(self)
        if len(registers):
            new.insert_registers(registers.detach().to(self.device, self.dtype))
            new.num_register_tokens += len(registers)
        return new

    def add(self, addition: Addition) -> None:
        """Put something into the module, in place; for a copy of one's own."""
        name, taken = addition.child_name, dict(self.module.named_children())
        if name in taken:  # a second one of its kind
            name = next(new for count in range(2, len(taken) + 3) if (new := f"{name}_{count}") not in taken)
        self.module.add_module(name, addition.to(self.device))
        addition.hang(self)
        addition.bind(self)
        self.additions.append(addition)

    @property
    def needs_regista(self) -> str | None:
        """Why the module's own library could not read the weights rightly; None if it can."""
        reasons = [addition.reason for addition in self.additions]
        return " and ".join(reasons) or None

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Backbone:
        """Move the module; returns self."""
        self.module.to(device=device, dtype=dtype)
        return self

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the model so that ``regista.load(folder)`` and its own library can read it.

        Raises:
            ValueError: see ``regista.backbones.saving.save_pretrained``.
        """
        from regista.backbones.saving import save_pretrained

        return save_pretrained(self, folder)

    def attention_backend(self) -> str:
        """Which attention the module runs by itself, for the record."""
        return "scaled_dot_product_attention"

    # Inside ---------------------------------------------------------------------------------

    def _sites(self) -> Sites:
        return Sites(tuple(self.block_sites()), self.patch_projection(), self.pool_attention())

    def _run(
        self, images: Tensor, layout: TokenLayout, wanted: Mapping[str, Reduce]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        with ExitStack() as stack:
            if not self.training:
                stack.enter_context(evaluation_mode(self.module))
            stack.enter_context(self.prepared(layout.image_size))
            hidden = self._hidden_keys(layout)
            fused = any(addition.needs_fused_attention for addition in self.additions)
            if fused or hidden is not None or reads_attention({*wanted, *self._edits}):
                stack.enter_context(self.fused_attention())
            recorder = recording(self._sites(), wanted, self._edits, layout, len(images), hidden_keys=hidden)
            captured = stack.enter_context(recorder)
            tokens = self.forward_tokens(images)
            if "pool.attn" in wanted:
                self.global_vector(tokens, layout)
        missing = [site for site in wanted if site not in captured]
        if missing:
            raise RuntimeError(
                f"{self.name}: nothing passed through {missing}; the module's attention does not go through "
                "torch's scaled_dot_product_attention (is it compiled or on a custom kernel?)"
            )
        return tokens, captured

    def _hidden_keys(self, layout: TokenLayout) -> slice | None:
        registers = layout.slice("registers")
        if self._visible_registers is None or registers.start == registers.stop:
            return None
        return slice(min(registers.start + self._visible_registers, registers.stop), registers.stop)


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Run in evaluation mode, then give every submodule its own mode back."""
    training = [child for child in module.modules() if child.training]
    if training:
        module.eval()
    try:
        yield
    finally:
        for child in training:
            child.training = True
