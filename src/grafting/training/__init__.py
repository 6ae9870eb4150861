"""Training: one loop, its objectives, and the making of the tiny lineage."""
