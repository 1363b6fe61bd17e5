"""Values that travel as codes between ranks.

delta_gather.py   the whole, made anew from what has changed since it was last gathered
sparse_gather.py  the whole, from what is not zero of each range
reduce.py         sums over ranks of what travels as codes
senders.py        who rounds such a summand, and which rank codes which stretch of it
residual.py       what coding has lost of gradients, until the next ones
"""
