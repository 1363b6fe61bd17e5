"""Values that travel as codes between ranks.

ranges.py         what a range of parameters travels as: blocks of codes, what has changed, what is not zero
reduce.py         sums over ranks of what travels as codes
senders.py        who rounds such a summand, and which rank codes which stretch of it
residual.py       what coding has lost of gradients, until the next ones
"""
