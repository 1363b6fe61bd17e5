"""``zerort ckpt``: look at, verify and export checkpoints, in one process."""
