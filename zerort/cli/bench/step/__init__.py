"""``zerort bench step``: a training step under several plans and without the runtime, in turn, in one run."""
