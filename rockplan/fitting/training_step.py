"""Training step: what a training loop does beside forward, backward and `optimizer.step()`.

guarantees: settings that exclude each other are refused when they are made.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from rockplan.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """How a loop trains, as far as memory depends on it.

    accumulate: forward and backward passes before each step of the optimizer, whose gradients add
    up. set_to_none: of `optimizer.zero_grad`; False keeps the memory of gradients from step to
    step. clip_norm: `torch.nn.utils.clip_grad_norm_` of all gradients before the step. grad_scaler:
    `torch.amp.GradScaler` scales the loss and unscales the gradients. average: an exponential
    moving average of parameters, as `torch.optim.swa_utils.AveragedModel` keeps it with
    `get_ema_multi_avg_fn`: a copy of parameters and buffers on the device. in_backward: an
    optimizer for each parameter steps as soon as its gradient exists
    (`register_post_accumulate_grad_hook`), and frees it. Raises InvalidInput for other values, and
    if gradients are to add up, be kept, clipped or unscaled while optimizers step in backward.
    """

    accumulate: int = 1
    set_to_none: bool = True
    clip_norm: bool = False
    grad_scaler: bool = False
    average: bool = False
    in_backward: bool = False

    def __post_init__(self) -> None:
        if type(self.accumulate) is not int or self.accumulate < 1:
            raise InvalidInput(f"accumulate is {self.accumulate!r}; pass a number of at least 1")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "accumulate" and type(value) is not bool:
                raise InvalidInput(f"{field.name} is {value!r}; choose False or True")
        if not self.in_backward:
            return
        of_all = {
            "accumulate": self.accumulate > 1,
            "set_to_none=False": not self.set_to_none,
            "clip_norm": self.clip_norm,
            "grad_scaler": self.grad_scaler,
        }
        if used := [name for name, is_used in of_all.items() if is_used]:
            raise InvalidInput(
                f"in_backward does not go with {', '.join(used)}: a gradient is gone as soon as "
                "its parameter has stepped"
            )


USUAL = TrainingStep()
"""`zero_grad()`, forward, backward, `step()`."""
