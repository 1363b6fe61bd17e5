"""What a model is made of when it is sharded, beside its parameters.

finding.py       which modules are units                  support.py     models that cannot be sharded
materialise.py   values for the meta device               buffers.py     running statistics, alike on all ranks
state_dict.py    full weights in and out                  compiled.py    names without torch.compile's wrappers
tables.py        embeddings with sparse gradients
"""
