"""The batches that a run is fed with.

taking.py           `rt.take`: this rank's part of each batch of an order
joining.py          `rt.join`: ranks with different numbers of batches end together
join_state.py       `JoinState`: whether a batch is this rank's own, or computed again
means.py            `rt.mean`: means over all micro-batches of a step
counted.py          which micro-batches count, in weights and means
"""
