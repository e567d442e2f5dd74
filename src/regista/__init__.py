"""Regista: the registers of Vision Transformers.

Is a ViT sick (``diagnose``), can it be cured without retraining (``fix``), did the cure help, and how is
one trained that never gets sick. ``import regista`` loads no model library; names and
subpackages load when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regista.backbones.grad_cam import reshape_transform as reshape_transform
    from regista.backbones.loading import load as load
    from regista.diagnosis.examination import diagnose as diagnose
    from regista.methods.fixing import fix as fix

__version__ = "0.1.0.dev0"
__all__ = ["__version__", "diagnose", "fix", "load", "reshape_transform"]

_MODULES = {
    "diagnose": "regista.diagnosis.examination",
    "fix": "regista.methods.fixing",
    "load": "regista.backbones.loading",
    "reshape_transform": "regista.backbones.grad_cam",
}

if not TYPE_CHECKING:  # a type checker reads the imports above, and so still finds misspelt names

    def __getattr__(name: str) -> Any:
        """Load a public name or a subpackage on first use."""
        from importlib import import_module
        from importlib.util import find_spec

        if name in _MODULES:
            value = getattr(import_module(_MODULES[name]), name)
            globals()[name] = value
            return value
        if not name.startswith("_") and find_spec(f"regista.{name}") is not None:
            return import_module(f"regista.{name}")
        raise AttributeError(f"module 'regista' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Public names, also those that are not loaded yet."""
    return sorted({*globals(), *__all__})
