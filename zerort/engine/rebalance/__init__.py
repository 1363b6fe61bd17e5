"""Shards cut anew while a run goes on: `Runtime.rebalance`.

recut.py     all sections on other partitions, one after the other, or nothing
moving.py    one array from one partition to another, in memory or through it
room.py      whether every rank has room for what it is to hold
auto.py      shares and shards by what ranks have measured; deciding.py says which, and why
"""
