"""Sweeps: tests whose members go one way, of which `make test` runs a few and `make sweep` all.

`make test` is to take 12 minutes on two cores. Members that run are evenly spaced. A test that is
named by its id runs in any case.
"""

from __future__ import annotations

import collections

import pytest

RUN = {
    "test_available.py::test_gradients_take_room_as_they_come": 1,
    "test_blocks_distributed.py::test_planned_blocks_on_several_processes": 1,
    "test_compiled.py::test_kernels_of_a_head_in_parts": 0,
    "test_compiled.py::test_no_further_from_eager_than_torch_compile": 0,
    "test_compiled.py::test_the_same_plan_in_another_process_with_an_empty_cache": 0,
    "test_distributed.py::test_tensor_parallel": 1,
    "test_dynamo.py::test_compiled_kernels_are_planned": 0,
    "test_effects.py::test_calls_are_those_of_eager": 10,
    "test_fit.py::test_another_process_has_the_same_key": 0,
    "test_fit.py::test_batches_between_captures_are_those_of_captures": 1,
    "test_fit.py::test_lengths_between_captures_are_those_of_captures": 1,
    "test_flex_attention.py::test_bits_are_those_of_eager": 3,
    "test_gpu_scripts.py::test_figures_come_before_the_time_is_over": 0,
    "test_hooks.py::test_an_optimizer_may_step_inside_backward": 5,
    "test_in_flight.py::test_calls_in_flight_take_less_time_than_the_best_plan_of_one_call": 0,
    "test_in_place.py::test_networks_of_many_operators": 1,
    "test_indices.py::test_where_nothing_is_found_operators_run_one_by_one": 0,
    "test_lengths.py::test_the_overhead_is_that_of_a_plan_made_anew": 1,
    "test_models.py::test_equal_within_budget_and_as_predicted": 4,
    "test_only_loss.py::test_an_error_names_options_that_are_enough": 1,
    "test_opaque.py::test_bits_are_those_of_eager": 10,
    "test_paging.py::test_bits_are_eagers_and_peaks_as_predicted_on_every_link": 2,
    "test_paging.py::test_each_wait_is_needed": 2,
    "test_paging_options.py::test_bits_are_eagers_whatever_the_link_does": 1,
    "test_pareto.py::test_curve_is_monotone_and_its_ends_are_the_minimum_and_keep_all": 1,
    "test_pipeline.py::test_a_plan_without_a_stage_is_legal_or_refused": 8,
    "test_planning.py::test_the_smallest_budget_does_not_depend_on_what_was_measured": 0,
    "test_planning.py::test_the_smallest_budget_is_at_most_what_any_budget_reaches": 0,
    "test_planning.py::"
    "test_where_the_search_for_the_smallest_is_cut_short_plans_for_other_budgets_count": 0,
    "test_python_state.py::test_is_planned_as_eager_or_refused": 62,
    "test_signature.py::test_what_the_forward_reads_of_an_attribute": 21,
    "test_signature.py::test_which_argument_is_a_tensor_of_the_module": 6,
    "test_takeover.py::test_training_is_bit_for_bit_eager_and_measured_as_predicted": 4,
    "test_tiled.py::test_results_and_gradients_are_those_of_eager": 8,
    "test_tiled.py::test_rows_of_an_embedding_are_added_to_the_gradient_of_its_head": 2,
    "test_tiled.py::test_the_curve_has_both": 0,
    "test_tiny.py::test_plans_of_tiny_models_are_near_the_optimum": 3,
    "test_versions.py::test_bits_and_peak_are_those_of_eager_execution": 14,
    "test_zoo.py::test_kernels_compute_what_they_do_where_nothing_runs_again": 2,
    "test_zoo.py::test_planned_is_eager_within_the_budget": 4,
}
"""Test -> how many members `make test` runs."""


def left_to_sweeps(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the members that `make test` leaves to `make sweep`."""
    families = collections.defaultdict(list)
    for item in items:
        families[item.nodeid.removeprefix("tests/").partition("[")[0]].append(item)
    left: list[pytest.Item] = []
    for name, count in RUN.items():
        members = families[name]
        run = {i * len(members) // count for i in range(count)}
        left += [item for i, item in enumerate(members) if i not in run]
    return left
