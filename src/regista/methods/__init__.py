"""Cures of a ViT, one folder each: ``config.py``, ``method.py`` and ``card.md``.

A folder here is a method; nothing else lists them. ``regista.fix`` runs one.
"""
