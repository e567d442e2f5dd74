"""Run folders as pages for people: one HTML file, plain text for terminals, a wide picture.

Reads ``regista.results`` alone: needs no torch and no model, and does no token arithmetic.

from __future__ import annotations
"""
