"""Smaller systems on the same parts: report evidence, zero-index recall, extractive answers with a gate."""
