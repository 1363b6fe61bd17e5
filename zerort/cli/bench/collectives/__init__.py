"""``zerort bench collectives``: the table of operations, who runs them, and the tables and plots of what was found."""
