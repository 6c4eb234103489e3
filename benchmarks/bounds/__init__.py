"""Lower bounds on times and peaks, offline: what `gap`, `proof`, `alternatives` state of plans."""
