"""What travels as codes (`zr.Wire`): formats by dtype, and who rounds.

coding.py      which formats a runtime's values travel in, and which dtypes have one
sending.py     who rounds gradients for that, and which ranks keep what is lost
"""
