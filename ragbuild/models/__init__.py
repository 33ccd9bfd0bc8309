"""Adapters to models: one small Protocol each, and the real implementations behind it."""
