"""Integrations: a plan by one line in trainers of other libraries, which are imported here alone.

`integrations.transformers.RockplanCallback` for transformers' Trainer and TRL,
`integrations.lightning.RockplanCallback` for Lightning, `integrations.torchtitan.RockplanAC` for
torchtitan; `integrations.dynamo.backend` is what `torch.compile(backend="rockplan")` calls.
"""
