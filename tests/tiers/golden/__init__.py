"""Files as each version wrote them. `python -m tests.tiers.golden OUT_DIR` writes those of this version; older ones stay as they are."""
