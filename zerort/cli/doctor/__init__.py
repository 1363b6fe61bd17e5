"""``zerort doctor``: one file per subject that it looks at; each returns findings (finding.py)."""
