"""Sweeps: tests whose members go one way, of which `make test` runs a few and `make sweep` all.

`make test` is to take 9 minutes on two cores. Members that run are evenly spaced: the most telling
ones come first. A test that is named by its id runs in any case.
"""

from __future__ import annotations

import collections

import pytest

RUN = {
    "test_available.py::test_gradients_take_room_as_they_come": 1,
    "test_backward.py::test_autocast_casts_inputs_as_in_eager": 2,
    "test_backward.py::test_other_memory_between_forward_and_backward_is_refused": 5,
    "test_blocks_distributed.py::test_planned_blocks_on_several_processes": 1,
    "test_blocks_trainers.py::test_trl": 3,
    "test_compiled.py::test_kernels_of_a_head_in_parts": 0,
    "test_compiled.py::test_no_further_from_eager_than_torch_compile": 0,
    "test_compiled.py::test_another_process_with_an_empty_cache_plans_alike": 0,
    "test_distributed.py::test_tensor_parallel": 1,
    "test_draft.py::test_memory_is_the_simulators_after_every_change": 20,
    "test_dynamo.py::test_compiled_kernels_are_planned": 0,
    "test_effects.py::test_calls_are_those_of_eager": 7,
    "test_effects.py::test_errors_are_those_of_eager": 4,
    "test_effects.py::test_factorizations_that_fail": 5,
    "test_effects.py::test_gradients_in_other_strides_call_nothing_twice": 4,
    "test_emit.py::test_random_schedules": 2,
    "test_exchange.py::test_exchanged_schedules_are_legal_and_no_slower": 7,
    "test_experts.py::test_ties_break_alike_when_routers_run_again": 1,
    "test_export.py::test_gradients_and_peak": 2,
    "test_fit.py::test_a_length_beyond_the_model_is_refused": 2,
    "test_fit.py::test_an_optimizer_allocates_what_is_said": 14,
    "test_fit.py::test_another_process_has_the_same_key": 0,
    "test_fit.py::test_kept_whole_has_what_formulas_keep": 3,
    "test_fit.py::test_optimizers_stepping_in_backward_need_what_is_said": 2,
    "test_fit.py::test_schedules_need_what_they_stand_for": 3,
    "test_fit.py::test_steps_of_a_plan_need_what_is_said": 2,
    "test_flex_attention.py::test_bits_are_those_of_eager": 2,
    "test_foreign_kernels.py::test_addresses_are_no_test_for_one_tensor": 2,
    "test_foreign_kernels.py::test_addresses_of_all_kinds_of_tensors_are_refused": 2,
    "test_foreign_kernels.py::test_functions_on_arrays_are_told_what_would_work": 2,
    "test_foreign_kernels.py::test_kernels_are_refused_by_name": 5,
    "test_foreign_kernels.py::test_memory_that_is_written_before_it_is_read": 7,
    "test_foreign_kernels.py::test_memory_that_nothing_has_written_is_not_read": 4,
    "test_fusion.py::test_networks_of_many_operators": 1,
    "test_fusion.py::test_a_losss_gradient_is_computed_element_by_element": 3,
    "test_fusion.py::test_training_with_gradients_that_accumulate": 3,
    "test_fusion.py::test_what_is_not_fused": 5,
    "test_fuzz.py::test_random_networks_are_as_eager_execution": 1,
    "test_gpu_scripts.py::test_blocks_under_fully_shard_on_one_device": 0,
    "test_gpu_scripts.py::test_figures_come_before_the_time_is_over": 0,
    "test_gpu_scripts.py::test_whole_steps_need_what_their_rows_predict": 0,
    "test_hooks.py::test_hooks_may_change_what_had_its_gradient": 2,
    "test_hooks.py::test_an_optimizer_may_step_inside_backward": 5,
    "test_hooks.py::test_gradients_that_wait_are_within_the_budget": 2,
    "test_hooks.py::test_incoming_gradients_of_another_pattern": 2,
    "test_in_flight.py::test_plans_for_calls_in_flight_keep_the_budget": 1,
    "test_in_flight.py::test_blocks_of_calls_in_flight_keep_the_budget": 1,
    "test_in_flight.py::test_calls_in_flight_beat_plans_of_one_call": 0,
    "test_in_place.py::test_networks_of_many_operators": 1,
    "test_indices.py::test_where_nothing_is_found_operators_run_singly": 0,
    "test_integrations.py::test_accelerate": 1,
    "test_integrations.py::test_lightning": 1,
    "test_lengths.py::test_other_sizes_run_the_known_plan": 2,
    "test_lengths.py::test_the_overhead_is_a_new_plans": 1,
    "test_lengths.py::test_the_peak_of_unusual_operands_is_promised": 3,
    "test_models.py::test_equal_within_budget_and_as_predicted": 4,
    "test_only_loss.py::test_an_error_names_options_that_are_enough": 1,
    "test_opaque.py::test_bits_are_those_of_eager": 10,
    "test_paging.py::test_bits_are_eagers_on_every_link": 2,
    "test_paging.py::test_each_wait_is_needed": 2,
    "test_paging_options.py::test_bits_are_eagers_whatever_the_link_does": 1,
    "test_pareto.py::test_the_curve_falls_from_minimum_to_keep_all": 1,
    "test_pipeline.py::test_plans_without_a_stage_are_legal_or_refused": 5,
    "test_planning.py::test_the_smallest_budget_is_independent_of_measurements": 0,
    "test_planning.py::test_no_budget_reaches_less_than_the_smallest": 0,
    "test_planning.py::test_a_smallest_cut_short_counts_other_plans": 0,
    "test_python_state.py::test_is_planned_as_eager_or_refused": 62,
    "test_signature.py::test_arguments_that_are_not_read_make_no_kind": 7,
    "test_signature.py::test_what_the_forward_reads_of_an_attribute": 14,
    "test_signature.py::test_which_argument_is_a_tensor_of_the_module": 6,
    "test_sizes.py::test_copies_run_all_sizes": 1,
    "test_sizes.py::test_one_program_runs_all_sizes": 5,
    "test_sizes.py::test_what_decides_by_a_size_stays_right": 6,
    "test_slices.py::test_a_forward_is_told_of_its_arguments_base": 2,
    "test_slices.py::test_slices_of_one_tensor_run_one_plan": 7,
    "test_starts.py::test_a_budget_that_is_accepted_holds": 4,
    "test_takeover.py::test_training_is_bitwise_eager_and_as_predicted": 3,
    "test_takeover.py::test_what_overwrites_an_operand_is_bitwise_the_result": 20,
    "test_tiled.py::test_a_large_vocabulary_needs_a_third": 0,
    "test_tiled.py::test_models_of_transformers": 1,
    "test_tiled.py::test_no_result_has_the_logits_of_all_rows": 5,
    "test_tiled.py::test_of_16_bits_only_last_bits_differ": 2,
    "test_tiled.py::test_only_tied_weights_gradients_differ": 2,
    "test_tiled.py::test_results_and_gradients_are_those_of_eager": 5,
    "test_tiled.py::test_embedding_rows_are_added_to_the_heads_gradient": 1,
    "test_tiled.py::test_the_curve_has_both": 0,
    "test_tiled.py::test_what_runs_again_changes_no_bit": 1,
    "test_tiny.py::test_plans_of_tiny_models_are_near_the_optimum": 2,
    "test_trainers.py::test_trainers_calls_take_over_the_samples_plan": 2,
    "test_trainers.py::test_a_default_model_is_planned_without_its_cache": 2,
    "test_trainers.py::test_a_model_in_eval_mode_is_said": 1,
    "test_trainers.py::test_trl": 3,
    "test_untouched.py::test_files_imported_by_the_first_forward_stay_registered": 3,
    "test_untouched.py::test_what_a_forward_writes_is_put_back": 7,
    "test_usage.py::test_functional_calls_backward_is_planned_with_its_parameters": 2,
    "test_usage.py::test_a_graph_that_is_not_retained_is_gone": 2,
    "test_usage.py::test_plans_run_under_compilation_of_the_module": 1,
    "test_usage.py::test_autocast": 1,
    "test_usage.py::test_compiled_parts_are_planned_as_in_eager": 3,
    "test_usage.py::test_copies_of_plans_with_literals_of_torch": 3,
    "test_usage.py::test_gradients_of_inputs_count_to_the_end": 1,
    "test_usage.py::test_modules": 9,
    "test_usage.py::test_signs_at_infinity_have_gradients_of_eager": 6,
    "test_value_shapes.py::test_masks_of_as_many_elements_keep_plans": 5,
    "test_value_shapes.py::test_masks_of_nothing_and_of_everything": 1,
    "test_value_shapes.py::test_what_integers_decide": 4,
    "test_versions.py::test_sums_in_place_need_no_more_room": 1,
    "test_versions.py::test_bits_and_peak_are_those_of_eager_execution": 8,
    "test_zoo.py::test_kernels_compute_alike_where_nothing_runs_again": 1,
    "test_zoo.py::test_planned_is_eager_within_the_budget": 3,
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
