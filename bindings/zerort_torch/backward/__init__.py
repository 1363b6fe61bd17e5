"""What a backward pass leaves and needs: gradients, saved weights, hooks on tensors.

gradients.py   ready gradients go into the sum over ranks      saved.py   what autograd keeps of a gathered weight
hooks.py       hooks that were made before `shard` go on       passes.py  which backward pass is under way
"""
