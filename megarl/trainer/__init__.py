"""Composition root: the loop, the update, placement, guards and metrics."""
