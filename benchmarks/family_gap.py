"""What a search for options of a block has proven of all corners at once.

takes: a ParetoSearch that is over. returns: nanoseconds.
"""

from __future__ import annotations

import numpy as np

from rockplan.ilp.blocks.pareto_search import ParetoSearch
from rockplan.ilp.scaling import UNLIMITED


def gap_ns(search: ParetoSearch) -> int | None:
    """The largest distance, over all corners, between the best answer there and the bound for
    schedules that need less than `step` bytes less; None where there is no answer, or where the
    time limit struck.

    Both change at few places only: an answer is the best one up to just below the next.
    """
    answers = np.array([(*a.needs, a.time_ns) for a in search.answers])
    bounds = np.array(search.bounds)
    slack = search.step - 1
    saved = np.append(np.unique(answers[:, 1]) - 1, UNLIMITED)
    worst = 0
    for peak in np.append(np.unique(answers[:, 0]) - 1, UNLIMITED):
        fits = (answers[:, 0] <= peak) & (answers[:, 1] <= saved[:, None])
        best = np.where(fits, answers[:, 2], UNLIMITED).min(axis=1)
        holds = (bounds[:, 0] >= peak - slack) & (bounds[:, 1] >= saved[:, None] - slack)
        bound = np.where(holds, bounds[:, 2], 0).max(axis=1)
        possible = [not search.is_infeasible((int(peak) - slack, int(s) - slack)) for s in saved]
        worst = max(worst, int((best - bound)[possible].max(initial=0)))
    return None if search.is_cut or worst > UNLIMITED // 2 else worst
