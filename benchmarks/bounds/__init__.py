"""Lower bounds on times and on peaks, offline: what `gap`, `proof` and `alternatives` state of plans."""
