"""Tables of which a batch touches a few rows: only those are gathered, reduced and updated (`register(rows=)`).

table.py      `RowTable`: this rank's rows, when each was last up to date, and their update
memory.py     `RowsInMemory`: where they are, if that is in memory
stored.py     `StoredRows`: the same of tables of which parameters or state rest on a disk
exchange.py   `RowExchange`: rows between ranks: from their owners to who asks, gradients from all to the owners
bucket.py     `RowBucket`: gradients of rows until the step; `RowGradient`: the sum of them
section.py    `RowSection`: a table as the section that units, steps and checkpoints know
checks.py     what can be declared, gathered and reduced as rows, and what cannot

A table is a section of its own, sharded over the ranks under every ZeRO stage, and cut between rows: each row has one
owner (decision 0156). What a row misses while nobody touches it is made up for when it is next needed
(`zerort.optim.late`, decision 0155). No bit depends on the ranks with `virtual_shards` (decision 0172).
Where every step has a digest, rows miss nothing (decision 0185). On GPUs numbers of rows are arrays of the host, and
values are on the GPU (decision 0192).
"""
