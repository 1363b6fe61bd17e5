"""``zerort plan``: what a model takes of each memory, under every plan or within a budget."""
