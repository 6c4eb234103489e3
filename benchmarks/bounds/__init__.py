"""Lower bounds on times and on peaks, offline: what `gap` and `proof` state of plans."""
