"""Threshold filters and the quality buffer of re-usable samples.

Nothing here yet: the loop trains on fresh samples only.
"""
