"""What keeps ranks from waiting for ever or blaming the wrong one: calls are compared, failures told and named.

call.py  checks.py            what a rank says it is doing; what its arguments must be
verdict.py  standing.py       the errors that ranks raise together; how far each rank has come
differing.py  stance.py       calls that may differ between ranks: who joins whose, who gives way
failure.py  last_words.py     one rank's unhandled exception ends the job, with its story told once
folded.py                     an unhandled error as its user should read it
"""
