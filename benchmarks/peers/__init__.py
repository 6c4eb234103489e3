"""Other algorithms for the same problem, as functions from a priced graph to schedules.

Each gives orders of computations; frees are the earliest that the order allows, re-executions of
which nothing is read are left out, `verify` checks and `simulate` prices every schedule. So each
is at least as good here as it was published.
"""
